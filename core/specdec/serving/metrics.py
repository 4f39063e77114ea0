"""Figures of a running engine: drafts and tokens, cost of rounds, queue and prefixes; per request and in total. Torch-free.

The scheduler reports what happens; nothing is measured here, and times are whatever monotonic clock it has, real or simulated.
``Metrics.snapshot`` is the one output, plain types that JSON takes; ``serving.prometheus`` writes it as Prometheus text.

Reporting never raises and never loses a delivered token: unknown and ended requests, empty records, records that contradict
themselves and clocks that run backwards are all counted as far as they make sense.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable
from math import isfinite
from threading import Lock
from typing import Any, NamedTuple

from attrs import define, field

from specdec.round.completion import Completion, Finish
from specdec.serving.statistics import DraftStatistics
from specdec.state.prefix_records import Lost, PrefixStatistics

#: Upper bounds of the histograms, in seconds.
SECONDS_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
#: Ended requests of which ``snapshot`` still has figures of their own.
KEPT_REQUESTS = 256
#: Version of the snapshot's keys: it changes if one goes away or gets another meaning.
SNAPSHOT_VERSION = 1


class LaneRecord(NamedTuple):
    """One lane of a round; a plain tuple will do.

    copied: drafts that the host gave to copy, of which the record says how many were offered. match_length: tokens they were
    found by. delivered: tokens of the record that belong to the output, None for all; 0 for a request that ended meanwhile.
    """

    completion: Completion
    copied: int = 0
    match_length: int | None = None
    delivered: int | None = None


class Durations:
    """A histogram of seconds."""

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0.0
        self._counts = [0] * (len(SECONDS_BOUNDS) + 1)

    def add(self, seconds: float) -> None:
        """Counts one duration, which a bound of the same value includes."""
        self.count += 1
        self.sum += seconds
        self._counts[bisect_left(SECONDS_BOUNDS, seconds)] += 1

    def as_data(self) -> dict[str, Any]:
        """buckets: [bound, durations up to it]; those above the last bound are in ``count`` alone."""
        total, buckets = 0, []
        for bound, count in zip(SECONDS_BOUNDS, self._counts, strict=False):
            total += count
            buckets.append([bound, total])
        return {"count": self.count, "sum": self.sum, "buckets": buckets}


@define(kw_only=True)
class ShapeCost:
    """Rounds of one batch capacity and width: how many, seconds in all, live lanes and tokens delivered."""

    rounds: int = 0
    seconds: float = 0.0
    lanes: int = 0
    tokens: int = 0


@define(kw_only=True, eq=False)
class RequestFigures:
    """One request. waiting_since: None while it runs and after it ended. finish: None until it ended."""

    number: int
    submitted: float
    waiting_since: float | None
    finish: str | None = None
    wait_seconds: float = 0.0
    first_token_seconds: float | None = None
    seconds: float | None = None
    admissions: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    proposed_copies: int = 0
    grammar_rejections: int = 0
    statistics: DraftStatistics = field(factory=DraftStatistics)

    def as_data(self) -> dict[str, Any]:
        """Plain types for JSON."""
        state = "ended" if self.finish else "running" if self.waiting_since is None else "waiting"
        return {
            "request": self.number,
            "state": state,
            "finish": self.finish,
            "wait_seconds": self.wait_seconds,
            "first_token_seconds": self.first_token_seconds,
            "seconds": self.seconds,
            "admissions": self.admissions,
            "preemptions": self.preemptions,
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "proposed_copies": self.proposed_copies,
            "grammar_rejections": self.grammar_rejections,
            "output": self.statistics.as_data(),
        }


class Metrics:
    """Counts of one engine since it was made. Thread-safe."""

    def __init__(self, *, kept_requests: int = KEPT_REQUESTS) -> None:
        """kept_requests: ended requests whose own figures stay in the snapshot, the latest ones; totals keep all."""
        self._lock = Lock()
        self._kept = kept_requests
        self._live: dict[int, RequestFigures] = {}
        self._ended: OrderedDict[int, RequestFigures] = OrderedDict()
        # of requests whose own figures are gone; totals are these and those of all requests
        self._forgotten = DraftStatistics()
        self._shapes: dict[tuple[int, int], ShapeCost] = {}
        self._prefix = PrefixStatistics()
        self._lost = Counter({str(reason): 0 for reason in Lost})
        self._finishes = Counter({_reason(reason): 0 for reason in Finish if reason is not Finish.NONE})
        self._wait, self._first_token, self._whole = Durations(), Durations(), Durations()
        self._waiting = self._running = 0
        self._submitted = self._admissions = self._preemptions = 0
        self._proposed_copies = self._grammar_rejections = 0

    # --- life of a request -----------------------------------------------------------------------------------------

    def submitted(self, number: int, now: float) -> None:
        """A request was queued. now: seconds, as everywhere. A number that is in use already is no new request."""
        with self._lock:
            if number in self._live:
                return
            self._forget(number)
            self._submitted += 1
            self._live[number] = RequestFigures(number=number, submitted=now, waiting_since=now)

    def admitted(self, number: int, now: float, reused_tokens: int | None, prompt_tokens: int) -> None:
        """It has a slot and pages, for the first time or again. prompt_tokens: to be consumed before it can go on, earlier
        output included; reused_tokens: those of them that a prefix checkpoint has, None if none was looked for."""
        with self._lock:
            self._admissions += 1
            if reused_tokens is not None:
                prefix = self._prefix
                prefix.lookups += 1
                prefix.prompt_tokens += prompt_tokens
                prefix.reused_tokens += reused_tokens
                prefix.full_hits += 0 < reused_tokens == prompt_tokens
                prefix.partial_hits += 0 < reused_tokens < prompt_tokens
            request = self._live.get(number)
            if request is None:
                return
            request.admissions += 1
            request.prompt_tokens += prompt_tokens
            request.reused_tokens += reused_tokens or 0
            if request.waiting_since is not None:
                seconds = _seconds(now - request.waiting_since)
                request.waiting_since = None
                request.wait_seconds += seconds
                self._wait.add(seconds)

    def first_token(self, number: int, now: float, delivered: int = 1) -> None:
        """The first token of a request is there. delivered: 1 if it came without a round; 0 if a round delivered it, whose
        record counts it, as happens to a request that is resumed with earlier output."""
        with self._lock:
            request = self._live.get(number)
            figures = request or self._ended.get(number)
            statistics = self._forgotten if figures is None else figures.statistics
            statistics.first_tokens += delivered
            if request is not None and request.first_token_seconds is None:
                request.first_token_seconds = _seconds(now - request.submitted)
                self._first_token.add(request.first_token_seconds)

    def preempted(self, number: int, now: float) -> None:
        """A running request gave slot and pages back and waits again."""
        with self._lock:
            self._preemptions += 1
            request = self._live.get(number)
            if request is not None:
                request.preemptions += 1
                request.waiting_since = now

    def finished(self, number: int, reason: Finish | str, now: float) -> None:
        """A request ended, waiting or running; a second end of the same request is none. reason: a ``Finish``, or a word for
        what rounds do not know."""
        with self._lock:
            request = self._live.pop(number, None)
            if request is None:
                return
            request.finish = _reason(reason)
            request.waiting_since = None
            request.seconds = _seconds(now - request.submitted)
            self._finishes[request.finish] += 1
            self._whole.add(request.seconds)
            self._ended[number] = request
            while len(self._ended) > self._kept:
                self._forget(next(iter(self._ended)))

    def cancelled(self, number: int, now: float) -> None:
        """A request was cancelled, waiting or running; it has ended."""
        self.finished(number, Finish.CANCELLED, now)

    def _forget(self, number: int) -> None:
        """Gives up the figures of an ended request, if there is one; totals keep its counts."""
        ended = self._ended.pop(number, None)
        if ended is not None:
            self._forgotten.merge(ended.statistics)

    # --- rounds ----------------------------------------------------------------------------------------------------

    def round(
        self,
        batch: int,
        width: int,
        seconds: float,
        records: Iterable[LaneRecord | tuple[Completion, int, int | None, int | None]],
    ) -> None:
        """A round was acknowledged. batch: capacity of its shape; width: verified rows per lane; seconds: what all of it cost.
        records: of its live lanes, for requests by their own number; records of an old epoch do not belong here."""
        with self._lock:
            shape = self._shapes.setdefault((batch, width), ShapeCost())
            shape.rounds += 1
            shape.seconds += _seconds(seconds)
            for completion, copied, match_length, delivered in records:
                figures = self._live.get(completion.request) or self._ended.get(completion.request)
                statistics = self._forgotten if figures is None else figures.statistics
                shape.lanes += 1
                shape.tokens += statistics.add(
                    completion, in_round=True, match_length=match_length, delivered=delivered
                )
                if copied:
                    self._proposed_copies += copied
                    if figures is not None:
                        figures.proposed_copies += copied

    def grammar_rejected(self, number: int, drafts: int = 1) -> None:
        """Drafts that the request's grammar forbids: an ordinary rejection, told apart here."""
        with self._lock:
            self._grammar_rejections += drafts
            request = self._live.get(number)
            if request is not None:
                request.grammar_rejections += drafts

    # --- prefixes and queue ----------------------------------------------------------------------------------------

    def prefix_lost(self, reason: Lost | str, tokens: int) -> None:
        """Tokens that were seen before had to be consumed again. reason: a ``Lost``, or a word of the scheduler's."""
        with self._lock:
            self._lost[str(reason)] += tokens

    def prefix_checkpoints(self, published: int, evicted: int) -> None:
        """How many checkpoints were made and evicted so far, as the cache counts them."""
        with self._lock:
            self._prefix.published, self._prefix.evicted = published, evicted

    def queue(self, waiting: int, running: int) -> None:
        """How many requests wait and run now."""
        with self._lock:
            self._waiting, self._running = waiting, running

    # --- figures ---------------------------------------------------------------------------------------------------

    def totals(self) -> DraftStatistics:
        """Draft and token counts of all requests, in an object of its own."""
        with self._lock:
            return self._totals()

    def _totals(self) -> DraftStatistics:
        total = DraftStatistics()
        total.merge(self._forgotten)
        for figures in (*self._ended.values(), *self._live.values()):
            total.merge(figures.statistics)
        return total

    def request(self, number: int) -> dict[str, Any] | None:
        """One element of the snapshot's ``by_request``; None if its figures are not there (any more)."""
        with self._lock:
            figures = self._live.get(number) or self._ended.get(number)
            return None if figures is None else figures.as_data()

    def snapshot(self) -> dict[str, Any]:
        """Everything as plain types, all of one moment. Counts never decrease, but for ``queue.waiting`` and ``running``.

        ==================  ===========================================================================================
        key                 meaning
        ==================  ===========================================================================================
        version             of these keys, 1
        requests            submitted; admissions and preemptions (a preempted request is admitted again); finished: requests
                            by reason, in lower-case words of ``Finish`` or the scheduler's own
        queue               waiting, running: requests now. wait_seconds (of each admission), first_token_seconds (from
                            submission), request_seconds (from submission to the end): each count, sum and buckets
                            [upper bound, durations up to it]
        prefix              lookups = full_hits + partial_hits + misses; prompt_tokens of lookups, reused_tokens of them;
                            lost_tokens by reason; checkpoints published and evicted
        rounds              one object per shape: batch (capacity), width, rounds, seconds, lanes (records), tokens delivered
        output              see below, of all requests
        proposed_copies     drafts the host gave to copy; those that fit a lane's budget are offered
        grammar_rejections  drafts that a grammar forbade
        by_request          live requests and the latest ended ones by number: request, state (waiting, running, ended),
                            finish, wait_seconds, first_token_seconds and seconds (None until known), admissions,
                            preemptions, prompt_tokens, reused_tokens, proposed_copies, grammar_rejections, output
        ==================  ===========================================================================================

        An ``output`` has tokens (delivered) and tokens_by_source, whose values add up to it: ``first`` came without a round,
        ``target`` are corrections and bonus tokens, ``learned`` and ``copied_N`` (found by a match of N tokens) are drafts.
        cut_tokens: of records, but behind the end of an output. lane_rounds: records of rounds, those without drafts included.
        offered, verified and accepted: drafts, sums of the rows ``drafts``, each with source, depth from 1, offered, verified,
        judged, accepted and emitted as ``DraftStatistics`` says. tokens_per_round, acceptance_rate: accepted / verified.
        inconsistent_records: records that contradicted themselves, which is a bug; their tokens count, their drafts do not.
        """
        with self._lock:
            prefix = self._prefix
            figures = sorted((*self._ended.values(), *self._live.values()), key=lambda one: one.number)
            return {
                "version": SNAPSHOT_VERSION,
                "requests": {
                    "submitted": self._submitted,
                    "admissions": self._admissions,
                    "preemptions": self._preemptions,
                    "finished": dict(self._finishes),
                },
                "queue": {
                    "waiting": self._waiting,
                    "running": self._running,
                    "wait_seconds": self._wait.as_data(),
                    "first_token_seconds": self._first_token.as_data(),
                    "request_seconds": self._whole.as_data(),
                },
                "prefix": {
                    "lookups": prefix.lookups,
                    "full_hits": prefix.full_hits,
                    "partial_hits": prefix.partial_hits,
                    "misses": prefix.misses,
                    "prompt_tokens": prefix.prompt_tokens,
                    "reused_tokens": prefix.reused_tokens,
                    "lost_tokens": dict(self._lost),
                    "published": prefix.published,
                    "evicted": prefix.evicted,
                },
                "rounds": [
                    {
                        "batch": batch,
                        "width": width,
                        "rounds": shape.rounds,
                        "seconds": shape.seconds,
                        "lanes": shape.lanes,
                        "tokens": shape.tokens,
                    }
                    for (batch, width), shape in sorted(self._shapes.items())
                ],
                "output": self._totals().as_data(),
                "proposed_copies": self._proposed_copies,
                "grammar_rejections": self._grammar_rejections,
                "by_request": [one.as_data() for one in figures],
            }


def _reason(reason: Finish | str) -> str:
    return reason.name.lower() if isinstance(reason, Finish) else str(reason)


def _seconds(value: float) -> float:
    """A duration that JSON and sums can hold; a clock that ran backwards measured nothing."""
    return value if isfinite(value) and value > 0 else 0.0
