"""Causal depthwise convolution over carried history."""

from __future__ import annotations

import torch
from torch import Tensor


def short_conv(extended: Tensor, taps: Tensor, rows: int, dilation: int = 1) -> Tensor:
    """y[t] = Σ_j taps[j] · x[t − (n−1−j)·dilation]; the last tap multiplies the current row.

    extended: [B, history + rows, C], the carried rows followed by the new ones, history = (n−1)·dilation;
    taps: [n, C] in the accumulate dtype. Returns [B, rows, C] in the accumulate dtype, no bias, no activation.
    Taps are added one after the other for every row count, so a row's value does not depend on how many rows a call has.
    """
    count = taps.shape[0]
    total = extended[:, :rows].to(taps.dtype) * taps[0]
    for j in range(1, count):
        start = j * dilation
        total = torch.addcmul(total, extended[:, start : start + rows].to(taps.dtype), taps[j])
    return total
