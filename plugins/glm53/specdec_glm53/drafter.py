"""The MTP drafter of GLM-5.3-Flash: one indexed layer with ordinary residuals, fed with a hidden state and the next token.

    z = (rms(e) | rms(h)) Wehᵀ            e: embedding of the next token (the target's table); h: the target's final-norm output
    r = z + attention(rms(z));   r = r + experts(rms(r));   m = rms(r)

m goes through the target's head and is the next row's h. A row's state depends on z alone, so absorption stops there. Every
row chooses its own groups: ``index_share_for_mtp_iteration`` of the configuration, which lets engines reuse the choice of an
earlier row, would change acceptance only. Source: SGLang 0.5.23 and vLLM for the fusion, the ``glm5_next`` class of
transformers 5.24 for the blocks. All heads and experts are assumed local.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.checkpoint.reader import Checkpoint
from specdec.checkpoint.weights import Weights, text_prefix
from specdec.declaration import Recipe
from specdec.drafting.recursive import RecursiveDrafter
from specdec.errors import CheckpointError
from specdec.interfaces import Capacities
from specdec.ops.grouped_rows import RowPlan
from specdec.ops.norms import rms_norm

from .latent_attention import IndexedAttention
from .mixture import load_mixture
from .state import drafter_layout
from .target import GlmTarget


class MtpDrafter(RecursiveDrafter[RowPlan]):
    """Draft weights and draft state; embedding and head are the target's. Methods are the core's ``Drafter`` protocol."""

    target: GlmTarget

    def __init__(
        self, checkpoint: Checkpoint, target: GlmTarget, capacities: Capacities, ring_extent: int | None = None
    ) -> None:
        """ring_extent: see ``state.drafter_layout``."""
        g = target.geometry
        layout = drafter_layout(
            g, max_draft_tokens=capacities.max_draft_tokens, dtype=capacities.dtype, ring_extent=ring_extent
        )
        super().__init__(target, layout, capacities, group_tokens=g.index_kpool)
        prefix = f"{text_prefix(checkpoint)}layers.{g.mtp_layer}."
        weights = Weights(checkpoint, prefix=prefix, dtype=target.dtype, device=target.device)
        hidden = g.hidden_size
        self.geometry = g
        self.token_scale = weights.precise_vector("enorm.weight", hidden)
        self.hidden_scale = weights.precise_vector("hnorm.weight", hidden)
        self.fusion = weights.matrix("eh_proj.weight", hidden, 2 * hidden)
        self.attention_scale = weights.precise_vector("input_layernorm.weight", hidden)
        self.attention = IndexedAttention.load(weights.under("self_attn."), g)
        self.forward_scale = weights.precise_vector("post_attention_layernorm.weight", hidden)
        # W4A16: activations are never quantised here, whatever the target's experts do
        self.experts = load_mixture(weights.under("mlp."), g, quantised_activations=False)
        self.final_scale = weights.precise_vector("shared_head.norm.weight", hidden)

    @classmethod
    def load(cls, *, recipe: Recipe, checkpoint: Checkpoint, target: GlmTarget, capacities: Capacities) -> MtpDrafter:
        """Loads the layer after the target's last one and allocates draft state.

        Raises CheckpointError for a missing or misshapen tensor, unknown storage, or a checkpoint without that layer.
        """
        if not target.geometry.num_nextn_predict_layers:
            raise CheckpointError(
                f"{checkpoint.directory}: config.json: num_nextn_predict_layers is 0, so there is no MTP layer to draft with; "
                "run without drafts (--no-mtp)"
            )
        return cls(checkpoint, target, capacities)

    def _norm(self, x: Tensor, scale: Tensor) -> Tensor:
        return rms_norm(x, scale, self.geometry.rms_norm_eps)

    def plan(self, slots: Tensor, positions: Tensor, valid: Tensor | None = None) -> RowPlan:
        """See ``RecursiveDrafter.plan``."""
        g = self.geometry
        return RowPlan.build(
            self.store,
            ratio=g.index_kpool,
            budget=g.budget_groups,
            slots=slots,
            positions=positions,
            tokens=self.target.tokens,
            valid=valid,
        )

    def fuse(self, feedback: Tensor, tokens: Tensor) -> Tensor:
        """Input z of the layer. feedback: [T, H]; tokens: [T] int64 in [0, V). Returns [T, H]."""
        embedded = self._norm(F.embedding(tokens, self.target.embedding), self.token_scale)
        return F.linear(torch.cat([embedded, self._norm(feedback, self.hidden_scale)], dim=-1), self.fusion)

    def step(self, feedback: Tensor, tokens: Tensor, plan: RowPlan) -> tuple[Tensor, Tensor]:
        """See ``RecursiveDrafter.step``. The next row takes the output of the layer's final norm."""
        z = self.fuse(feedback, tokens)
        r = z + self.attention(self._norm(z, self.attention_scale), plan, 0)
        r = r + self.experts(self._norm(r, self.forward_scale))
        m = self._norm(r, self.final_scale)
        return m, F.linear(m, self.target.head)

    def absorb_rows(self, feedback: Tensor, tokens: Tensor, plan: RowPlan) -> None:
        """See ``RecursiveDrafter.absorb_rows``. Latents, group keys and ring: the layer has no other state."""
        self.attention.write(self._norm(self.fuse(feedback, tokens), self.attention_scale), plan, 0)
