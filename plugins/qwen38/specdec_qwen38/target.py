"""The Qwen3.8-Flash target: embedding, 48 decoder layers on four streams, final mixer, vocabulary head.

One row function serves prompts, decoding and verification (``specdec.round.row_target``). Source: the ``qwen4_exp`` class of
transformers 5.24.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from specdec.checkpoint.quantisation import quantises_activations
from specdec.checkpoint.reader import Checkpoint
from specdec.checkpoint.weights import text_prefix
from specdec.declaration import Recipe
from specdec.interfaces import Capacities
from specdec.ops.delta_rule import delta_rule_replay
from specdec.ops.grouped_rows import move_anchor
from specdec.ops.moe import Mixture
from specdec.ops.rope import RopeTable
from specdec.round.row_target import RowTarget
from specdec.state.requests import Lanes

from .delta_net import DeltaNet
from .geometry import Geometry
from .hyper_connection import HyperConnection, combine
from .mixture import load_mixture
from .ngram_embedding import NgramEmbedding
from .sparse_attention import RopedRows, SparseAttention
from .state import target_layout
from .weights import Weights, head_weight, module_aliases

# what a verified row leaves behind where the recurrence is compact
RECORDS = ("delta_corrections", "delta_keys", "delta_decays")


@frozen(kw_only=True, eq=False)
class DecoderLayer:
    """One layer: mixer and block twice, and the n-gram embedding where the layer has one."""

    attention_mixer: HyperConnection
    block: DeltaNet | SparseAttention
    expert_mixer: HyperConnection
    experts: Mixture
    ngrams: NgramEmbedding | None = None

    @classmethod
    def load(cls, weights: Weights, kind: str, *, quantised_activations: bool, ple_ordinal: int | None) -> DecoderLayer:
        attention = kind == "full_attention"
        return cls(
            attention_mixer=HyperConnection.load(weights.under("attn_hyper_connection."), injects=True),
            block=SparseAttention.load(weights.under("self_attn."))
            if attention
            else DeltaNet.load(weights.under("linear_attn.")),
            expert_mixer=HyperConnection.load(weights.under("mlp_hyper_connection."), injects=True),
            experts=load_mixture(weights.under("mlp."), quantised_activations=quantised_activations),
            ngrams=None if ple_ordinal is None else NgramEmbedding.load(weights.under("ple."), ple_ordinal),
        )


class QwenTarget(RowTarget):
    """Target weights and state. Build with ``build``; methods are the core's ``Target`` protocol."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        geometry: Geometry,
        capacities: Capacities,
        device: torch.device,
        recurrence: str = "records",
    ) -> None:
        """recurrence: see ``state.target_layout``."""
        dtype = getattr(torch, capacities.dtype)
        layout = target_layout(
            geometry, max_draft_tokens=capacities.max_draft_tokens, dtype=capacities.dtype, recurrence=recurrence
        )
        super().__init__(layout, capacities, device, group_tokens=geometry.indexer_compress_ratio)
        weights = Weights(checkpoint, geometry, prefix=text_prefix(checkpoint), dtype=dtype, device=device)
        self.geometry = geometry
        self.vocab_size = geometry.vocab_size
        self.device = device
        self.dtype = dtype
        self.embedding = weights.matrix("embed_tokens.weight", geometry.vocab_size, geometry.hidden_size)
        self.head = head_weight(checkpoint, geometry, dtype, device)
        self.final_mixer = HyperConnection.load(weights.under("hyper_connection_mixer."), injects=False)
        self.layers = [self._load_layer(weights, index) for index in range(geometry.num_hidden_layers)]
        self.compact = recurrence == "records"
        self.rope = RopeTable.build(
            positions=self.tokens,
            rotated=geometry.rotary_dim,
            theta=geometry.rope_theta,
            dtype=dtype,
            device=device,
        )

    @classmethod
    def build(
        cls, *, recipe: Recipe, checkpoint: Checkpoint, capacities: Capacities, device: torch.device
    ) -> QwenTarget:
        """Loads the target and allocates its state.

        Raises CheckpointError for a missing or misshapen tensor, unknown storage, or a configuration value that has no
        implementation.
        """
        return cls(checkpoint, Geometry.from_config(checkpoint.config), capacities, device)

    def _load_layer(self, weights: Weights, index: int) -> DecoderLayer:
        layer = weights.under(f"layers.{index}.")
        aliases = module_aliases(self.geometry)
        ple = self.geometry.ple_layers
        return DecoderLayer.load(
            layer,
            self.geometry.layer_types[index],
            quantised_activations=quantises_activations(
                weights.checkpoint, f"{layer.prefix}mlp.experts", aliases=aliases
            ),
            ple_ordinal=ple.index(index) if index in ple else None,
        )

    # --- the rows of one call ------------------------------------------------------------------------------------

    def run_rows(self, tokens: Tensor, slots: Tensor, positions: Tensor, *, prompt: bool) -> tuple[Tensor, Tensor]:
        """See ``RowTarget.run_rows``. Feedback is the streams after the last layer; the final mixer makes the head's input."""
        g, store = self.geometry, self.store
        plan = RopedRows.of(store, g, self.rope, slots=slots, positions=positions, tokens=self.tokens)
        move_anchor(store, slots, positions, prompt=prompt)
        column = None if self.compact else store.column_index(slots, "delta_state")
        streams = F.embedding(tokens.reshape(-1), self.embedding).unsqueeze(1).repeat(1, g.hc_count, 1)
        seen = {"linear_attention": 0, "full_attention": 0, "ngrams": 0}
        for layer, kind in zip(self.layers, g.layer_types, strict=True):
            if layer.ngrams is not None:
                streams = streams + layer.ngrams(streams, tokens, store, seen["ngrams"], slots, prompt=prompt)
                seen["ngrams"] += 1
            m, inject = layer.attention_mixer.mix(streams)
            if isinstance(layer.block, DeltaNet):
                y = layer.block(m, store, seen[kind], slots, column, prompt=prompt)
            else:
                y = layer.block(m, plan, seen[kind])
            seen[kind] += 1
            streams = combine(streams, y, inject)
            m, inject = layer.expert_mixer.mix(streams)
            streams = combine(streams, layer.experts(m), inject)
        if g.ple_layers:
            self._keep_tokens(tokens, slots, prompt=prompt)
        return streams.flatten(1), self.final_mixer.mix(streams)[0]

    def _keep_tokens(self, tokens: Tensor, slots: Tensor, *, prompt: bool) -> None:
        store = self.store
        if prompt:
            history = torch.cat([store.read_window("ngram_tokens", 0, slots), tokens], dim=1)
            store.write_window("ngram_tokens", 0, slots, history[:, tokens.shape[1] :])
        else:
            store.write_candidates("ngram_tokens", 0, slots, tokens)

    # --- what the compact recurrence adds --------------------------------------------------------------------------

    def commit(self, lanes: Lanes, taken: Tensor) -> None:
        """See ``Target.commit``. Wide rounds replay the recorded rows; a single row went into the live matrix already."""
        if self.compact:
            if self.width > 1:
                self.store.write_rows("delta_state", lanes.slots, self._replayed(lanes.slots, taken))
            self.store.commit_records(*RECORDS)
        super().commit(lanes, taken)

    def _replayed(self, slots: Tensor, taken: Tensor) -> Tensor:
        """Recurrent matrices [layers, B, …] after ``taken`` rows of the last verification."""
        store = self.store
        state = store["delta_state"][:, :, 0].index_select(1, slots)
        corrections, keys, decays = (store.read_records(name, slots, self.width) for name in RECORDS)
        return delta_rule_replay(state, corrections, keys, decays, taken, self.width)

    def snapshot(self, slots: Tensor, taken: Tensor | None = None) -> dict[str, Tensor]:
        """See ``Target.snapshot``."""
        state = super().snapshot(slots, taken)
        if self.compact and taken is not None and self.width > 1:
            state["delta_state"] = self._replayed(slots, taken)
        return state
