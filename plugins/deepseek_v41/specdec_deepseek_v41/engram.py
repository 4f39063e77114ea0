"""Engram of DeepSeek-V4.1: rows of a large table, looked up by hashed token n-grams, gated into every stream.

    key_k, value = concat(rows) Wkv                                  one key a stream, one value
    dot_k = Σ_i X[k]_i · qw_ki · kw_ki · key_ki / (rms(X[k]) · rms(key_k) · √H)
    X[k] ← X[k] + σ(copysign(√max(|dot_k|, 1e-6), dot_k)) · value

Row ids follow from token ids alone, so rows could be fetched before the target runs, from memory that is not the device's: what a
layer needs is ``rows`` of ids [P, r] → [P, r · dim]. Source: official inference code of the release. A shard would hold some of
the rows or some of the value's columns.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from specdec.checkpoint.weights import Weights

from .engram_rows import RowIds
from .geometry import Geometry
from .linear import Linear, quantised

_SMALLEST_DOT = 1e-6
_BLOCK = 32


@frozen(kw_only=True, eq=False)
class EngramTable:
    """Table rows. values: [rows, dim], in the activation dtype, or bytes of E4M3 codes with scales: [rows, dim / 32] bytes,
    powers of two."""

    values: Tensor
    scales: Tensor | None
    dtype: torch.dtype

    @classmethod
    def load(cls, weights: Weights, rows: int, dim: int) -> EngramTable:
        """Reads ``embed``. Quantised rows stay as stored. Raises CheckpointError for a missing or misshapen tensor."""
        if not quantised(weights, "embed.weight"):
            return cls(values=weights.matrix("embed.weight", rows, dim), scales=None, dtype=weights.dtype)
        codes, scales = weights.stored("embed.weight"), weights.stored("embed.scale")
        return cls(values=codes.view(torch.uint8), scales=scales.view(torch.uint8), dtype=weights.dtype)

    def rows(self, ids: Tensor) -> Tensor:
        """ids: [P, r] int64 → [P, r · dim] in the activation dtype."""
        flat = ids.reshape(-1)
        values = self.values.index_select(0, flat)
        if self.scales is not None:
            codes = values.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, _BLOCK))
            powers = torch.exp2(self.scales.index_select(0, flat).float() - 127).unsqueeze(-1)
            values = (codes * powers).flatten(-2).to(self.dtype)
        return values.view(ids.shape[0], -1)


@frozen(kw_only=True, eq=False)
class Engram:
    """One layer. project: [(S + 1) · H, r · dim]; gate: [S, H], the product of both norm weights with the dot's constant factor,
    in the accumulate dtype."""

    table: EngramTable
    ids: RowIds
    project: Linear
    gate: Tensor
    eps: float

    @classmethod
    def load(cls, weights: Weights, geometry: Geometry, layer: int) -> Engram:
        """Reads the ``engram`` block of ``layer``. Raises CheckpointError for a missing or misshapen tensor."""
        g, shape = geometry, (geometry.hc_mult, geometry.hidden_size)
        count = g.engram_num_embeddings[g.engram_layer_ids.index(layer)]
        gate = weights.precise_vector("q_weight", *shape) * weights.precise_vector("k_weight", *shape)
        return cls(
            table=EngramTable.load(weights, count, g.engram_head_dim),
            ids=RowIds.of(g, layer, weights.device),
            project=Linear.load(weights, {"wkv.weight": (g.hc_mult + 1) * g.hidden_size}, g.engram_width),
            gate=gate * g.hidden_size**-0.5,
            eps=g.rms_norm_eps,
        )

    def __call__(self, streams: Tensor, history: Tensor) -> Tensor:
        """streams: [P, S, H]; history: [P, n] compressed ids, newest first. Returns new streams in the same dtype."""
        both = self.project(self.table.rows(self.ids(history))).view(streams.shape[0], -1, streams.shape[-1])
        precise = self.gate.dtype
        wide, keys, value = streams.to(precise), both[:, :-1].to(precise), both[:, -1:].to(precise)
        roots = torch.rsqrt(torch.stack([wide, keys]).square().mean(-1) + self.eps)
        dot = (wide * self.gate * keys).sum(-1) * roots[0] * roots[1]
        gate = torch.sigmoid(torch.copysign(dot.abs().clamp(min=_SMALLEST_DOT).sqrt(), dot))
        return torch.addcmul(wide, gate.unsqueeze(-1), value).to(streams.dtype)
