"""The Qwen3.8-Flash target: embedding, 48 decoder layers on four streams, final mixer, vocabulary head.

One row function serves prompts, decoding and verification. A prompt chunk commits as it goes; a verification writes
candidates only, and ``commit`` selects among them. Source: the ``qwen4_exp`` class of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from specdec.checkpoint.matrices import quantisation_of
from specdec.checkpoint.reader import Checkpoint
from specdec.declaration import Recipe
from specdec.interfaces import Capacities
from specdec.ops.delta_rule import delta_rule_replay
from specdec.ops.rope import RopeTable
from specdec.state.requests import Lanes
from specdec.state.store import StateStore

from .delta_net import DeltaNet
from .geometry import Geometry
from .hyper_connection import HyperConnection, combine
from .mixture import Mixture, load_mixture
from .ngram_embedding import NgramEmbedding
from .sparse_attention import RowPlan, SparseAttention, open_group_state
from .state import PAGE_TOKENS, target_layout
from .weights import Weights, head_weight, target_prefix

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


class QwenTarget:
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
        weights = Weights(checkpoint, geometry, prefix=target_prefix(checkpoint), dtype=dtype, device=device)
        self.geometry = geometry
        self.vocab_size = geometry.vocab_size
        self.device = device
        self.dtype = dtype
        self.embedding = weights.matrix("embed_tokens.weight", geometry.vocab_size, geometry.hidden_size)
        self.head = head_weight(checkpoint, geometry, dtype, device)
        self.final_mixer = HyperConnection.load(weights.under("hyper_connection_mixer."), injects=False)
        self.layers = [self._load_layer(weights, index) for index in range(geometry.num_hidden_layers)]
        self.store = StateStore(
            target_layout(
                geometry,
                max_draft_tokens=capacities.max_draft_tokens,
                dtype=capacities.dtype,
                recurrence=recurrence,
            ),
            slots=capacities.slots,
            pages=capacities.pages,
            context=capacities.context,
            device=device,
        )
        self.compact = recurrence == "records"
        self._width = 1
        # every position a round may touch: the context plus the widest round that starts at its last token
        self.tokens = -(-(capacities.context + self.store.horizon) // PAGE_TOKENS) * PAGE_TOKENS
        self.rope = RopeTable.build(
            positions=self.tokens,
            rotated=geometry.rotary_dim,
            theta=geometry.rope_theta,
            dtype=dtype,
            device=device,
        )
        self._steps = torch.arange(max(self.store.horizon, capacities.prefill_rows), device=device)

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
        name = f"{weights.prefix}layers.{index}.mlp.experts"
        # W4A4 is the meaning of NVFP4; a checkpoint that says W4A16 keeps activations as they are
        declared = quantisation_of(weights.checkpoint, name) or {}
        quantised = declared.get("quant_algo") != "W4A16_NVFP4"
        ple = self.geometry.ple_layers
        return DecoderLayer.load(
            weights.under(f"layers.{index}."),
            self.geometry.layer_types[index],
            quantised_activations=quantised,
            ple_ordinal=ple.index(index) if index in ple else None,
        )

    # --- the rows of one call ------------------------------------------------------------------------------------

    def _run(self, tokens: Tensor, slots: Tensor, positions: Tensor, *, prompt: bool) -> tuple[Tensor, Tensor]:
        """tokens, positions: [B, T]. Returns streams h [B·T, S, H] and sampling vectors [B·T, H]."""
        g, store = self.geometry, self.store
        plan = RowPlan.build(store, g, self.rope, slots=slots, positions=positions, tokens=self.tokens)
        self._move_anchor(slots, positions, prompt=prompt)
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
        return streams, self.final_mixer.mix(streams)[0]

    def _move_anchor(self, slots: Tensor, positions: Tensor, *, prompt: bool) -> None:
        """The interval must start right after what the previous one got accepted; then it becomes the last interval."""
        store = self.store
        expected = store.read_row("anchor", 0, slots) + store.selected.index_select(0, slots) + 1
        store.flag(slots, expected != positions[:, 0])
        store.write_row("anchor", slots, positions[:, -1] if prompt else positions[:, 0])

    def _keep_tokens(self, tokens: Tensor, slots: Tensor, *, prompt: bool) -> None:
        store = self.store
        if prompt:
            history = torch.cat([store.read_window("ngram_tokens", 0, slots), tokens], dim=1)
            store.write_window("ngram_tokens", 0, slots, history[:, tokens.shape[1] :])
        else:
            store.write_candidates("ngram_tokens", 0, slots, tokens)

    # --- Target protocol -------------------------------------------------------------------------------------------

    def prefill(self, tokens: Tensor, slot: Tensor, start: int) -> Tensor:
        """See ``Target.prefill``."""
        rows = tokens.shape[0]
        if rows > self._steps.shape[0]:
            raise ValueError(f"a prompt chunk of {rows} rows; {self._steps.shape[0]} were prepared")
        positions = (self._steps[:rows] + start).unsqueeze(0)
        streams, vectors = self._run(tokens.unsqueeze(0), slot, positions, prompt=True)
        feedback = streams.flatten(1)
        self.store.write_columns("feedback", 0, slot, feedback[-1:].unsqueeze(0))
        self.store.write_columns("sampling_vector", 0, slot, vectors[-1:].unsqueeze(0))
        self.store.selected.index_fill_(0, slot, 0)
        return feedback

    def first_logits(self, slots: Tensor) -> Tensor:
        """See ``Target.first_logits``."""
        column = self.store.column_index(slots, "sampling_vector")
        return F.linear(self.store.read_column("sampling_vector", 0, column), self.head)

    def verify(self, tokens: Tensor, lanes: Lanes) -> Tensor:
        """See ``Target.verify``."""
        batch, width = tokens.shape
        self._width = width
        positions = lanes.consumed.unsqueeze(1) + self._steps[:width]
        streams, vectors = self._run(tokens, lanes.slots, positions, prompt=False)
        self.store.write_columns("feedback", 0, lanes.slots, streams.view(batch, width, -1))
        self.store.write_columns("sampling_vector", 0, lanes.slots, vectors.view(batch, width, -1))
        return F.linear(vectors, self.head).view(batch, width, -1)

    def commit(self, lanes: Lanes, taken: Tensor) -> None:
        """See ``Target.commit``. Wide rounds replay the recorded rows; a single row went into the live matrix already."""
        store, slots = self.store, lanes.slots
        if self.compact:
            if self._width > 1:
                store.write_rows("delta_state", slots, self._replayed(slots, taken))
            store.commit_records(*RECORDS)
        store.commit(slots, taken)

    def _replayed(self, slots: Tensor, taken: Tensor) -> Tensor:
        """Recurrent matrices [layers, B, …] after ``taken`` rows of the last verification."""
        store = self.store
        state = store["delta_state"][:, :, 0].index_select(1, slots)
        corrections, keys, decays = (store.read_records(name, slots, self._width) for name in RECORDS)
        return delta_rule_replay(state, corrections, keys, decays, taken, self._width)

    def snapshot(self, slots: Tensor, taken: Tensor | None = None) -> dict[str, Tensor]:
        """See ``Target.snapshot``."""
        between_rounds = taken is None
        if taken is None:
            taken = torch.zeros_like(slots)
        state = self.store.state_after(slots, taken)
        if self.compact and not between_rounds and self._width > 1:
            state["delta_state"] = self._replayed(slots, taken)
        return state

    def restore(self, slot: int, state: Mapping[str, Tensor], consumed: int) -> None:
        """See ``Target.restore``."""
        self.store.restore(slot, {**state, **open_group_state(state, consumed, self.geometry)})

    def feedback(self, slots: Tensor) -> Tensor:
        """See ``Target.feedback``."""
        return self.store.read_column("feedback", 0, self.store.column_index(slots, "feedback"))

    def feedback_rows(self, slots: Tensor, rows: int) -> Tensor:
        """See ``Target.feedback_rows``."""
        return self.store["feedback"][0][:, :rows].index_select(0, slots)

    def faults(self, slots: Tensor) -> Tensor:
        """See ``Target.faults``."""
        return self.store.faults.index_select(0, slots)
