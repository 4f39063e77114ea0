"""Decays and write strengths of the delta rules, from what a layer projects.

    head:      ln α = rate · softplus(a + bias),               β = sigmoid(b)          one decay for each value head
    channel:   g = bound · sigmoid(rate · raw + shift),        β = sigmoid(b)          one for each key channel

rate < 0 and bound < 0. Sources: as ``delta_rule`` and ``channel_delta_rule``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.ops.select import uses_cuda


def head_gates(a: Tensor, b: Tensor, rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """a, b: [..., heads] in the activation dtype; rate, bias: [heads] in the accumulate dtype.

    Returns ln α and β, [..., heads] in the accumulate dtype; β is rounded to the activation dtype before. Changes nothing.
    """
    if uses_cuda("head_gates", a, b, rate, bias):
        from specdec.ops.cuda.delta_gates import head_gates as fast

        return fast(a, b, rate, bias)
    return rate * F.softplus(a.to(rate.dtype) + bias), torch.sigmoid(b).to(rate.dtype)


def channel_gates(raw: Tensor, b: Tensor, rate: Tensor, shift: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """raw: [..., heads, d] and b: [..., heads] in the activation dtype; rate: [heads, 1] and shift: [heads, d] in the accumulate
    dtype.

    Returns g [..., heads, d] and β [..., heads] in the accumulate dtype. Changes nothing.
    """
    if uses_cuda("channel_gates", raw, b, rate, shift):
        from specdec.ops.cuda.delta_gates import channel_gates as fast

        return fast(raw, b, rate, shift, bound)
    log_decay = bound * torch.sigmoid(torch.addcmul(shift, raw.to(shift.dtype), rate))
    return log_decay, torch.sigmoid(b.to(shift.dtype))
