"""A target and a drafter whose next-token logits depend on the last token only: rounds with laws that a test can write down.

They keep their state like models do (candidates until commit), so a round around them is a real one, and a fast one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import field, frozen
from torch import Tensor

from specdec.declaration import StateField, StateKind, StateLayout
from specdec.interfaces import Proposer
from specdec.round.allocation import PackedRows
from specdec.round.arena import Arena
from specdec.sampling.params import SamplingParams
from specdec.state.requests import Lanes
from specdec.state.store import StateStore

HORIZON = 7


def _store(owner: str, slots: int, *fields: StateField) -> StateStore:
    layout = StateLayout(owner=owner, fields=fields, max_draft_tokens=HORIZON)
    return StateStore(layout, slots=slots, pages=1, context=64, device=torch.device("cpu"))


class MarkovTarget:
    """table: [V, V] logits; row t is what follows token t."""

    def __init__(self, table: Tensor, *, slots: int) -> None:
        self.table = table
        self.vocab_size = table.shape[1]
        self.store = _store("target", slots)
        self.last = torch.zeros(slots + 1, dtype=torch.int64)
        self._inputs = torch.zeros(slots + 1, HORIZON + 1, dtype=torch.int64)

    def _rows(self, tokens: Tensor) -> Tensor:
        return self.table[tokens.clamp(0, self.vocab_size - 1)]

    def first_logits(self, slots: Tensor) -> Tensor:
        return self._rows(self.last.index_select(0, slots))

    def verify(self, tokens: Tensor, lanes: Lanes) -> Tensor:
        self._inputs[:, : tokens.shape[1]].index_copy_(0, lanes.slots, tokens)
        return self._rows(tokens)

    def verify_rows(self, tokens: Tensor, rows: PackedRows) -> Tensor:
        self._inputs[rows.slots, rows.index] = tokens
        return self._rows(tokens)

    def commit(self, lanes: Lanes, taken: Tensor) -> None:
        consumed = self._inputs.index_select(0, lanes.slots).gather(1, (taken - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
        before = self.last.index_select(0, lanes.slots)
        self.last.index_copy_(0, lanes.slots, torch.where(taken > 0, consumed, before))
        self.store.commit(lanes.slots, taken)

    def faults(self, slots: Tensor) -> Tensor:
        return self.store.faults.index_select(0, slots)


class MarkovDrafter:
    """Draws from its own table, beginning at the pending token."""

    lag = 1

    def __init__(self, table: Tensor, *, slots: int) -> None:
        self.table = table
        rows = StateField(name="rows", kind=StateKind.ROW, shape=(), dtype="int64", source="absorbed pairs")
        self.store = _store("drafter", slots, rows)

    def propose(self, lanes: Lanes, draft_tokens: int, proposer: Proposer) -> None:
        token = lanes.pending
        for depth in range(draft_tokens):
            token = proposer.draw(depth, self.table[token.clamp(0, self.table.shape[0] - 1)])

    def absorb(self, lanes: Lanes, tokens: Tensor, emitted: Tensor) -> None:
        """Nothing is kept but the count."""

    def commit(self, lanes: Lanes, emitted: Tensor) -> None:
        self.store.write_row("rows", lanes.slots, (lanes.consumed + emitted - 1) * lanes.live)

    def faults(self, slots: Tensor) -> Tensor:
        return self.store.faults.index_select(0, slots)


class ForecastingDrafter(MarkovDrafter):
    """Forecasts each draft from the token before it. confidence: [V] or by depth [K, V], the forecast after each token."""

    def __init__(self, table: Tensor, confidence: Tensor, *, slots: int) -> None:
        super().__init__(table, slots=slots)
        self.confidence = (
            confidence.to(torch.float32).expand(HORIZON, -1) if confidence.dim() == 1 else confidence.float()
        )

    def propose(self, lanes: Lanes, draft_tokens: int, proposer: Proposer) -> Tensor:
        token, forecasts = lanes.pending, []
        for depth in range(draft_tokens):
            safe = token.clamp(0, self.table.shape[0] - 1)
            forecasts.append(self.confidence[depth][safe])
            token = proposer.draw(depth, self.table[safe])
        return torch.stack(forecasts, dim=1)


@frozen(kw_only=True, eq=False)
class MarkovModel:
    """What a ``Driver`` runs on."""

    target: MarkovTarget
    drafter: MarkovDrafter
    arena: Arena = field()

    @classmethod
    def build(
        cls,
        target: Tensor,
        drafter: Tensor,
        *,
        slots: int = 4,
        extended: bool = True,
        confidence: Tensor | None = None,
        grammar: bool = False,
    ) -> MarkovModel:
        """Both tables are [V, V] logits. confidence: see ``ForecastingDrafter``; None for a drafter without forecasts. grammar:
        with masks."""
        arena = Arena(
            slots=slots,
            max_draft_tokens=HORIZON,
            stop_ids=4,
            device=torch.device("cpu"),
            extended=extended,
            vocab_size=target.shape[1],
            confidence_width=0 if confidence is None else HORIZON,
            grammar=grammar,
        )
        own = (
            MarkovDrafter(drafter, slots=slots)
            if confidence is None
            else ForecastingDrafter(drafter, confidence, slots=slots)
        )
        return cls(target=MarkovTarget(target, slots=slots), drafter=own, arena=arena)

    def admit(
        self,
        slot: int,
        prompt: Sequence[int],
        *,
        budget: int = 64,
        stops: Sequence[int] = (),
        output: Sequence[int] = (),
        min_new_tokens: int = 0,
        **sampling: object,
    ) -> None:
        """As ``Prepared.admit`` of a real model."""
        inputs = [*prompt, *output[:-1]]
        self.target.store.reset(slot)
        self.drafter.store.reset(slot)
        self.target.last[slot] = inputs[-1]
        self.arena.requests.admit(
            slot,
            request=slot + 100,
            epoch=1,
            consumed=len(inputs),
            budget=budget,
            sampling=SamplingParams(**sampling),
            stop_ids=tuple(stops),
            prompt=prompt,
            output=output,
            min_new_tokens=min_new_tokens,
        )


def random_table(vocab: int, seed: int, *, spread: float = 1.5, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal logits [V, V]."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(vocab, vocab, generator=generator, dtype=torch.float64) * spread).to(dtype)
