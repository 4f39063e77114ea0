"""A simulated device: slots, pages, an ordered stream and two frames, with declared costs and acceptance, on its own clock.

What a round does is decided when it is submitted, as on a real device where work is ordered; when it is done is kept beside it.
The clock moves where the host waits or works, and with ``advance``. Misuse that would corrupt a real device raises
``DeviceMisuse``, so that a scheduler is checked by every simulation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from attrs import define, field, frozen

from specdec.catalog import batch_capacities, checked_widths, require_integer
from specdec.errors import CapacityError, UsageError
from specdec.round.completion import Finish
from specdec.scheduling.device import FRAMES, LanePlan, RoundPlan, RoundResult
from specdec.scheduling.resident import Resident
from specdec.serving.grammar import GrammarState
from specdec.serving.request import Request, TokenLogprobs
from specdec.serving.stops import StopMatcher
from specdec.simulation.acceptance import STOP, Category, Luck
from specdec.simulation.costs import CostModel
from specdec.state.prefix_records import PrefixStatistics

__all__ = ["DeviceMisuse", "Nature", "SimulatedDevice"]


class DeviceMisuse(AssertionError):
    """The scheduler asked for what a real device must never be asked for."""


@frozen(kw_only=True, eq=False)
class Nature:
    """What a request is like. length: output tokens until it ends by itself; beyond its budget it never does."""

    category: Category
    luck: Luck
    length: int

    def token(self, position: int) -> int:
        """The output token at a position: whatever is drafted, the target emits this one."""
        return STOP if position == self.length - 1 else self.luck.token(position)

    def output(self, budget: int) -> tuple[int, ...]:
        """All that a request with this budget emits."""
        return tuple(self.token(position) for position in range(min(self.length, budget)))


@define(kw_only=True, eq=False)
class _Slot:
    """Row of a request. inputs: consumed prompt tokens so far; live: rounds may change it; dead rows report themselves."""

    number: int
    epoch: int
    budget: int
    pages: int
    inputs: int = 0
    nature: Nature | None = None
    consumed: int = 0
    generated: int = 0
    pending: int = -1
    finish: Finish = Finish.NONE
    live: bool = False


@define(kw_only=True, eq=False)
class _Frame:
    plan: RoundPlan
    records: list[list[int]]
    seconds: float
    done: float


@define(kw_only=True)
class RoundCounts:
    """Rounds of one shape and their device seconds; the live lanes in them, and what those emitted, were offered and accepted."""

    rounds: int = 0
    seconds: float = 0.0
    lanes: int = 0
    tokens: int = 0
    offered: int = 0
    accepted: int = 0

    def add(self, other: RoundCounts) -> None:
        """Adds another's counts."""
        for name in ("rounds", "seconds", "lanes", "tokens", "offered", "accepted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@define(kw_only=True)
class Work:
    """What a device did. rounds: by (batch capacity, width), first tokens not among them. busy: seconds of all work."""

    rounds: dict[tuple[int, int], RoundCounts] = field(factory=dict)
    busy: float = 0.0


class SimulatedDevice:
    """Implements ``specdec.scheduling.device.Device``. Deterministic; keeps no prefix checkpoints."""

    publishes = False

    def __init__(
        self,
        costs: CostModel,
        nature: Callable[[Request], Nature],
        *,
        concurrency: int = 4,
        widths: Sequence[int] = (1, 2, 3, 4, 5, 6),
        token_capacity: int = 128,
        context: int = 8192,
        page_tokens: int = 64,
        pages: int | None = None,
        prefill_tokens: int = 512,
        plain: bool = False,
    ) -> None:
        """nature: what a request is like, by the request alone. widths, token_capacity: the prepared shapes, as of a chain
        catalog. pages: all there are; None has enough for every slot. plain: no drafter is loaded, so the only width is 1.

        Raises UsageError for a number out of range.
        """
        widths = checked_widths(tuple(widths))
        for name, value in (("context", context), ("page_tokens", page_tokens), ("prefill_tokens", prefill_tokens)):
            require_integer(name, value, 1, None, "nothing could be served")
        require_integer("token_capacity", token_capacity, widths[-1], None, "one lane of the widest round must fit")
        self.costs = costs
        self.concurrency = concurrency
        self.context = context
        self.page_tokens = page_tokens
        self.prefill_tokens = prefill_tokens
        self.plain = plain
        self.horizon = 1 if plain else widths[-1]
        self.work = Work()
        self._nature = nature
        self._batches = batch_capacities(concurrency)
        self._widths = {
            batch: (1,) if plain else tuple(w for w in widths if w == 1 or batch * w <= token_capacity)
            for batch in self._batches
        }
        self.pages = concurrency * self._needed(context + self.horizon) if pages is None else pages
        require_integer("pages", self.pages, 1, None, "nothing could be served")
        self.free_pages = self.pages
        self._slots: dict[int, _Slot] = {}
        self._frames: deque[_Frame] = deque()
        self._columns = widths[-1]
        self._epoch = 0
        self._now = 0.0
        self._ready = 0.0

    # --- time --------------------------------------------------------------------------------------------------------

    def clock(self) -> float:
        """Simulated seconds."""
        return self._now

    def advance(self, moment: float) -> None:
        """Lets time pass until ``moment``; does nothing if that is over."""
        self._now = max(self._now, moment)

    def _work(self, seconds: float) -> float:
        """Appends work to the stream and returns when it will be done."""
        self._ready = max(self._ready, self._now) + seconds
        self.work.busy += seconds
        return self._ready

    # --- what a request may ask ----------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """See ``Device.check``; what needs text or logits is refused, for nothing here has any."""
        if len(request.prompt) + len(request.output) >= self.context:
            used = len(request.prompt) + len(request.output)
            raise UsageError(
                f"prompt and output have {used} tokens, which fill the context of {self.context}; raise it"
            )
        options = ("stop", "grammar", "logprobs", "prompt_logprobs")
        wanted = [name for name in options if getattr(request, name) not in ((), None)]
        if wanted:
            raise UsageError(f"{wanted[0]} needs a model; a simulated device has neither text nor logits")
        needed = self._needed(min(len(request.prompt) + request.max_new_tokens, self.context) + self.horizon)
        if needed > self.pages:
            raise CapacityError(
                f"the request needs {needed} pages of {self.page_tokens} tokens; there are {self.pages} in all"
            )

    def next_epoch(self) -> int:
        """See ``Device.next_epoch``."""
        self._epoch += 1
        return self._epoch

    def matcher(self, request: Request) -> StopMatcher | None:
        """None: stop strings are refused."""
        return None

    def grammar(self, request: Request) -> GrammarState | None:
        """None: grammars are refused."""
        return None

    def prefix_statistics(self) -> PrefixStatistics | None:
        """None: there are no checkpoints."""
        return None

    def batch_for(self, lanes: int) -> int:
        """See ``Device.batch_for``."""
        return next(batch for batch in self._batches if batch >= lanes)

    def widths(self, batch: int) -> tuple[int, ...]:
        """See ``Device.widths``."""
        return self._widths[batch]

    # --- pages ---------------------------------------------------------------------------------------------------------

    def _needed(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def _take(self, pages: int) -> None:
        if pages > self.free_pages:
            raise CapacityError(
                f"{pages} pages are needed and {self.free_pages} of {self.pages} are free; lower the "
                "concurrency or raise the pages"
            )
        self.free_pages -= pages

    def admit(self, resident: Resident, reach: int) -> int:
        """See ``Device.admit``; no prefix is ever known."""
        if resident.slot in self._slots or not 0 <= resident.slot < self.concurrency:
            raise DeviceMisuse(f"slot {resident.slot} is taken or none")
        pages = self._needed(reach)
        self._take(pages)
        self._slots[resident.slot] = _Slot(
            number=resident.number, epoch=resident.epoch, budget=resident.budget, pages=pages
        )
        return 0

    def reserve(self, slot: int, reach: int) -> None:
        """See ``Device.reserve``."""
        row = self._slot(slot)
        more = self._needed(reach) - row.pages
        if more > 0:
            self._take(more)
            row.pages += more

    def retire(self, slot: int) -> None:
        """See ``Device.retire``."""
        self._slot(slot).live = False

    def release(self, slot: int) -> None:
        """See ``Device.release``."""
        if any(lane.slot == slot for frame in self._frames for lane in frame.plan.lanes):
            raise DeviceMisuse(f"slot {slot} is released while a submitted round names it")
        self.free_pages += self._slots.pop(slot).pages

    def publish(self, resident: Resident, length: int, *, boundary: Any = None, lane: int = 0) -> None:
        """Raises: there are no checkpoints."""
        raise DeviceMisuse("a device that keeps no prefix checkpoints was asked for one")

    def _slot(self, slot: int) -> _Slot:
        if slot not in self._slots:
            raise DeviceMisuse(f"slot {slot} holds no request")
        return self._slots[slot]

    # --- work ----------------------------------------------------------------------------------------------------------

    def prefill(self, resident: Resident, end: int) -> tuple[TokenLogprobs, ...] | None:
        """See ``Device.prefill``; the host does not wait for it."""
        row = self._slot(resident.slot)
        tokens = end - row.inputs
        if resident.consumed != row.inputs or not 0 < tokens <= self.prefill_tokens:
            raise DeviceMisuse(f"a chunk from {resident.consumed} to {end}; {row.inputs} inputs are consumed")
        if end > row.pages * self.page_tokens:
            raise DeviceMisuse(f"{end} inputs do not fit {row.pages} pages")
        self._work(self.costs.prefill(tokens))
        row.inputs = end
        return None

    def enter(self, resident: Resident) -> None:
        """See ``Device.enter``."""
        row, request = self._slot(resident.slot), resident.request
        if row.inputs != len(request.inputs):
            raise DeviceMisuse(f"request {row.number} enters with {row.inputs} of {len(request.inputs)} inputs")
        row.nature = self._nature(request)
        row.consumed, row.generated = row.inputs, len(request.output)
        row.pending = request.output[-1] if request.output else -1
        row.live = True

    def submit(self, plan: RoundPlan) -> None:
        """See ``Device.submit``."""
        self._check_plan(plan)
        # the host decides first; meanwhile the device goes on with what it has
        self._now += self.costs.host
        seconds = self.costs.first if plan.first else self.costs.round(plan.batch, plan.width, plain=self.plain)
        counts = RoundCounts(rounds=1, seconds=seconds)
        records = [self._run(plan, lane, counts) for lane in plan.lanes]
        if not plan.first:
            self.work.rounds.setdefault((plan.batch, plan.width), RoundCounts()).add(counts)
        done = self._work(seconds)
        self._frames.append(_Frame(plan=plan, records=records, seconds=seconds, done=done))

    def collect(self, plan: RoundPlan, logprobs: bool) -> RoundResult:
        """See ``Device.collect``."""
        if not self._frames or self._frames[0].plan is not plan:
            raise DeviceMisuse(f"round {plan.number} is not the oldest submitted one")
        frame = self._frames.popleft()
        self.advance(frame.done)
        return RoundResult(records=frame.records, seconds=frame.seconds)

    def _check_plan(self, plan: RoundPlan) -> None:
        if len(self._frames) >= FRAMES:
            raise DeviceMisuse(f"round {plan.number} would overwrite a frame that was not read")
        if plan.batch not in self._widths or len(plan.lanes) > plan.batch or not plan.lanes:
            raise DeviceMisuse(f"{len(plan.lanes)} lanes in a batch of {plan.batch}; prepared: {self._batches}")
        if plan.width not in self._widths[plan.batch]:
            raise DeviceMisuse(f"width {plan.width} is not prepared at batch {plan.batch}")
        if len(set(plan.slots)) != len(plan.lanes):
            raise DeviceMisuse(f"a slot is in two lanes: {plan.slots}")
        for slot in plan.slots:
            row = self._slot(slot)
            if row.live and row.consumed + plan.width > row.pages * self.page_tokens:
                raise DeviceMisuse(
                    f"slot {slot} at {row.consumed} has {row.pages} pages, too few for width {plan.width}"
                )

    def _run(self, plan: RoundPlan, lane: LanePlan, counts: RoundCounts) -> list[int]:
        """One lane: drafts judged in order, clipped at the end of the output and at the budget; its record."""
        row = self._slot(lane.slot)
        emitted: list[int] = []
        offered = accepted = copied = 0
        if row.live and row.finish is Finish.NONE:
            nature = row.nature
            if nature is None or (row.generated == 0) is not plan.first:
                raise DeviceMisuse(f"slot {lane.slot} with {row.generated} tokens in round {plan.number}")
            if not plan.first:
                offered = max(0, min(lane.ceiling, row.budget - row.generated - 1, plan.width - 1))
            copied = min(len(lane.copies), offered)
            while accepted < offered and self._accepts(nature, lane, row.generated, accepted):
                accepted += 1
            end = min(row.budget, nature.length)
            emitted = [nature.token(at) for at in range(row.generated, min(row.generated + accepted + 1, end))]
            row.generated += len(emitted)
            row.consumed += 0 if plan.first else len(emitted)
            row.pending = emitted[-1]
            if row.pending == STOP:
                row.finish = Finish.STOP
            elif row.generated == row.budget:
                row.finish = Finish.LENGTH
            counts.lanes += 1
            counts.tokens += len(emitted)
            counts.offered += offered
            counts.accepted += accepted
        # in the order of completion.Field
        metadata = [
            row.number,
            row.epoch,
            plan.number,
            lane.slot,
            int(row.finish),
            row.consumed,
            row.generated,
            row.pending,
            len(emitted),
            offered,
            offered,
            accepted,
            (1 << copied) - 1,
            max(row.consumed - 1, 0),
            plan.width,
            0,
        ]
        return metadata + emitted + [-1] * (self._columns - len(emitted))

    @staticmethod
    def _accepts(nature: Nature, lane: LanePlan, generated: int, depth: int) -> bool:
        """A copied draft is accepted if it is what the target emits there, a learned one by the curve."""
        position = generated + depth
        if depth < len(lane.copies):
            return lane.copies[depth] == nature.token(position)
        return nature.category.accepts(nature.luck, position, depth)
