"""The scheduler: which round runs next, for any device. Plain Python, deterministic.

A step does at most one of each: prompt chunks of requests being admitted, one submission, one collection. What a round may do is
frozen before it (lanes, ceilings, copies, masks, width, pages); what it did is read from its records after it, in the order of
submission.

Fairness: prompts are consumed in the order of admission, ``chunks_per_step`` chunks between two rounds, so a running request
waits for that many chunks at most, and the first token of a new one comes after the chunks of those before it and its own, each
with at most one round in between. When pages run out, the request admitted last steps back, so the oldest always gets on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from attrs import frozen

from specdec.drafting.history import Copy, HistoryRing
from specdec.errors import CapacityError, UsageError
from specdec.round.completion import Completion, Field, Finish
from specdec.scheduling.admission import Admission
from specdec.scheduling.device import FRAMES, Device, LanePlan, RoundPlan, RoundResult
from specdec.scheduling.emissions import emission
from specdec.scheduling.policy import Outcome, Prospect, WidthPolicy
from specdec.scheduling.resident import Resident
from specdec.serving.metrics import LaneRecord, Metrics
from specdec.serving.request import Emission, Event, Request

if TYPE_CHECKING:
    from specdec.control.trace import TraceWriter

# plain integers: looking a member of an enumeration up costs more than what is done with it
_REQUEST, _EPOCH, _ROUND = int(Field.REQUEST), int(Field.EPOCH), int(Field.ROUND)


@frozen(kw_only=True, eq=False)
class _Flight:
    """A submitted round that was not collected. lanes: who was in each. handle: the device's own, for snapshots. decision: why
    it has its width, None if there was nothing to choose."""

    plan: RoundPlan
    lanes: tuple[Resident, ...]
    handle: Any
    decision: Any = None


class Scheduler:
    """Runs requests over a device. Not thread-safe."""

    def __init__(
        self,
        device: Device,
        policy: WidthPolicy,
        *,
        queue_depth: int = 1,
        chunks_per_step: int | None = None,
        reserved_output: int | None = None,
        isolate: bool = False,
        history: HistoryRing | None = None,
        metrics: Metrics | None = None,
        trace: TraceWriter | None = None,
        check_records: Callable[[int, Sequence[Sequence[int]]], None] | None = None,
    ) -> None:
        """queue_depth: rounds submitted before the first is collected, at most two. chunks_per_step: prompt chunks before each
        round; None admits everything that fits and consumes whole prompts first. reserved_output: output tokens whose pages a
        request gets when it is admitted, more as it grows; None reserves all, and nothing is ever preempted. isolate: an error
        of one request's own work ends that request, with the error in its last emission, instead of being raised. history:
        decoded tokens to copy drafts from; with it the host reads each round of a request before the next. check_records:
        called with a round's records before any of it is applied; what it raises is raised.

        Raises UsageError for numbers out of range.
        """
        if not 1 <= queue_depth <= FRAMES:
            raise UsageError(
                f"queue_depth is {queue_depth!r}; a device has {FRAMES} frames, so 1 or {FRAMES} are allowed"
            )
        for name, value in (("chunks_per_step", chunks_per_step), ("reserved_output", reserved_output)):
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value!r}; at least 1, or None")
        self.device = device
        self.policy = policy
        self.queue_depth = queue_depth
        self.chunks_per_step = chunks_per_step
        self.history = history
        self.metrics = metrics
        self.trace = trace
        self.admission = Admission(
            device, policy, reserved_output=reserved_output, isolate=isolate, history=history, metrics=metrics
        )
        self.flights: deque[_Flight] = deque()
        self._ready: deque[Emission] = deque()
        self._check_records = check_records

    # --- requests --------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        queue = self.admission
        return bool(queue.waiting or queue.residents or self.flights or self._ready or queue.farewells)

    def submit(self, request: Request) -> int:
        """Queues a request and returns its number. Raises as ``Device.check`` does."""
        return self.admission.submit(request)

    def cancel(self, number: int) -> bool:
        """Ends a waiting or running request; an emission without tokens says CANCELLED in the next step.

        What was acknowledged of it may serve as a prefix. Its slot and pages are free as soon as no submitted round names them.
        False if it has ended already or never existed.
        """
        return self.admission.cancel(number)

    # --- steps -----------------------------------------------------------------------------------------------------

    def step(self) -> Iterator[Event]:
        """Prompt chunks, then one submission, then one collection unless another round may be queued first.

        A caller may stop iterating at any event: nothing is done twice and nothing is lost.
        """
        yield from _drain(self.admission.farewells)
        yield from _drain(self._ready)
        yield from self.admission.consume_prompts(self.chunks_per_step)
        submitted = self._submit_next()
        if self.flights and (len(self.flights) >= self.queue_depth or not submitted):
            self._ready.extend(self._collect())
        if self.metrics is not None:
            self.metrics.queue(len(self.admission.waiting), len(self.admission.residents))
        yield from _drain(self._ready)

    # --- submission ------------------------------------------------------------------------------------------------

    def _submit_next(self) -> bool:
        """Submits first tokens of newcomers, else a round of everyone who may run. False if there was nothing to submit."""
        while len(self.flights) < self.queue_depth:
            residents = list(self.admission.residents.values())
            newcomers = [one for one in residents if one.entered and not one.started and not one.flights]
            if newcomers:
                lanes = tuple(self._lane(Prospect(one, 0, None)) for one in newcomers)
                return self._launch(self._plan(newcomers, lanes, 1, first=True), newcomers)
            running = self._may_run(residents)
            if not running:
                return False
            prospects = [self._prospect(one) for one in running]
            lanes = tuple(map(self._lane, prospects))
            batch, width, decision = self.device.batch_for(len(running)), 1, None
            if any(lane.ceiling for lane in lanes):
                prospects = [
                    Prospect(one, lane.ceiling, copy) for (one, _, copy), lane in zip(prospects, lanes, strict=True)
                ]
                decision = self.policy.choose(batch, self.device.widths(batch), prospects)
                width = decision.width
            try:
                for resident in running:
                    self.admission.reserve(resident, width)
            except CapacityError as error:
                # pages are short: what is in flight is read first, then the last one admitted steps back
                if self.flights:
                    return False
                self.admission.preempt(error)
                continue
            return self._launch(self._plan(running, lanes, width), running, decision)
        return False

    def _may_run(self, residents: Sequence[Resident]) -> list[Resident]:
        """Requests of which a round may be submitted now.

        Requests that the host decides about run together or not at all: joining singly while others of them are in flight,
        they would part into two groups that take turns and never meet again.
        """
        all_decided = self.history is not None
        barrier = any(one.flights and (all_decided or one.host_decides) for one in residents)
        return [
            one
            for one in residents
            if one.entered
            and (one.started or one.flights)
            # each round in flight emits a token at least: what certainly ends there has no use for another
            and one.generated + len(one.flights) < one.budget
            and not (barrier and (all_decided or one.host_decides))
        ]

    def _prospect(self, resident: Resident) -> Prospect:
        request = resident.request
        if request.stop:
            return Prospect(resident, 0, None)  # a token behind a stop string must not be consumed
        drafts = self.policy.drafts
        ceiling = drafts if request.draft_tokens is None else min(drafts, request.draft_tokens)
        copy = None
        if self.history is not None and ceiling:
            found = self.history.lookup(resident.run.tokens[-8:])
            copy = None if found is None else Copy(found.tokens[:ceiling], found.match_length)
        if request.grammar is not None:
            # learned drafts have no masks: only the device knows them
            ceiling = 0 if copy is None else len(copy.tokens)
        return Prospect(resident, ceiling, copy)

    @staticmethod
    def _lane(prospect: Prospect) -> LanePlan:
        resident, ceiling, copy = prospect
        copies, match = ((), None) if copy is None else (copy.tokens, copy.match_length)
        if resident.grammar is None:
            return LanePlan(slot=resident.slot, ceiling=ceiling, copies=copies, match_length=match)
        masks = tuple(resident.grammar.rows(copies))
        kept = len(masks) - 1
        return LanePlan(slot=resident.slot, ceiling=kept, copies=copies[:kept], match_length=match, masks=masks)

    def _plan(
        self, residents: Sequence[Resident], lanes: tuple[LanePlan, ...], width: int, *, first: bool = False
    ) -> RoundPlan:
        page = self.device.page_tokens
        crossing = any((one.consumed + one.ahead + width) // page > one.consumed // page for one in residents)
        return RoundPlan(
            number=self.admission.next_round,
            batch=self.device.batch_for(len(lanes)),
            width=width,
            lanes=lanes,
            boundary=self.device.publishes and crossing and not first,
            extended=any(one.extended for one in residents),
            first=first,
        )

    def _launch(self, plan: RoundPlan, lanes: Sequence[Resident], decision: Any = None) -> bool:
        """Submits. Whatever interrupts it leaves its lanes unsettled: the device may be a round ahead of the host."""
        known = [one.lost for one in lanes]
        for one in lanes:
            one.lost = True
        try:
            handle = self.device.submit(plan)
        except Exception as error:
            if not self.admission.isolate:
                raise
            self._fail(lanes, error)
            return True
        self.flights.append(_Flight(plan=plan, lanes=tuple(lanes), handle=handle, decision=decision))
        self.admission.next_round += 1
        for one, lost in zip(lanes, known, strict=True):
            one.lost = lost
            one.flights.append(plan)
        return True

    # --- collection ------------------------------------------------------------------------------------------------

    def _collect(self) -> list[Emission]:
        """Reads the oldest round's records, publishes what they acknowledge and retires what ended; a list, so that no caller
        can leave half of it undone."""
        flight = self.flights.popleft()
        plan = flight.plan
        for resident in flight.lanes:
            resident.flights.pop(0)
        try:
            result = self.device.collect(plan, any(one.request.logprobs is not None for one in flight.lanes))
            if self._check_records is not None:
                self._check_records(plan.number, result.records)
        except BaseException as error:
            for resident in flight.lanes:
                resident.lost = True
            self.admission.release_read(plan.number)
            if not self.admission.isolate or not isinstance(error, Exception):
                raise
            self._fail(flight.lanes, error)
            return []
        events: list[Emission] = []
        outcomes: list[Outcome] = []
        for lane, (resident, record) in enumerate(zip(flight.lanes, result.records, strict=True)):
            identity = (record[_REQUEST], record[_EPOCH], record[_ROUND])
            present = self.admission.residents.get(resident.slot) is resident
            if not present or identity != (resident.number, resident.epoch, plan.number):
                continue  # a late record: of a cancelled request, an earlier owner of the slot or an earlier round
            completion = Completion.parse(record)
            outcomes.append(Outcome(plan.lanes[lane], resident, completion))
            events.append(self._apply(resident, completion, flight, lane, result))
        self._report(flight, result.seconds, outcomes)
        for event in events:
            if event.finish is not Finish.NONE:
                self.admission.ended(event.request, event.finish)
        self.admission.release_read(plan.number)
        return events

    def _fail(self, lanes: Sequence[Resident], error: Exception) -> None:
        """A round could not be run or read: its requests end, others go on."""
        for resident in lanes:
            if self.admission.residents.get(resident.slot) is resident:
                self.admission.fail(resident, error)

    def _apply(
        self, resident: Resident, completion: Completion, flight: _Flight, lane: int, result: RoundResult
    ) -> Emission:
        resident.started, resident.lost = True, False
        finish, error = completion.finish, None
        if finish is Finish.LENGTH and resident.context_bound:
            finish = Finish.CONTEXT
        resident.run.extend(completion.tokens)
        resident.consumed = completion.consumed
        if self.history is not None:
            self.history.append(resident.number, completion.tokens)
        if resident.grammar is not None:
            finish, error = _advance(resident, completion.tokens, finish)
        text, finish = _match(resident, completion.tokens, finish)
        if self.device.publishes and finish is not Finish.FAULT:
            self._publish(resident, completion, finish, flight, lane)
        if finish is not Finish.NONE:
            self.admission.retire(resident)
        return emission(resident, completion, result, lane, finish=finish, text=text, error=error)

    def _publish(self, resident: Resident, completion: Completion, finish: Finish, flight: _Flight, lane: int) -> None:
        """Makes checkpoints at the page boundary that an acknowledged round crossed and, if it was the last, at its end."""
        if resident.consumed != len(resident.run.tokens) - 1:
            return  # records were lost: the host does not know which tokens the state stands for
        before, after = completion.consumed - completion.emitted, completion.consumed
        crossed = after // self.device.page_tokens * self.device.page_tokens
        if flight.plan.boundary and crossed > before:
            self.device.publish(resident, crossed, boundary=flight.handle, lane=lane)
        # a lane that ended on the device does nothing in rounds queued behind
        if finish is not Finish.NONE and (resident.settled or completion.finish is not Finish.NONE):
            self.device.publish(resident, after)

    def _report(self, flight: _Flight, seconds: float, outcomes: Sequence[Outcome]) -> None:
        """Tells policy, metrics and trace of a collected round."""
        plan, now = flight.plan, self.device.clock()
        if not plan.first:
            self.policy.observe(plan, seconds, outcomes)
        if self.metrics is not None:
            if plan.first:
                for _, resident, completion in outcomes:
                    self.metrics.first_token(resident.number, now, delivered=completion.emitted)
            else:
                records = [
                    LaneRecord(done, len(lane.copies), lane.match_length, done.emitted) for lane, _, done in outcomes
                ]
                self.metrics.round(plan.batch, plan.width, seconds, records)
            statistics = self.device.prefix_statistics()
            if statistics is not None:
                self.metrics.prefix_checkpoints(statistics.published, statistics.evicted)
        if self.trace is not None and not plan.first:
            self.trace.write(plan, flight.decision, seconds, now, outcomes)


def _drain(emissions: deque[Emission]) -> Iterator[Emission]:
    while emissions:
        yield emissions.popleft()


def _match(resident: Resident, tokens: tuple[int, ...], finish: Finish) -> tuple[str | None, Finish]:
    """Text that acknowledged tokens release, and whether the request ends, for one with stop strings."""
    matcher = resident.matcher
    if matcher is None:
        return None, finish
    found = matcher.push(tokens)
    assert found.kept == len(tokens), "rounds of such a request emit one token"
    text = found.text if finish is Finish.NONE else found.text + matcher.finish()
    return text, Finish.STOP if matcher.matched and finish is not Finish.FAULT else finish


def _advance(resident: Resident, tokens: tuple[int, ...], finish: Finish) -> tuple[Finish, str | None]:
    """Takes acknowledged tokens into the grammar: whether the request ends, and why if it cannot go on."""
    grammar = resident.grammar
    assert grammar is not None
    for token in tokens:
        if not grammar.accept(token):
            return Finish.FAULT, f"token {token} is not allowed by the grammar, which is a bug in specdec"
    if finish is not Finish.NONE:
        return finish, None
    if grammar.over:
        return Finish.STOP, None
    return (Finish.NONE, None) if grammar.dead_end is None else (Finish.FAULT, grammar.dead_end)
