"""specdec: a plugin framework for speculative decoding.

Importing this package loads only the standard library and pluggy: the hook markers and the version. Everything else is
imported from its own module (``specdec.declaration``, ``specdec.catalog``, ``specdec.errors`` ...), and nothing in the
declaration layer imports torch. ``Engine`` and what its callers need are loaded when they are first asked for.
"""

from importlib import import_module
from typing import Any

import pluggy

__version__ = "0.1.0"

#: Name of the pluggy project and of the entry-point group that plugins register under.
PROJECT = "specdec"

#: Marks a hook specification; used by :mod:`specdec.hookspecs` only.
hookspec = pluggy.HookspecMarker(PROJECT)

#: Marks a hook implementation in a plugin: ``@hookimpl def declare_speculation(): ...``.
hookimpl = pluggy.HookimplMarker(PROJECT)

_LAZY = {
    "Engine": "specdec.serving.engine",
    "Grammar": "specdec.serving.grammar",
    "Request": "specdec.serving.request",
    "SamplingParams": "specdec.sampling.params",
}

__all__ = ["PROJECT", "__version__", "hookimpl", "hookspec", *_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
