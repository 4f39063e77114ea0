"""Compressed rows of DeepSeek-V4.1: one row and one index key for each group of one or two tokens.

    lat_j = rms(a_j)                                                   ratio 1, a = x Wkv
    lat_j = rms(w₀ a_2j + w₁ a_2j+1),  w = softmax(b_2j, b_2j+1)       ratio 2, b = x Wgate, per channel, float32
    k_j = qdq(rope(rms(lat_j Wk)))       c_j = qdq(rope(lat_j))        at the group's first position

Row j is seen from the input that completes its group on. A source layer writes; layers after it read. Source: official
inference code of the release. Everything here is the same for every shard.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from specdec.checkpoint.weights import Weights
from specdec.ops.block_quantisation import fp4_e4m3, fp4_ue8m0
from specdec.ops.norms import rms_norm

from .geometry import Geometry
from .rotary import rotate
from .rows import Rows


@frozen(kw_only=True, eq=False)
class Compressor:
    """Weights of one source layer. inputs: [ratio · d, H], values, then scores; in the accumulate dtype for ratio 2; keys: [index
    dim, d]; scale: [d], key_scale: [index dim] in the accumulate dtype. layer: place among the sources of its ratio. qdq: as in
    ``Projections``."""

    ratio: int
    layer: int
    inputs: Tensor
    scale: Tensor
    keys: Tensor
    key_scale: Tensor
    eps: float
    qdq: bool = True

    @classmethod
    def load(cls, weights: Weights, geometry: Geometry, layer: int, *, qdq: bool = True) -> Compressor:
        """Reads ``compressor`` and the key part of ``indexer`` of the ``attn`` block of source ``layer``.

        Raises CheckpointError for a missing or misshapen tensor.
        """
        g, own, index = geometry, weights.under("compressor."), weights.under("indexer.")
        ratio = g.compress_ratios[layer]
        if ratio == 1:
            inputs = own.matrix("wkv.weight", g.head_dim, g.hidden_size)
        else:
            names = ("wkv.weight", "wgate.weight")
            inputs = torch.cat([own.precise_vector(name, g.head_dim, g.hidden_size) for name in names])
        return cls(
            ratio=ratio,
            layer=g.sources_of_ratio(ratio).index(layer),
            inputs=inputs,
            scale=own.precise_vector("norm.weight", g.head_dim),
            keys=index.matrix("wk.weight", g.index_head_dim, g.head_dim),
            key_scale=index.precise_vector("k_norm.weight", g.index_head_dim),
            eps=g.rms_norm_eps,
            qdq=qdq,
        )

    def __call__(self, x: Tensor, rows: Rows) -> None:
        """Writes what the rows complete. x: [P, H]."""
        read = F.linear(x.to(self.inputs.dtype), self.inputs)
        latent = rms_norm((read if self.ratio == 1 else self._pool(read, rows)).to(x.dtype), self.scale, self.eps)
        turns = rows.groups[self.ratio]
        key = rotate(rms_norm(F.linear(latent, self.keys), self.key_scale, self.eps), turns)
        row = rotate(latent, turns)
        rows.write_groups("index_keys", self.ratio, self.layer, fp4_ue8m0(key) if self.qdq else key)
        rows.write_groups("compressed", self.ratio, self.layer, fp4_e4m3(row) if self.qdq else row)

    def _pool(self, read: Tensor, rows: Rows) -> Tensor:
        """read: [P, 2d] → [P, d], each row pooled with the one before it; meant where the row ends a group."""
        raw = read.view(rows.count, 2, -1)
        first, first_score = rows.record("pending", self.layer, raw).index_select(0, rows.own["pending"] - 1).unbind(1)
        second, second_score = raw.unbind(1)
        # a softmax over two is a sigmoid of the difference
        return torch.lerp(first, second, torch.sigmoid(second_score - first_score))
