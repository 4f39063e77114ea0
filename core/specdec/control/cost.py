"""Seconds of a whole round by its shape, as measured. Torch-free.

Letters: B batch capacity, W verification width.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median_low

from specdec.errors import UsageError

#: Newest measurements of a shape that count. Their median ignores four outliers of nine and follows a lasting change after five.
WINDOW = 9
#: Measurements after which a shape is known. Of two the lower counts: a first round may pay for what later ones find done.
ENOUGH = 2
#: Measurements after which it is known whatever they say.
SURE = 4
#: A shape measured fewer times is not believed to cost so many times more than one with no fewer rows, or than one with fewer in
#: proportion to its rows: both of its first rounds were slow, and one believed to be dear would never be measured again.
UNLIKELY = 1.5


class RoundCosts:
    """Running estimates of round costs: of each shape the median of its newest measurements."""

    def __init__(self, declared: Mapping[tuple[int, int], float] | None = None) -> None:
        """declared: seconds by (B, W) that hold until the shape is measured, such as those of an earlier run.

        Raises UsageError for seconds that are not a number above 0.
        """
        self._samples: dict[tuple[int, int], deque[float]] = {}
        self._known = {shape: _positive(shape, seconds) for shape, seconds in (declared or {}).items()}

    def known(self, batch: int, width: int) -> bool:
        """Whether the shape was declared or measured often enough."""
        return (batch, width) in self._known

    def observe(self, batch: int, width: int, seconds: float) -> None:
        """Takes in one measured round. Raises UsageError for seconds that are not a number above 0."""
        shape = batch, width
        samples = self._samples.get(shape)
        if samples is None:
            samples = self._samples[shape] = deque(maxlen=WINDOW)
        samples.append(_positive(shape, seconds))
        if len(samples) < ENOUGH:
            return
        cost = median_low(samples)
        if len(samples) < SURE:
            self._known.pop(shape, None)
            if self._unlikely(shape, cost):
                return
            for other in [known for known in self._known if len(self._samples.get(known, ())) in range(1, SURE)]:
                if _within(other, shape) and self._known[other] > UNLIKELY * cost:
                    del self._known[other]
        self._known[shape] = cost

    def _unlikely(self, shape: tuple[int, int], cost: float) -> bool:
        rows = math.prod(shape)
        for other, known in self._known.items():
            if _within(other, shape) and cost > UNLIKELY * known * rows / math.prod(other):
                return True
            if _within(shape, other) and cost > UNLIKELY * known:
                return True
        return False

    def estimate(self, batch: int, width: int) -> float:
        """Seconds of a round of this shape.

        A shape that is not known is taken to cost what the dearest known one with neither more lanes nor more width costs, the
        least it can if rows are never cheaper for being more; without one, what the cheapest with neither fewer costs. 1.0 for
        every shape while nothing is known.
        """
        found = self._known.get((batch, width))
        if found is not None:
            return found
        floor = [cost for (b, w), cost in self._known.items() if b <= batch and w <= width]
        if floor:
            return max(floor)
        return min((cost for (b, w), cost in self._known.items() if b >= batch and w >= width), default=1.0)


def _within(shape: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether a shape has neither more lanes nor more width than another."""
    return shape[0] <= other[0] and shape[1] <= other[1]


def _positive(shape: tuple[int, int], seconds: float) -> float:
    if not 0 < seconds < math.inf:
        raise UsageError(f"a round of batch {shape[0]} and width {shape[1]} took {seconds} seconds; it must be above 0")
    return float(seconds)
