"""A loaded model as the device that a scheduler drives."""

from __future__ import annotations

import time
from typing import Any

import torch

from specdec.errors import CapacityError, UsageError
from specdec.preparation import PreparationConfig
from specdec.sampling.options import EXTENDED_OPTIONS, refuse_unsupported
from specdec.scheduling.device import RoundPlan, RoundResult
from specdec.scheduling.resident import Resident
from specdec.serving.grammar import GrammarCompiler, GrammarState
from specdec.serving.model import STOP_IDS, LoadedModel
from specdec.serving.prefixes import PrefixState
from specdec.serving.prefixes import prefix_cache as empty_cache
from specdec.serving.prompt_scores import PromptScores
from specdec.serving.request import Request, TokenLogprobs
from specdec.serving.slot_state import Snapshots
from specdec.serving.stops import StopMatcher
from specdec.state.prefix import PrefixCache
from specdec.state.prefix_records import PrefixStatistics
from specdec.state.upload import upload


class ModelDevice:
    """Slots, pages and rounds of one loaded model; methods are those of ``scheduling.device.Device``.

    The state of running requests is the model's, so only one device of a model may have requests running at a time.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: PreparationConfig | None = None,
        *,
        prefix_cache: PrefixCache | None = None,
        queued: bool = False,
    ) -> None:
        """config: the part of the model's configuration that is used, None for all of it. prefix_cache: checkpoints to continue
        prompts from and to leave behind, made by ``serving.prefixes.prefix_cache`` for this model; None does without. queued:
        another round may be submitted before one is collected.

        Zero drafts of a model that has some run its ordinary operations, without draft work or draft state.

        Raises UsageError if the cache is another model's, is used with drafts here and without them there, or the model's graphs
        keep nothing for one.
        """
        if prefix_cache is not None and prefix_cache.pools != model.pools:
            raise UsageError("the prefix cache was made for another model; make one with prefix_cache(model)")
        if prefix_cache is not None and model.graphs is not None and not model.config.snapshot_bytes:
            raise UsageError(
                "this model's rounds were captured without prefix checkpoints; prepare it with snapshot_bytes above 0, or with "
                "cuda_graphs=False"
            )
        self.model = model
        config = model.config if config is None else config
        self.concurrency = config.concurrency
        self.context = model.capacities.context
        self.horizon = model.recipe.max_draft_tokens + 1
        self.page_tokens = model.target.store.layout.page_tokens
        self.prefill_tokens = model.capacities.prefill_rows
        self.publishes = prefix_cache is not None
        self._rounds, self._prompts = model.rounds, model.prompts
        drafts = model.drafter is not None
        if model.ordinary is not None and not config.speculative:
            self._rounds, self._prompts, drafts = model.ordinary.rounds, model.ordinary.prompts, False
        cache = prefix_cache if prefix_cache is not None else empty_cache(model, 0)
        self.prefixes = PrefixState(model, cache, drafts=drafts)
        self._queued = queued
        self._compiler: GrammarCompiler | None = None
        self._copies = model.recipe.supports_history_drafts
        self._transfers = model.arena.transfers
        self._seconds: dict[int, float] = {}
        self._widths: dict[int, tuple[int, ...]] = {}
        for batch, width in sorted(self._rounds):
            if width in config.speculative_widths:
                self._widths[batch] = (*self._widths.get(batch, ()), width)

    def clock(self) -> float:
        """See ``Device.clock``."""
        return time.perf_counter()

    def next_epoch(self) -> int:
        """See ``Device.next_epoch``. Counted over all devices of the model."""
        return next(self.model.epochs)

    # --- requests --------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """See ``Device.check``.

        Raises UsageError if prompt and earlier output leave no room for one new token, a token id is outside the vocabulary,
        there are too many stop ids, earlier output already contains a stop string, or an option was not prepared or is none
        that the recipe can honour, and CapacityError if all pages together would not hold it; the message names value and limit.
        """
        context, vocab = self.context, self.model.target.vocab_size
        if len(request.prompt) >= context:
            raise UsageError(
                f"the prompt has {len(request.prompt)} tokens; the context of {context} leaves room for at most {context - 1}; "
                "shorten the prompt or raise context"
            )
        if len(request.prompt) + len(request.output) >= context:
            raise UsageError(
                f"prompt and output have {len(request.prompt)} + {len(request.output)} tokens, which fill the context of "
                f"{context}; raise context"
            )
        biased = tuple(token for token, _ in request.sampling.logit_bias)
        for name, tokens in (("prompt", request.prompt), ("output", request.output), ("logit_bias", biased)):
            outside = next((token for token in tokens if not 0 <= token < vocab), None)
            if outside is not None:
                raise UsageError(
                    f"{name} token {outside} is outside the vocabulary of {vocab}; ids are 0 to {vocab - 1}"
                )
        if request.stop_ids is not None and len(request.stop_ids) > STOP_IDS:
            raise UsageError(f"{len(request.stop_ids)} stop ids; at most {STOP_IDS} are supported")
        reach = min(len(request.prompt) + request.max_new_tokens, context) + self.horizon
        for pool in self.model.pools:
            if pool.needed(reach) > pool.pages:
                raise CapacityError(
                    f"the request needs {pool.needed(reach)} pages of {pool.page_tokens} tokens; there are {pool.pages} in all; "
                    "shorten the prompt or lower the number of new tokens"
                )
        refuse_unsupported(self.model.recipe, request.options_in_use)
        matcher = self.matcher(request)
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
        if request.grammar is not None:
            if self.model.arena.masks is None:
                raise UsageError("grammar: this model was prepared without masks; prepare it with grammar=True")
            self.grammar(request)

    def matcher(self, request: Request) -> StopMatcher | None:
        """See ``Device.matcher``."""
        if not request.stop:
            return None
        matcher = StopMatcher(self.model.tokenizer.stream(), request.stop, request.min_new_tokens)
        matcher.push(request.output)
        return matcher

    def grammar(self, request: Request) -> GrammarState | None:
        """See ``Device.grammar``. Raises UsageError for a grammar that is not valid, or does not allow the earlier output."""
        if request.grammar is None:
            return None
        if self._compiler is None:
            self._compiler = GrammarCompiler(self.model.tokenizer, self.model.target.vocab_size)
        return self._compiler.state(
            request.grammar,
            stop_ids=self._stops(request),
            min_new_tokens=request.min_new_tokens,
            output=request.output,
        )

    def prefix_statistics(self) -> PrefixStatistics | None:
        """See ``Device.prefix_statistics``."""
        return self.prefixes.cache.statistics if self.publishes else None

    def _stops(self, request: Request) -> tuple[int, ...]:
        """Ids that end a request."""
        defaults = self.model.defaults.stop_ids
        stops = defaults if request.stop_ids is None else request.stop_ids
        return tuple(token for token in stops if token not in defaults) if request.ignore_eos else stops

    # --- slots and prompts -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def admit(self, resident: Resident, reach: int) -> int:
        """See ``Device.admit``."""
        # reused tokens would have no scores
        reuse = resident.request.prompt_logprobs is None
        return self.prefixes.admit(resident.slot, resident.run, reach, reuse=reuse)

    @torch.inference_mode()
    def reserve(self, slot: int, reach: int) -> None:
        """See ``Device.reserve``."""
        self.prefixes.extend(slot, reach)

    @torch.inference_mode()
    def prefill(self, resident: Resident, end: int) -> tuple[TokenLogprobs, ...] | None:
        """See ``Device.prefill``. The drafter absorbs every row whose next token is known."""
        model, start = self.model, resident.consumed
        scores = resident.scores = PromptScores.of(resident.request, resident.number, resident.scores)
        if scores is None:
            self._prompts.consume(resident.run.tokens[start:end], resident.slot, start)
            return None
        # the logits of a scored prompt are read in the middle of a chunk, so such chunks are never replayed
        tokens = upload(resident.run.tokens, torch.int64, model.device)
        where = upload([resident.slot], torch.int64, model.device)
        self._prompts.run(
            tokens[start:end], where, start, between=lambda: scores.read(model.target, start, end, tokens)
        )
        return scores.take()

    @torch.inference_mode()
    def enter(self, resident: Resident) -> None:
        """See ``Device.enter``."""
        request = resident.request
        if self.model.arena.masks is not None:
            self.model.arena.masks.clear(resident.slot)
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

    @torch.inference_mode()
    def retire(self, slot: int) -> None:
        """See ``Device.retire``."""
        self.model.arena.requests.retire(slot)

    def release(self, slot: int) -> None:
        """See ``Device.release``."""
        self.prefixes.cache.release(slot)

    @torch.inference_mode()
    def publish(self, resident: Resident, length: int, *, boundary: Snapshots | None = None, lane: int = 0) -> None:
        """See ``Device.publish``."""
        self.prefixes.publish(resident.slot, resident.run, length, boundary=boundary, lane=lane)

    # --- rounds ----------------------------------------------------------------------------------------------------

    def batch_for(self, lanes: int) -> int:
        """See ``Device.batch_for``."""
        return next(batch for batch in sorted(self._widths) if batch >= lanes)

    def widths(self, batch: int) -> tuple[int, ...]:
        """See ``Device.widths``."""
        return self._widths[batch]

    @torch.inference_mode()
    def submit(self, plan: RoundPlan) -> Snapshots | None:
        """See ``Device.submit``. On a CPU the round runs here, elsewhere it is queued."""
        started = time.perf_counter()
        boundary, masked = None, False
        for lane in plan.lanes:
            if lane.masks is not None and self.model.arena.masks is not None:
                self.model.arena.masks.write(lane.slot, lane.masks)
                masked = True
        if plan.first:
            self.model.first_tokens[plan.batch].submit(plan.slots, plan.number, extended=plan.extended, masked=masked)
        else:
            captured = self._rounds[plan.batch, plan.width]
            captured.submit(
                plan.slots,
                [lane.ceiling for lane in plan.lanes],
                plan.number,
                boundary=plan.boundary,
                extended=plan.extended,
                copies=[lane.copies[: plan.width - 1] for lane in plan.lanes] if self._copies else None,
                masked=masked,
            )
            if plan.boundary:
                boundary = captured.boundary_state
                if self._queued or captured.program.captured:
                    # the next round, or a snapshot of a slot, may reuse the buffers before this one is collected
                    boundary = {
                        owner: {name: value.clone() for name, value in part.items()} for owner, part in boundary.items()
                    }
        self._transfers.end(plan.number)
        self._seconds[plan.number] = time.perf_counter() - started
        return boundary

    @torch.inference_mode()
    def collect(self, plan: RoundPlan, logprobs: bool) -> RoundResult:
        """See ``Device.collect``."""
        started, arena = time.perf_counter(), self.model.arena
        frame, slots = plan.number % 2, plan.slots
        records = arena.read_frame(frame, slots)
        columns: Any = arena.read_logprobs(frame, slots) if logprobs else ()
        forecasts = None if arena.forecasts is None else arena.read_forecasts(frame, slots)
        seconds = self._transfers.seconds(plan.number)
        host = self._seconds.pop(plan.number, 0.0) + time.perf_counter() - started
        seconds = host if seconds is None else seconds
        return RoundResult(records=records, seconds=seconds, logprobs=columns, forecasts=forecasts)
