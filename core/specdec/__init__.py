"""specdec: a plugin framework for speculative decoding.

Importing this package loads only the standard library and pluggy: the hook markers and the version. Everything else is
imported from its own module (``specdec.declaration``, ``specdec.catalog``, ``specdec.errors`` ...), and nothing in the
declaration layer imports torch.
"""

import pluggy

__version__ = "0.1.0"

#: Name of the pluggy project and of the entry-point group that plugins register under.
PROJECT = "specdec"

#: Marks a hook specification; used by :mod:`specdec.hookspecs` only.
hookspec = pluggy.HookspecMarker(PROJECT)

#: Marks a hook implementation in a plugin: ``@hookimpl def declare_speculation(): ...``.
hookimpl = pluggy.HookimplMarker(PROJECT)

__all__ = ["PROJECT", "__version__", "hookimpl", "hookspec"]
