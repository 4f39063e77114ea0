"""Gated residual: what a block reads of S streams through a gate of every value, and the weights it is written back with.

m = mean over streams of sigmoid(g) ∘ n;   b = 2 · sigmoid(w)
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.ops.select import uses_cuda


def read_streams(normed: Tensor, gate: Tensor, write: Tensor) -> tuple[Tensor, Tensor]:
    """normed: [T, S, H], the normed streams n; gate: [T, S·H], g; write: [T, W], w; all in the activation dtype.

    Returns m [T, H] and b [T, W] in that dtype, rounded after each step. Does not change its inputs.
    """
    if uses_cuda("read_streams", normed, gate, write):
        from specdec.ops.cuda.gated_residual import read_streams as fast

        return fast(normed, gate, write)
    opened = torch.sigmoid(gate).view_as(normed)
    return (opened * normed).mean(1), 2 * torch.sigmoid(write)
