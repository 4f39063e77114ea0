"""Fields read from a checkpoint's ``config.json``: attrs fields and checks whose message is one line for the file's owner.

A plugin's geometry is a record of such fields. Every refusal names the key, shows the value and says what is allowed.
Declaration layer: the standard library, attrs and :mod:`specdec.errors` only.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard, TypeVar

from attrs import NOTHING, field, fields_dict

from specdec.errors import CheckpointError

__all__ = [
    "as_items",
    "build",
    "check_rules",
    "integer",
    "is_integer",
    "number",
    "refuse",
    "renamed_items",
    "require_fixed",
    "text_section",
]

T = TypeVar("T")


def refuse(key: str, value: object, allowed: str) -> CheckpointError:
    """Return the error for a configuration value: ``key``, ``value`` (shortened to 80 characters) and what is allowed."""
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return CheckpointError(f"config.json: {key} is {shown}, allowed: {allowed}")


def is_integer(value: object) -> TypeGuard[int]:
    """Whether ``value`` is a true ``int``; JSON's ``true`` is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def integer(minimum: int, default: Any = NOTHING) -> Any:
    """Return an attrs field that holds an integer of at least ``minimum``.

    The record raises CheckpointError on construction if the value has another type or is smaller.
    """

    def check(_instance: object, attribute: Any, value: object) -> None:
        if not is_integer(value) or value < minimum:
            raise refuse(attribute.name, value, f"an integer of at least {minimum}")

    return field(default=default, validator=check)


def number(minimum: float, maximum: float) -> Any:
    """Return an attrs field that holds a number above ``minimum`` and at most ``maximum``; NaN never is.

    The record raises CheckpointError on construction if the value has another type or is outside.
    """

    def check(_instance: object, attribute: Any, value: object) -> None:
        real = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not real or not minimum < value <= maximum:  # type: ignore[operator]
            raise refuse(attribute.name, value, f"a number above {minimum:g} and at most {maximum:g}")

    return field(validator=check)


def as_items(value: object) -> object:
    """Converter: a list becomes a tuple; anything else stays as it is, for a rule to refuse."""
    return tuple(value) if isinstance(value, (list, tuple)) else value


def renamed_items(value: object, synonyms: Mapping[str, str]) -> object:
    """Return a list of names as a tuple in which every name that ``synonyms`` lists is replaced by its own word.

    Unknown names and values that are no list stay as they are, for a rule to refuse. Converters are made of it.
    """
    if not isinstance(value, (list, tuple)):
        return value
    return tuple(synonyms.get(item, item) if isinstance(item, str) else item for item in value)


def check_rules(record: object, rules: Iterable[tuple[str, str, bool]]) -> None:
    """Check ``rules``, each a key, what is allowed, and whether it holds, in order: later rules may rely on earlier ones.

    Raises:
        CheckpointError: at the first rule that does not hold, with the record's value of its key.
    """
    for key, allowed, holds in rules:
        if not holds:
            raise refuse(key, getattr(record, key), allowed)


def text_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text model's part of a ``config.json``: its ``text_config``, or all of it if there is none.

    Raises:
        CheckpointError: if that is not an object.
    """
    text = config.get("text_config", config) if isinstance(config, Mapping) else config
    if not isinstance(text, Mapping):
        raise refuse("text_config", text, "an object with the text model's keys")
    return text


def require_fixed(text: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """Check keys that would change the mathematics against the only values implemented; an absent key is fine.

    Raises:
        CheckpointError: if a key has another value.
    """
    for key, required in fixed.items():
        if text.get(key, required) != required:
            raise refuse(key, text[key], repr(required))


def build(cls: type[T], values: Mapping[str, Any]) -> T:
    """Return the attrs record ``cls`` made of those ``values`` that are its fields; other keys are ignored.

    Raises:
        CheckpointError: if a field has no value, or the record refuses one.
    """
    names = fields_dict(cls)  # type: ignore[arg-type]
    missing = [name for name in names if name not in values]
    if missing:
        raise CheckpointError(f"config.json: missing {', '.join(missing)}; every one of these keys is needed")
    return cls(**{name: values[name] for name in names})
