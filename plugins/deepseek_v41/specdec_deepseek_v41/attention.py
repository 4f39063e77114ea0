"""Latent attention of DeepSeek-V4.1 with a sink: the parts that every layer of the target and every draft stage has.

    qr = rms(x Wqa);  q_h = rope(qr Wqb_h);  row = qdq(rope(rms(x Wkv)))       one row is key and value of all heads
    o_h = Σ_i exp(ℓ_hi) row_i / (Σ_i exp(ℓ_hi) + exp(sink_h)),  ℓ_hi = q_h · row_i / √d
    y = Wob · concat_g (Woa_g · concat of the group's rope⁻¹(o_h))

Rows are stored rotated, so the output is rotated back at the query's position. Which rows a query sees is the caller's. Source:
official inference code of the release. All heads are assumed local: a shard would hold whole output groups with their heads and
add the parts of y; rows are the same for every shard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from specdec.checkpoint.weights import Weights
from specdec.ops.block_quantisation import fp8_ue8m0
from specdec.ops.norms import rms_norm
from specdec.ops.sink_attention import attend, attend_window, attends_in_place

from .geometry import Geometry
from .linear import Linear
from .rotary import Rotation, rotate
from .rows import Rows

if TYPE_CHECKING:
    from .indexer import Selected


@frozen(kw_only=True, eq=False)
class Projections:
    """Weights of one layer.

    inputs: [q rank + d, H], query latent, then row; row_input: the second part alone; query_scale: [q rank] and row_scale: [d] in
    the accumulate dtype; queries: [heads · d, q rank]; groups: [G, heads · d / G, rank], output projection of each group;
    output: [H, G · rank]; sink: [heads] in the accumulate dtype. qdq: whether rows are rounded as the cache rounds them; False
    only in tests.
    """

    inputs: Linear
    row_input: Linear
    query_scale: Tensor
    row_scale: Tensor
    queries: Linear
    groups: Tensor
    output: Linear
    sink: Tensor
    geometry: Geometry
    qdq: bool = True

    @classmethod
    def load(cls, weights: Weights, geometry: Geometry, *, qdq: bool = True) -> Projections:
        """Reads one ``attn`` block. Raises CheckpointError for a missing or misshapen tensor."""
        g = geometry
        inputs = Linear.load(weights, {"wq_a.weight": g.q_lora_rank, "wkv.weight": g.head_dim}, g.hidden_size)
        first = weights.matrix("wo_a.weight", g.output_width, g.group_width)
        return cls(
            inputs=inputs,
            row_input=Linear(weight=inputs.weight[g.q_lora_rank :], quantised=inputs.quantised),
            query_scale=weights.precise_vector("q_norm.weight", g.q_lora_rank),
            row_scale=weights.precise_vector("kv_norm.weight", g.head_dim),
            queries=Linear.load(weights, {"wq_b.weight": g.query_width}, g.q_lora_rank),
            groups=first.view(g.o_groups, g.o_lora_rank, g.group_width).transpose(1, 2).contiguous(),
            output=Linear.load(weights, {"wo_b.weight": g.hidden_size}, g.output_width),
            sink=weights.precise_vector("attn_sink", g.num_attention_heads),
            geometry=g,
            qdq=qdq,
        )

    def project(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, heads, d], their latent qr [T, q rank] and rows [T, d], all in the dtype of x: [T, H]."""
        g = self.geometry
        latent, row = self.inputs(x).split([g.q_lora_rank, g.head_dim], dim=-1)
        qr = rms_norm(latent, self.query_scale, g.rms_norm_eps)
        q = self.queries(qr).view(-1, g.num_attention_heads, g.head_dim)
        return rotate(q, rotation.forward.unsqueeze(1)), qr, self._finish(row, rotation)

    def rows(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Rows alone. x: [T, H] → [T, d]."""
        return self._finish(self.row_input(x), rotation)

    def _finish(self, row: Tensor, rotation: Rotation) -> Tensor:
        rotated = rotate(rms_norm(row, self.row_scale, self.geometry.rms_norm_eps), rotation.forward)
        return fp8_ue8m0(rotated) if self.qdq else rotated

    def write_back(self, o: Tensor, rotation: Rotation) -> Tensor:
        """o: [T, heads, d] → [T, H]. Rotates o in place."""
        g = self.geometry
        back = rotate(o, rotation.inverse.unsqueeze(1)).view(-1, g.o_groups, g.group_width).transpose(0, 1)
        return self.output(torch.bmm(back, self.groups).transpose(0, 1).flatten(1))


def attend_rows(q: Tensor, row: Tensor, rows: Rows, layer: int, selected: Selected | None, sink: Tensor) -> Tensor:
    """Attention of each row of a call to its window, which ``row`` is added to first, and to what is selected beside it.

    q: [P, heads, d]; row: [P, d]; sink: [heads]. Returns [P, heads, d] in the dtype of q.
    """
    if attends_in_place(q):
        buffer, last, extent = rows.record("window", layer, row), rows.own["window"], rows.bias.shape[-1]
        groups = None if selected is None else selected.groups
        return attend_window(q, buffer, last, rows.lay.positions, extent, sink, groups)
    keys, bias = rows.windows(layer, row), rows.bias
    if selected is not None:
        assert selected.keys is not None and selected.bias is not None
        keys, bias = torch.cat([keys, selected.keys], dim=1), selected.bias
    return attend(q.unsqueeze(1), keys, bias, sink).squeeze(1)
