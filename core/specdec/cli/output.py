"""What commands write: results to standard output, messages to standard error.

A message never continues a line of something else, and standard output or a file that cannot be written is a refusal of one
line.
"""

import io
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from specdec.errors import SpecdecError, UsageError

__all__ = [
    "OutputError",
    "check_writable",
    "clear_progress",
    "discard",
    "progress",
    "replace_unwritable",
    "say",
    "show",
    "write",
    "write_file",
]

# The streams whose last line is unfinished: text that is still generated, a progress line that is still rewritten.
_streaming: TextIO | None = None
_progressing: TextIO | None = None


class OutputError(SpecdecError):
    """Standard output or a file cannot be written: its device is full, or it was closed before the command began."""


def write(text: str, *, end: str = "\n") -> None:
    """Writes ``text`` and ``end`` to standard output at once.

    Raises OutputError if it cannot be written, BrokenPipeError if its reader has gone.
    """
    global _streaming
    stream = sys.stdout
    if stream is None:
        raise OutputError("standard output is closed; send it to a terminal, a file or another command")
    if text + end:
        # before it is written: an interrupt may come in between
        _streaming = None if (text + end).endswith("\n") else stream
    try:
        stream.write(text + end)
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        discard(stream)
        reason = error.strerror or error
        raise OutputError(
            f"standard output cannot be written: {reason}; make room or send it somewhere else"
        ) from error


def say(line: str) -> None:
    """Writes a message to standard error, on a line of its own. Without a standard error that can be written, it is lost."""
    if _streaming is not None and _streaming is sys.stdout:
        # the message says what went wrong; a second failure would hide it
        with suppress(OSError, OutputError):
            write("")
    clear_progress()
    _to_stderr(line + "\n")


def show(text: str) -> None:
    """Writes ``text`` to standard error as it is: a prompt, or what moves a terminal's cursor."""
    _to_stderr(text)


def progress(line: str) -> None:
    """Shows ``line`` on the terminal at standard error until the next message or ``progress``."""
    global _progressing
    _to_stderr(line + "\r")
    _progressing = sys.stderr


def clear_progress() -> None:
    """Takes away what ``progress`` shows."""
    global _progressing
    if _progressing is not None and _progressing is sys.stderr:
        _to_stderr("\x1b[K")
    _progressing = None


def _to_stderr(text: str) -> None:
    stream = sys.stderr
    if stream is None:
        return
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        discard(stream)


def discard(stream: TextIO) -> None:
    """Sends the rest of a stream nowhere: what its buffer still holds would make the interpreter complain at exit."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def replace_unwritable() -> None:
    """Lets standard output show a ``?`` where its encoding lacks a character of the model's text, instead of failing."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def check_writable(option: str, path: str) -> None:
    """Refuses, before any work is done, a file that cannot be written afterwards; it is neither made nor emptied.

    Raises UsageError naming option, path and reason.
    """
    file = Path(path)
    if not path or file.is_dir():
        reason = "is a directory" if path else "is empty"
    elif not file.parent.is_dir():
        reason = f"the folder {str(file.parent)!r} does not exist"
    elif not os.access(file if file.exists() else file.parent, os.W_OK):
        reason = "permission denied"
    else:
        return
    raise UsageError(f"{option} {path!r}: {reason}; name a file that can be written")


def write_file(option: str, path: str, text: str) -> None:
    """Writes ``text`` and a line break to the file that an option names. Raises OutputError if that fails."""
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(f"{option} {path!r}: {reason}; make room or name another file") from error
