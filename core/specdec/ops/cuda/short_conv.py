"""Causal depthwise convolution in one kernel; see ``specdec.ops.short_conv``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def short_conv(extended: Tensor, taps: Tensor, rows: int, dilation: int = 1) -> Tensor:
    """See ``specdec.ops.short_conv.short_conv``; float32 result."""
    return _run(extended, taps, rows, dilation, torch.float32, silu=False, rounds_first=False)


def silu_conv(extended: Tensor, taps: Tensor, rows: int, dilation: int = 1, *, rounds_first: bool) -> Tensor:
    """See ``specdec.ops.short_conv.silu_conv``."""
    return _run(extended, taps, rows, dilation, extended.dtype, silu=True, rounds_first=rounds_first)


def _run(
    extended: Tensor, taps: Tensor, rows: int, dilation: int, dtype: torch.dtype, *, silu: bool, rounds_first: bool
) -> Tensor:
    batch, _, channels = extended.shape
    if extended.stride(-1) != 1:
        extended = extended.contiguous()
    out = torch.empty(batch, rows, channels, dtype=dtype, device=extended.device)
    block = min(triton.next_power_of_2(channels), 512)
    _convolve[(batch * rows, triton.cdiv(channels, block))](
        extended,
        taps.contiguous(),
        out,
        rows,
        extended.stride(0),
        extended.stride(1),
        CHANNELS=channels,
        TAPS=taps.shape[0],
        DILATION=dilation,
        BLOCK=block,
        SILU=silu,
        ROUNDS_FIRST=rounds_first,
        num_warps=2,
    )
    return out


@triton.jit(do_not_specialize=["rows", "lane_stride"])
def _convolve(
    x_ptr,
    taps_ptr,
    out_ptr,
    rows,
    lane_stride,
    row_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    DILATION: tl.constexpr,
    BLOCK: tl.constexpr,
    SILU: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < CHANNELS
    first = x_ptr + (row // rows) * lane_stride + (row % rows) * row_stride + at
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TAPS):
        x = tl.load(first + j * DILATION * row_stride, mask=inside, other=0.0).to(tl.float32)
        total += x * tl.load(taps_ptr + j * CHANNELS + at, mask=inside, other=0.0)
    kind = out_ptr.dtype.element_ty
    if ROUNDS_FIRST:
        total = total.to(kind).to(tl.float32)
    if SILU:
        total = tl.div_rn(total, 1.0 + tl.exp(-total))
    tl.store(out_ptr + row * CHANNELS + at, total.to(kind), mask=inside)
