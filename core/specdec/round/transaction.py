"""One speculative round as a transaction: draft, verify, law, accept, clip, commit, complete.

``ChainRound.run`` is the whole round, top to bottom. It is a tensor program on fixed buffers: the host's decisions are in the
staging buffer, the outcome is in a transfer frame and in the state stores, and nothing in between synchronises.

Letters: B lanes, K draft tokens, W = K + 1, V vocabulary, N consumed tokens, a accepted drafts, t emitted tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specdec.catalog import RoundShape
from specdec.errors import PluginError, UsageError
from specdec.interfaces import Drafter, Target
from specdec.places import method_of
from specdec.round.arena import Arena
from specdec.round.completion import Finish
from specdec.round.contract import described, expect, expect_every_depth
from specdec.round.graphs import Program
from specdec.round.proposer import ChainProposer
from specdec.round.staging import Staging
from specdec.sampling.chain import resolve_empty
from specdec.sampling.philox import TARGET_DOMAIN
from specdec.sampling.sampler import RoundWords
from specdec.state.requests import BUDGET, CONSUMED, EPOCH, FINISH, GENERATED, PENDING, REQUEST, SEED, Lanes


class _Settlement:
    """Clip, commit of the request table and completion record: the same for every kind of round."""

    def __init__(self, target: Target, drafter: Drafter | None, arena: Arena, staging: Staging, width: int) -> None:
        self.target = target
        self.drafter = drafter
        self.arena = arena
        self.staging = staging
        self.columns = torch.arange(width, device=arena.device)
        padding = arena.max_draft_tokens + 1 - width
        self.padding = torch.full((staging.batch, padding), -1, dtype=torch.int64, device=arena.device)

    def clip(self, lanes: Lanes, tokens: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
        """Emitted length t [B] and finish code [B].

        tokens: [B, W] emitted if nothing clips, −1 padded. The first stop id, the budget and a missing token end the prefix;
        a missing token (the target's row is not a law) or a broken state invariant ends the request as FAULT.
        """
        rows = lanes.integers
        remaining = rows[:, BUDGET] - rows[:, GENERATED]
        missing = tokens.gather(1, accepted.unsqueeze(1)).squeeze(1) < 0
        offered = accepted + 1 - missing.to(torch.int64)
        stops = self.arena.requests.stops.index_select(0, lanes.slots)
        stopping = (tokens.unsqueeze(2) == stops.unsqueeze(1)).any(2) & (self.columns < offered.unsqueeze(1))
        until_stop = torch.where(stopping, self.columns + 1, offered.unsqueeze(1) + 1).amin(1)
        emitted = torch.minimum(torch.minimum(offered, remaining), until_stop) * lanes.live
        faults = self._faults(lanes)
        # a stop id before the missing token ends the request as it would have without drafts
        broken = (missing & (emitted == offered) & (emitted < until_stop)) | (faults > 0)
        finish = torch.where(emitted == remaining, int(Finish.LENGTH), int(Finish.NONE))
        finish = torch.where(emitted == until_stop, int(Finish.STOP), finish)
        return emitted, torch.where(broken, int(Finish.FAULT), finish)

    def _faults(self, lanes: Lanes) -> Tensor:
        """Broken invariants of every lane, [B] int64."""
        found = []
        for owner in (self.target, self.drafter):
            if owner is not None:
                found.append(owner.faults(lanes.slots))
                expect(found[-1], (lanes.count,), "B", of=owner, method="faults", integer=True)
        return found[0] if len(found) == 1 else found[0] + found[1]

    def complete(
        self,
        lanes: Lanes,
        *,
        tokens: Tensor,
        accepted: Tensor,
        offered: Tensor,
        verified: Tensor,
        emitted: Tensor,
        consumed: Tensor,
        finish: Tensor,
        sources: Tensor | None = None,
    ) -> None:
        """Advances the request table and writes one record per lane; dead lanes report themselves with zero emission.

        sources: source bits [B] int64, None where nothing can be copied.
        """
        live = lanes.live
        last = tokens.gather(1, (emitted - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
        advanced = self.arena.requests.advance(lanes, consumed=consumed, emitted=emitted, last=last, finish=finish)
        rows = torch.where(live.unsqueeze(1), advanced, lanes.resident)
        faults = self._faults(lanes)
        zero = draft_rows = torch.zeros_like(emitted)
        if self.drafter is not None:
            draft_rows = self.drafter.store["rows"][0].index_select(0, lanes.slots).view(-1)
        metadata = torch.stack(
            [
                rows[:, REQUEST],
                rows[:, EPOCH],
                self.staging.round.expand_as(emitted),
                lanes.requested,
                rows[:, FINISH],
                rows[:, CONSUMED],
                rows[:, GENERATED],
                rows[:, PENDING],
                emitted,
                offered * live,
                verified * live,
                accepted * live,
                zero if sources is None else sources * live,
                draft_rows * live,
                zero + self.columns.shape[0],
                faults * live,
            ],
            dim=1,
        )
        shown = torch.where(self.columns < emitted.unsqueeze(1), tokens, -1)
        record = torch.cat([metadata, shown, self.padding], dim=1)
        self.arena.frames.index_copy_(0, self.frame_rows(lanes), record)

    def frame_rows(self, lanes: Lanes) -> Tensor:
        """Row of each lane in the transfer frame of this round, [B] int64."""
        return self.staging.frame * (self.arena.slots + 1) + lanes.requested

    def extend(self, lanes: Lanes, logits: Tensor, tokens: Tensor, emitted: Tensor) -> None:
        """What extended rounds commit on top: emitted tokens are counted, and what the target thought of them is kept.

        logits: [B, W, V] of the target, untouched by options; tokens: [B, W] int64, the first ``emitted`` [B] of a lane count.
        """
        options, logprobs = self.arena.requests.options, self.arena.logprobs
        assert options is not None and logprobs is not None
        options.commit(lanes.slots, tokens, emitted)
        logprobs.write(self.frame_rows(lanes), logits, tokens)


class ChainRound:
    """The ordinary chain round of one shape: K learned drafts, W = K + 1 verified inputs, eager or captured alike.

    ``proposer`` and ``verify`` are where another kind of round differs; see ``specdec.round.allocated``.
    """

    def __init__(
        self,
        *,
        target: Target,
        drafter: Drafter | None,
        shape: RoundShape,
        arena: Arena,
        max_draft_tokens: int,
        history_drafts: bool = False,
    ) -> None:
        """history_drafts: whether the round takes copies. Raises ValueError for a shape with drafts and no drafter."""
        if shape.draft_tokens and drafter is None:
            raise ValueError(f"a round with {shape.draft_tokens} drafts needs a drafter")
        self.target = target
        self.drafter = drafter
        self.shape = shape
        self.arena = arena
        self.max_draft_tokens = max_draft_tokens
        self.history_drafts = history_drafts
        self.staging = Staging(arena, shape.batch, shape.draft_tokens if history_drafts else 0)
        self._settlement = _Settlement(target, drafter, arena, self.staging, shape.verify_width)
        drafts, vocab = shape.draft_tokens, target.vocab_size
        self.boundary_state: dict[str, Mapping[str, Tensor]] = {}
        self.draft_probs = arena.scratch("draft_probs", (shape.batch, drafts, vocab), torch.float32)
        self.draft_tokens = arena.scratch("draft_tokens", (shape.batch, drafts), torch.int64)
        name = f"the round of {shape.batch} lanes and width {shape.verify_width}"
        self.program = Program(lambda **variant: self.run(**variant), name)

    def submit(
        self,
        slots: Sequence[int],
        ceilings: Sequence[int],
        number: int,
        *,
        boundary: bool = False,
        extended: bool = False,
        copies: Sequence[Sequence[int]] | None = None,
        masked: bool = False,
    ) -> None:
        """See ``Round.submit``."""
        if copies is not None and not self.history_drafts:
            if any(copies):
                raise UsageError(
                    "this recipe does not declare supports_history_drafts, so its rounds take no copies; submit without"
                )
            copies = None
        self.staging.write(slots, ceilings, number, copies)
        self.program(boundary=boundary, extended=extended, masked=masked)

    def run(self, *, boundary: bool = False, extended: bool = False, masked: bool = False) -> None:
        """See ``Round.run``.

        The accept rule in words: draft token x with draft law q and target law p is accepted with probability min(1, p(x)/q(x));
        the first rejected one is replaced by a draw from the positive part of p − q; after K acceptances a bonus token is
        drawn from the last row of p.
        """
        target, drafter, settlement = self.target, self.drafter, self._settlement
        drafts = self.shape.draft_tokens
        self._mark("begin")
        for owner in self._owners:
            owner.store.begin_round()
        lanes = self.arena.requests.lanes(self.staging.slots)
        params, sampler = lanes.law, self.arena.sampler
        words = RoundWords.of(lanes.integers[:, SEED], lanes.consumed, self.max_draft_tokens)

        # 1 draft, 2 copy: the proposer puts a copied token where the drafter's own would be, and the drafter goes on from it
        forecasts = None
        if drafter is not None:
            proposer = self.proposer(lanes, words)
            forecasts = drafter.propose(lanes, drafts, proposer)
            self._check_proposals(proposer, forecasts)
        self._mark("draft")

        # a lane's drafts count only up to its ceiling and to what its budget can still emit
        remaining = lanes.integers[:, BUDGET] - lanes.integers[:, GENERATED]
        offered = torch.minimum(self.staging.ceilings, remaining - 1).clamp(min=0, max=drafts)

        # 3 verify; an id that is no token will be rejected, but nothing can be embedded for it
        inputs = self.draft_tokens.clamp(0, target.vocab_size - 1)
        block = torch.cat([lanes.pending.unsqueeze(1), inputs], dim=1)
        logits, verified = self.verify(lanes, block, offered, forecasts)
        expect(logits, (*block.shape, target.vocab_size), "B, W, V", of=target, method="verify", padded=True)
        self._mark("verify")

        # 4 law; drafts were drawn without penalties, from the law that was kept for them, which leaves the emitted law exact
        shaped = self.arena.requests.shaped(lanes, logits, inputs) if extended else logits
        if masked:
            shaped = self.arena.masked(lanes, shaped)
        target_probs = sampler.law(shaped, params, target.vocab_size)[..., : target.vocab_size]

        # 5 accept
        outcome = resolve_empty(
            sampler.verify(self.draft_tokens, self.draft_probs, target_probs, words, verified), self.draft_tokens
        )

        # 6 clip
        emitted, finish = settlement.clip(lanes, outcome.tokens, outcome.accepted)
        self._mark("accept")

        # 7 commit; snapshots fall between absorption and selection, where the state after any number of inputs can be read
        if drafter is not None:
            drafter.absorb(lanes, outcome.tokens, emitted)
        if boundary:
            self.boundary_state = self._at_boundary(lanes, emitted)
        if drafter is not None:
            drafter.commit(lanes, emitted)
        target.commit(lanes, emitted)
        if extended:
            settlement.extend(lanes, logits, outcome.tokens, emitted)
        for owner in self._owners:
            owner.store.end_round(owner)

        # 8 complete
        settlement.complete(
            lanes,
            tokens=outcome.tokens,
            accepted=outcome.accepted,
            offered=offered,
            verified=verified,
            emitted=emitted,
            consumed=emitted,
            finish=finish,
            sources=None if self.staging.copies is None else self.staging.copies.sources(offered),
        )
        self._mark("commit")

    def proposer(self, lanes: Lanes, words: RoundWords) -> ChainProposer:
        """What the drafter draws through."""
        return ChainProposer(
            params=lanes.law,
            sampler=self.arena.sampler,
            words=words,
            tokens=self.draft_tokens,
            probs=self.draft_probs,
            vocab_size=self.target.vocab_size,
            copies=self.staging.copies,
            drafter=self.drafter,
        )

    def _check_proposals(self, proposer: ChainProposer, forecasts: object) -> None:
        """A draft that was not proposed would be what an earlier round left there."""
        expect_every_depth(proposer.drawn, self.shape.draft_tokens, of=self.drafter)
        if forecasts is None:
            return
        wanted = [self.shape.batch, self.shape.draft_tokens]
        if not isinstance(forecasts, Tensor) or list(forecasts.shape) != wanted or forecasts.dtype != torch.float32:
            raise PluginError(
                f"{method_of(self.drafter, 'propose')} returns {described(forecasts)}; it returns None, or forecasts of "
                f"acceptance [B, K] = {wanted} float32; tokens go through the proposer"
            )

    def verify(self, lanes: Lanes, block: Tensor, offered: Tensor, forecasts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Target logits [B, W, V] of pending token and drafts, and how many drafts of each lane they judge, [B] int64.

        block: [B, W] int64; offered: [B] int64, most drafts that each lane may use; forecasts: see ``Drafter.propose``.
        """
        return self.target.verify(block, lanes), offered

    def _mark(self, name: str) -> None:
        if self.arena.phases is not None:
            self.arena.phases.mark(name)

    @property
    def _owners(self) -> list[Target | Drafter]:
        return [owner for owner in (self.target, self.drafter) if owner is not None]

    def _at_boundary(self, lanes: Lanes, emitted: Tensor) -> dict[str, Mapping[str, Tensor]]:
        """State at the next page boundary of each lane; meaningless for lanes whose emission does not reach it."""
        page = self.target.store.layout.page_tokens
        taken = torch.minimum(page - lanes.consumed % page, emitted)
        found = {"target": self.target.snapshot(lanes.slots, taken)}
        if self.drafter is not None:
            found["drafter"] = self.drafter.snapshot(lanes.slots, taken)
        if self.arena.device.type != "cuda":
            return found
        # a graph's own results may be where another graph of its pool works; these are read after it
        return {
            owner: {name: self._kept(f"boundary.{owner}.{name}", value) for name, value in part.items()}
            for owner, part in found.items()
        }

    def _kept(self, name: str, value: Tensor) -> Tensor:
        shape = list(value.shape)
        shape[1] = self.arena.slots
        kept = self.arena.scratch(name, tuple(shape), value.dtype)[:, : value.shape[1]]
        kept.copy_(value)
        return kept


class FirstToken:
    """Samples the first token of requests whose prompt is consumed, from the saved sampling vector; no target pass.

    It is the bonus draw of a round that would have started one position earlier, so it uses that position's words.
    """

    def __init__(self, *, target: Target, drafter: Drafter | None, arena: Arena, batch: int) -> None:
        self.target = target
        self.arena = arena
        self.max_draft_tokens = arena.max_draft_tokens
        self.staging = Staging(arena, batch)
        self._settlement = _Settlement(target, drafter, arena, self.staging, 1)
        self.program = Program(self._run, f"first tokens of {batch} lanes")

    def submit(self, slots: Sequence[int], number: int, *, extended: bool = False, masked: bool = False) -> None:
        """Copies the slots to the staging buffer and runs. Lanes beyond ``slots`` are dead. extended, masked: see
        ``Round.submit``; the first token is under the slot's first mask."""
        self.staging.write(slots, [0] * len(slots), number)
        self.program(extended=extended, masked=masked)

    def _run(self, *, boundary: bool = False, extended: bool = False, masked: bool = False) -> None:
        # nothing is consumed, so no boundary is crossed
        self.run(extended=extended, masked=masked)

    def run(self, *, extended: bool = False, masked: bool = False) -> None:
        """The tensor program alone; reads the staging buffer."""
        lanes = self.arena.requests.lanes(self.staging.slots)
        sampler = self.arena.sampler
        words = RoundWords.of(lanes.integers[:, SEED], lanes.consumed - 1, self.max_draft_tokens)
        saved = self.target.first_logits(lanes.slots)
        shape = (lanes.count, self.target.vocab_size)
        expect(saved, shape, "B, V", of=self.target, method="first_logits", padded=True)
        logits = saved.unsqueeze(1)
        no_drafts = lanes.slots.unsqueeze(1)[:, :0]
        shaped = self.arena.requests.shaped(lanes, logits, no_drafts) if extended else logits
        if masked:
            shaped = self.arena.masked(lanes, shaped)
        probs = sampler.law(shaped, lanes.law, self.target.vocab_size)
        tokens = sampler.draw(probs.squeeze(1), words, TARGET_DOMAIN, 0).unsqueeze(1)
        nothing = torch.zeros_like(lanes.slots)
        emitted, finish = self._settlement.clip(lanes, tokens, nothing)
        if extended:
            self._settlement.extend(lanes, logits, tokens, emitted)
        self._settlement.complete(
            lanes,
            tokens=tokens,
            accepted=nothing,
            offered=nothing,
            verified=nothing,
            emitted=emitted,
            consumed=nothing,
            finish=finish,
        )
