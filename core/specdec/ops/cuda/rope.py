"""Rotary position embedding in one kernel for each pairing, rounded where ``specdec.ops.rope`` rounds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .norms import rows_of

# Rows of one program that rotates pairs: a row has few of them.
_PAIR_ROWS = 4


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See ``specdec.ops.rope.apply_rope``; contiguous result."""
    width, rotated = x.shape[-1], cos.shape[-1]
    out = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, cos.dtype), device=x.device)
    period = _rows_per_turn(x, cos)
    if period is None or sin.shape != cos.shape:
        cos, sin = (turn.expand(*x.shape[:-1], rotated) for turn in (cos, sin))
        period = 1
    x, inner, outer_stride, inner_stride = rows_of(x)
    _rotate_rows[(out.numel() // width,)](
        x,
        cos.contiguous(),
        sin.contiguous(),
        out,
        inner,
        outer_stride,
        inner_stride,
        period,
        WIDTH=width,
        ROTATED=rotated,
        BLOCK=triton.next_power_of_2(width),
        num_warps=1,
        enable_fp_fusion=False,
    )
    return out


def rotate_pairs(x: Tensor, turns: Tensor) -> Tensor:
    """See ``specdec.ops.rope.rotate_pairs``; changes x."""
    pairs = turns.shape[-1]
    period = _rows_per_turn(x, turns)
    if period is None:
        turns, period = turns.expand(*x.shape[:-1], pairs), 1
    rows, inner, outer_stride, inner_stride = rows_of(x)
    count = x.numel() // x.shape[-1]
    _rotate_pairs[(triton.cdiv(count, _PAIR_ROWS),)](
        rows,
        torch.view_as_real(turns.contiguous()),
        count,
        inner,
        outer_stride,
        inner_stride,
        period,
        FIRST=x.shape[-1] - 2 * pairs,
        PAIRS=pairs,
        ROWS=_PAIR_ROWS,
        BLOCK=triton.next_power_of_2(pairs),
        num_warps=1,
    )
    if rows is not x:
        x.copy_(rows)
    return x


def _rows_per_turn(x: Tensor, cos: Tensor) -> int | None:
    """Consecutive rows of x that share a row of cos; None if they are not consecutive."""
    if cos.dim() != x.dim():
        return None
    wanted, given = x.shape[:-1], cos.shape[:-1]
    same = 0
    while same < len(given) and given[same] == wanted[same]:
        same += 1
    return None if any(size != 1 for size in given[same:]) else wanted[same:].numel()


@triton.jit(do_not_specialize=["inner", "outer_stride", "inner_stride", "period"])
def _rotate_rows(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    inner,
    outer_stride,
    inner_stride,
    period,
    WIDTH: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside, turned = at < WIDTH, at < ROTATED
    kind = out_ptr.dtype.element_ty
    start = x_ptr + (row // inner) * outer_stride + (row % inner) * inner_stride
    turn = (row // period) * ROTATED + at
    x = tl.load(start + at, mask=inside, other=0.0)
    half: tl.constexpr = ROTATED // 2
    # sin carries the sign
    other = tl.load(start + tl.where(at < half, at + ROTATED - half, at - half), mask=turned, other=0.0)
    cos = tl.load(cos_ptr + turn, mask=turned, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + turn, mask=turned, other=0.0).to(tl.float32)
    straight = (x.to(tl.float32) * cos).to(kind).to(tl.float32)
    crossed = (other.to(tl.float32) * sin).to(kind).to(tl.float32)
    y = tl.where(turned, (straight + crossed).to(kind), x.to(kind))
    tl.store(out_ptr + row * WIDTH + at, y, mask=inside)


@triton.jit(do_not_specialize=["count", "inner", "outer_stride", "inner_stride", "period"])
def _rotate_pairs(
    x_ptr,
    turns_ptr,
    count,
    inner,
    outer_stride,
    inner_stride,
    period,
    FIRST: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    present = (row < count) & (pair < PAIRS)
    cells = x_ptr + (row // inner) * outer_stride + (row % inner) * inner_stride + FIRST + 2 * pair
    turn = turns_ptr + ((row // period) * PAIRS + pair) * 2
    real = tl.load(cells, mask=present, other=0.0).to(tl.float32)
    imaginary = tl.load(cells + 1, mask=present, other=0.0).to(tl.float32)
    cos = tl.load(turn, mask=present, other=0.0)
    sin = tl.load(turn + 1, mask=present, other=0.0)
    kind = x_ptr.dtype.element_ty
    tl.store(cells, (real * cos - imaginary * sin).to(kind), mask=present)
    tl.store(cells + 1, (real * sin + imaginary * cos).to(kind), mask=present)
