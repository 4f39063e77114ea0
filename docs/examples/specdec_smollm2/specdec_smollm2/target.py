"""A dense Llama: token embedding, layers of grouped-query attention and gated MLP, final norm, vocabulary head.

One function of rows serves prompts, decoding and verification (``specdec.round.row_target``): every row writes its key and
value into a page and attends to the positions up to its own. What a rejected draft wrote stays behind the committed length,
where nobody reads it before it is written again, so nothing has to be undone.

Source: Touvron et al., "Llama 2" (arXiv:2307.09288), grouped-query attention included; half-split rope as in the safetensors
releases.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from specdec.checkpoint.reader import Checkpoint
from specdec.checkpoint.weights import Weights
from specdec.interfaces import Capacities
from specdec.ops.norms import rms_norm
from specdec.ops.rope import RopeTable, apply_rope
from specdec.round.row_target import RowTarget
from specdec.state.store import StateStore

from .geometry import Geometry
from .inventory import EMBEDDING, FINAL_NORM, HEAD, LAYER
from .state import target_layout


@frozen(kw_only=True, eq=False)
class Rows:
    """What all layers of one call share. B lanes of T rows; S positions a call may attend to."""

    store: StateStore
    entries: Tensor  # [B·T] where each row's key and value go
    page_rows: Tensor  # pages of each lane's S positions
    visible: Tensor  # [B, 1, repeat·T, S] bool, positions up to each row's own
    unwritten: Tensor  # [B, S, 1, 1, 1] bool, positions behind the last row
    cos: Tensor  # [B, T, 1, head_dim]
    sin: Tensor

    @classmethod
    def of(cls, store: StateStore, g: Geometry, rope: RopeTable, slots: Tensor, positions: Tensor, tokens: int) -> Rows:
        """slots: [B]; positions: [B, T]; tokens: S."""
        seen = torch.arange(tokens, device=positions.device)
        causal = seen <= positions.unsqueeze(-1)
        cos, sin = rope.at(positions)
        return cls(
            store=store,
            entries=store.entries(slots, positions),
            page_rows=store.page_rows(slots, tokens),
            visible=causal.repeat(1, g.num_attention_heads // g.num_key_value_heads, 1).unsqueeze(1),
            unwritten=(seen > positions[:, -1:])[:, :, None, None, None],
            cos=cos.unsqueeze(2),
            sin=sin.unsqueeze(2),
        )


@frozen(kw_only=True, eq=False)
class Layer:
    """Weights of one layer; what reads the same input is one matrix."""

    attention_scale: Tensor  # [H]
    projection: Tensor  # rows queries, keys, values
    output: Tensor
    mlp_scale: Tensor  # [H]
    gate_up: Tensor  # rows gate, up
    down: Tensor
    geometry: Geometry

    @classmethod
    def load(cls, weights: Weights, g: Geometry) -> Layer:
        """weights: under the layer's prefix. Raises CheckpointError for a missing or misshapen tensor."""
        hidden, inner = g.hidden_size, g.intermediate_size
        attention, mlp = weights.under("self_attn."), weights.under("mlp.")
        query = attention.matrix("q_proj.weight", g.query_width, hidden)
        key, value = (attention.matrix(f"{name}_proj.weight", g.kv_width, hidden) for name in ("k", "v"))
        gate, up = (mlp.matrix(f"{name}_proj.weight", inner, hidden) for name in ("gate", "up"))
        return cls(
            attention_scale=weights.precise_vector("input_layernorm.weight", hidden),
            projection=torch.cat([query, key, value]),
            output=attention.matrix("o_proj.weight", hidden, g.query_width),
            mlp_scale=weights.precise_vector("post_attention_layernorm.weight", hidden),
            gate_up=torch.cat([gate, up]),
            down=mlp.matrix("down_proj.weight", hidden, inner),
            geometry=g,
        )

    def __call__(self, x: Tensor, rows: Rows, index: int) -> Tensor:
        """x: [B, T, H] → [B, T, H]. Writes the keys and values of layer ``index``."""
        eps = self.geometry.rms_norm_eps
        x = x + F.linear(self._attend(rms_norm(x, self.attention_scale, eps), rows, index), self.output)
        gate, up = F.linear(rms_norm(x, self.mlp_scale, eps), self.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down)

    def _attend(self, m: Tensor, rows: Rows, index: int) -> Tensor:
        """m: [B, T, H] → [B, T, heads · head_dim]."""
        g = self.geometry
        lanes, count, _ = m.shape
        heads, kv = g.num_attention_heads, g.num_key_value_heads
        projected = F.linear(m, self.projection).unflatten(-1, (heads + 2 * kv, g.head_dim))
        turned = apply_rope(projected[:, :, : heads + kv], rows.cos, rows.sin)
        written = torch.stack([turned[:, :, heads:], projected[:, :, heads + kv :]], dim=2)
        rows.store.paged("kv", index).index_copy_(0, rows.entries, written.flatten(0, 1))
        # pages never written may hold anything, even NaN, and NaN · 0 is NaN
        held = rows.store.read_pages("kv", index, rows.page_rows, lanes).masked_fill(rows.unwritten, 0)
        keys, values = held[:, :, 0].transpose(1, 2), held[:, :, 1].transpose(1, 2)
        # the query heads that share a key head become rows of it
        repeat = heads // kv
        query = turned[:, :, :heads].unflatten(2, (kv, repeat)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=rows.visible)
        return attended.unflatten(2, (repeat, count)).permute(0, 3, 1, 2, 4).flatten(2)


class LlamaTarget(RowTarget):
    """Target weights and state; methods are those of ``specdec.interfaces.Target``."""

    #: The drafter reads no feedback; what the head reads is the row kept.
    sampling_field = "feedback"

    def __init__(self, checkpoint: Checkpoint, capacities: Capacities, device: torch.device) -> None:
        """Raises CheckpointError for a missing or misshapen tensor, or a configuration value without an implementation."""
        g = Geometry.from_config(checkpoint.config)
        layout = target_layout(g, max_draft_tokens=capacities.max_draft_tokens, dtype=capacities.dtype)
        super().__init__(layout, capacities, device)
        dtype = getattr(torch, capacities.dtype)
        weights = Weights(checkpoint, prefix="", dtype=dtype, device=device)
        self.geometry = g
        self.vocab_size = g.vocab_size
        self.embedding = weights.matrix(EMBEDDING, g.vocab_size, g.hidden_size)
        self.head = weights.matrix(HEAD, g.vocab_size, g.hidden_size) if weights.has(HEAD) else self.embedding
        self.final_scale = weights.precise_vector(FINAL_NORM, g.hidden_size)
        self.layers = [Layer.load(weights.under(LAYER.format(l=index)), g) for index in range(g.num_hidden_layers)]
        self.rope = RopeTable.build(
            positions=self.tokens, rotated=g.head_dim, theta=g.rope_theta, dtype=dtype, device=device
        )

    def run_rows(self, tokens: Tensor, slots: Tensor, positions: Tensor, *, prompt: bool) -> tuple[Tensor, Tensor]:
        """See ``RowTarget.run_rows``. Prompt rows and candidates are written alike."""
        g = self.geometry
        rows = Rows.of(self.store, g, self.rope, slots, positions, self.tokens)
        x = F.embedding(tokens, self.embedding)
        for index, layer in enumerate(self.layers):
            x = layer(x, rows, index)
        x = rms_norm(x, self.final_scale, g.rms_norm_eps).flatten(0, 1)
        return x, x
