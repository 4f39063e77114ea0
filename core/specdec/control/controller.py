"""Which verification width a round runs at: the one with most expected tokens per second. Torch-free and deterministic.

    rate(W) = Σ over lanes (1 + S[1] + … + S[W − 1]) / cost(B, W)

S is a lane's prefix survival under its ceiling, cost the measured seconds of the whole round. Width one is a candidate like the
others, with a cost of its own. A shape of which nothing is known counts as cheap as it can be, so it is measured before it is
passed over. The width in use stays until another is better by a margin; a budget of time pays for probes of others.

Letters: B batch capacity, W verification width, P target rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import accumulate, chain, zip_longest

from attrs import frozen

from specdec.catalog import checked_widths, listed
from specdec.control.cost import RoundCosts
from specdec.control.exploration import SHARE, ExplorationBudget
from specdec.errors import UsageError

#: A width stays in use until another is better by this share: estimates of equally good widths differ by noise, and a third of
#: the three per cent that the choice may lose is enough for that.
MARGIN = 0.01
#: Rounds at width one after which drafting again is called a re-entry.
PARKED = 32
#: A probe is wider than it need be, and shows more, if what that is expected to lose is at most so much of what is put aside.
WIDE = 1 / 16
#: Rounds after which the cost of a width that is not in use is worth a probe.
STALE = 512


class Reason(StrEnum):
    """Why a width was chosen.

    ONLY: no lane may use a draft, or one width is prepared. FIXED: the policy is fixed. BEST: most expected tokens per second.
    HELD: within the margin of the best and in use before. REENTRY: best, after a long time at width one. MEASURE: might be best,
    and its cost is not known. PROBE: not best; the exploration budget pays.
    """

    ONLY = "only"
    FIXED = "fixed"
    BEST = "best"
    HELD = "held"
    REENTRY = "re-entry"
    MEASURE = "measure"
    PROBE = "probe"


#: Probability that a lane's first j drafts are accepted, j = 1 … the most drafts that it may use; () for none. A plain tuple: a
#: batch has one for every lane of every round.
LaneOutlook = tuple[float, ...]


@frozen(kw_only=True)
class Decision:
    """candidates: (expected tokens of the whole round, expected seconds) of each width that was considered. What it was made of,
    for the trace: lanes, widths that were allowed, and turn, how many rounds the controller had observed."""

    batch: int
    width: int
    reason: Reason
    candidates: dict[int, tuple[float, float]]
    lanes: Sequence[LaneOutlook] = ()
    allowed: Sequence[int] = ()
    turn: int = 0

    @property
    def probe(self) -> bool:
        """Whether the round runs to learn, not because its width is the best known."""
        return self.reason in (Reason.PROBE, Reason.MEASURE)


class WidthController:
    """Chooses widths and learns what they cost. One for each loaded model; not thread-safe."""

    def __init__(
        self,
        widths: Sequence[int],
        *,
        costs: RoundCosts | None = None,
        rows: Mapping[tuple[int, int], int] | None = None,
        margin: float = MARGIN,
        share: float = SHARE,
    ) -> None:
        """widths: every prepared width, increasing from 1. costs: what is known already, further measurements are added. rows: P
        by (B, W), of allocated rounds that have fewer than B·W. margin: see MARGIN; 0 lets noise decide between equals. share: of
        all time, what probes may lose; 0 never probes.

        Raises UsageError for widths that do not increase from 1, or a share or margin outside [0, 1).
        """
        self.widths = checked_widths(tuple(widths))
        for name, value in (("margin", margin), ("share", share)):
            if not 0 <= value < 1:
                raise UsageError(f"{name} is {value}; it must be at least 0 and below 1")
        self.costs = RoundCosts() if costs is None else costs
        self.margin = margin
        self.budget = ExplorationBudget(share)
        self._rows = dict(rows or {})
        self._round = 0
        #: Width in use by batch capacity, and the round that last ran a shape.
        self._held: dict[int, int] = {}
        self._ran: dict[tuple[int, int], int] = {}
        #: The probe that was not charged yet: its shape, and the ordinary choice beside it.
        self._pending: tuple[tuple[int, int], _Ordinary] | None = None
        self._parked = 0

    def choose(self, batch: int, lanes: Sequence[LaneOutlook], *, allowed: Sequence[int] | None = None) -> Decision:
        """The width of the next round.

        batch: capacity of the round; lanes: those that run in it, one at least. allowed: widths prepared at this capacity,
        increasing from 1; None for all. Widths behind the first that holds every lane's drafts are not considered.

        Raises UsageError if there are no lanes or ``allowed`` does not begin with 1.
        """
        widths = self.widths if allowed is None else allowed
        if not lanes or not widths or widths[0] != 1:
            raise UsageError(f"a round of {len(lanes)} lanes at widths {listed(widths)}; one lane and width 1 at least")
        by_depth = list(map(sum, zip_longest(*lanes, fillvalue=0.0)))
        candidates = self._candidates(batch, lanes, by_depth, widths)
        if len(candidates) == 1:
            width, reason = next(iter(candidates)), Reason.ONLY
        else:
            width, reason = self._ordinary(batch, candidates)
            if reason is not Reason.MEASURE:
                self._held[batch] = width
                probe = self._probe(batch, width, candidates, [len(lanes), *by_depth])
                if probe is not None:
                    width, reason = probe, Reason.PROBE
        return Decision(
            batch=batch,
            width=width,
            reason=reason,
            candidates=candidates,
            lanes=lanes,
            allowed=widths,
            turn=self._round,
        )

    def observe(self, batch: int, width: int, seconds: float, emitted: Sequence[int]) -> None:
        """Takes in one collected round: seconds of the whole of it, tokens of each of its lanes.

        Raises UsageError for seconds that are not a number above 0.
        """
        measured = not self.costs.known(batch, width)
        self.costs.observe(batch, width, seconds)
        self._round += 1
        self._ran[batch, width] = self._round
        self.budget.earn(seconds)
        if self._pending is not None and self._pending[0] == (batch, width):
            # by its usual cost: a slow round is no fault of the probe
            self.budget.settle(self._round, self._pending[1].loss(width, self.costs.estimate(batch, width), emitted))
            self._pending = None
        elif width == 1 or not measured:
            self._parked = self._parked + 1 if width == 1 else 0

    def _candidates(
        self, batch: int, lanes: Sequence[LaneOutlook], by_depth: Sequence[float], widths: Sequence[int]
    ) -> dict[int, tuple[float, float]]:
        count, deepest = len(lanes), len(by_depth)
        expected = list(accumulate(by_depth, initial=float(count)))
        candidates = {}
        for width in widths:
            drafts = min(width - 1, deepest)
            tokens, rows = expected[drafts], self._rows.get((batch, width))
            if rows is not None and rows < count * (drafts + 1):
                # survival never grows along a lane, so the greatest ones are prefixes
                offered = sorted(chain.from_iterable(lane[:drafts] for lane in lanes), reverse=True)
                tokens = count + sum(offered[: rows - count])
            candidates[width] = tokens, self.costs.estimate(batch, width)
            if drafts == deepest:
                break
        return candidates

    def _ordinary(self, batch: int, candidates: Mapping[int, tuple[float, float]]) -> tuple[int, Reason]:
        """The best width known, or the narrowest unknown one if an unknown one may be best: it bounds the cost of wider ones."""
        rates = {width: tokens / seconds for width, (tokens, seconds) in candidates.items()}
        best = max(rates, key=rates.__getitem__)
        unknown = [width for width in candidates if not self.costs.known(batch, width)]
        if unknown and (best in unknown or unknown[0] == 1):
            return unknown[0], Reason.MEASURE
        held = self._held.get(batch, best)
        if held != best and rates.get(held, 0.0) * (1 + self.margin) >= rates[best]:
            return held, Reason.HELD
        return best, Reason.REENTRY if best > 1 and self._parked >= PARKED else Reason.BEST

    def _probe(
        self, batch: int, width: int, candidates: Mapping[int, tuple[float, float]], alive: Sequence[float]
    ) -> int | None:
        """A width to probe instead of the ordinary one, if one is worth it, it is time and there is enough put aside.

        alive: expected lanes whose first j drafts are accepted, j = 0 ….
        """
        if not self.budget.open(self._round):
            return None
        tokens, seconds = candidates[width]
        price = seconds / tokens
        found, most, unknown = None, math.inf, False
        for other, (expected, cost) in candidates.items():
            if unknown:
                break  # the narrowest one that is not known bounds the cost of wider ones
            unknown = not self.costs.known(batch, other)
            loss = cost - expected * price
            if other == width or loss > self.budget.most:
                continue  # never to be afforded
            # what it would bring if every draft behind the ordinary width were accepted
            if other > width and (tokens + alive[width - 1] * (other - width)) * price > cost:
                if found is None or found < width or loss <= WIDE * self.budget.balance:
                    found, most = other, loss
            elif found is None and self._round - self._ran.get((batch, other), 0) > STALE:
                found, most = other, loss
        if found is None or most > self.budget.balance:
            return None
        self.budget.start(self._round)
        self._pending = (batch, found), _Ordinary(width=width, tokens=tokens, seconds=seconds)
        return found


@frozen(kw_only=True)
class _Ordinary:
    """What a round would have been without its probe: width, expected tokens and seconds."""

    width: int
    tokens: float
    seconds: float

    def loss(self, width: int, seconds: float, emitted: Sequence[int]) -> float:
        """Seconds that a probe lost: what it cost beyond the ordinary round, less its further tokens at the ordinary price.

        A wider round shows what the ordinary one would have emitted, so that luck at depths which both verify, and which would
        have been the same, is charged to nobody. What a narrower one left unseen counts as expected.
        """
        if width > self.width:
            further = sum(count - self.width for count in emitted if count > self.width)
            return seconds - self.seconds - further * self.seconds / self.tokens
        return seconds - sum(emitted) * self.seconds / self.tokens
