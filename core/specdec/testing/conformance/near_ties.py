"""Text of plain decoding, and when rounds count as giving the same text in lower precision than float64.

Rounds of another width or batch add the same numbers in another order. In float64 that decides no token. In lower precision it
may, where two tokens are almost equally good; so a text is the same if it is equal, or if at the first difference plain decoding
itself found the other token less than a declared bound worse. Such a near tie is logged. What follows it is another text, and
nothing of that request is compared from there on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import overload

from attrs import frozen
from torch import Tensor

#: Near ties are logged here, as warnings: ``pytest --log-cli-level=WARNING`` shows them.
LOG = logging.getLogger("specdec.testing.conformance")


@frozen(eq=False)
class PlainText(Sequence[int]):
    """Greedy tokens of plain decoding. logits: [n, V], the row that each token is the argmax of. Slices keep their rows."""

    tokens: tuple[int, ...]
    logits: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[int]:
        return iter(self.tokens)

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> PlainText: ...

    def __getitem__(self, place: int | slice) -> int | PlainText:
        if isinstance(place, slice):
            return PlainText(self.tokens[place], self.logits[place])
        return self.tokens[place]

    def gap(self, place: int, other: int) -> float:
        """By how much ``other`` was worse for plain decoding than the token it chose."""
        row = self.logits[place]
        return float(row[self.tokens[place]] - row[other])

    def margins(self) -> list[float]:
        """Per token, how far the second best was behind."""
        best = self.logits.topk(2, dim=-1).values
        return (best[:, 0] - best[:, 1]).tolist()


def follows(found: Sequence[int], plain: PlainText, near_tie: float) -> bool:
    """Whether ``found`` is how ``plain`` begins; False if they part at a near tie, which is logged.

    near_tie: declared bound of the difference of two logits; 0 allows none. Raises AssertionError for any other difference, and
    for tokens behind the end of ``plain``.
    """
    for place, (token, wanted) in enumerate(zip(found, plain)):
        if token == wanted:
            continue
        gap = plain.gap(place, token)
        assert gap < near_tie, (
            f"token {place} is {token} and not {wanted} as in plain decoding, where it was worse by {gap:.3g} (near ties are "
            f"below {near_tie:g}): {list(found)} against {list(plain)}"
        )
        LOG.warning("near tie at token %d: %d for %d, worse by %.3g of %g", place, token, wanted, gap, near_tie)
        return False
    assert len(found) <= len(plain), f"{list(found)} goes on behind plain decoding's {list(plain)}"
    return True
