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
from collections import defaultdict, deque
from collections.abc import Iterator
from itertools import accumulate
from math import sqrt
from operator import mul, sub

from attrs import frozen

from specdec.catalog import require_integer
from specdec.errors import UsageError

#: Acceptance of a draft before anything was seen.
PRIOR = 0.7
#: Outcomes that it weighs. A depth that was never judged is taken to be like the one before it.
PRIOR_WEIGHT = 4.0
#: Outcomes of all requests after which one weighs half: a few requests' worth, so that a new mix of work is followed.
GLOBAL_HALF_LIFE = 512.0
#: Outcomes are counted together, as of one age, when they are a sixteenth of those that count already, and at most so many.
MOST_NOTED = 128
#: Rounds of a request after which an outcome weighs half, as long as nothing surprises.
LOCAL_HALF_LIFE = 64.0
#: Rounds after which an outcome weighs half in what a request did recently: a dozen tell .9 from .5.
RECENT_HALF_LIFE = 12.0
#: Text counts as changed when recent outcomes are so many times likelier with every prefix accepted as often as twice the prefix,
#: or half of it, was: a cumulative sum test (E. S. Page, Continuous inspection schemes, Biometrika 41, 1954) in products. A false
#: alarm is cheap, the counts come back within some rounds; a lower bound pays for more of them than it gains after changes.
SURPRISE = 60.0
#: Newest outcomes that keep their weight after a surprise, for it was they that surprised.
LATEST = 4
#: Outcome, at the average of all requests, that is added to what a request did recently, so that nothing seen changes no odds.
LEAST_SEEN = 1.0
#: Most that the odds of a request are taken to differ from those of all.
MOST_ODDS = 1e4
#: Variance added to that of recent rejections, or a single one among certain drafts would already set requests apart.
LEAST_VARIANCE = 0.25
#: What a request's older counts weigh after a surprise.
KEPT = 1 / 16
#: Outcomes of its own that the global estimate weighs for a request: where requests differ, where they are alike, and after the
#: request surprised.
FEWEST_SHARED, MOST_SHARED, SHARED_AFTER_SURPRISE = 4.0, 32.0, 3.0
#: Outcomes that recent rejections stand for, when the spread of requests is taken from them.
RECENT_OUTCOMES = 10.0
#: An estimate of n outcomes changes little by one more. It is made anew, and time passes, after half as many rounds, and after so
#: many at the latest: with many lanes that is most of what a decision costs the host.
SETTLED_ROUNDS = 8
#: Weights grow instead of every count shrinking; from here they are brought back to 1, long before precision is lost.
_GREATEST_WEIGHT = 1e9
#: More halvings than this leave nothing of a count.
_MOST_HALVINGS = 60.0
#: Probabilities below this are as good as none.
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

    def judged(self) -> Iterator[float]:
        """Weight of judged drafts by depth, 0 … K: of outcomes that begin no deeper and do not end before it."""
        return accumulate(map(sub, self.starts, self.ends))


@frozen
class _Estimate:
    """Of one source over all requests. hazards: h[0] … h[K − 1]; sums: of the first 0 … K of them."""

    hazards: list[float]
    sums: list[float]


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
        # outcomes that are not counted yet, how many more make them worth it, and how many are counted
        self._notes: defaultdict[_Outcome, int] = defaultdict(int)
        self._missing = 1
        self._counted = 0
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

    def note(self, outcome: _Outcome) -> None:
        """Takes in depths of one source, as ``judged`` gives them; for an outcome of no request this is all."""
        self._notes[outcome] += 1
        self._missing -= 1
        if not self._missing:
            self._count()

    def hazards(self, match_length: int | None = None) -> tuple[float, ...]:
        """h[0] … h[K − 1] of learned drafts, or of copies found by a match of this length."""
        return tuple(self.estimate(match_length or _LEARNED).hazards)

    def survival(self, drafts: int, copied: int = 0, match_length: int | None = None) -> tuple[float, ...]:
        """Probability that the first j drafts of a round are all accepted, j = 1 … drafts, for a request not known yet.

        No more than K drafts are looked at. Raises UsageError for copies without the length of their match.
        """
        return RequestSurvival(self).survival(drafts, copied, match_length)

    def note_distance(self, square: float, outcomes: int) -> None:
        """So many outcomes of a request later its recent rejections are the root of so many variances from what the estimate of
        all requests expects."""
        self._spread += min(outcomes * _GLOBAL_RATE, 1.0) * (square - self._spread)

    def estimate(self, source: int) -> _Estimate:
        """Of a source, with all but the newest outcomes; the caller must not change it."""
        found = self._estimates.get(source)
        if found is None:
            hazards = self._hazards(self._counts.get(source))
            sums = list(accumulate(hazards, initial=0.0))
            found = self._estimates[source] = _Estimate(hazards=hazards, sums=sums)
        return found

    def _count(self) -> None:
        for (source, first, end, rejected), times in self._notes.items():
            counts = self._counts.get(source)
            if counts is None:
                counts = self._counts[source] = _Counts(self.drafts)
            counts.fade(2.0 ** (times / GLOBAL_HALF_LIFE))
            counts.add(first, end, rejected, times)
            self._estimates.pop(source, None)
        self._counted += sum(self._notes.values())
        self._missing = min(max(self._counted // 16, 1), MOST_NOTED)
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
        #: What ``survival(K)`` gives, if nothing has to be estimated for it; read by callers for whom a call per lane is dear.
        self.outlook: tuple[float, ...] | None = None

    def observe(self, verified: int, accepted: int, copied: int = 0, match_length: int | None = None) -> None:
        """Takes in one round's outcome, here and in the history; arguments and errors are those of ``AcceptanceHistory.observe``.

        A round that verified nothing lets time pass: older outcomes weigh less.
        """
        history, turn, learned = self._history, self._turn + 1, self._learned
        plain = history._plain.get((verified, accepted))
        if copied or learned is None or plain is None:
            for outcome in history.judged(verified, accepted, copied, match_length):
                self._of(outcome[0]).add(turn, outcome)
                history.note(outcome)
        elif verified:
            # the same for rounds without copies, of which there are many
            learned.add(turn, plain)
            history.note(plain)
        self._turn = turn
        if learned is not None and turn >= learned.due:
            self.outlook = None

    def survival(self, drafts: int, copied: int = 0, match_length: int | None = None) -> tuple[float, ...]:
        """Probability that the first j drafts of the next round are all accepted, j = 1 … drafts, at most K.

        copied, match_length: as that round will have them. Raises UsageError for copies without the length of their match.
        """
        if not copied:
            own = self._learned
            if own is None or self._turn >= own.due:
                own = self._refreshed(_LEARNED)
                self.outlook = own.survival
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
            own.refresh(self._turn, self._history, source)
        return own


class _Own:
    """Counts of one request and source, and what it did recently."""

    __slots__ = (
        "accepted",
        "alone",
        "common",
        "counts",
        "due",
        "expected",
        "fewer",
        "fresh",
        "judged",
        "latest",
        "more",
        "outcomes",
        "rejections",
        "survival",
        "turn",
    )

    def __init__(self, turn: int, common: _Estimate) -> None:
        """turn: the request's round. common: over all requests."""
        self.counts = _Counts(len(common.hazards))
        self.turn = self.due = turn
        # since the text last changed
        self.outcomes = 0
        self.alone = False
        self.common = common
        self.survival: tuple[float, ...] = ()
        self._estimate([1.0 - hazard for hazard in common.hazards])
        # recent drafts that were judged, rejections of them, and those that the global estimate expected
        self.judged = self.rejections = self.expected = 0.0
        # outcomes since the last estimate
        self.fresh = 0
        # how many times likelier outcomes are with a change to more rejections, and to fewer, at the likeliest time for it
        self.more = self.fewer = 1.0
        self.latest: deque[_Outcome] = deque(maxlen=LATEST)

    def add(self, turn: int, outcome: _Outcome) -> None:
        """Takes in an outcome."""
        if turn >= self.turn + SETTLED_ROUNDS:
            self._pass(turn)
        _, first, end, rejected = outcome
        counts, sums = self.counts, self.common.sums
        # as _Counts.add does for one outcome
        weight = counts.weight
        counts.starts[first] += weight
        counts.ends[end] += weight
        if rejected:
            counts.rejected[end - 1] += weight
        self.outcomes += 1
        self.fresh += 1
        self.latest.append(outcome)
        self.judged += end - first
        self.expected += sums[end] - sums[first]
        # acceptance a², or √a, instead of a: (1 − a²) / (1 − a) = 1 + a, (1 − √a) / (1 − a) = 1 / (1 + √a)
        more, fewer = self.more, self.fewer
        if rejected:
            self.rejections += 1.0
            end -= 1
            rate = self.accepted[end]
            more *= 1.0 + rate
            fewer /= 1.0 + sqrt(rate)
        if end:
            passed = self.survival[end - 1]
            if first:
                passed /= self.survival[first - 1]
            more *= passed
            fewer /= sqrt(passed)
        self.more = more if more > 1.0 else 1.0
        self.fewer = fewer if fewer > 1.0 else 1.0
        if more > SURPRISE or fewer > SURPRISE:
            self._restart(turn)

    def refresh(self, turn: int, history: AcceptanceHistory, source: int) -> None:
        """Estimates acceptance anew: counts shrunk to those of all requests, and if the request once surprised, to what has its
        odds of rejection as many times greater as the request's recently were."""
        common = history.estimate(source)
        if self.fresh:
            # as if these drafts had all been alike: no less than it is
            variance = self.expected * (1.0 - self.expected / self.judged) + LEAST_VARIANCE
            history.note_distance((self.rejections - self.expected) ** 2 / variance, self.fresh)
            self.fresh = 0
        self.due = turn + min(max(self.outcomes // 2, 1), SETTLED_ROUNDS)
        if turn != self.turn:
            self._pass(turn)
        self.common = common
        counts, hazards = self.counts, common.hazards
        if self.alone:
            weight, skew = SHARED_AFTER_SURPRISE * counts.weight, self._odds() - 1.0
            hazards = [(hazard + skew * hazard) / (1.0 + skew * hazard) for hazard in hazards]
        else:
            weight = history.shared * counts.weight
        self._estimate(
            [
                1.0 - (rejected + weight * hazard) / (judged + weight)
                for rejected, judged, hazard in zip(counts.rejected, counts.judged(), hazards)
            ]
        )

    def _estimate(self, accepted: list[float]) -> None:
        """accepted: probability that draft d is accepted if those before it were, d = 0 … K − 1."""
        self.accepted = accepted
        self.survival = tuple(accumulate(accepted, mul))

    def _odds(self) -> float:
        """Odds of a recent rejection over what they are for all requests."""
        if not self.judged:
            return 1.0
        common = min(max(self.expected / self.judged, _LEAST_HAZARD), 1.0 - _LEAST_HAZARD)
        rejected = self.rejections + LEAST_SEEN * common
        accepted = self.judged - self.rejections + LEAST_SEEN * (1.0 - common)
        return min(max(rejected * (1.0 - common) / (accepted * common), 1.0 / MOST_ODDS), MOST_ODDS)

    def _restart(self, turn: int) -> None:
        """The text has changed: forgets nearly all but the outcomes that said so."""
        counts, sums = self.counts, self.common.sums
        counts.fade(1 / KEPT)
        self.judged = self.rejections = self.expected = 0.0
        for _, first, end, rejected in self.latest:
            counts.add(first, end, rejected, 1)
            self.judged += end - first
            self.rejections += rejected
            self.expected += sums[end] - sums[first]
        self.more = self.fewer = 1.0
        self.alone = True
        self.outcomes, self.due = len(self.latest), turn

    def _pass(self, turn: int) -> None:
        """Lets the rounds since the last outcome pass."""
        passed = turn - self.turn
        self.turn = turn
        if passed < len(_PASSING):
            fade, keep = _PASSING[passed]
        else:
            fade, keep = _passing(passed)
        self.counts.fade(fade)
        self.judged *= keep
        self.rejections *= keep
        self.expected *= keep


_GLOBAL_RATE = math.log(2.0) / GLOBAL_HALF_LIFE


def _passing(rounds: int) -> tuple[float, float]:
    """What so many rounds do to a request's counts, and to what it did recently."""
    return 2.0 ** min(rounds / LOCAL_HALF_LIFE, _MOST_HALVINGS), 0.5 ** (rounds / RECENT_HALF_LIFE)


_PASSING = [_passing(rounds) for rounds in range(2 * SETTLED_ROUNDS)]


def _copies(copied: int, match_length: int | None) -> int:
    """Source of copied drafts."""
    if copied < 0 or match_length is None or match_length < 1:
        raise UsageError(
            f"{copied} copied drafts after a match of {match_length} tokens; copies come from a match of some"
        )
    return match_length
