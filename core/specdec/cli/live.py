"""How speculation goes while text is generated: one line on a terminal at standard error, nothing anywhere else.

Where the text goes to a file, the line is simply rewritten. Where it goes to another command, which may show it on the same
terminal, there is none. Where text and line share a terminal, the line stands below the text: it is drawn while the text's column
is known, and the cursor goes back to where the text ends. It is taken away before anything is written that may reach the line
below. With characters whose width terminals disagree about, it stays away until the text begins a new line.
"""

from __future__ import annotations

import os
import stat
import sys
import time
import unicodedata
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from attrs import evolve, frozen

from specdec.cli.output import clear_progress, progress, show, write

if TYPE_CHECKING:
    from types import TracebackType

    from specdec.serving.request import Emission

__all__ = ["RECENT_ROUNDS", "Cursor", "LiveLine"]

#: Rounds of the acceptance that is shown.
RECENT_ROUNDS = 32
#: Seconds between two drawings, so at most ten a second.
_INTERVAL = 0.1
#: A terminal smaller than this has no room for a line beside the text.
_COLUMNS, _ROWS = 20, 3
#: Languages whose terminals may show characters of ambiguous width over two columns.
_WIDE_LANGUAGES = ("ja", "ko", "zh")


@frozen(kw_only=True)
class Cursor:
    """Where the terminal's cursor is in the text's last line.

    column: from 0; equal to columns while the next character is still to wrap. certain: whether the column is known. columns:
    width of the terminal. wide: whether characters of ambiguous width make the column uncertain.
    """

    columns: int
    column: int = 0
    certain: bool = True
    wide: bool = False

    @property
    def drawable(self) -> bool:
        """Whether the cursor can be brought back here."""
        return self.certain and self.column < self.columns

    def after(self, text: str) -> tuple[Cursor, bool]:
        """The cursor behind ``text``, and whether the text may reach a line below."""
        column, certain, below = self.column, self.certain, not self.certain
        for character in text:
            if character == "\n":
                column, certain, below = 0, True, True
                continue
            width = _width(character, self.wide)
            if character == "\r":
                column = 0
            elif character == "\t":
                column = min(column // 8 * 8 + 8, self.columns - 1)
            elif width is None:
                certain, below = False, True
            elif column + width > self.columns:
                column, below = width, True
            else:
                column += width
        return evolve(self, column=column, certain=certain), below


#: Characters beyond ASCII whose width terminals agree about, but for ambiguous ones: alphabets, punctuation, arrows, mathematics,
#: boxes, CJK and Hangul syllables. Not emoji, whose sequences some show as one.
_KNOWN = (
    (0xA0, 0x530),
    (0x2010, 0x2028),
    (0x2030, 0x205F),
    (0x2190, 0x2300),
    (0x2500, 0x25A0),
    (0x3000, 0x3100),
    (0x4E00, 0xA000),
    (0xAC00, 0xD7A4),
    (0xFF01, 0xFF61),
)


def _width(character: str, wide: bool) -> int | None:
    """Columns of a character; None where terminals differ."""
    if " " <= character <= "~":
        return 1
    known = any(first <= ord(character) < end for first, end in _KNOWN)
    if not known or unicodedata.category(character)[0] in "CM":
        return None
    kind = unicodedata.east_asian_width(character)
    if kind == "A" and wide:
        return None
    return 2 if kind in "WF" else 1


class LiveLine:
    """The line of one request. A context manager that takes the line away at its end, however it ends."""

    def __init__(self, *, streaming: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        """streaming: text is written to standard output meanwhile, through ``write`` only, from the beginning of a line."""
        self._clock = clock
        self._place = _place(streaming)
        self._cursor = Cursor(columns=_columns(), wide=_wide())
        self._utf8 = "utf" in (getattr(sys.stdout, "encoding", None) or "").lower()
        self._shown = False
        self._drawn = float("-inf")
        self._tokens = self._in_rounds = self._rounds = 0
        self._started: float | None = None
        self._recent: deque[tuple[int, int]] = deque(maxlen=RECENT_ROUNDS)

    def __enter__(self) -> LiveLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()
        clear_progress()

    def write(self, text: str) -> None:
        """Writes text of the output. Raises as ``output.write`` does."""
        if self._place == "below" and text:
            cursor = self._cursor
            if cursor.column and cursor.columns != _columns():
                cursor = evolve(cursor, certain=False)
            elif not cursor.column:
                cursor = evolve(cursor, columns=_columns())
            after, below = cursor.after(text)
            if below:
                self.clear()
            if "\x1b" in text or not (self._utf8 or text.isascii()):
                # what the terminal makes of it is not known, also not behind the next line break
                self.clear()
                self._place = "nowhere"
            self._cursor = after
        write(text, end="")

    def update(self, emission: Emission) -> None:
        """Counts what came and shows it, unless the line was drawn a moment ago."""
        now, count = self._clock(), len(emission.tokens)
        self._tokens += count
        if self._started is None:
            self._started = now  # the first token belongs to the prompt
        elif count:
            self._rounds += 1
            self._in_rounds += count
            self._recent.append((emission.completion.verified, emission.completion.accepted))
        if self._place != "nowhere" and self._rounds and now - self._drawn >= _INTERVAL:
            self._draw(self.text(now))
            self._drawn = now

    def text(self, now: float) -> str:
        """The line. now: on the clock of ``update``."""
        verified, accepted = (sum(values) for values in zip(*self._recent, strict=True)) if self._recent else (0, 0)
        rounds = f"last {len(self._recent)} rounds" if len(self._recent) > 1 else "1 round"
        acceptance = f"acceptance {accepted / verified:.2f} ({rounds})" if verified else "no drafts"
        seconds = now - (now if self._started is None else self._started)
        parts = (
            f"{self._tokens} tokens",
            f"{self._in_rounds / max(self._rounds, 1):.2f}/round",
            acceptance,
            f"{self._in_rounds / seconds if seconds > 0 else 0.0:.1f} tokens/s",
        )
        return "  ".join(parts)

    def clear(self) -> None:
        """Takes the line away; the next ``update`` may show it again."""
        if self._shown and self._place == "own":
            clear_progress()
        elif self._shown:
            show("\x1b[J")  # what is behind the cursor, wherever that is
        self._shown = False

    def _draw(self, line: str) -> None:
        line = line[: max(_columns() - 1, 0)]
        if self._place == "own":
            progress(line + "\x1b[K")
            self._shown = True
        elif self._cursor.drawable and self._cursor.columns == _columns():
            back = f"\x1b[{self._cursor.column}C" if self._cursor.column else ""
            show(f"\n\r{line}\x1b[K\x1b[1A\r{back}")
            self._shown = True


def _place(streaming: bool) -> Literal["own", "below", "nowhere"]:
    """Where the line may be."""
    if sys.stderr is None or not sys.stderr.isatty() or os.environ.get("TERM", "") in ("", "dumb"):
        return "nowhere"
    columns, rows = _size()
    if columns < 1:
        return "nowhere"
    if not streaming or sys.stdout is None:
        return "own"
    if not sys.stdout.isatty():
        return "nowhere" if _is_pipe() else "own"
    if not _same_terminal():
        return "own"
    return "below" if columns >= _COLUMNS and rows >= _ROWS else "nowhere"


def _is_pipe() -> bool:
    """Whether the text goes to another command, which may show it on this very terminal; also if that cannot be found out."""
    try:
        mode = os.fstat(sys.stdout.fileno()).st_mode
    except (OSError, ValueError):
        return True
    return not (stat.S_ISREG(mode) or stat.S_ISCHR(mode))


def _same_terminal() -> bool:
    """Whether both streams are one terminal; also if that cannot be found out."""
    try:
        return os.fstat(sys.stdout.fileno()).st_rdev == os.fstat(sys.stderr.fileno()).st_rdev
    except (OSError, ValueError):
        return True


def _size() -> tuple[int, int]:
    try:
        return os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):
        return 80, 24


def _columns() -> int:
    return _size()[0]


def _wide() -> bool:
    found = next((os.environ[name] for name in ("LC_ALL", "LC_CTYPE", "LANG") if os.environ.get(name)), "")
    return found.startswith(_WIDE_LANGUAGES)
