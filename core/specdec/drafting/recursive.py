"""A drafter inside the model: one layer that is fed its own output and the token just drawn.

Row i pairs the feedback h[i] with token x[i + 1] at position i; N consumed tokens make N − 1 rows of history. A proposal
begins with row N − 1, saved feedback and pending token, and goes on with the layer's own output. Rows of a proposal never
survive a round: after verification ``absorb`` rewrites their positions from real feedback, and ``commit`` counts them.

``RecursiveDrafter`` keeps that account for any model. The model supplies the plan of rows, one step, and the writing of
absorbed rows. Its draft state is one grouped context (``specdec.ops.grouped_rows``) and the row count:
``raw_tags``, ``anchor`` and ``rows`` among the declared fields.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor

from specdec.declaration import StateLayout
from specdec.interfaces import Capacities, Proposer, Target
from specdec.ops.grouped_rows import RowPlan, open_group_state
from specdec.state.requests import Lanes
from specdec.state.store import StateStore

Plan = TypeVar("Plan", bound=RowPlan)


class RecursiveDrafter(ABC, Generic[Plan]):
    """History accounting of a recursive drafter; the methods below the line are the core's ``Drafter`` protocol."""

    #: Row i needs token i + 1.
    lag = 1

    def __init__(self, target: Target, layout: StateLayout, capacities: Capacities, *, group_tokens: int) -> None:
        """Allocates draft state on the target's device. target: whose feedback is read; group_tokens: tokens of a key group."""
        device = target.store.device
        self.target = target
        self._group_tokens = group_tokens
        self.store = StateStore(
            layout, slots=capacities.slots, pages=capacities.pages, context=capacities.context, device=device
        )
        self._steps = torch.arange(max(self.store.horizon, capacities.prefill_rows), device=device)

    @abstractmethod
    def plan(self, slots: Tensor, positions: Tensor, valid: Tensor | None = None) -> Plan:
        """Plans rows of one call; see ``RowPlan.build``."""

    @abstractmethod
    def step(self, feedback: Tensor, tokens: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        """One row per lane through the layer. feedback: [B, D]; tokens: [B] int64, the ones after the row's position.

        Returns what the next row takes as feedback [B, D], and draft logits [B, V]. Writes the row's state.
        """

    @abstractmethod
    def absorb_rows(self, feedback: Tensor, tokens: Tensor, plan: Plan) -> None:
        """Writes the state of B·T teacher-forced rows; nothing is attended. feedback: [B·T, D]; tokens: [B·T] int64."""

    # --- account of history ------------------------------------------------------------------------------------------

    def _set_history(self, slots: Tensor, anchor: Tensor, accepted: Tensor) -> None:
        """The last interval starts at ``anchor`` and ``accepted`` ≥ 1 of its rows are history: anchor + accepted rows in all.

        This is the commit of every draft field.
        """
        self.store.write_row("anchor", slots, anchor)
        self.store.write_row("rows", slots, anchor + accepted)
        self.store.commit(slots, accepted)

    def _check_history(self, slots: Tensor, first: Tensor) -> None:
        """The next row must continue both the absorbed rows and the last interval."""
        store = self.store
        expected = store.read_row("anchor", 0, slots) + store.selected.index_select(0, slots) + 1
        store.flag(slots, (expected != first) | (store.read_row("rows", 0, slots) != first))

    # --- Drafter protocol --------------------------------------------------------------------------------------------

    def prefill(self, feedback: Tensor, tokens: Tensor, slot: Tensor, start: int | Tensor) -> None:
        """See ``Drafter.prefill``."""
        rows = tokens.shape[0]
        positions = (self._steps[:rows] + start).unsqueeze(0)
        self._check_history(slot, positions[:, 0])
        self.absorb_rows(feedback, tokens, self.plan(slot, positions))
        self._set_history(slot, positions[:, -1], torch.ones_like(slot))

    def propose(self, lanes: Lanes, draft_tokens: int, proposer: Proposer) -> Tensor | None:
        """See ``Drafter.propose``. Proposal rows are a rejected tail of the interval that starts at row N−1."""
        slots = lanes.slots
        first = lanes.consumed - 1
        self._check_history(slots, first)
        feedback, token = self.target.feedback(slots), lanes.pending
        plan = self.plan(slots, first.unsqueeze(1) + self._steps[: max(draft_tokens, 1)])
        if draft_tokens == 0:
            self.absorb_rows(feedback, token, plan)
        for depth, row in zip(range(draft_tokens), plan.steps()):
            feedback, logits = self.step(feedback, token, row)
            token = proposer.draw(depth, logits)
        return None

    def absorb(self, lanes: Lanes, tokens: Tensor, emitted: Tensor) -> None:
        """See ``Drafter.absorb``."""
        rows = tokens.shape[1] - 1
        if rows:
            steps = self._steps[:rows]
            valid = steps < (emitted - 1).unsqueeze(1)
            plan = self.plan(lanes.slots, lanes.consumed.unsqueeze(1) + steps, valid)
            feedback = self.target.feedback_rows(lanes.slots, rows).flatten(0, 1)
            self.absorb_rows(feedback, tokens[:, :rows].clamp(min=0).reshape(-1), plan)

    def commit(self, lanes: Lanes, emitted: Tensor) -> None:
        """See ``Drafter.commit``."""
        absorbed = (emitted - 1).clamp(min=0)
        # with one emitted token nothing is absorbed and the interval that began at row N−1 stays the last one
        self._set_history(lanes.slots, lanes.consumed - (absorbed == 0).to(torch.int64), absorbed.clamp(min=1))

    def snapshot(self, slots: Tensor, taken: Tensor | None = None) -> dict[str, Tensor]:
        """See ``Drafter.snapshot``. Rows are addressed by position and tag, so ``restore`` finds any earlier length in it."""
        return self.store.state_after(slots, torch.zeros_like(slots))

    def restore(self, slot: Tensor, state: Mapping[str, Tensor], consumed: Tensor) -> None:
        """See ``Drafter.restore``."""
        rows = (consumed - 1).clamp(min=0)
        changed = open_group_state(state, rows, self._group_tokens)
        self.store.restore(slot, {**state, **changed, "rows": torch.zeros_like(state["rows"]) + rows})

    def faults(self, slots: Tensor) -> Tensor:
        """See ``Drafter.faults``."""
        return self.store.faults.index_select(0, slots)
