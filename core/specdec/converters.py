"""Foreign data to records, strictly: one cattrs converter and one error formatter for the whole project.

cattrs alone turns 3.7 into 3, "9" into 9 and True into 1, accepts unknown keys and reduces a validator's message to "invalid
value". Here none of that happens. Import this module only where data is read: cattrs takes time to import.

Declaration layer: the standard library, attrs, cattrs and other declaration modules only.
"""

import json
import math
from collections.abc import Mapping
from types import GenericAlias
from typing import Any, TypeVar, get_args, get_origin

import attrs
import cattrs
from cattrs.errors import ForbiddenExtraKeysError

from specdec.errors import DeclarationError, SpecdecError

__all__ = ["structure", "structure_json", "unstructure", "unstructure_json"]

T = TypeVar("T")

#: Problems listed before a message says how many more there are.
_SHOWN = 8

_EXPECTED: dict[type, str] = {bool: "true or false", int: "an integer", str: "a string"}


def structure(data: Any, cls: type[T], source: str, *, error: type[SpecdecError] = DeclarationError) -> T:
    """Builds ``cls`` from plain data (objects, lists, strings, numbers).

    ``source`` names where the data comes from, a file name usually; every problem is reported with a path that starts
    with it, in the words of the validator that found it.

    Raises:
        error: if a key is missing or unknown, a value has another type than declared, or a validator refuses it. An integer
            is accepted for a float field; nothing else is converted.
    """
    try:
        return _CONVERTER.structure(data, cls)
    except Exception as caught:
        raise error(_summary(caught, source)) from caught


def structure_json(text: str, cls: type[T], source: str, *, error: type[SpecdecError] = DeclarationError) -> T:
    """Builds ``cls`` from JSON text.

    Raises:
        error: if the text is not JSON, repeats a key or holds NaN or infinity; else as :func:`structure`.
    """
    try:
        data = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except ValueError as caught:
        raise error(f"{source}: not valid JSON: {caught}") from caught
    return structure(data, cls, source, error=error)


def unstructure(record: Any) -> Any:
    """Plain data of a record, from which :func:`structure` builds an equal one."""
    return _CONVERTER.unstructure(record)


def unstructure_json(record: Any) -> str:
    """JSON text of a record, indented, with a final line break."""
    return json.dumps(unstructure(record), indent=2, allow_nan=False) + "\n"


def _found(value: object) -> str:
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, bool):
        return "true" if value else "false"
    return "null" if value is None else repr(value)


def _exactly(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"must be {_EXPECTED[kind]}, got {_found(value)}")
    return value


def _number(value: Any, _: type) -> float:
    # An integer literal is a number in JSON; a bool is not, although Python counts it as an int.
    if type(value) not in (int, float) or not math.isfinite(value):
        raise TypeError(f"must be a finite number, got {_found(value)}")
    return float(value)


def _is_uniform_tuple(kind: Any) -> bool:
    return get_origin(kind) is tuple and get_args(kind)[-1:] == (Ellipsis,)


def _build() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    for kind in _EXPECTED:
        converter.register_structure_hook(kind, _exactly)
    converter.register_structure_hook(float, _number)

    def record_hook(kind: Any) -> Any:
        from_mapping = converter.gen_structure_attrs_fromdict(kind)

        def hook(value: Any, cls: Any) -> Any:
            if not isinstance(value, Mapping):
                raise TypeError(f"must be an object, got {_found(value)}")
            return from_mapping(value, cls)

        return hook

    def tuple_hook(kind: Any) -> Any:
        items: Any = GenericAlias(list, get_args(kind)[:1])

        def hook(value: Any, _: Any) -> Any:
            # A string is iterable too, and would become a tuple of its letters.
            if not isinstance(value, list | tuple):
                raise TypeError(f"must be a list, got {_found(value)}")
            return tuple(converter.structure(list(value), items))

        return hook

    converter.register_structure_hook_factory(attrs.has, record_hook)
    converter.register_structure_hook_factory(_is_uniform_tuple, tuple_hook)
    return converter


_CONVERTER = _build()


def _words(caught: BaseException, _: type | None) -> str:
    """What is wrong, in the words of whoever found it."""
    if isinstance(caught, ForbiddenExtraKeysError):
        return f"unknown key {', '.join(repr(key) for key in sorted(caught.extra_fields))}"
    if isinstance(caught, KeyError):
        return "missing"
    return str(caught)


def _summary(caught: BaseException, source: str) -> str:
    problems = []
    for line in cattrs.transform_error(caught, path="$", format_exception=_words):
        words, _, place = line.rpartition(" @ $")
        problems.append(f"{source}{':' + place.lstrip('.') if place else ''}: {words}")
    if len(problems) > _SHOWN:
        problems[_SHOWN:] = [f"and {len(problems) - _SHOWN} more problems"]
    return "; ".join(problems)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} is repeated")
    return data


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
