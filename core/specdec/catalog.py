"""Which round shapes are prepared: batch capacities and verification widths.

Declaration layer: the standard library, attrs and other declaration modules only.

Letters: B lanes (batch capacity), D or K draft tokens, W verification width (= K + 1 in a chain), P physical target rows.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

from specdec.errors import UsageError

__all__ = [
    "RoundShape",
    "batch_capacities",
    "checked_widths",
    "chunk_sizes",
    "listed",
    "require_integer",
    "speculative_shapes",
]


def batch_capacities(concurrency: int) -> tuple[int, ...]:
    """Powers of two from one through ``concurrency`` padded to the next power of two: 3 → (1, 2, 4).

    Raises:
        UsageError: if ``concurrency`` is not an integer of at least 1.
    """
    require_integer("concurrency", concurrency, 1, None, "a batch has at least one lane")
    return tuple(1 << exponent for exponent in range((concurrency - 1).bit_length() + 1))


def chunk_sizes(prefill_tokens: Iterable[int], context: int) -> tuple[int, ...]:
    """Rows of captured prompt chunks, greatest first: those that were asked for, none longer than the context, and the powers of
    two below the smallest of them."""
    wanted = {min(tokens, context) for tokens in prefill_tokens}
    return tuple(
        sorted(wanted | {1 << bit for bit in range(min(wanted).bit_length()) if 1 << bit < min(wanted)}, reverse=True)
    )


@frozen(kw_only=True, order=True)
class RoundShape:
    """One prepared round: B lanes, D drafts, W verified inputs per lane, P physical target rows.

    ``packed_rows`` is 0 for the rectangular layout of B·W rows; a packed round may have fewer rows than that, but one for each
    lane. Shapes order by batch, then drafts, then width.

    Raises:
        UsageError: if a number is out of range, W exceeds D + 1, or P is not 0 and outside [B, B·W].
    """

    batch: int
    draft_tokens: int
    verify_width: int
    packed_rows: int = 0

    def __attrs_post_init__(self) -> None:
        require_integer("batch", self.batch, 1, None, "a round has at least one lane")
        require_integer("draft_tokens", self.draft_tokens, 0, None, "a round offers no or some drafts")
        require_integer(
            "verify_width",
            self.verify_width,
            1,
            self.draft_tokens + 1,
            "the pending token and at most every draft are verified",
        )
        if self.packed_rows != 0:
            rows = self.batch * self.verify_width
            require_integer(
                "packed_rows", self.packed_rows, self.batch, rows, "0 means the rectangular layout of B·W rows"
            )

    @property
    def target_rows(self) -> int:
        """Rows that the target computes."""
        return self.packed_rows or self.batch * self.verify_width


def speculative_shapes(
    concurrency: int,
    widths: Iterable[int],
    speculative_token_capacity: int,
    fixed_width: int | None = None,
    *,
    packed: bool = False,
) -> tuple[RoundShape, ...]:
    """The chain catalog: width one at every batch capacity, each wider width where B·W fits the token capacity.

    With ``fixed_width``, one shape per batch capacity: that width where it fits, width one elsewhere. Concurrency 4 with
    widths 1 … 6 and capacity 128 gives eighteen shapes, a fixed width three. Ordered by batch, then width.

    packed: rounds allocate the rows of their lanes, so a wider width is there at every batch capacity up to the token capacity,
    with that many physical rows where B·W would be more.

    Raises:
        UsageError: if the widths do not increase from 1, or ``fixed_width`` is not one of them.
    """
    catalog = checked_widths(tuple(widths))
    require_integer(
        "speculative_token_capacity", speculative_token_capacity, 1, None, "a round has at least one target row"
    )
    if fixed_width is not None and fixed_width not in catalog:
        raise UsageError(f"fixed_width {fixed_width!r} must be one of the prepared widths {listed(catalog)}")
    shapes: list[RoundShape] = []
    for batch in batch_capacities(concurrency):
        fitting = [
            width
            for width in catalog
            if width == 1 or (batch if packed else batch * width) <= speculative_token_capacity
        ]
        if fixed_width is not None:
            fitting = [fixed_width if fixed_width in fitting else 1]
        for width in fitting:
            short = width > 1 and batch * width > speculative_token_capacity
            shapes.append(
                RoundShape(
                    batch=batch,
                    draft_tokens=width - 1,
                    verify_width=width,
                    packed_rows=speculative_token_capacity if short else 0,
                )
            )
    return tuple(shapes)


def checked_widths(widths: tuple[int, ...]) -> tuple[int, ...]:
    """The widths as they are.

    Raises:
        UsageError: if they are not integers that increase from 1.
    """
    if not widths or any(type(width) is not int for width in widths):
        raise UsageError(f"speculative_widths must be integers, got {widths!r}")
    if widths[0] != 1 or any(later <= earlier for earlier, later in zip(widths, widths[1:])):
        raise UsageError(
            f"speculative_widths {listed(widths)} must increase and start with 1: plain decoding is always prepared"
        )
    return widths


def require_integer(option: str, value: object, minimum: int, maximum: int | None, reason: str) -> None:
    """Checks an option.

    Raises:
        UsageError: if ``value`` is not an integer within the range; the message names option, value, range and ``reason``.
    """
    span = f"at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"{option} must be an integer {span}, got {value!r}: {reason}")
    if value < minimum or (maximum is not None and value > maximum):
        raise UsageError(f"{option} {value} must be {span}: {reason}")


def listed(numbers: Iterable[int]) -> str:
    """Numbers as messages show them: ``1, 2, 4``."""
    return ", ".join(str(number) for number in numbers)
