"""A page of the docs as its reader works through it: files written and commands typed, in order, in one shell."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from attrs import frozen

_FENCE = re.compile(
    r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<body>.*?)^```$', re.MULTILINE | re.DOTALL
)
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


@frozen(kw_only=True)
class File:
    """A file that the reader writes: path below the folder the shell is in, and its text."""

    path: str
    text: str


@frozen(kw_only=True)
class Command:
    """A command that the reader types, and what the page shows of its output; … stands for any text, on a line of its own for
    any lines."""

    line: str
    shown: str


def steps(page: str) -> Iterator[File | Command]:
    """Fenced blocks of a Markdown text: titled ones are files, ``console`` ones are commands, others are only read."""
    for block in _FENCE.finditer(page):
        if block["title"]:
            yield File(path=block["title"], text=block["body"])
        elif block["language"] == "console":
            for part in re.split(r"^\$ ", block["body"], flags=re.MULTILINE)[1:]:
                line, _, shown = part.partition("\n")
                yield Command(line=line, shown=shown)


def shows(shown: str, printed: str) -> bool:
    """Whether what a page shows was printed. Numbers are those of the machine that measured: any number stands for any other."""
    lines = []
    for line in shown.splitlines():
        if line.strip() == "…":
            lines.append(r"(?:.*\n)*?")
            continue
        parts = [r"\s+".join(re.escape(word) for word in re.split(r"\s+", part)) for part in _measured(line).split("…")]
        lines.append(".*".join(parts) + r"[ ]*\n")
    return re.fullmatch("".join(lines), _measured(printed.rstrip("\n") + "\n")) is not None


def _measured(text: str) -> str:
    return _NUMBER.sub("0", text)


class Shell:
    """A bash in which commands are typed one after the other; folder, variables and an activated environment stay.

    ``folder`` is where it is. It lives ``deadline`` seconds at most: then it is killed, and the running command fails.
    """

    def __init__(self, folder: Path, environ: Mapping[str, str], *, deadline: float) -> None:
        self._bash = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=folder,
            env=dict(environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._timer = threading.Timer(deadline, self._kill)
        self._timer.start()
        self.folder = folder

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()
        self._kill()
        self._bash.communicate()

    def _kill(self) -> None:
        """Ends the shell and what runs in it."""
        with suppress(ProcessLookupError):
            os.killpg(self._bash.pid, signal.SIGKILL)

    def type(self, line: str) -> tuple[int, str]:
        """Exit code and everything that a command prints, standard error included; −1 if the shell ended."""
        mark = "specdec-tutorial-done"
        assert self._bash.stdin is not None and self._bash.stdout is not None
        # what the command reads is not what is typed next
        self._bash.stdin.write(f"{{ {line}\n}} < /dev/null; code=$?; echo; echo {mark} $code $PWD\n")
        self._bash.stdin.flush()
        printed = ""
        for text in self._bash.stdout:
            if text.startswith(mark):
                _, code, where = text.split(maxsplit=2)
                self.folder = Path(where.strip())
                return int(code), printed.removesuffix("\n")
            printed += text
        return -1, printed
