"""What a simulated device needs: seconds of a round by batch capacity and width, of a first token, of a prompt chunk."""

from __future__ import annotations

import math

from attrs import field, fields, frozen

from specdec.errors import UsageError


def _seconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise UsageError(f"{name} is {value!r}; it must be a number of seconds, 0 or more")


@frozen(kw_only=True)
class Band:
    """Rounds of at most ``rows`` target rows, None for all: seconds = ``fixed`` + ``row`` per target row."""

    rows: int | None = None
    fixed: float = 0.0
    row: float = 0.0

    def __attrs_post_init__(self) -> None:
        if self.rows is not None and (type(self.rows) is not int or self.rows < 1):
            raise UsageError(f"rows is {self.rows!r}; a band reaches to at least one row, or None for all")
        _seconds("fixed", self.fixed)
        _seconds("row", self.row)


@frozen(kw_only=True)
class CostModel:
    """Declared costs in seconds.

    A round of B lanes and width W has B·W target rows, padding included, and costs ``base``, its band, ``lane`` per lane and,
    unless the device is plain, ``absorb`` for keeping draft history and the drafts: ``draft`` + ``draft_lane`` per lane for each
    of W − 1, or ``block`` + ``draft_lane`` per lane once if the drafter proposes a whole block. A step between bands is where
    another kernel takes over.

    first: sampling the first tokens of a batch. chunk, prompt_token: each prompt chunk and each of its tokens. host: seconds
    of the host before each submission, during which the device goes on with a round that was submitted before.

    Raises UsageError for a number out of range, or bands that do not increase to one without an end.
    """

    base: float = 0.0
    bands: tuple[Band, ...] = field(default=(Band(),), converter=tuple)
    lane: float = 0.0
    absorb: float = 0.0
    draft: float = 0.0
    draft_lane: float = 0.0
    block: float | None = None
    first: float = 0.0
    chunk: float = 0.0
    prompt_token: float = 0.0
    host: float = 0.0

    def __attrs_post_init__(self) -> None:
        for attribute in fields(CostModel):
            value = getattr(self, attribute.name)
            if attribute.name != "bands" and not (attribute.name == "block" and value is None):
                _seconds(attribute.name, value)
        ends = [band.rows for band in self.bands]
        if not ends or ends[-1] is not None or None in ends[:-1]:
            raise UsageError(f"bands end at {ends}; the last one, and no other, must have no end")
        if any(
            later is not None and earlier is not None and later <= earlier for earlier, later in zip(ends, ends[1:])
        ):
            raise UsageError(f"bands end at {ends}; they must increase")

    def round(self, batch: int, width: int, *, plain: bool = False) -> float:
        """Seconds of a round. plain: nothing is drafted and no draft history kept; then the width is 1."""
        rows = batch * width
        band = next(band for band in self.bands if band.rows is None or rows <= band.rows)
        seconds = self.base + band.fixed + band.row * rows + self.lane * batch
        if plain:
            return seconds
        seconds += self.absorb
        if width > 1:
            lanes = self.draft_lane * batch
            seconds += (width - 1) * (self.draft + lanes) if self.block is None else self.block + lanes
        return seconds

    def prefill(self, tokens: int) -> float:
        """Seconds of a prompt chunk."""
        return self.chunk + self.prompt_token * tokens
