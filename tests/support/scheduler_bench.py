"""The real scheduler over a simulated device that serves requests the host decides about and fails where it is told to.

Everything that comes out is compared with what the request's nature says; slots, pages, order and frames are checked after every
step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attrs import define, evolve, field, frozen

from specdec.errors import UsageError
from specdec.round.completion import Finish
from specdec.sampling.params import SamplingParams
from specdec.scheduling.device import RoundPlan, RoundResult
from specdec.scheduling.resident import Resident
from specdec.scheduling.scheduler import Scheduler
from specdec.serving.grammar import Grammar
from specdec.serving.metrics import Metrics
from specdec.serving.request import Emission, Progress, Request, TokenLogprobs
from specdec.serving.stops import StopMatcher
from specdec.simulation.acceptance import STOP, Category, Copies, Luck
from specdec.simulation.costs import CostModel
from specdec.simulation.device import DeviceMisuse, Nature, SimulatedDevice
from specdec.simulation.history import SimulatedHistory
from specdec.simulation.policies import named_policy

WIDTHS = (1, 2, 3, 5)
COSTS = CostModel(base=1.0, draft=0.1, first=0.1, chunk=0.2, prompt_token=0.001, host=0.01)
#: Copies that are often wrong somewhere.
CATEGORY = Category(conditional=(0.8, 0.6), copies=Copies(rate=0.5, long_share=0.5, long=(0.9,), short=(0.6,), most=4))
#: Steps that a request which runs waits for its next round at most: for first tokens of others, then until those are read, for
#: a round of others that it may not join, then until that is read, because pages are short.
MOST_STEPS_WAITED = 5
NEVER = -1
#: An error of the device, and what a request that it ended is told.
GONE = RuntimeError("the device is gone")
#: A grammar that no output satisfies, which turns out when the request's prompt is consumed.
IMPOSSIBLE = Grammar(kind="json")
GONE_LINE = "RuntimeError: the device is gone"


class Letters:
    """A text stream of one letter for each token."""

    def push(self, tokens: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token % 7) for token in tokens)

    def finish(self) -> str:
        return ""


class ScriptedGrammar:
    """Allows what the target emits; complete after so many tokens, or at a dead end."""

    def __init__(self, nature: Nature, script: Grammar) -> None:
        complete, dead = script.text.split(",")
        self._nature = nature
        self._complete, self._dead = int(complete) or NEVER, int(dead) or NEVER
        self.taken = 0

    def accept(self, token: int) -> bool:
        if self.over or self.dead_end or token != self._nature.token(self.taken):
            return False
        self.taken += 1
        return True

    def rows(self, copies: Sequence[int] = ()) -> list[bytes]:
        found = [b"\xff"]
        for place, token in enumerate(copies):
            after = self.taken + place + 1
            if after in (self._complete, self._dead) or token != self._nature.token(after - 1):
                break
            found.append(b"\xff")
        return found

    @property
    def over(self) -> bool:
        return self.taken == self._complete

    @property
    def dead_end(self) -> str | None:
        return "nothing may follow" if self.taken == self._dead else None


@frozen
class Fault:
    """An error of one operation. done: the device had done the work before it failed."""

    operation: str
    error: BaseException
    done: bool = False


class HostileDevice(SimulatedDevice):
    """Fails once in each armed operation; keeps what it was asked for, in order."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.faults: dict[str, Fault] = {}
        #: Called inside the next submission, before its work, as a handler of a signal is.
        self.inside: Callable[[], Any] | None = None
        self.log: list[tuple[str, Any]] = []
        #: Requests whose records were lost, so that nobody knows their output.
        self.damaged: set[int] = set()
        #: Slots of which each round must be read before the next, and whether all of them are.
        self.decided: set[int] = set()
        self.all_decided = False

    def check(self, request: Request) -> None:
        super().check(evolve(request, stop=(), grammar=None))

    def matcher(self, request: Request) -> StopMatcher | None:
        if not request.stop:
            return None
        matcher = StopMatcher(Letters(), request.stop)  # type: ignore[arg-type]
        matcher.push(request.output)
        return matcher

    def grammar(self, request: Request) -> Any:
        if request.grammar is None:
            return None
        if request.grammar == IMPOSSIBLE:
            raise UsageError("no output can satisfy it")
        state = ScriptedGrammar(self._nature(request), request.grammar)
        assert all(map(state.accept, request.output)), "a request is resumed with tokens its grammar does not allow"
        return state

    def admit(self, resident: Resident, reach: int) -> int:
        consumed = super().admit(resident, reach)
        self.log.append(("admit", resident.number))
        (self.decided.add if resident.request.stop or resident.request.grammar else self.decided.discard)(resident.slot)
        return consumed

    def prefill(self, resident: Resident, end: int) -> tuple[TokenLogprobs, ...] | None:
        self.log.append(("chunk", resident.number))
        fault = self.faults.pop("prefill", None)
        if fault is None or fault.done:
            super().prefill(resident, end)
        if fault is not None:
            raise fault.error
        return None

    def submit(self, plan: RoundPlan) -> None:
        in_flight = {lane.slot for frame in self._frames for lane in frame.plan.lanes}
        if in_flight.intersection(plan.slots if self.all_decided else self.decided.intersection(plan.slots)):
            raise DeviceMisuse("a round of a request whose last one the host must read first")
        inside, self.inside = self.inside, None
        if inside is not None:
            inside()
        fault = self.faults.pop("submit", None)
        if fault is None or fault.done:
            super().submit(plan)
        if fault is not None:
            if fault.done:
                self._lose(self._frames.pop().plan)
            raise fault.error
        self.log.append(("first" if plan.first else "round", [self._slots[lane.slot].number for lane in plan.lanes]))

    def collect(self, plan: RoundPlan, logprobs: bool) -> RoundResult:
        result = super().collect(plan, logprobs)
        fault = self.faults.pop("collect", None)
        if fault is not None:
            self._lose(plan)
            raise fault.error
        return result

    def _lose(self, plan: RoundPlan) -> None:
        self.damaged.update(self._slots[lane.slot].number for lane in plan.lanes)


@define(kw_only=True, eq=False)
class Seen:
    """What came out for one request."""

    request: Request
    tokens: list[int] = field(factory=list)
    text: str = ""
    finish: Finish = Finish.NONE
    error: str | None = None
    cancelled: bool = False
    #: Emissions that were collected before it was cancelled and not told yet.
    collected: int = 0


class SchedulerBench:
    """One scheduler, its device, and everything that was asked of it."""

    def __init__(
        self,
        *,
        policy: str = "adaptive",
        queue_depth: int = 1,
        chunks_per_step: int | None = 1,
        reserved_output: int | None = None,
        isolate: bool = True,
        copying: bool = False,
        widths: Sequence[int] = WIDTHS,
        category: Category = CATEGORY,
        **device: Any,
    ) -> None:
        self.natures: dict[int, Nature] = {}
        self.category = category
        named = named_policy(policy, widths)
        self.device = HostileDevice(
            COSTS, lambda request: self.natures[request.sampling.seed], widths=widths, plain=named.plain, **device
        )
        self.device.all_decided = copying
        self.history = SimulatedHistory() if copying else None
        self.policy = named.make()
        self.metrics = Metrics(kept_requests=1 << 20)
        self.scheduler = Scheduler(
            self.device,
            self.policy,
            queue_depth=queue_depth,
            chunks_per_step=chunks_per_step,
            reserved_output=reserved_output,
            isolate=isolate,
            history=self.history,
            metrics=self.metrics,
        )
        self.seen: dict[int, Seen] = {}
        self.steps = 0
        # steps since a resident's last round, of those that could have run it
        self._waited: dict[int, int] = {}

    # --- what a caller does --------------------------------------------------------------------------------------------

    def submit(
        self,
        *,
        prompt: int = 5,
        output: int = 10,
        budget: int | None = None,
        stop: tuple[str, ...] = (),
        grammar: Grammar | None = None,
        draft_tokens: int | None = None,
    ) -> int:
        """A request of a nature of its own. output: tokens until it ends by itself; budget: None is all of them."""
        seed = len(self.natures)
        self.natures[seed] = Nature(category=self.category, luck=Luck(0, seed), length=output)
        request = Request(
            prompt=(1,) * prompt,
            sampling=SamplingParams(seed=seed),
            max_new_tokens=output if budget is None else budget,
            stop=stop,
            grammar=grammar,
            draft_tokens=draft_tokens,
        )
        number = self.scheduler.submit(request)
        assert number not in self.seen
        if self.history is not None:
            self.history.expect(number, self.natures[seed])
        self.seen[number] = Seen(request=request)
        return number

    def cancel(self, number: int) -> bool:
        """Cancels; what was running then is told in an emission."""
        one = self.seen.get(number)
        told = self.scheduler.cancel(number)
        if one is not None and told:
            assert not one.finish and not one.cancelled, "a request ended twice"
            one.cancelled = True
            one.collected = sum(event.request == number for event in self.scheduler._ready)
        self.check()
        return told

    def step(self, events: int | None = None, between: Callable[[], None] = lambda: None) -> BaseException | None:
        """One step, left after so many events; ``between`` is called after each. Returns what it raised."""
        begun, before = self._unentered(), len(self.device.log)
        self._trail = [
            *getattr(self, "_trail", [])[-8:],
            (
                len(self.scheduler.flights),
                [
                    (r.number, r.started, [f.number for f in r.flights], r.host_decides)
                    for r in self.scheduler.admission.residents.values()
                ],
            ),
        ]
        self.steps += 1
        iterator = self.scheduler.step()
        try:
            for count, event in enumerate(iterator, start=1):
                self._take(event)
                between()
                if count == events:
                    iterator.close()  # type: ignore[attr-defined]
                    self._waited.clear()
                    break
            else:
                self._check_step(self.device.log[before:], begun)
        except BaseException as error:
            if isinstance(error, AssertionError):
                raise
            self._waited.clear()
            # a caller that is told of an error gives up what it concerns
            for number in sorted(self.device.damaged):
                if not self.seen[number].finish:
                    self.cancel(number)
            self.check()
            return error
        self.check()
        return None

    def finish(self, most: int = 20_000) -> None:
        """Steps until nothing is left, then checks that nothing is held and every output is what it must be."""
        self.device.faults.clear()
        self.device.inside = None
        for _ in range(most):
            if not self.scheduler.busy:
                break
            assert self.step() is None
        assert not self.scheduler.busy, "requests do not come to their ends"
        device, queue = self.device, self.scheduler.admission
        assert sorted(queue.free_slots) == list(range(device.concurrency)) and device.free_pages == device.pages
        assert not device._slots and not device._frames and not queue._retiring and not self.scheduler.flights
        assert not getattr(self.policy, "_requests", ())
        assert self.history is None or (not self.history._simulated and not self.history._ends)
        for number, one in self.seen.items():
            self._check_output(number, one)
        self._check_metrics()

    # --- what must hold ------------------------------------------------------------------------------------------------

    def expected(self, request: Request) -> tuple[list[int], Finish]:
        """All that a request emits and why it ends, from its nature alone."""
        nature = self.natures[request.sampling.seed]
        room = self.device.context - len(request.prompt)
        budget = min(request.max_new_tokens, room)
        tokens = list(nature.output(budget))
        finish = Finish.CONTEXT if room < request.max_new_tokens else Finish.LENGTH
        if tokens[-1] == STOP:
            finish = Finish.STOP
        if request.grammar == IMPOSSIBLE:
            return [], Finish.FAULT
        if request.grammar is not None:
            complete, dead = (int(end) for end in request.grammar.text.split(","))
            for end, why in ((complete, Finish.STOP), (dead, Finish.FAULT)):
                if 0 < end < len(tokens):
                    tokens, finish = tokens[:end], why
        letters = Letters().push(tokens)
        for end in range(1, len(tokens) + 1):
            if any(stop in letters[:end] for stop in request.stop):
                return tokens[:end], finish if finish is Finish.FAULT and end == len(tokens) else Finish.STOP
        return tokens, finish

    def check(self) -> None:
        """Slots, pages, frames and order agree between scheduler and device."""
        device, queue, scheduler = self.device, self.scheduler.admission, self.scheduler
        residents, retiring = queue.residents, [slot for _, slot in queue._retiring]
        assert sorted([*queue.free_slots, *residents, *retiring]) == list(range(device.concurrency))
        assert device._slots.keys() == {*residents, *retiring}
        assert device.free_pages + sum(row.pages for row in device._slots.values()) == device.pages
        assert len(device._frames) == len(scheduler.flights) <= scheduler.queue_depth
        numbers = [one.number for one in (*residents.values(), *queue.waiting)]
        assert numbers == sorted(set(numbers)), "requests overtake each other"
        live = {number for number, one in self.seen.items() if not one.finish and not one.cancelled}
        for number in numbers:
            assert number in live
        for one in residents.values():
            request = one.request
            nature = self.natures[request.sampling.seed]
            known = [nature.token(place) for place in range(len(one.run.tokens) - len(request.prompt))]
            if one.number not in device.damaged:
                assert list(one.run.tokens) == [*request.prompt, *known]
            assert one.flights == [flight.plan for flight in scheduler.flights if one in flight.lanes]

    def _unentered(self) -> Resident | None:
        """Whose prompt is being consumed."""
        for one in self.scheduler.admission.residents.values():
            if one.consumed < len(one.request.inputs) and not one.entered:
                return one
        return None

    def _check_step(self, log: Sequence[tuple[str, Any]], begun: Resident | None) -> None:
        """A whole step: chunks in order and no more than allowed, one submission, nobody who may run is passed over."""
        chunks = [number for what, number in log if what == "chunk"]
        rounds = [numbers for what, numbers in log if what in ("first", "round")]
        most = self.scheduler.chunks_per_step
        assert most is None or len(chunks) <= most
        assert chunks == sorted(chunks) and len(rounds) <= 1
        if begun is not None and not self.seen[begun.number].cancelled and not self.device.faults:
            assert chunks and (begun.number == chunks[0] or self.seen[begun.number].finish)
        running = {one.number for one in self.scheduler.admission.residents.values() if one.started}
        for number in [number for number in self._waited if number not in running]:
            del self._waited[number]
        for one in self.scheduler.admission.residents.values():
            if one.started:
                got_on = one.flights or any(one.number in numbers for numbers in rounds)
                self._waited[one.number] = 0 if got_on else self._waited.get(one.number, 0) + 1
                assert self._waited[one.number] <= MOST_STEPS_WAITED, (
                    f"request {one.number} may run and is passed over"
                    + str(
                        [
                            (r.number, r.started, [f.number for f in r.flights], r.host_decides)
                            for r in self.scheduler.admission.residents.values()
                        ]
                    )
                )

    def _take(self, event: Emission | Progress) -> None:
        one = self.seen[event.request]
        assert not one.finish, "an event behind the last one"
        if isinstance(event, Progress):
            assert event.consumed <= event.total == len(one.request.prompt) + max(len(one.tokens) - 1, 0)
            return
        if one.cancelled:
            assert event.finish is (Finish.NONE if one.collected else Finish.CANCELLED)
            one.collected -= 1
        assert (event.text is None) == (not one.request.stop)
        record = event.completion
        assert record.request == event.request and record.tokens == event.tokens
        if event.tokens:
            assert record.offered >= record.verified >= record.accepted >= record.emitted - 1
            assert record.consumed == len(one.request.prompt) + record.generated - 1
        one.tokens.extend(event.tokens)
        one.text += event.text or ""
        one.finish, one.error = event.finish, event.error
        assert (event.error is not None) == (event.finish is Finish.FAULT)

    def _check_output(self, number: int, one: Seen) -> None:
        tokens, finish = self.expected(one.request)
        assert one.finish is not Finish.NONE
        if one.cancelled:
            assert one.finish is Finish.CANCELLED
        if one.finish is Finish.CANCELLED or (one.error or "").startswith(GONE_LINE):
            if number not in self.device.damaged:
                assert one.tokens == tokens[: len(one.tokens)], number
        else:
            assert (one.tokens, one.finish) == (tokens, finish), number
        if one.request.stop and one.finish is not Finish.FAULT:
            text = Letters().push(one.tokens)
            starts = [text.find(stop) for stop in one.request.stop if stop in text]
            assert one.text == (text[: min(starts)] if starts else text), number

    def _check_metrics(self) -> None:
        figures = self.metrics.snapshot()
        delivered = {number: len(one.tokens) for number, one in self.seen.items()}
        assert {one["request"]: one["output"]["tokens"] for one in figures["by_request"]} == delivered
        assert figures["output"]["tokens"] == sum(delivered.values())
        assert figures["output"]["inconsistent_records"] == 0
        finished = figures["requests"]["finished"]
        for reason in Finish:
            if reason is not Finish.NONE:
                assert finished[reason.name.lower()] == sum(one.finish is reason for one in self.seen.values())
        assert figures["requests"]["preemptions"] == self.scheduler.admission.preemptions
        assert figures["requests"]["submitted"] == len(self.seen)


def grammar(complete: int = 0, dead: int = 0) -> Grammar:
    """A grammar of ``ScriptedGrammar``; 0 for never."""
    return Grammar(kind="regex", text=f"{complete},{dead}")


def submissions(bench: SchedulerBench) -> list[tuple[str, list[int]]]:
    """First tokens and rounds in order, with the requests in them."""
    return [entry for entry in bench.device.log if entry[0] in ("first", "round")]
