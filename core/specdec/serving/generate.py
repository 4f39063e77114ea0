"""The generation loop: several requests in one batch at a fixed verification width; finished lanes leave, waiting ones enter.

Plain decoding is the same loop at width one. The loop is plain Python around captured rounds: it freezes decisions before a
round and reads one completion frame after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import torch
from attrs import define

from specdec.errors import UsageError
from specdec.round.completion import Completion, Finish
from specdec.serving.model import STOP_IDS, LoadedModel
from specdec.serving.request import Emission, Event, Progress, Request
from specdec.state.pages import PagePool


@define(kw_only=True, eq=False)
class _Resident:
    """One admitted request. context_bound: the context, not max_new_tokens, sets its budget."""

    number: int
    request: Request
    slot: int
    epoch: int
    context_bound: bool


class Generator:
    """Runs requests over a loaded model. Not thread-safe."""

    def __init__(self, model: LoadedModel, *, width: int | None = None) -> None:
        """width: verification width of every round; None takes the configuration's fixed width or the widest prepared.

        Raises UsageError if the width was not prepared.
        """
        widths = model.config.speculative_widths
        self.width = width or model.config.fixed_width or widths[-1]
        if self.width not in widths:
            raise UsageError(f"width {self.width} was not prepared; prepared: {', '.join(map(str, widths))}")
        self.model = model
        self._waiting: deque[tuple[int, Request]] = deque()
        self._residents: dict[int, _Resident] = {}
        self._free_slots = list(range(model.capacities.slots - 1, -1, -1))
        page = model.recipe.target_layout.page_tokens
        self._pools = [PagePool(pages=model.capacities.pages, page_tokens=page) for _ in self._stores]
        self._next_request = 0
        self._round = 0
        self._epoch = 0

    @property
    def _stores(self):
        stores = [self.model.target.store]
        if self.model.drafter is not None:
            stores.append(self.model.drafter.store)
        return stores

    def submit(self, request: Request) -> int:
        """Queues a request and returns its number.

        Raises UsageError if the prompt leaves no room for one new token, a token id is outside the vocabulary, or there are too
        many stop ids; the message names value and limit.
        """
        context, vocab = self.model.capacities.context, self.model.target.vocab_size
        if len(request.prompt) >= context:
            raise UsageError(
                f"the prompt has {len(request.prompt)} tokens; the context of {context} leaves room for at most {context - 1}; "
                "shorten the prompt or raise --context"
            )
        outside = next((token for token in request.prompt if not 0 <= token < vocab), None)
        if outside is not None:
            raise UsageError(f"prompt token {outside} is outside the vocabulary of {vocab}")
        if request.stop_ids is not None and len(request.stop_ids) > STOP_IDS:
            raise UsageError(f"{len(request.stop_ids)} stop ids; at most {STOP_IDS} are supported")
        number = self._next_request
        self._next_request += 1
        self._waiting.append((number, request))
        return number

    def run(self, requests: Iterable[Request] = ()) -> Iterator[Event]:
        """Submits ``requests`` and yields events until nothing is waiting or running."""
        for request in requests:
            self.submit(request)
        while self._waiting or self._residents:
            yield from self.step()

    def step(self) -> Iterator[Event]:
        """Either admits every waiting request that fits and samples its first token, or runs one round over all residents."""
        with torch.inference_mode():
            if self._waiting and self._free_slots:
                admitted: list[_Resident] = []
                while self._waiting and self._free_slots:
                    resident = yield from self._admit(*self._waiting.popleft())
                    admitted.append(resident)
                yield from self._first_tokens(admitted)
            elif self._residents:
                yield from self._run_round(list(self._residents.values()))

    # --- admission -------------------------------------------------------------------------------------------------

    def _admit(self, number: int, request: Request) -> Iterator[Event]:
        model = self.model
        slot = self._free_slots.pop()
        self._epoch += 1
        room = model.capacities.context - len(request.prompt)
        budget = min(request.max_new_tokens, room)
        reach = len(request.prompt) + budget + model.recipe.max_draft_tokens + 1
        for store, pool in zip(self._stores, self._pools, strict=True):
            store.reset(slot)
            store.set_pages(slot, pool.reserve(slot, min(reach, store.page_table.shape[1] * pool.page_tokens)))
        yield from self._prefill(number, slot, request.prompt)
        stops = request.stop_ids if request.stop_ids is not None else model.defaults.stop_ids
        model.arena.requests.admit(
            slot,
            request=number,
            epoch=self._epoch,
            consumed=len(request.prompt),
            budget=budget,
            sampling=request.sampling,
            stop_ids=stops,
        )
        resident = _Resident(
            number=number,
            request=request,
            slot=slot,
            epoch=self._epoch,
            context_bound=room < request.max_new_tokens,
        )
        self._residents[slot] = resident
        return resident

    def _prefill(self, number: int, slot: int, prompt: tuple[int, ...]) -> Iterator[Event]:
        """Consumes the prompt in chunks; the drafter absorbs every row whose next token is known."""
        model = self.model
        where = torch.tensor([slot], dtype=torch.int64).to(model.device)
        tokens = torch.tensor(prompt, dtype=torch.int64).to(model.device)
        size = model.capacities.prefill_rows
        for start in range(0, len(prompt), size):
            chunk = tokens[start : start + size]
            # read before the chunk overwrites it: the row before the chunk pairs with the chunk's first token
            tail = model.target.feedback(where)
            feedback = model.target.prefill(chunk, where, start)
            if model.drafter is not None:
                if start:
                    model.drafter.prefill(torch.cat([tail, feedback[:-1]]), chunk, where, start - 1)
                elif len(chunk) > 1:
                    model.drafter.prefill(feedback[:-1], chunk[1:], where, 0)
            yield Progress(request=number, consumed=start + len(chunk), total=len(prompt))

    # --- rounds ----------------------------------------------------------------------------------------------------

    def _first_tokens(self, admitted: list[_Resident]) -> Iterator[Event]:
        batch = next(b for b in sorted(self.model.first_tokens) if b >= len(admitted))
        self.model.first_tokens[batch].submit([r.slot for r in admitted], self._round)
        yield from self._collect(admitted)

    def _run_round(self, running: list[_Resident]) -> Iterator[Event]:
        drafts = self.width - 1
        ceilings = []
        for resident in running:
            wanted = resident.request.draft_tokens
            ceilings.append(drafts if wanted is None else min(drafts, wanted))
        _, captured = self.model.round_for(len(running), self.width)
        captured.submit([r.slot for r in running], ceilings, self._round)
        yield from self._collect(running)

    def _collect(self, residents: list[_Resident]) -> Iterator[Event]:
        records = self.model.arena.read_frame(self._round % 2, [r.slot for r in residents])
        self._round += 1
        for resident, record in zip(residents, records, strict=True):
            completion = Completion.parse(record)
            if (completion.request, completion.epoch) != (resident.number, resident.epoch):
                continue  # a record of an earlier owner of the slot
            finish = completion.finish
            if finish is Finish.LENGTH and resident.context_bound:
                finish = Finish.CONTEXT
            if finish is not Finish.NONE:
                self._retire(resident)
            yield Emission(
                request=resident.number, tokens=completion.tokens, finish=finish, completion=completion
            )

    def _retire(self, resident: _Resident) -> None:
        del self._residents[resident.slot]
        self.model.arena.requests.retire(resident.slot)
        for pool in self._pools:
            pool.release(resident.slot)
        self._free_slots.append(resident.slot)


