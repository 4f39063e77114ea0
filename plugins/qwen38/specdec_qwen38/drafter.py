"""The MTP drafter of Qwen3.8-Flash: one decoder layer fed with the target's residual and the next token.

    A = rms(e) · (1 + w_e) · Weᵀ          e: embedding of the next token (the target's table)
    B = rms(r) · (1 + w_r), per stream · Whᵀ     r: multi-stream residual, one mean square over all D values
    Z[s] = B[s] + A                       input streams of the layer

The layer's output streams (before the mixer) are the next step's r; the mixer's output goes through the target's head.
Row i pairs h[i] with x[i+1] at position i. Proposal rows use the drafter's own r and never survive a round: after
verification ``absorb`` rewrites their positions from real feedback (``specdec.drafting.recursive``). Source: b12x 1.5.1
``sequence.mtp_feedback`` for the fusion, the ``qwen4_exp`` layer for the rest.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from specdec.checkpoint.reader import Checkpoint
from specdec.declaration import Recipe
from specdec.drafting.recursive import RecursiveDrafter
from specdec.interfaces import Capacities
from specdec.ops.norms import rms_norm

from .hyper_connection import HyperConnection, combine
from .mixture import load_mixture
from .sparse_attention import RopedRows, SparseAttention
from .state import drafter_layout
from .target import QwenTarget
from .weights import DRAFTER_PREFIX, Weights


class MtpDrafter(RecursiveDrafter[RopedRows]):
    """Draft weights and draft state; embedding and head are the target's. Methods are the core's ``Drafter`` protocol."""

    target: QwenTarget

    def __init__(self, checkpoint: Checkpoint, target: QwenTarget, capacities: Capacities) -> None:
        g, dtype, device = target.geometry, target.dtype, target.device
        layout = drafter_layout(g, max_draft_tokens=capacities.max_draft_tokens, dtype=capacities.dtype)
        super().__init__(target, layout, capacities, group_tokens=g.indexer_compress_ratio)
        weights = Weights(checkpoint, g, prefix=DRAFTER_PREFIX, dtype=dtype, device=device)
        layer = weights.under("layers.0.")
        self.geometry = g
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

    @classmethod
    def load(cls, *, recipe: Recipe, checkpoint: Checkpoint, target: QwenTarget, capacities: Capacities) -> MtpDrafter:
        """Loads ``mtp.*`` and allocates draft state.

        Raises CheckpointError for a missing or misshapen tensor, or unknown storage.
        """
        return cls(checkpoint, target, capacities)

    # --- one layer -------------------------------------------------------------------------------------------------

    def plan(self, slots: Tensor, positions: Tensor, valid: Tensor | None = None) -> RopedRows:
        """See ``RecursiveDrafter.plan``."""
        target = self.target
        return RopedRows.of(
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

    def step(self, feedback: Tensor, tokens: Tensor, plan: RopedRows) -> tuple[Tensor, Tensor]:
        """See ``RecursiveDrafter.step``. The next row takes the layer's residual."""
        streams = self.fuse(feedback, tokens)
        m, inject = self.attention_mixer.mix(streams)
        streams = combine(streams, self.attention(m, plan, 0), inject)
        m, inject = self.expert_mixer.mix(streams)
        streams = combine(streams, self.experts(m), inject)
        return streams.flatten(1), F.linear(self.final_mixer.mix(streams)[0], self.target.head)

    def absorb_rows(self, feedback: Tensor, tokens: Tensor, plan: RopedRows) -> None:
        """See ``RecursiveDrafter.absorb_rows``. Keys, values and selector state: the layer has no deeper state."""
        m, _ = self.attention_mixer.mix(self.fuse(feedback, tokens))
        self.attention.write(m, plan, 0)
