"""Commands on a terminal: a pseudo terminal for some of their streams, and what its screen shows at the end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import threading
import time
import unicodedata
from collections.abc import Mapping, Sequence
from typing import IO, Any

from attrs import define, field

COLUMNS, ROWS = 72, 12
_ESCAPE = re.compile(r"\x1b\[(\d*)([A-Za-z])")


class Screen:
    """What a terminal shows: characters of one column or two, line breaks, wrapping, and the escapes that the command may use.

    Like real ones it wraps only when a character follows the last column, and scrolls at its last row; lines that left at the top
    are kept. Any other escape is an error.
    """

    def __init__(self, columns: int = COLUMNS, rows: int = ROWS) -> None:
        self.columns, self.rows = columns, rows
        self.lines: list[list[str]] = [[] for _ in range(rows)]
        self.row, self.column = 0, 0  # row: of all lines, those that scrolled away included

    @property
    def top(self) -> int:
        return len(self.lines) - self.rows

    def feed(self, text: str) -> None:
        at = 0
        while at < len(text):
            if text[at] == "\x1b":
                found = _ESCAPE.match(text, at)
                assert found, repr(text[at : at + 8])
                self._escape(found[2], int(found[1]) if found[1] else None)
                at = found.end()
            else:
                self._character(text[at])
                at += 1

    def _escape(self, kind: str, number: int | None) -> None:
        if kind == "K" and not number:
            del self.lines[self.row][self.column :]
        elif kind == "J" and not number:
            del self.lines[self.row][self.column :]
            for line in self.lines[self.row + 1 :]:
                line.clear()
        elif kind == "A":
            self.row = max(self.row - (number or 1), self.top)
        elif kind == "C":
            self.column = min(self.column + (number or 1), self.columns - 1)
        else:
            raise AssertionError(f"escape {kind} {number}")

    def _character(self, character: str) -> None:
        if character == "\n":
            self._down()
        elif character == "\r":
            self.column = 0
        elif character == "\t":
            self.column = min(self.column // 8 * 8 + 8, self.columns - 1)
        elif unicodedata.combining(character):
            line = self.lines[self.row]
            if self.column and len(line) >= self.column:
                line[self.column - 1] += character
        else:
            assert character >= " ", repr(character)
            width = 2 if unicodedata.east_asian_width(character) in "WF" else 1
            if self.column + width > self.columns:
                self.column = 0
                self._down()
            line = self.lines[self.row]
            line.extend(" " * (self.column + width - len(line)))
            line[self.column : self.column + width] = [character, *[""] * (width - 1)]
            self.column += width

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append([])

    def text(self) -> list[str]:
        """All lines, without spaces at their ends and empty ones at the end."""
        found = ["".join(line).rstrip() for line in self.lines]
        while found and not found[-1]:
            found.pop()
        return found


@define(kw_only=True)
class Session:
    """A command of which the named streams are one pseudo terminal; the others are pipes."""

    process: subprocess.Popen[bytes]
    master: int
    chunks: list[tuple[float, str]] = field(factory=list)
    piped: dict[str, bytes] = field(factory=dict)
    _threads: list[threading.Thread] = field(factory=list)

    @classmethod
    def start(
        cls,
        arguments: Sequence[str],
        *,
        terminal: Sequence[str],
        environment: dict[str, str],
        files: Mapping[str, IO[bytes]] | None = None,
        **options: Any,
    ) -> Session:
        """files: streams that are open files instead."""
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        streams: dict[str, Any] = {
            name: slave if name in terminal else subprocess.PIPE for name in ("stdin", "stdout", "stderr")
        }
        streams.update(files or {})

        def own_terminal() -> None:
            os.setsid()
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

        process = subprocess.Popen(
            [sys.executable, *arguments],
            env={**environment, "TERM": "xterm", "LANG": "C.UTF-8", "PYTHONIOENCODING": "utf-8"},
            preexec_fn=own_terminal,
            **streams,
            **options,
        )
        os.close(slave)
        session = cls(process=process, master=master)
        for name in ("stdout", "stderr"):
            pipe = getattr(process, name)
            if pipe is not None:
                thread = threading.Thread(target=lambda n=name, p=pipe: session.piped.__setitem__(n, p.read()))
                thread.start()
                session._threads.append(thread)
        return session

    @property
    def shown(self) -> str:
        """What was written to the terminal so far."""
        return "".join(text for _, text in self.chunks)

    def read(self, seconds: float) -> bool:
        """Takes what the terminal gets within this time. False when nobody holds it any more."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if not select.select([self.master], [], [], left)[0]:
                continue
            try:
                data = os.read(self.master, 65536)
            except OSError:
                return False
            if not data:
                return False
            self.chunks.append((time.monotonic(), data.decode("utf-8", "replace")))
        return True

    def expect(self, words: str, seconds: float = 60) -> None:
        """Waits until the terminal has got these words after all that was expected before."""
        until = time.monotonic() + seconds
        while words not in self.shown[self._seen :]:
            assert time.monotonic() < until, (words, self.shown)
            if not self.read(0.05) and words not in self.shown[self._seen :]:
                raise AssertionError((words, self.shown))
        self._seen = self.shown.index(words, self._seen) + len(words)

    _seen: int = 0

    def type(self, text: str) -> None:
        os.write(self.master, text.encode("utf-8"))

    def finish(self, seconds: float = 60) -> int:
        """The exit code. Reads to the end."""
        until = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < until, self.shown
            self.read(0.05)
        self.read(0.05)
        for thread in self._threads:
            thread.join(timeout=10)
        with contextlib.suppress(OSError):
            os.close(self.master)
        return self.process.returncode
