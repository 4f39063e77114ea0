"""The generation loop: several requests in one batch at a fixed verification width; finished lanes leave, waiting ones enter.

Plain decoding is the same loop at width one. The loop is plain Python around captured rounds: it freezes decisions before a
round and reads one completion frame after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
from attrs import define

from specdec.control.survival import PrefixSurvival
from specdec.errors import CapacityError, UsageError
from specdec.round.completion import METADATA_FIELDS, Completion, Field, Finish
from specdec.sampling.logprobs import LogprobColumn
from specdec.sampling.options import EXTENDED_OPTIONS, refuse_unsupported
from specdec.serving.model import STOP_IDS, LoadedModel
from specdec.serving.prefixes import PrefixState, Snapshots, TokenRun
from specdec.serving.prefixes import prefix_cache as empty_cache
from specdec.serving.prompt_scores import PromptScores
from specdec.serving.ranks import RankAgreement
from specdec.serving.request import Emission, Event, Progress, Request, TokenLogprobs
from specdec.serving.stops import StopMatcher
from specdec.state.prefix import PrefixCache


@define(kw_only=True, eq=False)
class _Resident:
    """One admitted request.

    budget: most new tokens. context_bound: the context, not max_new_tokens, sets it. run: prompt and acknowledged output.
    consumed: inputs whose state the slot holds, as acknowledged. started: its first token was sampled. in_flight: a round of it
    was submitted and not acknowledged, so the slot's state is not known to be that of ``consumed``. matcher: looks for stop
    strings, None if there are none.
    """

    number: int
    request: Request
    slot: int
    epoch: int
    budget: int
    context_bound: bool
    run: TokenRun
    consumed: int = 0
    started: bool = False
    in_flight: bool = False
    matcher: StopMatcher | None = None

    @property
    def settled(self) -> bool:
        """Whether the slot's state is that of ``consumed`` tokens of ``run``, the last token of which is pending."""
        return not self.in_flight and self.consumed == len(self.run.tokens) - 1


class Generator:
    """Runs requests over a loaded model. Not thread-safe.

    The state of running requests is the model's, so only one generator of a model may have requests running at a time.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        width: int | None = None,
        prefix_cache: PrefixCache | None = None,
        ranks: RankAgreement | None = None,
    ) -> None:
        """width: verification width of every round; None takes the configuration's fixed width or the widest prepared.
        prefix_cache: checkpoints to continue prompts from and to leave behind, made by ``serving.prefixes.prefix_cache`` for
        this model; None does without. ranks: compares every round with the other ranks of a tensor-parallel run before any of
        it is applied, and raises DesynchronisationError from ``step`` and ``run`` if they differ.

        Raises UsageError if the width was not prepared or the cache is another model's.
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
        if prefix_cache is not None and prefix_cache.pools != model.pools:
            raise UsageError("the prefix cache was made for another model; make one with prefix_cache(model)")
        self._publishes = prefix_cache is not None
        self._prefixes = PrefixState(model, prefix_cache if prefix_cache is not None else empty_cache(model, 0))
        self._page = model.target.store.layout.page_tokens
        self._cancelled: deque[Emission] = deque()
        self._ranks = ranks
        # of the first waiting request, if it asks for them; kept while it waits, so that nothing is delivered twice
        self._scores: PromptScores | None = None
        self._next_request = 0
        self._round = 0
        #: How often drafted prefixes survived, learned from the outcomes of rounds alone; None where nothing is drafted.
        self.survival = PrefixSurvival(model.config.max_draft_tokens) if model.config.max_draft_tokens else None

    def submit(self, request: Request) -> int:
        """Queues a request and returns its number.

        Raises UsageError if prompt and earlier output leave no room for one new token, a token id is outside the vocabulary,
        there are too many stop ids, earlier output already contains a stop string, or an option was not prepared or is none
        that the recipe can honour, and CapacityError if all pages together would not hold it; the message names value and limit.
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
        if len(request.prompt) + len(request.output) >= context:
            raise UsageError(
                f"prompt and output have {len(request.prompt)} + {len(request.output)} tokens, which fill the context of "
                f"{context}; raise --context"
            )
        biased = tuple(token for token, _ in request.sampling.logit_bias)
        for name, tokens in (("prompt", request.prompt), ("output", request.output), ("logit_bias", biased)):
            outside = next((token for token in tokens if not 0 <= token < vocab), None)
            if outside is not None:
                raise UsageError(f"{name} token {outside} is outside the vocabulary of {vocab}")
        if request.stop_ids is not None and len(request.stop_ids) > STOP_IDS:
            raise UsageError(f"{len(request.stop_ids)} stop ids; at most {STOP_IDS} are supported")
        reach = self._reach(request)
        for pool in self.model.pools:
            if pool.needed(reach) > pool.pages:
                raise CapacityError(
                    f"the request needs {pool.needed(reach)} pages of {pool.page_tokens} tokens; there are {pool.pages} in all; "
                    "shorten the prompt or lower the number of new tokens"
                )
        refuse_unsupported(self.model.recipe, request.options_in_use)
        matcher = self._matcher(request)
        if matcher is not None and matcher.matched:
            raise UsageError(
                f"the text of the {len(request.output)} tokens in output already contains a stop string, so this request has "
                "ended; resume it with other strings or not at all"
            )
        if request.extended and self.model.arena.requests.options is None:
            names = [name for name in request.options_in_use if name in EXTENDED_OPTIONS]
            raise UsageError(
                f"{', '.join(names)}: this model was prepared without such options; prepare it with extended_sampling=True"
            )

    def run(self, requests: Iterable[Request] = ()) -> Iterator[Event]:
        """Submits ``requests`` and yields events until nothing is waiting or running.

        Raises as ``submit`` does, before any of ``requests`` is queued.
        """
        requests = list(requests)
        for request in requests:
            self._check(request)
        for request in requests:
            self.submit(request)
        while self._waiting or self._residents or self._cancelled:
            yield from self.step()

    @torch.inference_mode()
    def cancel(self, number: int) -> bool:
        """Ends a waiting or running request; its slot and pages are free at once, and an emission without tokens says CANCELLED
        in the next step. What was acknowledged of it may serve as a prefix. False if it has ended already or never existed.
        """
        for place, (waiting, request) in enumerate(self._waiting):
            if waiting == number:
                del self._waiting[place]
                self._cancelled.append(self._cancellation(number, None, "" if request.stop else None))
                return True
        resident = next((resident for resident in self._residents.values() if resident.number == number), None)
        if resident is None:
            return False
        if self._publishes and resident.settled:
            self._prefixes.publish(resident.slot, resident.run, resident.consumed)
        self._retire(resident)
        text = None if resident.matcher is None else resident.matcher.finish()
        self._cancelled.append(self._cancellation(number, resident, text))
        return True

    def _cancellation(self, number: int, resident: _Resident | None, text: str | None) -> Emission:
        """The record of a request that no round ended: of what was acknowledged, with nothing emitted."""
        record = [0] * METADATA_FIELDS
        record[Field.REQUEST], record[Field.ROUND], record[Field.SLOT] = number, self._round, -1
        record[Field.FINISH] = Finish.CANCELLED
        if resident is not None:
            generated = len(resident.run.tokens) - len(resident.request.prompt)
            record[Field.EPOCH], record[Field.SLOT] = resident.epoch, resident.slot
            record[Field.CONSUMED], record[Field.GENERATED] = resident.consumed, generated
            record[Field.PENDING] = resident.run.tokens[-1]
        completion = Completion.parse(record)
        return Emission(request=number, tokens=(), finish=Finish.CANCELLED, completion=completion, text=text)

    # as a decorator, because a `with` around a yield would leave the caller in inference mode between two events
    @torch.inference_mode()
    def step(self) -> Iterator[Event]:
        """Either admits every waiting request that fits and samples its first token, or runs one round over all residents.

        A caller may stop iterating at any event: a prompt that was not wholly consumed starts again with the next step.
        """
        while self._cancelled:
            yield self._cancelled.popleft()
        while self._waiting and self._free_slots:
            resident = self._claim()
            if resident is None:
                break
            yield from self._consume(resident)
        newcomers = [resident for resident in self._residents.values() if not resident.started]
        if newcomers:
            yield from self._first_tokens(newcomers)
        elif self._residents:
            yield from self._run_round(list(self._residents.values()))

    # --- admission -------------------------------------------------------------------------------------------------

    def _claim(self) -> _Resident | None:
        """A slot and pages for the first waiting request, with the state of what a checkpoint knows of its prompt.

        None if it must wait until running requests give pages back. Raises CapacityError if there are none to wait for.
        """
        number, request = self._waiting[0]
        room = self.model.capacities.context - len(request.prompt)
        resident = _Resident(
            number=number,
            request=request,
            slot=self._free_slots[-1],
            epoch=next(self.model.epochs),
            budget=min(request.max_new_tokens, room),
            context_bound=room < request.max_new_tokens,
            run=TokenRun(request.inputs),
        )
        try:
            resident.consumed = self._prefixes.admit(
                resident.slot,
                resident.run,
                self._reach(request),
                reuse=request.prompt_logprobs is None,  # reused tokens would have no scores
            )
        except CapacityError:
            if not self._residents:
                raise
            return None
        self._free_slots.pop()
        return resident

    def _reach(self, request: Request) -> int:
        """Tokens whose pages a request needs: everything its rounds may touch, the window of the last one included."""
        context = self.model.capacities.context
        return min(len(request.prompt) + request.max_new_tokens, context) + self.model.recipe.max_draft_tokens + 1

    def _consume(self, resident: _Resident) -> Iterator[Progress]:
        """Consumes the rest of the first waiting request's prompt; it waits on if that is left unfinished."""
        try:
            yield from self._prefill(resident)
        except BaseException:
            self._release(resident.slot)
            raise
        if not self._is_next(resident):
            self._release(resident.slot)
            return
        self._enter(resident)
        resident.run.extend(resident.request.output[-1:])
        resident.started = bool(resident.request.output)
        resident.matcher = self._matcher(resident.request)
        self._waiting.popleft()
        self._residents[resident.slot] = resident

    def _is_next(self, resident: _Resident) -> bool:
        """Whether the request being admitted is still wanted: the caller may cancel it between two events."""
        return bool(self._waiting) and self._waiting[0][0] == resident.number

    def _enter(self, resident: _Resident) -> None:
        """Writes the request's row on the device."""
        request = resident.request
        self.model.arena.requests.admit(
            resident.slot,
            request=resident.number,
            epoch=resident.epoch,
            consumed=len(request.inputs),
            budget=resident.budget,
            sampling=request.sampling,
            stop_ids=self._stops(request),
            prompt=request.prompt,
            output=request.output,
            min_new_tokens=request.min_new_tokens,
        )

    def _stops(self, request: Request) -> tuple[int, ...]:
        """Ids that end a request."""
        defaults = self.model.defaults.stop_ids
        stops = defaults if request.stop_ids is None else request.stop_ids
        return tuple(token for token in stops if token not in defaults) if request.ignore_eos else stops

    def _matcher(self, request: Request) -> StopMatcher | None:
        """Looks for the stop strings of a request, in the text of its earlier output first; None if it has none."""
        if not request.stop:
            return None
        matcher = StopMatcher(self.model.tokenizer.stream(), request.stop, request.min_new_tokens)
        matcher.push(request.output)
        return matcher

    def _prefill(self, resident: _Resident) -> Iterator[Progress]:
        """Consumes what is left of the prompt in chunks; the drafter absorbs every row whose next token is known.

        Chunks end at page boundaries where checkpoints are kept, because state can be read only between chunks.
        """
        model, number = self.model, resident.number
        where = torch.tensor([resident.slot], dtype=torch.int64).to(model.device)
        tokens = torch.tensor(resident.request.inputs, dtype=torch.int64).to(model.device)
        total = len(tokens)
        self._scores = scores = PromptScores.of(resident.request, number, self._scores)
        if resident.consumed:
            yield Progress(request=number, consumed=resident.consumed, total=total)
        while resident.consumed < total and self._is_next(resident):
            start = resident.consumed
            end = min(start + model.capacities.prefill_rows, total)
            if self._publishes:
                end = min(end, (start // self._page + 1) * self._page)
            chunk = tokens[start:end]
            # read before the chunk overwrites it: with lag 1 the row before the chunk pairs with the chunk's first token
            tail = model.target.feedback(where)
            feedback = model.target.prefill(chunk, where, start)
            if scores is not None:
                # before the drafter runs, whose scratch may be where the chunk's hidden states are
                scores.read(model.target, start, end, tokens)
            if model.drafter is not None:
                if not model.drafter.lag:
                    model.drafter.prefill(feedback, chunk, where, start)
                elif start:
                    model.drafter.prefill(torch.cat([tail, feedback[:-1]]), chunk, where, start - 1)
                elif len(chunk) > 1:
                    model.drafter.prefill(feedback[:-1], chunk[1:], where, 0)
            resident.consumed = end
            if self._publishes and (end == total or end % self._page == 0):
                self._prefixes.publish(resident.slot, resident.run, end)
            yield Progress(
                request=number, consumed=end, total=total, logprobs=None if scores is None else scores.take()
            )

    # --- rounds ----------------------------------------------------------------------------------------------------

    def _first_tokens(self, newcomers: list[_Resident]) -> list[Emission]:
        batch = next(b for b in sorted(self.model.first_tokens) if b >= len(newcomers))
        extended = any(resident.request.extended for resident in newcomers)
        for resident in newcomers:
            resident.in_flight = True
        self.model.first_tokens[batch].submit([r.slot for r in newcomers], self._round, extended=extended)
        return self._collect(newcomers, None)

    def _run_round(self, running: list[_Resident]) -> list[Emission]:
        ceilings = [self._ceiling(resident.request) for resident in running]
        # a round for lanes that draft nothing verifies nothing but their pending tokens
        _, captured = self.model.round_for(len(running), self.width if any(ceilings) else 1)
        extended = any(resident.request.extended for resident in running)
        boundary = self._publishes and any(self._may_cross(resident) for resident in running)
        for resident in running:
            resident.in_flight = True
        captured.submit([r.slot for r in running], ceilings, self._round, boundary=boundary, extended=extended)
        return self._collect(running, captured.boundary_state if boundary else None)

    def _ceiling(self, request: Request) -> int:
        """Most drafts of a round for one request."""
        if request.stop:
            return 0  # a token behind a stop string must not be consumed, and only the host knows where one ends
        drafts = self.width - 1
        return drafts if request.draft_tokens is None else min(drafts, request.draft_tokens)

    def _may_cross(self, resident: _Resident) -> bool:
        return (resident.consumed + self.width) // self._page > resident.consumed // self._page

    def _collect(self, residents: list[_Resident], boundary: Snapshots | None) -> list[Emission]:
        """Reads the round's records, publishes what they acknowledge and retires what ended; a list, so that no caller can
        leave half of it undone. boundary: the round's snapshots at page boundaries, if it took any."""
        frame, slots = self._round % 2, [r.slot for r in residents]
        records = self.model.arena.read_frame(frame, slots)
        if self._ranks is not None:
            self._ranks.check(self._round, records)
        asked = any(resident.request.logprobs is not None for resident in residents)
        logprobs = self.model.arena.read_logprobs(frame, slots) if asked else [()] * len(slots)
        forecasting = self.model.arena.forecasts is not None
        forecasts = self.model.arena.read_forecasts(frame, slots) if forecasting else [()] * len(slots)
        number = self._round
        self._round += 1
        events = []
        for lane, (resident, record, row) in enumerate(zip(residents, records, logprobs, strict=True)):
            identity = (record[Field.REQUEST], record[Field.EPOCH], record[Field.ROUND])
            present = self._residents.get(resident.slot) is resident
            if not present or identity != (resident.number, resident.epoch, number):
                continue  # a late record: of a cancelled request, an earlier owner of the slot or an earlier round
            completion = Completion.parse(record)
            resident.started = True
            if self.survival is not None and completion.verified:
                self.survival.observe(completion.verified, completion.accepted)
            finish = completion.finish
            if finish is Finish.LENGTH and resident.context_bound:
                finish = Finish.CONTEXT
            resident.run.extend(completion.tokens)
            resident.consumed, resident.in_flight = completion.consumed, False
            text, finish = self._match(resident, completion.tokens, finish)
            if self._publishes and resident.settled and finish is not Finish.FAULT:
                self._publish(resident, completion, finish, boundary, lane)
            if finish is not Finish.NONE:
                self._retire(resident)
            wanted = resident.request.logprobs
            events.append(
                Emission(
                    request=resident.number,
                    tokens=completion.tokens,
                    finish=finish,
                    completion=completion,
                    logprobs=None if wanted is None else self._logprobs(completion.tokens, row, wanted),
                    forecasts=tuple(forecasts[lane][: completion.verify_width - 1]) if forecasting else None,
                    text=text,
                )
            )
        return events

    @staticmethod
    def _match(resident: _Resident, tokens: tuple[int, ...], finish: Finish) -> tuple[str | None, Finish]:
        """Text that acknowledged tokens release, and whether the request ends, for one with stop strings."""
        matcher = resident.matcher
        if matcher is None:
            return None, finish
        found = matcher.push(tokens)
        assert found.kept == len(tokens), "rounds of such a request emit one token"
        text = found.text if finish is Finish.NONE else found.text + matcher.finish()
        return text, Finish.STOP if matcher.matched and finish is not Finish.FAULT else finish

    def _publish(
        self, resident: _Resident, completion: Completion, finish: Finish, boundary: Snapshots | None, lane: int
    ) -> None:
        """Makes checkpoints at the page boundary that an acknowledged round crossed and, if it was the last, at its end."""
        before, after = completion.consumed - completion.emitted, completion.consumed
        crossed = after // self._page * self._page
        if boundary is not None and crossed > before:
            self._prefixes.publish(resident.slot, resident.run, crossed, boundary=boundary, lane=lane)
        if finish is not Finish.NONE:
            self._prefixes.publish(resident.slot, resident.run, after)

    @staticmethod
    def _logprobs(tokens: tuple[int, ...], columns: Sequence[LogprobColumn], count: int) -> tuple[TokenLogprobs, ...]:
        """Aligned with the emitted tokens: column j of the frame is the row that decided token j."""
        return tuple(
            TokenLogprobs(token=token, logprob=chosen, top=tuple(top[:count]))
            for token, (chosen, top) in zip(tokens, columns, strict=False)
        )

    def _retire(self, resident: _Resident) -> None:
        del self._residents[resident.slot]
        self.model.arena.requests.retire(resident.slot)
        self._release(resident.slot)

    def _release(self, slot: int) -> None:
        self._prefixes.cache.release(slot)
        self._free_slots.append(slot)
