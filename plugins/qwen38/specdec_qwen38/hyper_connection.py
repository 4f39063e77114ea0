"""Gated residual (hyper-connection) of Qwen3.8-Flash: S streams of width H around every block.

    n = grouped_rms(X) · (1 + w);   a = silu(n Wdownᵀ / S);   g = sigmoid(a Wupᵀ)
    m = mean over streams of g ∘ n              input of the block
    b = 2 · sigmoid(n Winjᵀ / S)                one weight per stream
    X[s] ← X[s] + b[s] · y                      y = block(m), the same for every stream

Source: the ``qwen4_exp`` class of transformers 5.24. The combination is computed in float32 and rounded once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from specdec.ops.gated_residual import read_streams
from specdec.ops.norms import rms_norm

from .weights import Weights


@frozen(kw_only=True, eq=False)
class HyperConnection:
    """One mixer. down: [R + S, D] (mix rows, then injection rows; final mixers have none), divided by S already;
    up: [D, R]; scale: [S, H]."""

    scale: Tensor
    down: Tensor
    up: Tensor
    rank: int
    eps: float

    @classmethod
    def load(cls, weights: Weights, *, injects: bool) -> HyperConnection:
        """Reads ``hc_norm`` and the mixing weights under ``weights``; merges the two projections of n."""
        g = weights.geometry
        down = weights.matrix("input_mix_weight_down.weight", g.hc_lowrank, g.streams_width)
        if injects:
            down = torch.cat([down, weights.matrix("block_inject_weight.weight", g.hc_count, g.streams_width)])
        return cls(
            scale=weights.norm_scale("hc_norm.weight", g.streams_width).view(g.hc_count, g.hidden_size),
            down=down / g.hc_count,
            up=weights.matrix("input_mix_weight_up.weight", g.streams_width, g.hc_lowrank),
            rank=g.hc_lowrank,
            eps=g.rms_norm_eps,
        )

    def mix(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """streams: [T, S, H] → block input m [T, H] and injection weights [T, S, 1] (empty for a final mixer)."""
        normed = rms_norm(streams, self.scale, self.eps)
        low = F.linear(normed.flatten(1), self.down)
        m, inject = read_streams(normed, F.linear(F.silu(low[:, : self.rank]), self.up), low[:, self.rank :])
        return m, inject.unsqueeze(-1)


def combine(streams: Tensor, block: Tensor, inject: Tensor) -> Tensor:
    """streams [T, S, H] + inject [T, S, 1] · block [T, H]; does not change its inputs."""
    return torch.addcmul(streams, inject, block.unsqueeze(1))
