"""The scheduler: which round runs next, for any device. Plain Python, deterministic.

A step does at most one of each: prompt chunks of requests being admitted, one submission, one collection. What a round may do is
frozen before it (lanes, ceilings, copies, masks, width, pages); what it did is read from its records after it, in the order of
submission.

Fairness: prompts are consumed in the order of admission, ``chunks_per_step`` chunks between two rounds, so a running request
waits for that many chunks at most, and the first token of a new one comes after the chunks of those before it and its own, each
with at most one round in between. First tokens go before a round, but not twice while somebody who runs is left out: then that
round comes first. When pages run out, the request admitted last steps back, so the oldest always gets on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from attrs import frozen

from specdec.drafting.history import Copy, HistoryRing
from specdec.errors import CapacityError, UsageError
from specdec.round.completion import Completion, Field, Finish
from specdec.scheduling.admission import Admission
from specdec.scheduling.device import FRAMES, Device, LanePlan, RoundPlan, RoundResult
from specdec.scheduling.emissions import emitted_logprobs, fault_text
from specdec.scheduling.policy import Outcome, Prospect, WidthPolicy
from specdec.scheduling.resident import Resident
from specdec.serving.metrics import LaneRecord, Metrics
from specdec.serving.request import Emission, Event, Request
from specdec.serving.stops import StopMatcher

if TYPE_CHECKING:
    from specdec.control.trace import TraceWriter

# plain integers: looking a member of an enumeration up costs more than what is done with it
_REQUEST, _EPOCH, _ROUND = int(Field.REQUEST), int(Field.EPOCH), int(Field.ROUND)
_NONE = Finish.NONE
# an emission's fields in order, without the cost of keywords
_new = tuple.__new__


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
            device, reserved_output=reserved_output, isolate=isolate, history=history, metrics=metrics
        )
        self.flights: deque[_Flight] = deque()
        self._ready: deque[Emission] = deque()
        # these waited for first tokens of others, or for what is in flight, and go before further first tokens: newcomers that
        # end with one token make room for more
        self._owed: list[Resident] = []
        # requests, and how many copies their grammars refused, of the round that is being planned
        self._refused: list[tuple[int, int]] = []
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
        # what was collected before its request was cancelled comes before the word that it was
        yield from _drain(self._ready)
        yield from _drain(self.admission.farewells)
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
            self._refused.clear()
            residents = list(self.admission.residents.values())
            newcomers = [one for one in residents if one.entered and not one.started and not one.flights]
            if newcomers and not any(one in residents for one in self._owed):
                lanes = [self._lane(one, 0)[0] for one in newcomers]
                return self._launch(self._plan(newcomers, lanes, 1, first=True), newcomers)
            running = self._may_run(residents)
            if not running:
                self._owed = _passed_over(residents)
                return False
            drafts, copying = self.policy.drafts, self.history is not None
            lanes, prospects, drafting = [], list[Prospect](), False
            for one in running:
                # most rounds of most requests: the same plan as before
                lane, copy = one.plan, None
                if lane is None or copying or lane.ceiling != drafts or not one.plain:
                    lane, copy = self._lane(one, drafts)
                lanes.append(lane)
                prospects.append((one, lane.ceiling, copy))
                drafting = drafting or lane.ceiling > 0
            width, decision = 1, None
            if drafting:
                batch = self.device.batch_for(len(running))
                decision = self.policy.choose(batch, self.device.widths(batch), prospects)
                width = decision.width
            try:
                self.admission.reserve(running, width)
            except CapacityError as error:
                # pages are short: what is in flight is read first, then the last one admitted steps back
                if self.flights:
                    self._owed = _passed_over(residents)
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

    def _lane(self, resident: Resident, drafts: int) -> tuple[LanePlan, Copy | None]:
        """What a lane may do in its next round, of at most ``drafts`` drafts, and the copy that begins them."""
        request, copy = resident.request, None
        if request.draft_tokens is not None and request.draft_tokens < drafts:
            drafts = request.draft_tokens
        if request.stop:
            drafts = 0  # a token behind a stop string must not be consumed
        if drafts and self.history is not None:
            found = self.history.lookup(resident.run.tokens[-8:])
            if found is not None:
                copy = Copy(found.tokens[:drafts], found.match_length)
        if resident.grammar is not None:
            # learned drafts have no masks: only the device knows them
            masks = tuple(resident.grammar.rows(() if copy is None else copy.tokens))
            drafts = len(masks) - 1
            if copy is not None and drafts < len(copy.tokens):
                self._refused.append((resident.number, len(copy.tokens) - drafts))
                copy = Copy(copy.tokens[:drafts], copy.match_length) if drafts else None
            return _lane_plan(resident, drafts, copy, masks), copy
        if copy is not None:
            return _lane_plan(resident, drafts, copy, None), copy
        if resident.plan is None or resident.plan.ceiling != drafts:
            resident.plan = _lane_plan(resident, drafts, None, None)
        return resident.plan, None

    def _plan(
        self, residents: Sequence[Resident], lanes: Sequence[LanePlan], width: int, *, first: bool = False
    ) -> RoundPlan:
        page = self.device.page_tokens
        crossing = self.device.publishes and any(
            (one.consumed + one.ahead + width) // page > one.consumed // page for one in residents
        )
        return RoundPlan(
            number=self.admission.next_round,
            batch=self.device.batch_for(len(lanes)),
            width=width,
            lanes=tuple(lanes),
            boundary=crossing and not first,
            extended=any(one.extended for one in residents),
            first=first,
        )

    def _launch(self, plan: RoundPlan, lanes: Sequence[Resident], decision: Any = None) -> bool:
        """Submits. Whatever interrupts it leaves its lanes unsettled: the device may be a round ahead of the host."""
        for one in lanes:
            one.flights.append(plan)
        try:
            handle = self.device.submit(plan)
        except BaseException as error:
            for one in lanes:
                one.flights.pop()
                one.lost = True
            self.admission.take_back(plan.number, self.flights[-1].plan.number if self.flights else None)
            if not self.admission.isolate or not isinstance(error, Exception):
                raise
            self.admission.fail(lanes, error)
            return True
        if plan.first:
            self._owed = _passed_over(self.admission.residents.values())
        elif self._owed:
            self._owed = [one for one in self._owed if one not in lanes]
        if self.metrics is not None:
            for number, copies in self._refused:
                self.metrics.grammar_rejected(number, copies)
        self.flights.append(_Flight(plan=plan, lanes=tuple(lanes), handle=handle, decision=decision))
        self.admission.next_round += 1
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
            self.admission.fail(flight.lanes, error)
            return []
        events: list[Emission] = []
        outcomes: list[Outcome] = []
        ended: list[Emission] = []
        # looked up once: what follows is paid for every lane of every round
        number, parse, keep, note = plan.number, Completion.parse, events.append, outcomes.append
        usual = self.history is None and not self.device.publishes and result.forecasts is None
        for lane, (planned, resident, record) in enumerate(zip(plan.lanes, flight.lanes, result.records, strict=True)):
            if (
                record[_REQUEST] != resident.number
                or record[_EPOCH] != resident.epoch
                or record[_ROUND] != number
                or resident.retired
            ):
                continue  # a late record: of a cancelled request, an earlier owner of the slot or an earlier round
            done = parse(record)
            tokens, finish = done.tokens, done.finish
            resident.started, resident.lost = True, False
            resident.run.tokens.extend(tokens)
            resident.generated += done.emitted
            resident.consumed = done.consumed
            note((planned, resident, done))
            if usual and finish is _NONE and resident.plain:
                keep(_new(Emission, (resident.number, tokens, _NONE, done, None, None, None, None)))
                continue
            event = self._apply(resident, done, flight, lane, result)
            keep(event)
            if event.finish is not _NONE:
                ended.append(event)
        self._report(flight, result.seconds, outcomes)
        for event in ended:
            self.admission.ended(event.request, event.finish)
        self.admission.release_read(plan.number)
        return events

    def _apply(self, resident: Resident, done: Completion, flight: _Flight, lane: int, result: RoundResult) -> Emission:
        """What a request's caller gets of a record that its resident has taken in, and what follows if it is the last."""
        tokens, finish = done.tokens, done.finish
        if finish is Finish.LENGTH and resident.context_bound:
            finish = Finish.CONTEXT
        text = error = logprobs = forecasts = None
        if self.history is not None:
            self.history.append(resident.number, tokens)
        if resident.grammar is not None:
            finish, error = _advance(resident, tokens, finish)
        if resident.matcher is not None:
            text, finish = _match(resident.matcher, tokens, finish)
        if self.device.publishes and finish is not Finish.FAULT:
            self._publish(resident, done, finish, flight, lane)
        if finish is Finish.FAULT and error is None:
            error = fault_text(done.faults)
        if finish is not Finish.NONE:
            self.admission.retire(resident)
        if resident.request.logprobs is not None:
            logprobs = emitted_logprobs(tokens, result.logprobs[lane], resident.request.logprobs)
        if result.forecasts is not None:
            forecasts = tuple(result.forecasts[lane][: done.verify_width - 1])
        return Emission(resident.number, tokens, finish, done, logprobs, forecasts, text, error)

    def _publish(self, resident: Resident, completion: Completion, finish: Finish, flight: _Flight, lane: int) -> None:
        """Makes checkpoints at the page boundary that an acknowledged round crossed and, if it was the last, at its end."""
        if resident.consumed != len(resident.run.tokens) - 1:
            return  # records were lost: the host does not know which tokens the state stands for
        before, after = completion.consumed - completion.emitted, completion.consumed
        crossed = after // self.device.page_tokens * self.device.page_tokens
        if flight.plan.boundary and crossed > before:
            self.admission.publish(resident, crossed, boundary=flight.handle, lane=lane)
        # a lane that ended on the device does nothing in rounds queued behind
        if finish is not Finish.NONE and (resident.settled or completion.finish is not Finish.NONE):
            self.admission.publish(resident, after)

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


def _passed_over(residents: Iterable[Resident]) -> list[Resident]:
    """Those who run and have no round in flight."""
    return [one for one in residents if one.started and not one.flights]


def _lane_plan(resident: Resident, drafts: int, copy: Copy | None, masks: tuple[bytes, ...] | None) -> LanePlan:
    if copy is None:
        return LanePlan(slot=resident.slot, ceiling=drafts, masks=masks)
    return LanePlan(slot=resident.slot, ceiling=drafts, copies=copy.tokens, match_length=copy.match_length, masks=masks)


def _match(matcher: StopMatcher, tokens: tuple[int, ...], finish: Finish) -> tuple[str, Finish]:
    """Text that acknowledged tokens release, and whether the request ends."""
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
