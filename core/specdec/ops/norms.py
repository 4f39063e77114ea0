"""Root-mean-square norms.

Arithmetic is at least float32: half-precision inputs are widened once and rounded once at the end.
Source of the formulas: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467).
"""

from __future__ import annotations

import torch
from torch import Tensor


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which norms, softmax and recurrences of ``dtype`` activations are computed: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def rms(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) over the last axis, in the accumulate dtype (not rounded back).

    x: [..., n], any float dtype. Returns [..., n] in ``accumulate_dtype(x.dtype)``. Does not change x.
    """
    x = x.to(accumulate_dtype(x.dtype))
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """``rms(x) * scale``, rounded once to the dtype of x.

    x: [..., n]; scale: broadcastable to x, in the accumulate dtype. A zero-centred norm passes ``1 + weight``.
    """
    return (rms(x, eps) * scale).to(x.dtype)


def unit_norm(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(sum(x²) + eps) over the last axis, in the accumulate dtype; the form used for delta-rule keys and queries."""
    x = x.to(accumulate_dtype(x.dtype))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
