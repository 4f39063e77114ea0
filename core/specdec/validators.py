"""Small attrs validators whose messages show the wrong value and the expected form.

Declaration layer: the standard library, attrs and :mod:`specdec.errors` only.
"""

from collections.abc import Iterable
from typing import Any, Protocol

from specdec.errors import DeclarationError

__all__ = ["as_tuple", "integer", "one_of", "text", "tuple_of"]


class _Validator(Protocol):
    def __call__(self, instance: Any, attribute: Any, value: Any, /) -> None: ...


def as_tuple(items: Iterable[Any]) -> tuple[Any, ...]:
    """Converter for tuple fields, so that a list may be given. A string stays as it is, for a validator to refuse.

    Typed loosely because type checkers cannot infer ``tuple`` as a converter.
    """
    # A string would become a tuple of its letters.
    return items if isinstance(items, str) else tuple(items)  # type: ignore[return-value]


def _where(instance: Any, attribute: Any) -> str:
    """``Class.field``, with the record's own name where it has one that is already set."""
    name = getattr(instance, "name", None)
    label = f" {name!r}" if isinstance(name, str) and attribute.name != "name" else ""
    return f"{type(instance).__name__}{label}.{attribute.name}"


def integer(minimum: int | None = None, maximum: int | None = None) -> _Validator:
    """Validator: a true ``int`` (not a ``bool``) within ``[minimum, maximum]``.

    Raises:
        DeclarationError: if the value is of another type or outside the range.
    """

    def check(instance: Any, attribute: Any, value: Any, /) -> None:
        if not isinstance(value, int) or isinstance(value, bool):
            raise DeclarationError(f"{_where(instance, attribute)} must be an integer, got {value!r}")
        if minimum is not None and value < minimum:
            raise DeclarationError(f"{_where(instance, attribute)} must be at least {minimum}, got {value}")
        if maximum is not None and value > maximum:
            raise DeclarationError(f"{_where(instance, attribute)} must be at most {maximum}, got {value}")

    return check


def text(*, empty: bool = False) -> _Validator:
    """Validator: a ``str``, not empty unless ``empty``.

    Raises:
        DeclarationError: if the value is not a string, or is blank.
    """

    def check(instance: Any, attribute: Any, value: Any, /) -> None:
        if not isinstance(value, str) or not (empty or value.strip()):
            raise DeclarationError(f"{_where(instance, attribute)} must be a non-empty string, got {value!r}")

    return check


def one_of(allowed: tuple[Any, ...]) -> _Validator:
    """Validator: one of the listed values.

    Raises:
        DeclarationError: if the value is not in ``allowed``.
    """

    def check(instance: Any, attribute: Any, value: Any, /) -> None:
        if value not in allowed:
            names = ", ".join(repr(item) for item in allowed)
            raise DeclarationError(f"{_where(instance, attribute)} must be one of {names}; got {value!r}")

    return check


def tuple_of(kind: type, *, minimum: int | None = None, empty: bool = False) -> _Validator:
    """Validator: a tuple whose items are all exactly of type ``kind``; integers also at least ``minimum``.

    Raises:
        DeclarationError: if the value is not such a tuple, or is empty without ``empty``.
    """

    def check(instance: Any, attribute: Any, value: Any, /) -> None:
        place = _where(instance, attribute)
        if not isinstance(value, tuple) or not (empty or value):
            raise DeclarationError(f"{place} must be a non-empty tuple of {kind.__name__}, got {value!r}")
        for item in value:
            if type(item) is not kind:
                raise DeclarationError(f"{place} must hold {kind.__name__} values only, got {item!r}")
            if minimum is not None and isinstance(item, int) and item < minimum:
                raise DeclarationError(f"{place} values must be at least {minimum}, got {item}")

    return check
