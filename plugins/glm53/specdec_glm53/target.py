"""The GLM-5.3-Flash target: embedding, decoder layers on four streams, mean of the streams, final norm, vocabulary head.

One row function serves prompts, decoding and verification (``specdec.round.row_target``). Every verified row leaves a
recurrent matrix in a column of its own, and commit selects among them. The output of the final norm is both the head's input
and the drafter's feedback. Source: the ``glm5_next`` class of transformers 5.24.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from specdec.checkpoint.quantisation import quantises_activations
from specdec.checkpoint.reader import Checkpoint
from specdec.checkpoint.weights import Weights, head_name, text_prefix
from specdec.declaration import Recipe
from specdec.interfaces import Capacities
from specdec.ops.grouped_rows import RowPlan, move_anchor
from specdec.ops.moe import Mixture
from specdec.ops.norms import rms_norm
from specdec.round.row_target import RowTarget
from specdec.tensor_names import TEXT_PREFIX, TEXT_PREFIXES

from .delta_attention import DeltaAttention
from .geometry import Geometry
from .hyper_connection import HyperConnection, combine
from .latent_attention import IndexedAttention
from .mixture import DenseBlock, load_dense, load_mixture
from .state import target_layout


@frozen(kw_only=True, eq=False)
class DecoderLayer:
    """One layer: hyper-connection, norm and block, twice."""

    attention_mixer: HyperConnection
    attention_scale: Tensor  # [H], in the accumulate dtype
    attention: DeltaAttention | IndexedAttention
    forward_mixer: HyperConnection
    forward_scale: Tensor
    forward: DenseBlock | Mixture

    @classmethod
    def load(cls, weights: Weights, geometry: Geometry, index: int, *, quantised_activations: bool) -> DecoderLayer:
        """Reads layer ``index``. Raises CheckpointError for a missing or misshapen tensor."""
        g = geometry
        attention, forward = weights.under("self_attn."), weights.under("mlp.")
        return cls(
            attention_mixer=HyperConnection.load(weights, g, "attn"),
            attention_scale=weights.precise_vector("input_layernorm.weight", g.hidden_size),
            attention=DeltaAttention.load(attention, g)
            if g.layer_types[index] == "linear_attention"
            else IndexedAttention.load(attention, g),
            forward_mixer=HyperConnection.load(weights, g, "ffn"),
            forward_scale=weights.precise_vector("post_attention_layernorm.weight", g.hidden_size),
            forward=load_dense(forward, g)
            if g.mlp_layer_types[index] == "dense"
            else load_mixture(forward, g, quantised_activations=quantised_activations),
        )


class GlmTarget(RowTarget):
    """Target weights and state. Build with ``build``; methods are the core's ``Target`` protocol."""

    sampling_field = "feedback"

    def __init__(
        self,
        checkpoint: Checkpoint,
        geometry: Geometry,
        capacities: Capacities,
        device: torch.device,
        ring_extent: int | None = None,
    ) -> None:
        """ring_extent: see ``state.target_layout``."""
        g, dtype = geometry, getattr(torch, capacities.dtype)
        layout = target_layout(
            g, max_draft_tokens=capacities.max_draft_tokens, dtype=capacities.dtype, ring_extent=ring_extent
        )
        super().__init__(layout, capacities, device, group_tokens=g.index_kpool)
        weights = Weights(checkpoint, prefix=text_prefix(checkpoint), dtype=dtype, device=device)
        self.geometry = g
        self.vocab_size = g.vocab_size
        self.device = device
        self.dtype = dtype
        self.embedding = weights.matrix("embed_tokens.weight", g.vocab_size, g.hidden_size)
        whole = Weights(checkpoint, prefix="", dtype=dtype, device=device)
        self.head = whole.matrix(head_name(checkpoint), g.vocab_size, g.hidden_size)
        self.final_scale = weights.precise_vector("norm.weight", g.hidden_size)
        self.layers = [self._load_layer(weights, index) for index in range(g.num_hidden_layers)]

    @classmethod
    def build(
        cls, *, recipe: Recipe, checkpoint: Checkpoint, capacities: Capacities, device: torch.device
    ) -> GlmTarget:
        """Loads the target and allocates its state.

        Raises CheckpointError for a missing or misshapen tensor, unknown storage, or a configuration value that has no
        implementation.
        """
        return cls(checkpoint, Geometry.from_config(checkpoint.config), capacities, device)

    def _load_layer(self, weights: Weights, index: int) -> DecoderLayer:
        layer = weights.under(f"layers.{index}.")
        # configurations list modules under the official names whatever the tensors are called
        aliases = dict.fromkeys(TEXT_PREFIXES, TEXT_PREFIX)
        quantised = quantises_activations(weights.checkpoint, f"{layer.prefix}mlp.experts", aliases=aliases)
        return DecoderLayer.load(layer, self.geometry, index, quantised_activations=quantised)

    def run_rows(self, tokens: Tensor, slots: Tensor, positions: Tensor, *, prompt: bool) -> tuple[Tensor, Tensor]:
        """See ``RowTarget.run_rows``."""
        g, store = self.geometry, self.store
        plan = RowPlan.build(
            store, ratio=g.index_kpool, budget=g.budget_groups, slots=slots, positions=positions, tokens=self.tokens
        )
        move_anchor(store, slots, positions, prompt=prompt)
        column = store.column_index(slots, "kda_state")
        streams = F.embedding(tokens.reshape(-1), self.embedding).unsqueeze(1).repeat(1, g.hc_mult, 1)
        linear = indexed = 0
        for layer in self.layers:
            u, post, comb = layer.attention_mixer.mix(streams)
            x = rms_norm(u, layer.attention_scale, g.rms_norm_eps)
            if isinstance(layer.attention, DeltaAttention):
                y = layer.attention(x, store, linear, slots, column, prompt=prompt)
                linear += 1
            else:
                y = layer.attention(x, plan, indexed)
                indexed += 1
            streams = combine(streams, y, post, comb)
            u, post, comb = layer.forward_mixer.mix(streams)
            streams = combine(streams, layer.forward(rms_norm(u, layer.forward_scale, g.rms_norm_eps)), post, comb)
        h = rms_norm(streams.mean(1), self.final_scale, g.rms_norm_eps)
        return h, h
