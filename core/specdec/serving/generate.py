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
from specdec.round.completion import Completion, Field, Finish
from specdec.serving.model import STOP_IDS, LoadedModel
from specdec.serving.request import Emission, Event, Progress, Request
from specdec.state.pages import PagePool
from specdec.state.store import StateStore


@define(kw_only=True, eq=False)
class _Resident:
    """One admitted request.

    budget: most new tokens. context_bound: the context, not max_new_tokens, sets it. started: its first token was sampled.
    """

    number: int
    request: Request
    slot: int
    epoch: int
    budget: int
    context_bound: bool
    started: bool = False


class Generator:
    """Runs requests over a loaded model. Not thread-safe.

    The state of running requests is the model's, so only one generator of a model may have requests running at a time.
    """

    def __init__(self, model: LoadedModel, *, width: int | None = None) -> None:
        """width: verification width of every round; None takes the configuration's fixed width or the widest prepared.

        Raises UsageError if the width was not prepared.
        """
        widths = model.config.speculative_widths
        if width is None:
            width = model.config.fixed_width or widths[-1]
        self.width = width
        if self.width not in widths:
            raise UsageError(f"width {self.width} was not prepared; prepared: {', '.join(map(str, widths))}")
        self.model = model
        self._waiting: deque[tuple[int, Request]] = deque()
        self._residents: dict[int, _Resident] = {}
        # the slots are padded to a batch capacity; what was asked for is the most that runs at once
        self._free_slots = list(range(model.config.concurrency - 1, -1, -1))
        page = model.recipe.target_layout.page_tokens
        self._pools = [PagePool(pages=model.capacities.pages, page_tokens=page) for _ in self._stores]
        self._next_request = 0
        self._round = 0

    @property
    def _stores(self) -> list[StateStore]:
        stores = [self.model.target.store]
        if self.model.drafter is not None:
            stores.append(self.model.drafter.store)
        return stores

    def submit(self, request: Request) -> int:
        """Queues a request and returns its number.

        Raises UsageError if the prompt leaves no room for one new token, a token id is outside the vocabulary, or there are too
        many stop ids; the message names value and limit.
        """
        self._check(request)
        number = self._next_request
        self._next_request += 1
        self._waiting.append((number, request))
        return number

    def _check(self, request: Request) -> None:
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

    def run(self, requests: Iterable[Request] = ()) -> Iterator[Event]:
        """Submits ``requests`` and yields events until nothing is waiting or running.

        Raises UsageError as ``submit`` does, before any of ``requests`` is queued.
        """
        requests = list(requests)
        for request in requests:
            self._check(request)
        for request in requests:
            self.submit(request)
        while self._waiting or self._residents:
            yield from self.step()

    # as a decorator, because a `with` around a yield would leave the caller in inference mode between two events
    @torch.inference_mode()
    def step(self) -> Iterator[Event]:
        """Either admits every waiting request that fits and samples its first token, or runs one round over all residents.

        A caller may stop iterating at any event: a prompt that was not wholly consumed starts again with the next step.
        """
        while self._waiting and self._free_slots:
            yield from self._admit()
        newcomers = [resident for resident in self._residents.values() if not resident.started]
        if newcomers:
            yield from self._first_tokens(newcomers)
        elif self._residents:
            yield from self._run_round(list(self._residents.values()))

    # --- admission -------------------------------------------------------------------------------------------------

    def _admit(self) -> Iterator[Progress]:
        """Gives the first waiting request a slot and consumes its prompt; it waits on if that is left unfinished."""
        number, request = self._waiting[0]
        room = self.model.capacities.context - len(request.prompt)
        resident = _Resident(
            number=number,
            request=request,
            slot=self._free_slots.pop(),
            epoch=next(self.model.epochs),
            budget=min(request.max_new_tokens, room),
            context_bound=room < request.max_new_tokens,
        )
        try:
            self._reserve(resident)
            yield from self._prefill(number, resident.slot, request.prompt)
        except BaseException:
            self._release(resident.slot)
            raise
        self._enter(resident)
        self._waiting.popleft()
        self._residents[resident.slot] = resident

    def _reserve(self, resident: _Resident) -> None:
        """Resets the slot and gives it pages for everything its rounds may touch."""
        reach = len(resident.request.prompt) + resident.budget + self.model.recipe.max_draft_tokens + 1
        for store, pool in zip(self._stores, self._pools, strict=True):
            store.reset(resident.slot)
            tokens = min(reach, store.page_table.shape[1] * pool.page_tokens)
            store.set_pages(resident.slot, pool.reserve(resident.slot, tokens))

    def _enter(self, resident: _Resident) -> None:
        """Writes the request's row on the device."""
        request, stops = resident.request, resident.request.stop_ids
        self.model.arena.requests.admit(
            resident.slot,
            request=resident.number,
            epoch=resident.epoch,
            consumed=len(request.prompt),
            budget=resident.budget,
            sampling=request.sampling,
            stop_ids=self.model.defaults.stop_ids if stops is None else stops,
        )

    def _prefill(self, number: int, slot: int, prompt: tuple[int, ...]) -> Iterator[Progress]:
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

    def _first_tokens(self, newcomers: list[_Resident]) -> list[Emission]:
        batch = next(b for b in sorted(self.model.first_tokens) if b >= len(newcomers))
        self.model.first_tokens[batch].submit([r.slot for r in newcomers], self._round)
        return self._collect(newcomers)

    def _run_round(self, running: list[_Resident]) -> list[Emission]:
        drafts = self.width - 1
        ceilings = []
        for resident in running:
            wanted = resident.request.draft_tokens
            ceilings.append(drafts if wanted is None else min(drafts, wanted))
        _, captured = self.model.round_for(len(running), self.width)
        captured.submit([r.slot for r in running], ceilings, self._round)
        return self._collect(running)

    def _collect(self, residents: list[_Resident]) -> list[Emission]:
        """Reads the round's records and retires what ended; a list, so that no caller can leave half of it undone."""
        records = self.model.arena.read_frame(self._round % 2, [r.slot for r in residents])
        number = self._round
        self._round += 1
        events = []
        for resident, record in zip(residents, records, strict=True):
            identity = (record[Field.REQUEST], record[Field.EPOCH], record[Field.ROUND])
            if identity != (resident.number, resident.epoch, number):
                continue  # a late record: of an earlier owner of the slot or of an earlier round
            completion = Completion.parse(record)
            resident.started = True
            finish = completion.finish
            if finish is Finish.LENGTH and resident.context_bound:
                finish = Finish.CONTEXT
            if finish is not Finish.NONE:
                self._retire(resident)
            events.append(
                Emission(request=resident.number, tokens=completion.tokens, finish=finish, completion=completion)
            )
        return events

    def _retire(self, resident: _Resident) -> None:
        del self._residents[resident.slot]
        self.model.arena.requests.retire(resident.slot)
        self._release(resident.slot)

    def _release(self, slot: int) -> None:
        for pool in self._pools:
            pool.release(slot)
        self._free_slots.append(slot)
