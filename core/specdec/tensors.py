"""What tensors a checkpoint part holds: groups of like tensors, never a list of all of them.

A model of 512 experts has hundreds of thousands of tensors. A plugin declares them as patterns with axes, so that importing
it costs nothing; totals are products, and a name is found again by its pattern.

Declaration layer: the standard library, attrs and other declaration modules only. Import these names from
:mod:`specdec.declaration`.
"""

import re
from collections.abc import Collection, Iterator
from functools import cached_property
from itertools import product
from math import prod

from attrs import field, frozen

from specdec.errors import DeclarationError
from specdec.validators import as_tuple, one_of, text, tuple_of

__all__ = ["DTYPE_BYTES", "TensorGroup", "TensorInventory", "TensorSpec"]

#: Bytes of one element by dtype name; the names are attributes of ``torch``.
DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e8m0fnu": 1,
    "uint8": 1,
    "int8": 1,
    "int64": 8,
    "int32": 4,
    "uint32": 4,
    "bool": 1,
}

_DTYPES = tuple(DTYPE_BYTES)
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_PIECE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}|(\d+)")
_DIGITS = re.compile(r"\d+")

AxisValues = int | tuple[int, ...]


@frozen(kw_only=True)
class TensorSpec:
    """One stored tensor: its name in the checkpoint, shape and dtype name (a key of ``DTYPE_BYTES``).

    ``any_length``: the tensor is a list whose length depends on the values stored; its shape is declared as ``(0,)``.
    """

    name: str = field(validator=text())
    shape: tuple[int, ...] = field(converter=as_tuple, validator=tuple_of(int, minimum=0, empty=True))
    dtype: str = field(validator=one_of(_DTYPES))
    any_length: bool = field(default=False, validator=one_of((False, True)))

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar (shape ``()``)."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Payload bytes in the checkpoint."""
        return self.numel * DTYPE_BYTES[self.dtype]


def _freeze_axes(axes: Collection[tuple[str, AxisValues]]) -> tuple[tuple[str, AxisValues], ...]:
    return tuple((name, values if isinstance(values, int) else tuple(values)) for name, values in axes)


def _axis_range(values: AxisValues) -> Collection[int]:
    return range(values) if isinstance(values, int) else values


@frozen(kw_only=True)
class TensorGroup:
    """Like tensors that differ only by numbers in their names.

    ``name`` is a pattern such as ``"draft.layers.0.mlp.experts.{e}.up_proj.weight"``. ``axes`` gives for each placeholder the
    numbers it takes: an ``int`` n means 0 … n−1, a tuple lists them. A pattern without placeholders is one tensor.
    ``any_length`` declares lists whose length depends on the values stored: the shape is then ``(0,)``, and the totals count
    the tensors but none of their bytes. ``source`` says where shape and dtype are known from.

    Raises:
        DeclarationError: if a placeholder has no axis, an axis no placeholder, an axis repeats or lists no or negative
            numbers, a placeholder touches a digit (the number could not be read back), or a list of any length declares
            another shape than ``(0,)``.
    """

    name: str = field(validator=text())
    axes: tuple[tuple[str, AxisValues], ...] = field(default=(), converter=_freeze_axes)
    shape: tuple[int, ...] = field(converter=as_tuple, validator=tuple_of(int, minimum=0, empty=True))
    dtype: str = field(validator=one_of(_DTYPES))
    source: str = field(validator=text())
    any_length: bool = field(default=False, validator=one_of((False, True)))

    @any_length.validator
    def _declared_empty(self, attribute: object, value: bool) -> None:
        if value and self.shape != (0,):
            raise DeclarationError(f"TensorGroup {self.name!r}: any_length needs shape (0,), got {self.shape}")

    @axes.validator
    def _check_axes(self, attribute: object, value: tuple[tuple[str, AxisValues], ...]) -> None:
        names = [name for name, _ in value]
        used = set(_PLACEHOLDER.findall(self.name))
        if len(set(names)) != len(names) or set(names) != used:
            raise DeclarationError(
                f"TensorGroup {self.name!r}: placeholders {sorted(used)} need exactly one axis each, got axes {names}"
            )
        if re.search(r"\}[\d{]|\d\{", self.name):
            raise DeclarationError(
                f"TensorGroup {self.name!r}: a placeholder may not touch a digit or another placeholder, "
                "or its number could not be read back from a tensor name"
            )
        for name, values in value:
            numbers = _axis_range(values)
            if isinstance(values, bool) or not numbers or any(type(n) is not int or n < 0 for n in numbers):
                raise DeclarationError(
                    f"TensorGroup {self.name!r}: axis {name!r} must be a positive count or a tuple of numbers >= 0, "
                    f"got {values!r}"
                )
            if len(set(numbers)) != len(numbers):
                raise DeclarationError(f"TensorGroup {self.name!r}: axis {name!r} repeats a number: {values!r}")

    @property
    def count(self) -> int:
        """Number of tensors, without expanding."""
        return prod(len(_axis_range(values)) for _, values in self.axes)

    @property
    def bytes(self) -> int:
        """Payload bytes of all tensors of the group, without expanding."""
        return self.count * prod(self.shape) * DTYPE_BYTES[self.dtype]

    def expand(self) -> Iterator[TensorSpec]:
        """Every tensor of the group, the last axis running fastest."""
        names = [name for name, _ in self.axes]
        for numbers in product(*(_axis_range(values) for _, values in self.axes)):
            yield self._spec(self.name.format(**dict(zip(names, numbers, strict=True))))

    def match(self, name: str) -> TensorSpec | None:
        """The tensor called ``name`` if it belongs to this group, else ``None``."""
        found = self._pattern.fullmatch(name)
        if found is None or any(int(found[axis]) not in numbers for axis, numbers in self._numbers):
            return None
        return self._spec(name)

    def _spec(self, name: str) -> TensorSpec:
        return TensorSpec(name=name, shape=self.shape, dtype=self.dtype, any_length=self.any_length)

    @cached_property
    def _numbers(self) -> tuple[tuple[str, Collection[int]], ...]:
        return tuple((name, range(v) if isinstance(v, int) else frozenset(v)) for name, v in self.axes)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        seen: set[str] = set()
        parts: list[str] = []
        for literal, axis in zip(*[iter([*_PLACEHOLDER.split(self.name), ""])] * 2, strict=True):
            parts.append(re.escape(literal))
            if axis:
                # A number is written without leading zeros, so "01" is another name, not expert 1.
                parts.append(f"(?P={axis})" if axis in seen else f"(?P<{axis}>0|[1-9][0-9]*)")
                seen.add(axis)
        return re.compile("".join(parts))

    @property
    def _skeleton(self) -> str:
        """The pattern with every number, fixed or variable, replaced by ``#``: the key of the inventory's index."""
        return _PIECE.sub("#", self.name)

    def _positions(self) -> list[Collection[int] | str]:
        """For each ``#`` of the skeleton: the numbers it may be, or the fixed digits."""
        numbers = dict(self._numbers)
        return [numbers[axis] if axis else digits for axis, digits in _PIECE.findall(self.name)]


def _may_coincide(first: Collection[int] | str, second: Collection[int] | str) -> bool:
    """Whether one number of a name can be the same in two patterns."""
    if isinstance(first, str) and isinstance(second, str):
        return first == second
    if isinstance(first, str):
        first, second = second, first
    if isinstance(second, str):
        return str(int(second)) == second and int(second) in first
    return not set(first).isdisjoint(second)


@frozen(kw_only=True)
class TensorInventory:
    """All tensors of one checkpoint part (target or drafter), as groups.

    Raises:
        DeclarationError: if two groups declare the same tensor name.
    """

    groups: tuple[TensorGroup, ...] = field(converter=as_tuple, validator=tuple_of(TensorGroup, empty=True), repr=False)

    @groups.validator
    def _disjoint(self, attribute: object, value: tuple[TensorGroup, ...]) -> None:
        buckets: dict[str, list[TensorGroup]] = {}
        for group in value:
            bucket = buckets.setdefault(group._skeleton, [])
            for other in bucket:
                pairs = zip(group._positions(), other._positions(), strict=True)
                if all(_may_coincide(mine, theirs) for mine, theirs in pairs):
                    raise DeclarationError(
                        f"TensorInventory: groups {other.name!r} and {group.name!r} declare the same tensor; "
                        "keep one of them"
                    )
            bucket.append(group)

    @property
    def count(self) -> int:
        """Number of tensors, without expanding."""
        return sum(group.count for group in self.groups)

    @property
    def bytes(self) -> int:
        """Payload bytes of all tensors, without expanding."""
        return sum(group.bytes for group in self.groups)

    def expand(self) -> Iterator[TensorSpec]:
        """Every tensor, group by group. Costs one record per tensor; totals do not need it."""
        for group in self.groups:
            yield from group.expand()

    def lookup(self, name: str) -> TensorSpec | None:
        """The declared tensor called ``name``, or ``None``. Quick: tries only groups that differ by numbers."""
        for group in self._index.get(_DIGITS.sub("#", name), ()):
            spec = group.match(name)
            if spec is not None:
                return spec
        return None

    @cached_property
    def _index(self) -> dict[str, list[TensorGroup]]:
        index: dict[str, list[TensorGroup]] = {}
        for group in self.groups:
            index.setdefault(group._skeleton, []).append(group)
        return index
