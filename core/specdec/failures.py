"""An error of somebody's code while requests run, as one line for who sent the request and as a traceback for who asks.

Declaration layer: the standard library and other declaration modules only.
"""

from __future__ import annotations

import os
import sys
import traceback

from specdec.errors import SpecdecError
from specdec.places import raised

__all__ = ["TRACEBACK_VARIABLE", "error_line", "reported", "show_traceback"]

#: Environment variable that asks for the traceback of every error that ends a command or a request.
TRACEBACK_VARIABLE = "SPECDEC_TRACEBACK"


def error_line(error: BaseException) -> str:
    """One line for a user: a deliberate error's own, another one's with its type and the plugin's line that it came through."""
    if isinstance(error, SpecdecError):
        return str(error)
    message = " / ".join(line.strip() for line in str(error).splitlines() if line.strip())
    where = raised(error)
    return type(error).__name__ + (f": {message}" if message else "") + (f" ({where})" if where else "")


def show_traceback(error: BaseException) -> bool:
    """Prints the traceback to stderr if the user asked for it; returns whether."""
    if os.environ.get(TRACEBACK_VARIABLE, "") in ("", "0"):
        return False
    if sys.stderr is not None:
        traceback.print_exception(error, file=sys.stderr)
    return True


def reported(error: BaseException) -> str:
    """``error_line`` of an error that goes no further; its traceback, which nobody else will see, is shown if asked for."""
    show_traceback(error)
    return error_line(error)
