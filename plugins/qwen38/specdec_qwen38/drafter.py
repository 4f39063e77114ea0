"""The MTP drafter of Qwen3.8-Flash: one decoder layer fed with the target's residual and the next token.

    A = rms(e) · (1 + w_e) · Weᵀ          e: embedding of the next token (the target's table)
    B = rms(r) · (1 + w_r), per stream · Whᵀ     r: multi-stream residual, one mean square over all D values
    Z[s] = B[s] + A                       input streams of the layer

The layer's output streams (before the mixer) are the next step's r; the mixer's output goes through the target's head.
Row i pairs h[i] with x[i+1] at position i. Proposal rows use the drafter's own r and never survive a round: after
verification ``absorb`` rewrites their positions from real feedback. Source: b12x 1.5.1 ``sequence.mtp_feedback`` for the
fusion, the ``qwen4_exp`` layer for the rest.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.checkpoint.reader import Checkpoint
from specdec.declaration import Recipe
from specdec.interfaces import Capacities, Proposer
from specdec.ops.norms import rms_norm
from specdec.state.requests import Lanes
from specdec.state.store import StateStore

from .hyper_connection import HyperConnection, combine
from .mixture import load_mixture
from .sparse_attention import RowPlan, SparseAttention, open_group_state
from .state import drafter_layout
from .target import QwenTarget
from .weights import DRAFTER_PREFIX, Weights


class MtpDrafter:
    """Draft weights and draft state; embedding and head are the target's. Methods are the core's ``Drafter`` protocol."""

    def __init__(self, checkpoint: Checkpoint, target: QwenTarget, capacities: Capacities) -> None:
        g, dtype, device = target.geometry, target.dtype, target.device
        weights = Weights(checkpoint, g, prefix=DRAFTER_PREFIX, dtype=dtype, device=device)
        layer = weights.under("layers.0.")
        self.geometry = g
        self.target = target
        self.token_scale = weights.norm_scale("pre_fc_norm_embedding.weight", g.hidden_size)
        self.residual_scale = weights.norm_scale("pre_fc_norm_hidden.weight", g.streams_width)
        self.token_projection = weights.matrix("fc_embedding.weight", g.hidden_size, g.hidden_size)
        self.residual_projection = weights.matrix("fc_hidden.weight", g.hidden_size, g.hidden_size)
        self.attention_mixer = HyperConnection.load(layer.under("attn_hyper_connection."), injects=True)
        self.attention = SparseAttention.load(layer.under("self_attn."))
        self.expert_mixer = HyperConnection.load(layer.under("mlp_hyper_connection."), injects=True)
        # W4A16: activations are never quantised here, whatever the target's experts do
        self.experts = load_mixture(layer.under("mlp."), quantised_activations=False)
        self.final_mixer = HyperConnection.load(weights.under("hyper_connection_mixer."), injects=False)
        self.store = StateStore(
            drafter_layout(g, max_draft_tokens=capacities.max_draft_tokens, dtype=capacities.dtype),
            slots=capacities.slots,
            pages=capacities.pages,
            context=capacities.context,
            device=device,
        )
        self._steps = torch.arange(max(self.store.horizon, capacities.prefill_rows), device=device)

    @classmethod
    def load(cls, *, recipe: Recipe, checkpoint: Checkpoint, target: QwenTarget, capacities: Capacities) -> MtpDrafter:
        """Loads ``mtp.*`` and allocates draft state.

        Raises CheckpointError for a missing or misshapen tensor, or unknown storage.
        """
        return cls(checkpoint, target, capacities)

    # --- one layer -------------------------------------------------------------------------------------------------

    def _plan(self, slots: Tensor, positions: Tensor, valid: Tensor | None = None) -> RowPlan:
        target = self.target
        return RowPlan.build(
            self.store,
            self.geometry,
            target.rope,
            slots=slots,
            positions=positions,
            tokens=target.tokens,
            valid=valid,
        )

    def fuse(self, residual: Tensor, tokens: Tensor) -> Tensor:
        """Input streams Z. residual: [T, D]; tokens: [T] int64 in [0, V). Returns [T, S, H]."""
        g = self.geometry
        embedded = F.embedding(tokens, self.target.embedding)
        a = F.linear(rms_norm(embedded, self.token_scale, g.rms_norm_eps), self.token_projection)
        normed = rms_norm(residual, self.residual_scale, g.rms_norm_eps).view(-1, g.hc_count, g.hidden_size)
        return F.linear(normed, self.residual_projection) + a.unsqueeze(1)

    def _step(self, residual: Tensor, tokens: Tensor, plan: RowPlan) -> tuple[Tensor, Tensor]:
        """Returns the layer's residual [T, D] and draft logits [T, V]."""
        streams = self.fuse(residual, tokens)
        m, inject = self.attention_mixer.mix(streams)
        streams = combine(streams, self.attention(m, plan, 0), inject)
        m, inject = self.expert_mixer.mix(streams)
        streams = combine(streams, self.experts(m), inject)
        return streams.flatten(1), F.linear(self.final_mixer.mix(streams)[0], self.target.head)

    def _absorb_rows(self, residual: Tensor, tokens: Tensor, plan: RowPlan) -> None:
        """Writes keys, values and selector state of teacher-forced rows; nothing is attended, the layer has no deeper state."""
        m, _ = self.attention_mixer.mix(self.fuse(residual, tokens))
        self.attention.write(m, plan, 0)

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

    # --- Drafter protocol ------------------------------------------------------------------------------------------

    def prefill(self, feedback: Tensor, tokens: Tensor, slot: Tensor, start: int) -> None:
        """See ``Drafter.prefill``."""
        rows = tokens.shape[0]
        positions = (self._steps[:rows] + start).unsqueeze(0)
        self._check_history(slot, positions[:, 0])
        self._absorb_rows(feedback, tokens, self._plan(slot, positions))
        self._set_history(slot, positions[:, -1], torch.ones_like(slot))

    def propose(self, lanes: Lanes, draft_tokens: int, proposer: Proposer) -> None:
        """See ``Drafter.propose``. Proposal rows are a rejected tail of the interval that starts at row N−1."""
        slots = lanes.slots
        first = lanes.consumed - 1
        self._check_history(slots, first)
        residual, token = self.target.feedback(slots), lanes.pending
        plan = self._plan(slots, first.unsqueeze(1) + self._steps[: max(draft_tokens, 1)])
        if draft_tokens == 0:
            self._absorb_rows(residual, token, plan)
        for depth, step in zip(range(draft_tokens), plan.steps(self.geometry)):
            residual, logits = self._step(residual, token, step)
            token = proposer.draw(depth, logits)

    def absorb(self, lanes: Lanes, tokens: Tensor, emitted: Tensor) -> None:
        """See ``Drafter.absorb``."""
        slots, rows = lanes.slots, tokens.shape[1] - 1
        absorbed = (emitted - 1).clamp(min=0)
        if rows:
            steps = self._steps[:rows]
            valid = steps < absorbed.unsqueeze(1)
            plan = self._plan(slots, lanes.consumed.unsqueeze(1) + steps, valid)
            feedback = self.target.feedback_rows(slots, rows).flatten(0, 1)
            self._absorb_rows(feedback, tokens[:, :rows].clamp(min=0).reshape(-1), plan)
        # with one emitted token nothing is absorbed and the interval that began at row N−1 stays the last one
        self._set_history(slots, lanes.consumed - (absorbed == 0).to(torch.int64), absorbed.clamp(min=1))

    def snapshot(self, slots: Tensor) -> dict[str, Tensor]:
        """See ``Drafter.snapshot``."""
        return self.store.state_after(slots, torch.zeros_like(slots))

    def restore(self, slot: int, state: Mapping[str, Tensor], consumed: int) -> None:
        """See ``Drafter.restore``."""
        rows = max(consumed - 1, 0)
        changed = open_group_state(state, rows, self.geometry)
        self.store.restore(slot, {**state, **changed, "rows": torch.full_like(state["rows"], rows)})

    def faults(self, slots: Tensor) -> Tensor:
        """See ``Target.faults``."""
        return self.store.faults.index_select(0, slots)
