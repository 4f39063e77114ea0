"""Whether what a hook returned is what the core will call: checked once, at preparation, against the protocols.

Declaration layer: the standard library, attrs and other declaration modules only.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Any, Protocol

from specdec.declaration import Recipe, StateKind, StateLayout
from specdec.interfaces import Drafter, PackedTarget, Round, Target
from specdec.places import at, blamed

__all__ = ["mistake_in", "protocol_of"]


def protocol_of(hook: str, recipe: Recipe) -> type:
    """The protocol that a preparation hook's result must satisfy."""
    if hook == "build_target_state":
        return PackedTarget if recipe.confidence_width else Target
    return Drafter if hook == "load_drafter" else Round


def mistake_in(result: object, protocol: type) -> str | None:
    """What is wrong with an object, for a message that says which hook returned it; None if it can be used.

    Looked at are: that it is an object of the protocol's kind, that it has every member and that its methods can be called as the
    core calls them; then its state. Calls none of its methods.
    """
    contract = f"specdec.interfaces.{protocol.__name__}"
    kind = type(result)
    if isinstance(result, type):
        return f"the class {result.__name__}{at(result)} itself; return an object of it, with the methods of {contract}"
    if kind.__module__ == "builtins":
        return f"{_article(kind.__name__)}; return one object with the methods of {contract}"
    named = f"an object of {kind.__name__}{at(kind)}"
    members = dict(_members(protocol))
    missing = [name for name in members if not _has(result, name)]
    if missing:
        return f"{named} without {', '.join(missing)}; {contract} has {', '.join(members)}"
    for name, wanted in members.items():
        if isinstance(wanted, FunctionType):
            wrong = _call_mistake(getattr(result, name), name, wanted)
            if wrong:
                return f"{named}, whose {wrong}"
    try:
        wrong = _state_mistake(result, protocol)
    except Exception as error:
        where = blamed(error)
        wrong = f"state cannot be looked at: {type(error).__name__}: {error}" + (f" ({where})" if where else "")
    return f"{named}, whose {wrong}" if wrong else None


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _members(protocol: type) -> Iterator[tuple[str, Any]]:
    """Names of attributes, properties and methods; what they are in the protocol, None for attributes."""
    for owner in reversed(protocol.__mro__):
        if owner in (object, Protocol) or not getattr(owner, "_is_protocol", False):
            continue
        for name in inspect.get_annotations(owner):
            yield name, None
        for name, value in vars(owner).items():
            if not name.startswith("_") and isinstance(value, FunctionType | property):
                yield name, value


def _has(result: object, name: str) -> bool:
    try:
        getattr(result, name)
    except AttributeError:
        return False
    except Exception:
        # a property that cannot be read yet, such as the state of a round that has not run
        return True
    return True


def _call_mistake(method: Any, name: str, wanted: FunctionType) -> str | None:
    """Whether the call would fail, or mistake one argument for another."""
    if not callable(method):
        return f"{name} is {_article(type(method).__name__)}, not a method"
    try:
        found = inspect.signature(method)
    except (TypeError, ValueError):
        return None
    asked = [parameter for parameter in inspect.signature(wanted).parameters.values() if parameter.name != "self"]
    positional = [parameter for parameter in asked if parameter.kind is not parameter.KEYWORD_ONLY]
    keywords = [parameter.name for parameter in asked if parameter.kind is parameter.KEYWORD_ONLY]
    required = sum(parameter.default is parameter.empty for parameter in positional)
    # annotations would bury the names
    shown = f"{name}({', '.join(found.parameters)}){at(method)}"
    called = f"{name}({', '.join(parameter.name for parameter in asked)})"
    takes = [p.name for p in found.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    ours = [parameter.name for parameter in positional]
    if takes != ours and sorted(takes) == sorted(ours):
        return f"{shown} has its arguments in another order than the core gives them: {called}"
    if not all(_binds(found, count, keywords) for count in (required, len(positional))):
        return f"{shown} cannot be called as the core does: {called}"
    return None


def _binds(signature: inspect.Signature, positional: int, keywords: list[str]) -> bool:
    try:
        signature.bind(*[None] * positional, **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True


def _state_mistake(result: Any, protocol: type) -> str | None:
    if protocol is Round:
        return None
    layout = getattr(result.store, "layout", None)
    owner = "drafter" if protocol is Drafter else "target"
    if not isinstance(layout, StateLayout):
        return f"store is {_article(type(result.store).__name__)}; make it with specdec.state.store.StateStore from the layout"
    if layout.owner != owner:
        return f"store has a layout of the {layout.owner}; give it one with owner={owner!r}"
    if protocol is not Drafter:
        size = result.vocab_size
        return None if isinstance(size, int) and size > 0 else f"vocab_size is {size!r}; it is the number of token ids"
    if result.lag not in (0, 1):
        return f"lag is {result.lag!r}; it is 1 where row i of history needs token i + 1, else 0"
    counted = [field for field in layout.fields if field.name == "rows"]
    wanted = (StateKind.ROW, (), 1, "int64")
    if not counted or (counted[0].kind, counted[0].shape, counted[0].layers, counted[0].dtype) != wanted:
        return (
            "state does not count its rows of history: declare a field 'rows' of kind row, shape (), one layer, int64, and "
            "set it in prefill and commit (specdec.context_fields.absorbed_rows)"
        )
    return None
