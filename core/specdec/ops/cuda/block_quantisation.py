"""Values quantised in blocks and widened again in one kernel, bit for bit as ``specdec.ops.block_quantisation`` does."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .block_formats import round_e2m1, round_e4m3
from .norms import rows_of

_FP8_UE8M0, _FP4_UE8M0, _FP4_E4M3 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# Blocks of one program.
_BLOCKS = 16


def fp8_ue8m0(values: Tensor) -> Tensor:
    """See ``specdec.ops.block_quantisation.fp8_ue8m0``; contiguous result."""
    return _quantise(values, 32, _FP8_UE8M0)


def fp4_ue8m0(values: Tensor) -> Tensor:
    """See ``specdec.ops.block_quantisation.fp4_ue8m0``; contiguous result."""
    return _quantise(values, 32, _FP4_UE8M0)


def fp4_e4m3(values: Tensor) -> Tensor:
    """See ``specdec.ops.block_quantisation.fp4_e4m3``; contiguous result."""
    return _quantise(values, 16, _FP4_E4M3)


def _quantise(values: Tensor, size: int, form: tl.constexpr) -> Tensor:
    width = values.shape[-1]
    out = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    values, inner, outer_stride, inner_stride = rows_of(values)
    blocks = out.numel() // size
    _quantise_blocks[(triton.cdiv(blocks, _BLOCKS),)](
        values,
        out,
        blocks,
        inner,
        outer_stride,
        inner_stride,
        WIDTH=width,
        SIZE=size,
        BLOCKS=_BLOCKS,
        FORM=form,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return out


@triton.jit(do_not_specialize=["blocks", "inner", "outer_stride", "inner_stride"])
def _quantise_blocks(
    x_ptr,
    out_ptr,
    blocks,
    inner,
    outer_stride,
    inner_stride,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    FORM: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    present = (block < blocks)[:, None]
    at = tl.arange(0, SIZE)[None, :]
    row, first = block // (WIDTH // SIZE), (block % (WIDTH // SIZE)) * SIZE
    start = (row // inner) * outer_stride + (row % inner) * inner_stride + first
    x = tl.load(x_ptr + start[:, None] + at, mask=present, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), axis=1)[:, None]
    if FORM == _FP4_E4M3:
        # at least 6 · 2^-9
        wanted = tl.div_rn(tl.where(largest < 0.01171875, 0.01171875, largest), 6.0)
        scale = round_e4m3(tl.where(wanted > 448.0, 448.0, wanted))
        found = round_e2m1(tl.div_rn(x, tl.broadcast_to(scale, (BLOCKS, SIZE)))) * scale
    else:
        # the smallest power of two under which the block fits; see ``power_of_two_scale`` for the addition
        if FORM == _FP8_UE8M0:
            bits = tl.where(largest < 1e-4, 1e-4, largest).to(tl.int32, bitcast=True) + (0x1FFFFF - (8 << 23))
        else:
            # 6 · 2^-126
            smallest = 7.052966104933725e-38
            bits = tl.where(largest < smallest, smallest, largest).to(tl.int32, bitcast=True) + (0x3FFFFF - (2 << 23))
        exponent = bits >> 23
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        scaled = x * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        found = (round_e4m3(scaled) if FORM == _FP8_UE8M0 else round_e2m1(scaled)) * scale
    found = tl.where(x != x, x, found)
    target = out_ptr + (block * SIZE)[:, None] + at
    tl.store(target, found.to(out_ptr.dtype.element_ty), mask=present)
