"""Who has a slot: the queue, prompts, pages and ends.

Requests are admitted in the order they came and their prompts consumed in that order. A request that gives its place up, because
pages ran out or its prompt was interrupted, waits at the head of the queue with the output it has.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from attrs import evolve

from specdec.drafting.history import HistoryRing
from specdec.errors import CapacityError
from specdec.failures import reported
from specdec.round.completion import Finish
from specdec.scheduling.device import Device
from specdec.scheduling.emissions import farewell, last_text
from specdec.scheduling.resident import Resident, TokenRun, Waiting
from specdec.serving.metrics import Metrics
from specdec.serving.request import Emission, Progress, Request
from specdec.state.prefix_records import Lost

_log = logging.getLogger(__name__)
#: What was lost for want of room, and what would have kept it; that a prefix had no checkpoint yet is nobody's mistake.
_CURES = {
    Lost.EVICTED: "because their checkpoint was evicted; raise snapshot_bytes",
    Lost.BUDGET: "because one checkpoint is larger than the budget; raise snapshot_bytes",
    Lost.PAGES: "because no page was free for a copy; raise pages or lower the concurrency",
}


class Admission:
    """Waiting requests and residents of one device."""

    def __init__(
        self,
        device: Device,
        *,
        reserved_output: int | None,
        isolate: bool,
        history: HistoryRing | None,
        metrics: Metrics | None,
    ) -> None:
        """For the parameters see ``Scheduler``."""
        self.device = device
        self.reserved_output = reserved_output
        self.isolate = isolate
        self.history = history
        self.metrics = metrics
        self.waiting: deque[Waiting] = deque()
        #: By slot, in order of admission.
        self.residents: dict[int, Resident] = {}
        self.free_slots = list(range(device.concurrency - 1, -1, -1))
        #: Last emissions of requests that no round ended.
        self.farewells: deque[Emission] = deque()
        self.next_round = 0
        self.preemptions = 0
        # (last submitted round that names it, slot)
        self._retiring: list[tuple[int, int]] = []
        self._next_request = 0
        # somebody was preempted and nobody has ended since, so there is no room for anybody more
        self._crowded = False

    # --- queue -----------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> int:
        """See ``Scheduler.submit``."""
        self.device.check(request)
        number = self._next_request
        self._next_request += 1
        self.waiting.append(Waiting(number=number, request=request))
        if self.history is not None:
            self.history.response(number)
        if self.metrics is not None:
            self.metrics.submitted(number, self.device.clock())
        return number

    def cancel(self, number: int) -> bool:
        """See ``Scheduler.cancel``."""
        for place, entry in enumerate(self.waiting):
            if entry.number == number:
                del self.waiting[place]
                self._part(number, Finish.CANCELLED, None, "" if entry.request.stop else None)
                return True
        resident = next((one for one in self.residents.values() if one.number == number), None)
        if resident is None:
            return False
        if resident.entered and resident.settled:
            self.publish(resident, resident.consumed)
        self.retire(resident)
        self._part(number, Finish.CANCELLED, resident, last_text(resident))
        return True

    def fail(self, residents: Iterable[Resident], error: BaseException) -> None:
        """Ends requests for an error of their own work, those that have ended already excepted; the others go on."""
        line = reported(error)
        for resident in residents:
            if self._present(resident):
                self.retire(resident)
                self._part(resident.number, Finish.FAULT, resident, last_text(resident), line)

    def _part(
        self, number: int, finish: Finish, resident: Resident | None, text: str | None, error: str | None = None
    ) -> None:
        self.farewells.append(farewell(number, finish, self.next_round, resident, text=text, error=error))
        self.ended(number, finish)

    def ended(self, number: int, finish: Finish) -> None:
        """A request will emit nothing more."""
        if self.history is not None:
            self.history.end(number)
        if self.metrics is not None:
            self.metrics.finished(number, finish, self.device.clock())

    # --- prompts ---------------------------------------------------------------------------------------------------

    def consume_prompts(self, chunks: int | None) -> Iterator[Progress]:
        """Admits and consumes prompt chunks, at most ``chunks`` of them; None goes on until nobody else fits.

        A caller may stop iterating at any event: a prompt goes on where it was.
        """
        while chunks is None or chunks > 0:
            resident = next((one for one in self.residents.values() if not one.entered), None)
            if resident is None:
                resident = self._admit()
                if resident is None:
                    return
                if resident.consumed:
                    yield Progress(request=resident.number, consumed=resident.consumed, total=resident.total)
            if resident.consumed < resident.total and self._present(resident):
                event = self._chunk(resident)
                chunks = None if chunks is None else chunks - 1
                if event is not None:
                    yield event
            # the caller may have cancelled it between two events
            if resident.consumed == resident.total and self._present(resident):
                self._enter(resident)

    def _present(self, resident: Resident) -> bool:
        return self.residents.get(resident.slot) is resident

    def _admit(self) -> Resident | None:
        """A slot and pages for the first waiting request, with the state of what a checkpoint knows of its prompt.

        None if there is none or it must wait until running requests give pages back. Raises CapacityError if there is nobody
        to wait for.
        """
        if not self.waiting or not self.free_slots or (self._crowded and self.residents):
            return None
        entry = self.waiting[0]
        request = entry.request
        room = self.device.context - len(request.prompt)
        resident = Resident(
            number=entry.number,
            request=request,
            slot=self.free_slots[-1],
            epoch=self.device.next_epoch(),
            budget=min(request.max_new_tokens, room),
            context_bound=room < request.max_new_tokens,
            run=TokenRun(request.inputs),
            scores=entry.scores,
            acceptance=entry.acceptance,
        )
        lost = self._lost()
        try:
            resident.consumed = self.device.admit(resident, self._first_reach(request))
        except Exception as error:
            if isinstance(error, CapacityError) and (self.residents or self._retiring):
                return None
            if not self.isolate:
                raise
            self.waiting.popleft()
            self._part(entry.number, Finish.FAULT, None, "" if request.stop else None, reported(error))
            return None
        self.free_slots.pop()
        self.waiting.popleft()
        self.residents[resident.slot] = resident
        if self.metrics is not None:
            reused = resident.consumed if self.device.publishes and request.prompt_logprobs is None else None
            self.metrics.admitted(entry.number, self.device.clock(), reused, resident.total)
        for reason, total in self._lost().items():
            tokens = total - lost.get(reason, 0)
            if tokens and self.metrics is not None:
                self.metrics.prefix_lost(reason, tokens)
            if tokens and reason in _CURES:
                _log.warning(
                    "request %d: %d of %d prompt tokens were seen before and are consumed again, %s",
                    entry.number,
                    tokens,
                    resident.total,
                    _CURES[reason],
                )
        return resident

    def _lost(self) -> dict[Lost, int]:
        """Tokens that had to be consumed again so far, by reason."""
        statistics = self.device.prefix_statistics()
        return {} if statistics is None else dict(statistics.lost_tokens)

    def _chunk(self, resident: Resident) -> Progress | None:
        """Consumes one prompt chunk. Chunks end at page boundaries where checkpoints are kept, for state can be read only between
        chunks. None if an error ended the request."""
        total, page = resident.total, self.device.page_tokens
        end = min(resident.consumed + self.device.prefill_tokens, total)
        if self.device.publishes:
            end = min(end, (resident.consumed // page + 1) * page)
        try:
            logprobs = self.device.prefill(resident, end)
            resident.consumed = end
            if end == total or end % page == 0:
                self.publish(resident, end)
        except BaseException as error:
            if self.isolate and isinstance(error, Exception):
                self.fail([resident], error)
                return None
            # the slot may hold half a chunk, so the prompt starts again
            self._step_back(resident)
            raise
        return Progress(request=resident.number, consumed=end, total=total, logprobs=logprobs)

    def _enter(self, resident: Resident) -> None:
        """The prompt is consumed: rounds may run. A resumed request has its pending token already."""
        try:
            resident.grammar = self.device.grammar(resident.request)
            resident.matcher = self.device.matcher(resident.request)
            self.device.enter(resident)
        except Exception as error:
            if not self.isolate:
                self.retire(resident)
                self.ended(resident.number, Finish.FAULT)
                raise
            self.fail([resident], error)
            return
        resident.run.extend(resident.request.output[-1:])
        resident.started = bool(resident.request.output)
        resident.entered = True

    # --- pages -----------------------------------------------------------------------------------------------------

    def _first_reach(self, request: Request) -> int:
        """Tokens whose pages a request is admitted with."""
        output = request.max_new_tokens
        if self.reserved_output is not None:
            output = min(output, len(request.output) + self.reserved_output)
        return self._reach(request, len(request.prompt) + output)

    def _reach(self, request: Request, tokens: int) -> int:
        """Tokens whose pages hold ``tokens`` of a request, bounded by its end, and the window of the last round."""
        end = min(len(request.prompt) + request.max_new_tokens, self.device.context)
        return min(tokens, end) + self.device.horizon

    def reserve(self, residents: Sequence[Resident], width: int) -> None:
        """Pages for everything that one more round and the unacknowledged ones may touch. Raises CapacityError."""
        if self.reserved_output is None:
            return
        for resident in residents:
            tokens = resident.consumed + resident.ahead + width
            self.device.reserve(resident.slot, self._reach(resident.request, tokens))

    def preempt(self, shortage: CapacityError) -> None:
        """The request admitted last gives its pages up; nobody is admitted until some request has ended.

        One that runs alone has nobody to wait for: it ends with the shortage as its error, or raises it.
        """
        if len(self.residents) == 1:
            if not self.isolate:
                raise shortage
            self.fail(list(self.residents.values()), shortage)
            return
        resident = list(self.residents.values())[-1]
        if resident.entered and resident.settled:
            self.publish(resident, resident.consumed)
        self._step_back(resident)
        self.preemptions += 1
        self._crowded = True
        if self.metrics is not None:
            self.metrics.preempted(resident.number, self.device.clock())

    def _step_back(self, resident: Resident) -> None:
        """A resident waits again, at the head of the queue, with the output it has; the prefix cache may know its state."""
        request = resident.request
        if resident.entered:
            request = evolve(request, output=resident.output, prompt_logprobs=None)
        self.retire(resident)
        self.waiting.appendleft(
            Waiting(number=resident.number, request=request, scores=resident.scores, acceptance=resident.acceptance)
        )

    # --- checkpoints and ends --------------------------------------------------------------------------------------

    def publish(self, resident: Resident, length: int, *, boundary: Any = None, lane: int = 0) -> None:
        """Makes a prefix checkpoint where checkpoints are kept; see ``Device.publish``. No request fails for want of one."""
        if not self.device.publishes:
            return
        try:
            self.device.publish(resident, length, boundary=boundary, lane=lane)
        except Exception as error:
            if not self.isolate:
                raise
            _log.warning(
                "request %d: no checkpoint of its first %d tokens: %s", resident.number, length, reported(error)
            )

    def retire(self, resident: Resident) -> None:
        """No later round runs the request; slot and pages are free once the last submitted round that names them is read."""
        del self.residents[resident.slot]
        resident.retired = True
        self._crowded = False
        self.device.retire(resident.slot)
        if resident.flights:
            self._retiring.append((resident.flights[-1].number, resident.slot))
        else:
            self._release(resident.slot)

    def release_read(self, number: int) -> None:
        """Rounds up to this one were read: frees what only they named."""
        for last, slot in [entry for entry in self._retiring if entry[0] <= number]:
            self._retiring.remove((last, slot))
            self._release(slot)

    def take_back(self, number: int, earlier: int | None) -> None:
        """A round was not submitted after all: what it named last waits for the ``earlier`` one, None if none is in flight."""
        self._retiring = [
            (last if last != number or earlier is None else earlier, slot) for last, slot in self._retiring
        ]
        if earlier is None:
            self.release_read(number)

    def _release(self, slot: int) -> None:
        self.device.release(slot)
        self.free_slots.append(slot)
