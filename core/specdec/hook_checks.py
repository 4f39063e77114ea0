"""What is wrong with a plugin's hooks, found before any of them is called: names, arguments, markers.

Declaration layer: the standard library, pluggy and other declaration modules only.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

import pluggy

from specdec import hookspecs
from specdec.places import at

__all__ = ["HOOKS", "hook_mistake", "unmarked"]

#: Argument names of every hook.
HOOKS: dict[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(getattr(hookspecs, name)).parameters)
    for name in ("declare_speculation", "build_target_state", "load_drafter", "capture_round")
}


def hook_mistake(plugin: object, manager: pluggy.PluginManager) -> str | None:
    """The first implementation that cannot be called, with its place and what is meant instead; None if all can.

    manager: of the project, to read markers as it does.
    """
    for name in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, name)
        if options is None:
            continue
        function = getattr(plugin, name)
        hook = options.get("specname") or name
        if hook not in HOOKS:
            if options.get("optionalhook"):
                continue
            known = ", ".join(HOOKS)
            return f"{name}{at(function)} is marked as a hook, but there is no {hook!r};{_close(hook, HOOKS)} hooks: {known}"
        wrong = _argument_mistake(function, HOOKS[hook])
        if wrong:
            return f"{name}{at(function)} {wrong}"
    return None


def unmarked(plugin: object, hook: str) -> str:
    """A sentence that the plugin has a function of the hook's name without the marker, with its place; empty if it has none."""
    function = getattr(plugin, hook, None)
    if not inspect.isroutine(function):
        return ""
    return f"; {hook}{at(function)} lacks the marker: put @hookimpl (from specdec import hookimpl) above it"


def _argument_mistake(function: Callable[..., Any], passed: tuple[str, ...]) -> str | None:
    offered = f"the hook passes: {', '.join(passed) or 'nothing'}" + ("; take those you need" if passed else "")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.default is not parameter.empty:
            continue
        if parameter.kind is parameter.KEYWORD_ONLY:
            return f"takes {parameter.name!r} by keyword only, which is never passed; drop the * before it; {offered}"
        if parameter.name not in passed:
            return f"takes {parameter.name!r}, which is not passed;{_close(parameter.name, passed)} {offered}"
    return None


def _close(name: str, known: Any) -> str:
    found = difflib.get_close_matches(name, list(known), n=1)
    return f" did you mean {found[0]!r}?" if found else ""
