"""Causal depthwise convolution over carried history."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.ops.select import uses_cuda


def short_conv(extended: Tensor, taps: Tensor, rows: int, dilation: int = 1) -> Tensor:
    """y[t] = Σ_j taps[j] · x[t − (n−1−j)·dilation]; the last tap multiplies the current row.

    extended: [B, history + rows, C], the carried rows followed by the new ones, history = (n−1)·dilation;
    taps: [n, C] in the accumulate dtype. Returns [B, rows, C] in the accumulate dtype, no bias, no activation.
    Taps are added one after the other for every row count, so a row's value does not depend on how many rows a call has.
    """
    if uses_cuda("short_conv", extended, taps):
        from specdec.ops.cuda.short_conv import short_conv as fast

        return fast(extended, taps, rows, dilation)
    count = taps.shape[0]
    total = extended[:, :rows].to(taps.dtype) * taps[0]
    for j in range(1, count):
        start = j * dilation
        total = torch.addcmul(total, extended[:, start : start + rows].to(taps.dtype), taps[j])
    return total


def silu_conv(extended: Tensor, taps: Tensor, rows: int, dilation: int = 1, *, rounds_first: bool) -> Tensor:
    """``silu(short_conv(...))`` in the dtype of ``extended``, [B, rows, C]; other arguments as ``short_conv``.

    rounds_first: the convolution is rounded to that dtype before the silu too.
    """
    if uses_cuda("silu_conv", extended, taps):
        from specdec.ops.cuda.short_conv import silu_conv as fast

        return fast(extended, taps, rows, dilation, rounds_first=rounds_first)
    convolved = short_conv(extended, taps, rows, dilation)
    return F.silu(convolved.to(extended.dtype) if rounds_first else convolved).to(extended.dtype)
