"""Where something is written, as "file:line": functions, classes, running code and errors, for messages to plugin authors.

What is one's own is code outside the core, torch and the other libraries that only pass calls on.

Declaration layer: the standard library only.
"""

from __future__ import annotations

import inspect
import linecache
import os
import sys
import sysconfig
import traceback
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["at", "blamed", "depth", "method_of", "place", "raised", "running"]

_CORE = f"{Path(__file__).parent}{os.sep}"
_STANDARD = f"{sysconfig.get_path('stdlib')}{os.sep}"
#: Folders where other distributions are, below the standard library's.
_INSTALLED = ("site-packages", "dist-packages")
#: Lines of decorators that are looked behind for a function's name.
_MOST_DECORATORS = 8
#: Libraries whose frames lie between an author's line and the core. Only loaded ones can have any.
_PASSING_ON = ("torch", "numpy", "attr", "attrs", "pluggy")


def _folder(name: str) -> str | None:
    file = getattr(sys.modules.get(name), "__file__", None)
    return f"{Path(file).parent}{os.sep}" if file else None


@cache
def _is_own(file: str, core: bool) -> bool:
    """core: whether the core's files count. A library that code ran from is loaded, so answers stay true."""
    if file.startswith("<"):
        return False
    if file.startswith(_CORE):
        return core
    if file.startswith(_STANDARD) and not any(part in _INSTALLED for part in Path(file).parts):
        return False
    return not any(folder and file.startswith(folder) for folder in map(_folder, _PASSING_ON))


def place(thing: object) -> str:
    """Where a function, method, property or class is written, or the class of another object; empty if nobody knows."""
    if isinstance(thing, property):
        thing = thing.fget
    function = inspect.unwrap(getattr(thing, "__func__", thing)) if callable(thing) else thing
    code = getattr(function, "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{_line_of_name(code.co_filename, code.co_firstlineno)}"
    kind = thing if isinstance(thing, type) else type(thing)
    try:
        file, first = inspect.getsourcefile(kind), inspect.findsource(kind)[1] + 1
    except (OSError, TypeError):
        return ""
    return f"{file}:{_line_of_name(str(file), first)}"


def _line_of_name(file: str, first: int) -> int:
    """The line with a function's or class's name; decorators come before it. ``first`` for a lambda, or without the source."""
    for line in range(first, first + _MOST_DECORATORS + 1):
        if linecache.getline(file, line).lstrip().startswith(("def ", "async def ", "class ")):
            return line
    return first


def at(thing: object) -> str:
    """`` (file:line)`` of ``place``, to follow a name in a message; empty if nobody knows."""
    found = place(thing)
    return f" ({found})" if found else ""


def blamed(error: BaseException) -> str:
    """The innermost line of one's own that an error came through; empty if there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_own(frame.filename, False):
            return f"{frame.filename}:{frame.lineno}"
    return ""


def raised(error: BaseException) -> str:
    """ "file:line in function" of the innermost line of one's own that an error came through, the core's if there is none; empty
    for an error that was never raised."""
    frames = traceback.extract_tb(error.__traceback__)
    for core in (False, True):
        for frame in reversed(frames):
            if _is_own(frame.filename, core):
                return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return ""


def depth() -> int:
    """Frames of the running call, the caller's included; see ``running``. A number, not a frame: that would keep alive what
    its variables hold."""
    frame, found = _caller(), 0
    while frame is not None:
        frame, found = frame.f_back, found + 1
    return found


def running(since: int = 0, but: str = "") -> str:
    """ "file:line in function" of the innermost running code of one's own, the core's if there is none; empty without either.

    since: the ``depth`` of whoever began; frames outside that one are not looked at, so that a command that runs a round is not
    blamed for it. but: a file whose frames do not count, that of who asks.
    """
    frames: list[FrameType] = []
    frame = _caller()
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    inside = frames[: len(frames) - since + 1] if since else frames
    for core in (False, True):
        for one in inside:
            if one.f_code.co_filename != but and _is_own(one.f_code.co_filename, core):
                return f"{one.f_code.co_filename}:{one.f_lineno} in {one.f_code.co_name}"
    return ""


def _caller() -> FrameType | None:
    """The frame outside this module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame


def method_of(owner: Any, name: str) -> str:
    """ "Class.method (file:line)" of a plugin's object. Drafters that the core's tests wrap are looked through."""
    while type(owner).__module__.startswith("specdec.") and hasattr(owner, "inner"):
        owner = owner.inner
    return f"{type(owner).__name__}.{name}{at(getattr(owner, name, None))}"
