"""Root-mean-square norms.

Arithmetic is at least float32: half-precision inputs are widened once and rounded once at the end.
Source of the formulas: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.ops.select import uses_cuda


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which norms, softmax and recurrences of ``dtype`` activations are computed: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def rms(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) over the last axis, in the accumulate dtype (not rounded back).

    x: [..., n], any float dtype. Returns [..., n] in ``accumulate_dtype(x.dtype)``. Does not change x.
    """
    if uses_cuda("rms", x):
        from specdec.ops.cuda.norms import rms as fast

        return fast(x, eps)
    x = x.to(accumulate_dtype(x.dtype))
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """``rms(x) * scale``, rounded once to the dtype of x.

    x: [..., n]; scale: broadcastable to x, in the accumulate dtype. A zero-centred norm passes ``1 + weight``.
    """
    if uses_cuda("rms_norm", x, scale):
        from specdec.ops.cuda.norms import rms_norm as fast

        return fast(x, scale, eps)
    return (rms(x, eps) * scale).to(x.dtype)


def unit_norm(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(sum(x²) + eps) over the last axis, in the accumulate dtype; the form used for delta-rule keys and queries."""
    if uses_cuda("unit_norm", x):
        from specdec.ops.cuda.norms import unit_norm as fast

        return fast(x, eps)
    x = x.to(accumulate_dtype(x.dtype))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def gated_rms_norm(x: Tensor, gate: Tensor, scale: Tensor, eps: float, activation: str) -> Tensor:
    """``rms(x) * scale * activation(gate)`` in the dtype of ``gate``: output norm of a linear attention layer.

    x, gate: [..., n] of one shape, x is rounded to the dtype of gate first; scale: [n]; activation: ``sigmoid`` or ``silu``.
    With scale in the accumulate dtype the product is rounded once; with scale in the dtype of gate the norm and its product
    with scale are rounded to that before.
    """
    if uses_cuda("gated_rms_norm", x, gate, scale):
        from specdec.ops.cuda.norms import gated_rms_norm as fast

        return fast(x, gate, scale, eps, activation)
    normed = rms(x.to(gate.dtype), eps)
    wide = gate.to(normed.dtype)
    opened = torch.sigmoid(wide) if activation == "sigmoid" else F.silu(wide)
    return ((normed.to(scale.dtype) * scale).to(wide.dtype) * opened).to(gate.dtype)
