"""Manifold-constrained hyper-connections (mHC): S residual streams of width H around every block of a model.

    c = fn · rms(X)                              S + S + S² coefficients of a row: read, write, mix
    pre = sigmoid(c_read) + ε                    u = Σ_s pre_s · X[s] is what a block reads (``collapse``)
    post = 2 · sigmoid(c_write)
    C = sinkhorn(softmax_j(c_mix) + ε)           rows and columns that sum to one, from stream i to stream j
    X'[j] = post_j · y + Σ_i C[i, j] · X[i]      y = block(u) is written back (``expand``)

with c scaled and shifted by ``scale`` and ``base`` of each part. Which block reads through ``pre``, the one that writes through
``post`` or the next one, is the model's. Source: Xie et al., "mHC: Manifold-Constrained Hyper-Connections" (arXiv:2512.24880).
Coefficients are float32 or wider whatever the streams are, and streams are rounded once. Every shard of a model holds all of it;
y must be complete before ``expand``.
"""

from __future__ import annotations

import math
from typing import Self

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from specdec.ops.select import uses_cuda


@frozen(kw_only=True, eq=False)
class HyperConnection:
    """One site of a layer, all in the accumulate dtype. fn: [S·(S + 2), S·H], rows multiplied by the scale of their part;
    base: [S·(S + 2)]; ones: [S, 1]."""

    fn: Tensor
    base: Tensor
    ones: Tensor
    streams: int
    iterations: int
    hc_eps: float
    rms_eps: float

    @classmethod
    def build(cls, *, fn: Tensor, base: Tensor, scale: Tensor, iterations: int, hc_eps: float, rms_eps: float) -> Self:
        """From stored tensors in the accumulate dtype. fn: [S·(S + 2), S·H]; base: [S·(S + 2)]; scale: [3], of read, write and
        mix. iterations: Sinkhorn steps; hc_eps, rms_eps: ε of the mixing and of the norm. Allocates; preparation only."""
        count = math.isqrt(fn.shape[0] + 1) - 1
        per_row = torch.cat([scale[0].expand(count), scale[1].expand(count), scale[2].expand(count * count)])
        return cls(
            fn=fn * per_row.unsqueeze(-1),
            base=base,
            ones=torch.ones(count, 1, dtype=fn.dtype, device=fn.device),
            streams=count,
            iterations=iterations,
            hc_eps=hc_eps,
            rms_eps=rms_eps,
        )

    def mixes(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """streams: [T, S, H] → read weights [T, S], write weights [T, S] and mixing matrix [T, S, S] (from stream, to stream) in
        the accumulate dtype. Does not change the streams."""
        if uses_cuda("mixes", streams, self.fn, self.base):
            from specdec.ops.cuda.hyper_connection import mixes as fast

            eps = {"hc_eps": self.hc_eps, "rms_eps": self.rms_eps}
            return fast(streams, self.fn, self.base, iterations=self.iterations, **eps)
        count = self.streams
        flat = streams.to(self.fn.dtype).flatten(1)
        root = torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.rms_eps)
        coefficients = torch.addcmul(self.base, F.linear(flat, self.fn), root)
        gates = torch.sigmoid(coefficients[:, : 2 * count])
        raw = torch.softmax(coefficients[:, 2 * count :].view(-1, count, count), dim=-1) + self.hc_eps
        return gates[:, :count] + self.hc_eps, 2 * gates[:, count:], self._sinkhorn(raw)

    def _sinkhorn(self, raw: Tensor) -> Tensor:
        """Divides columns, then (rows, columns) iterations − 1 times by their sums plus ε. raw: [T, S, S].

        The result is raw[i, j] / (ρ_i γ_j). A step on rows, C ← C / (Σ_j C + ε), is ρ ← Σ_j raw[i, j] / γ_j + ε ρ, exactly, so
        a step costs a product with the constant matrix and a reciprocal of S numbers; the many steps make this the most
        frequent operator of a layer.
        """
        transposed = raw.transpose(1, 2).contiguous()
        rows = self.ones.expand(raw.shape[0], -1, -1).clone()
        columns = torch.baddbmm(rows, transposed, rows, beta=self.hc_eps)
        for _ in range(self.iterations - 1):
            rows.baddbmm_(raw, columns.reciprocal(), beta=self.hc_eps)
            columns.baddbmm_(transposed, rows.reciprocal(), beta=self.hc_eps)
        return raw / (rows * columns.transpose(1, 2))


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Σ_s pre[s] · X[s]. streams: [T, S, H]; pre: [T, S].

    Returns [T, H] in the dtype of streams, computed in that of ``pre`` and rounded once. Does not change its inputs.
    """
    if uses_cuda("collapse", streams, pre):
        from specdec.ops.cuda.hyper_connection import collapse as fast

        return fast(streams, pre)
    return torch.bmm(pre.unsqueeze(1), streams.to(pre.dtype)).squeeze(1).to(streams.dtype)


def expand(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """X'[j] = post[j] · y + Σ_i comb[i, j] · X[i]. streams: [T, S, H]; y: [T, H]; post: [T, S]; comb: [T, S, S].

    Returns [T, S, H] in the dtype of streams, computed in that of ``post`` and rounded once. Does not change its inputs.
    """
    if uses_cuda("expand", streams, y, post, comb):
        from specdec.ops.cuda.hyper_connection import expand as fast

        return fast(streams, y, post, comb)
    wide = streams.to(post.dtype)
    written = post.unsqueeze(-1) * y.to(post.dtype).unsqueeze(1)
    return torch.baddbmm(written, comb.transpose(1, 2), wide).to(streams.dtype)
