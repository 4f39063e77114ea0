"""How often drafts are accepted, learned from the outcomes of rounds: over all requests, and of one request. Torch-free.

What is kept is hazards: h[d] estimates the probability that draft d is rejected when the drafts before it were accepted, d = 0 …
K − 1, so that a prefix of j drafts survives with (1 − h[0]) · … · (1 − h[j − 1]). Counts are censored: a depth is judged only
where a draft was verified there and every draft before it was accepted; what lies behind stays as it was.

Drafts copied from decoded text are counted apart from learned ones, and apart by the length of the match that found them: a
copy after eight equal tokens is another event than one after four. Forecasts of a drafter never enter: mixed in here they would
let a drafter that overrates itself keep its own reputation.

A request begins as all requests are on average and goes its own way as its counts grow, the sooner the more requests were seen
to differ. Its memory is long while outcomes are those expected, and is cut where they are not: text changes within a response.
"""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import accumulate
from operator import mul

from attrs import frozen

from specdec.catalog import require_integer
from specdec.errors import UsageError

#: Acceptance of a draft before anything was seen.
PRIOR = 0.7
#: Outcomes that it weighs. A depth that was never judged is taken to be like the one before it.
PRIOR_WEIGHT = 4.0
#: Outcomes of all requests after which one weighs half: a few requests' worth, so that a new mix of work is followed.
GLOBAL_HALF_LIFE = 512.0
#: Outcomes that are counted together at most.
MOST_NOTED = 64
#: Rounds of a request after which an outcome weighs half, as long as nothing surprises.
LOCAL_HALF_LIFE = 64.0
#: Rounds after which an outcome weighs half in what a request did recently: a dozen tell .9 from .5.
RECENT_HALF_LIFE = 12.0
#: Recent rejections so many standard deviations from those expected mean that the text has changed. A false alarm is cheap, the
#: counts come back within some rounds. At 3 a change takes half as long again to be noticed; at 2 noise costs half a per cent.
SURPRISE = 2.25
#: Variance added to that of recent rejections, or a single one among certain drafts would already surprise.
LEAST_VARIANCE = 0.25
#: What a request's counts weigh after a surprise.
KEPT = 1 / 16
#: Outcomes of its own that the global estimate weighs for a request: where requests differ, where they are alike, and after the
#: request surprised.
FEWEST_SHARED, MOST_SHARED, SHARED_AFTER_SURPRISE = 4.0, 32.0, 3.0
#: Outcomes that recent rejections stand for, when the spread of requests is taken from them.
RECENT_OUTCOMES = 10.0
#: An estimate of this many outcomes changes little by one more; from here on it is made anew, and time passes, every few rounds
#: only. With 64 lanes that is half of the host's time for a round.
SETTLED_OUTCOMES, SETTLED_ROUNDS = 16, 4
#: Weights grow instead of every count shrinking; from here they are brought back to 1, long before precision is lost.
_GREATEST_WEIGHT = 1e9
#: More halvings than this leave nothing of a count.
_MOST_HALVINGS = 60.0
#: Hazards below this are as good as none.
_LEAST_HAZARD = 1e-6
#: Source of learned drafts; those of copies are the lengths of their matches.
_LEARNED = 0


#: Depths ``first`` … ``end`` − 1 of a source were judged, the last of them rejected or not: (source, first, end, rejected).
_Outcome = tuple[int, int, int, bool]


class _Counts:
    """Judged and rejected drafts of one source by depth, older ones weighing less; ``weight`` is that of the newest outcome.

    ends, starts: weight of outcomes by the depth behind their last judged draft, and by that of their first, 0 … K.
    """

    __slots__ = ("ends", "rejected", "starts", "weight")

    def __init__(self, drafts: int) -> None:
        self.ends, self.starts, self.rejected = [0.0] * (drafts + 1), [0.0] * (drafts + 1), [0.0] * drafts
        self.weight = 1.0

    def fade(self, factor: float) -> None:
        """Everything counted so far weighs less by this factor, at least 1, than what is counted from now on."""
        self.weight *= factor
        if self.weight > _GREATEST_WEIGHT:
            self.ends = [count / self.weight for count in self.ends]
            self.starts = [count / self.weight for count in self.starts]
            self.rejected = [count / self.weight for count in self.rejected]
            self.weight = 1.0

    def add(self, first: int, end: int, rejected: bool, times: int) -> None:
        """So many times depths ``first`` … ``end`` − 1 were judged, the last of them rejected or not."""
        weight = self.weight * times
        self.ends[end] += weight
        self.starts[first] += weight
        if rejected:
            self.rejected[end - 1] += weight

    def judged(self) -> list[float]:
        """Weight of judged drafts by depth, 0 … K − 1: of outcomes that end behind it and begin no deeper."""
        changes = [end - start for end, start in zip(self.ends, self.starts)]
        return list(accumulate(changes[:0:-1]))[::-1]


@frozen
class _Estimate:
    """Of one source over all requests. hazards: h[0] … h[K − 1]; sums: of the first 0 … K of them. most: what takes the greatest
    hazard to 1."""

    hazards: list[float]
    sums: list[float]
    most: float


class AcceptanceHistory:
    """Acceptance over all requests of a loaded model."""

    def __init__(self, drafts: int, *, prior: float = PRIOR) -> None:
        """drafts: K. prior: acceptance of each draft before anything was seen.

        Raises UsageError for a number out of range.
        """
        require_integer("drafts", drafts, 1, None, "acceptance of no drafts is nothing to learn")
        if not 0 < prior <= 1:
            raise UsageError(f"prior is {prior}; it must be above 0 and at most 1")
        self.drafts = drafts
        self._prior = 1.0 - prior
        self._counts: dict[int, _Counts] = {}
        # outcomes of a round are noted one by one and counted together, as of one age, when an estimate is asked for
        self._notes: defaultdict[_Outcome, int] = defaultdict(int)
        self._estimates: dict[int, _Estimate] = {}
        # what is judged by rounds without copies, by (verified, accepted); depths 0 … −1 where nothing was verified
        self._plain: dict[tuple[int, int], _Outcome] = {
            (verified, accepted): (_LEARNED, 0, min(accepted + 1, verified), accepted < verified)
            for verified in range(drafts + 1)
            for accepted in range(verified + 1)
        }
        # mean square of requests' recent distance from the global estimate, in standard deviations; 1 if they are alike
        self._spread = 1.0
        #: Outcomes of a request's own that the global estimate weighs for it.
        self.shared = MOST_SHARED

    def observe(self, verified: int, accepted: int, copied: int = 0, match_length: int | None = None) -> None:
        """Takes in one round's outcome of one request; a RequestSurvival does it for its own.

        verified: drafts that the target judged; accepted: the prefix of them that it accepted; copied: how many of the first
        drafts were copied; match_length: length of the match that led to them.

        Raises UsageError unless 0 ≤ accepted ≤ verified ≤ K and copies come with the length of their match.
        """
        for outcome in self.judged(verified, accepted, copied, match_length):
            self.note(outcome)

    def judged(self, verified: int, accepted: int, copied: int, match_length: int | None) -> tuple[_Outcome, ...]:
        """Judged depths by source: (source, first, end, rejected). Arguments and errors as ``observe``."""
        plain = self._plain.get((verified, accepted))
        if plain is None:
            raise UsageError(
                f"accepted {accepted} of {verified} verified drafts; 0 <= accepted <= verified <= {self.drafts}"
            )
        if not copied:
            return (plain,) if verified else ()
        source, end, rejected = _copies(copied, match_length), min(accepted + 1, verified), accepted < verified
        if end <= copied:
            return ((source, 0, end, rejected),) if end else ()
        return (source, 0, copied, False), (_LEARNED, copied, end, rejected)

    def note(self, outcome: _Outcome, square: float | None = None) -> None:
        """Takes in depths of one source, as ``judged`` gives them. square: the request's recent rejections are its root of
        standard deviations from what the global estimate expects; None for no request's."""
        times = self._notes[outcome] = self._notes[outcome] + 1
        if square is not None:
            self._spread += _GLOBAL_RATE * (square - self._spread)
        if times >= MOST_NOTED:
            self._count()

    def hazards(self, match_length: int | None = None) -> tuple[float, ...]:
        """h[0] … h[K − 1] of learned drafts, or of copies found by a match of this length."""
        return tuple(self.estimate(match_length or _LEARNED).hazards)

    def survival(self, drafts: int, copied: int = 0, match_length: int | None = None) -> tuple[float, ...]:
        """Probability that the first j drafts of a round are all accepted, j = 1 … drafts, for a request not known yet.

        No more than K drafts are looked at. Raises UsageError for copies without the length of their match.
        """
        return RequestSurvival(self).survival(drafts, copied, match_length)

    def estimate(self, source: int) -> _Estimate:
        """Of a source, with all that was noted; the caller must not change it."""
        if self._notes:
            self._count()
        found = self._estimates.get(source)
        if found is None:
            hazards = self._hazards(self._counts.get(source))
            found = self._estimates[source] = _Estimate(
                hazards=hazards,
                sums=list(accumulate(hazards, initial=0.0)),
                most=1.0 / max(max(hazards), _LEAST_HAZARD),
            )
        return found

    def _count(self) -> None:
        for (source, first, end, rejected), times in self._notes.items():
            counts = self._counts.get(source)
            if counts is None:
                counts = self._counts[source] = _Counts(self.drafts)
            counts.fade(2.0 ** (times / GLOBAL_HALF_LIFE))
            counts.add(first, end, rejected, times)
            self._estimates.pop(source, None)
        self._notes.clear()
        beyond = max(self._spread - 1.0, RECENT_OUTCOMES / MOST_SHARED)
        self.shared = max(FEWEST_SHARED, RECENT_OUTCOMES / beyond)

    def _hazards(self, counts: _Counts | None) -> list[float]:
        if counts is None:
            return [self._prior] * self.drafts
        hazard, hazards, prior = self._prior, [], PRIOR_WEIGHT * counts.weight
        for judged, rejected in zip(counts.judged(), counts.rejected):
            hazard = (rejected + prior * hazard) / (judged + prior)
            hazards.append(hazard)
        return hazards


class RequestSurvival:
    """Acceptance of one request: its own counts, shrunk to those of all requests."""

    def __init__(self, history: AcceptanceHistory) -> None:
        """history: of the model that the request runs on; outcomes of this request are added to it."""
        self._history = history
        self._own: dict[int, _Own] = {}
        # that of learned drafts, which every round without copies asks for; also in ``_own``
        self._learned: _Own | None = None
        self._turn = 0

    def observe(self, verified: int, accepted: int, copied: int = 0, match_length: int | None = None) -> None:
        """Takes in one round's outcome, here and in the history; arguments and errors are those of ``AcceptanceHistory.observe``.

        A round that verified nothing lets time pass: older outcomes weigh less.
        """
        history, turn, learned = self._history, self._turn + 1, self._learned
        plain = history._plain.get((verified, accepted))
        if copied or learned is None or plain is None:
            for outcome in history.judged(verified, accepted, copied, match_length):
                source, first, end, rejected = outcome
                history.note(outcome, self._of(source).add(turn, first, end, rejected))
        elif verified:
            # the same for rounds without copies, of which there are many
            history.note(plain, learned.add(turn, 0, plain[2], plain[3]))
        self._turn = turn

    def survival(self, drafts: int, copied: int = 0, match_length: int | None = None) -> tuple[float, ...]:
        """Probability that the first j drafts of the next round are all accepted, j = 1 … drafts, at most K.

        copied, match_length: as that round will have them. Raises UsageError for copies without the length of their match.
        """
        if not copied:
            own = self._learned
            if own is None or self._turn >= own.due:
                own = self._refreshed(_LEARNED)
            return own.survival if drafts >= len(own.survival) else own.survival[:drafts]
        copies = self._refreshed(_copies(copied, match_length)).accepted
        learned = self._refreshed(_LEARNED).accepted
        return tuple(accumulate((copies[:copied] + learned[copied:])[:drafts], mul))

    def _of(self, source: int) -> _Own:
        own = self._own.get(source)
        if own is None:
            own = self._own[source] = _Own(self._turn, self._history.estimate(source))
            if source == _LEARNED:
                self._learned = own
        return own

    def _refreshed(self, source: int) -> _Own:
        own = self._of(source)
        if self._turn >= own.due:
            own.refresh(self._turn, self._history.estimate(source), self._history.shared)
        return own


class _Own:
    """Counts of one request and source, and what it did recently."""

    __slots__ = (
        "accepted",
        "alone",
        "common",
        "counts",
        "due",
        "excess",
        "expected",
        "outcomes",
        "rejections",
        "sums",
        "survival",
        "turn",
        "variance",
    )

    def __init__(self, turn: int, common: _Estimate) -> None:
        """turn: the request's round. common: over all requests."""
        self.counts = _Counts(len(common.hazards))
        self.turn = self.due = turn
        # since the text last changed
        self.outcomes = 0
        self.alone = False
        # what was expected of the round that is now judged: by the global estimate, and by the request's own; sums: rejections
        # expected of the first 0 … K drafts
        self.common = common
        self.accepted = [1.0 - hazard for hazard in common.hazards]
        self.sums = common.sums
        self.survival: tuple[float, ...] = ()
        # recent rejections, those that the global estimate expected, how many more there were than the own estimate expected,
        # and the variance of that
        self.rejections = self.expected = self.excess = self.variance = 0.0

    def add(self, turn: int, first: int, end: int, rejected: bool) -> float:
        """Takes in an outcome. Returns the squared distance of recent rejections from what the global estimate expects."""
        if turn >= self.turn + SETTLED_ROUNDS:
            self._pass(turn)
        counts, drafts = self.counts, end - first
        # as _Counts.add does for one outcome
        weight = counts.weight
        counts.ends[end] += weight
        if first:
            counts.starts[first] += weight
        if rejected:
            counts.rejected[end - 1] += weight
        self.outcomes += 1
        sums, own = self.common.sums, self.sums
        expected = own[end] - own[first]
        self.rejections += rejected
        self.expected += sums[end] - sums[first]
        self.excess += rejected - expected
        # as if these drafts had all been alike: no less than it is
        self.variance += expected * (1.0 - expected / drafts)
        variance = self.variance + LEAST_VARIANCE
        if self.excess * self.excess > SURPRISE * SURPRISE * variance:
            counts.fade(1 / KEPT)
            self.excess = self.variance = 0.0
            self.alone = True
            self.outcomes, self.due = 0, turn
        distance = self.rejections - self.expected
        return distance * distance / variance

    def refresh(self, turn: int, common: _Estimate, shared: float) -> None:
        """Estimates acceptance anew: counts shrunk to ``common``, and to a multiple of it, that of recent rejections, if the
        request once surprised."""
        self.due = turn + (1 if self.outcomes < SETTLED_OUTCOMES else SETTLED_ROUNDS)
        if turn != self.turn:
            self._pass(turn)
        self.common = common
        counts = self.counts
        if self.alone:
            weight = SHARED_AFTER_SURPRISE * counts.weight
            # one rejection on either side, so that nothing seen means one
            prior = weight * min((self.rejections + 1.0) / (self.expected + 1.0), common.most)
        else:
            weight = prior = shared * counts.weight
        self.accepted = [
            1.0 - (rejected + prior * hazard) / (judged + weight)
            for rejected, judged, hazard in zip(counts.rejected, counts.judged(), common.hazards)
        ]
        self.sums = list(accumulate([1.0 - rate for rate in self.accepted], initial=0.0))
        self.survival = tuple(accumulate(self.accepted, mul))

    def _pass(self, turn: int) -> None:
        """Lets the rounds since the last outcome pass."""
        passed = turn - self.turn
        self.turn = turn
        if passed == 1:
            fade, keep = _FADE, _KEEP
        else:
            fade = 2.0 ** min(passed / LOCAL_HALF_LIFE, _MOST_HALVINGS)
            keep = 0.5 ** (passed / RECENT_HALF_LIFE)
        self.counts.fade(fade)
        self.rejections *= keep
        self.expected *= keep
        self.excess *= keep
        self.variance *= keep


_GLOBAL_RATE = math.log(2.0) / GLOBAL_HALF_LIFE
#: What one round does to a request's counts and to what it did recently.
_FADE, _KEEP = 2.0 ** (1 / LOCAL_HALF_LIFE), 0.5 ** (1 / RECENT_HALF_LIFE)


def _copies(copied: int, match_length: int | None) -> int:
    """Source of copied drafts."""
    if copied < 0 or match_length is None or match_length < 1:
        raise UsageError(
            f"{copied} copied drafts after a match of {match_length} tokens; copies come from a match of some"
        )
    return match_length
