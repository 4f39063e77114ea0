"""Hyper-connections in one kernel for each of their three steps; see ``specdec.ops.hyper_connection``.

The reference runs two batched products and two reciprocals for each of about twenty Sinkhorn steps. Here a row's S × S matrix
stays in registers for all of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Input values that one program multiplies; wider rows are split over programs and summed by a second kernel. Fixed by the
# width alone, so that a row is summed in the same order whatever the number of rows.
_SPAN = 1024
_BLOCK = 128


def mixes(
    streams: Tensor, fn: Tensor, base: Tensor, *, iterations: int, hc_eps: float, rms_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``specdec.ops.hyper_connection.HyperConnection.mixes``; fn, base: its tensors, float32."""
    rows, count, hidden = streams.shape
    width = count * hidden
    pre = torch.empty(rows, count, dtype=torch.float32, device=streams.device)
    post = torch.empty_like(pre)
    comb = torch.empty(rows, count, count, dtype=torch.float32, device=streams.device)
    streams, fn, base = streams.contiguous(), fn.contiguous(), base.contiguous()
    splits = triton.cdiv(width, _SPAN)
    sizes = {"S": count, "BS": triton.next_power_of_2(count), "WIDTH": width}
    numbers = (base, pre, post, comb, iterations, hc_eps, rms_eps)
    if splits == 1:
        _mix_rows[(rows,)](streams, fn, *numbers, **sizes, BLOCK=_BLOCK, num_warps=1)
        return pre, post, comb
    # per row and split: S·(S + 2) products and the sum of squares
    partial = torch.empty(rows, splits, count * (count + 2) + 1, dtype=torch.float32, device=streams.device)
    _partial_rows[(rows, splits)](streams, fn, partial, **sizes, SPAN=_SPAN, BLOCK=_BLOCK, num_warps=4)
    _finish_rows[(rows,)](partial, *numbers, **sizes, SPLITS=splits, num_warps=1)
    return pre, post, comb


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """See ``specdec.ops.hyper_connection.collapse``."""
    rows, count, hidden = streams.shape
    out = torch.empty(rows, hidden, dtype=streams.dtype, device=streams.device)
    block = min(triton.next_power_of_2(hidden), 512)
    _collapse_rows[(rows, triton.cdiv(hidden, block))](
        streams.contiguous(), pre, out, pre.stride(0), pre.stride(1), S=count, HIDDEN=hidden, BLOCK=block, num_warps=2
    )
    return out


def expand(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """See ``specdec.ops.hyper_connection.expand``."""
    rows, count, hidden = streams.shape
    out = torch.empty(rows, count, hidden, dtype=streams.dtype, device=streams.device)
    block = min(triton.next_power_of_2(hidden), 256)
    _expand_rows[(rows, triton.cdiv(hidden, block))](
        streams.contiguous(),
        y.contiguous(),
        post.contiguous(),
        comb.contiguous(),
        out,
        S=count,
        BS=triton.next_power_of_2(count),
        HIDDEN=hidden,
        BLOCK=block,
        num_warps=2,
    )
    return out


@triton.jit
def _products(
    x_ptr, fn_ptr, row, first, last, S: tl.constexpr, BS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Products of values ``first`` to ``last`` of a row with its S read, S write and S × S mix rows of fn; sum of squares."""
    i = tl.arange(0, BS)
    lanes = tl.arange(0, BLOCK)
    read = tl.zeros([BS, BLOCK], tl.float32)
    write = tl.zeros([BS, BLOCK], tl.float32)
    mix = tl.zeros([BS, BS, BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    one = (i < S)[:, None]
    both = (i < S)[:, None, None] & (i < S)[None, :, None]
    fn_read = fn_ptr + i[:, None] * WIDTH
    fn_mix = fn_ptr + (2 * S + i[:, None, None] * S + i[None, :, None]) * WIDTH
    for start in range(first, last, BLOCK):
        at = start + lanes
        inside = at < last
        x = tl.load(x_ptr + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
        squares += x * x
        held = one & inside[None, :]
        read += tl.load(fn_read + at[None, :], mask=held, other=0.0) * x[None, :]
        write += tl.load(fn_read + S * WIDTH + at[None, :], mask=held, other=0.0) * x[None, :]
        mix += tl.load(fn_mix + at[None, None, :], mask=both & inside[None, None, :], other=0.0) * x[None, None, :]
    return tl.sum(read, axis=1), tl.sum(write, axis=1), tl.sum(mix, axis=2), tl.sum(squares, axis=0)


@triton.jit
def _finish(
    read,
    write,
    mix,
    squares,
    base_ptr,
    pre_ptr,
    post_ptr,
    comb_ptr,
    row,
    iterations,
    hc_eps,
    rms_eps,
    S: tl.constexpr,
    BS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Gates and the mixing matrix of a row from its products."""
    i = tl.arange(0, BS)
    one = i < S
    both = one[:, None] & one[None, :]
    root = tl.rsqrt(squares / WIDTH + rms_eps)
    read = tl.load(base_ptr + i, mask=one, other=0.0) + read * root
    write = tl.load(base_ptr + S + i, mask=one, other=0.0) + write * root
    tl.store(pre_ptr + row * S + i, tl.sigmoid(read) + hc_eps, mask=one)
    tl.store(post_ptr + row * S + i, 2.0 * tl.sigmoid(write), mask=one)
    cells = i[:, None] * S + i[None, :]
    mix = tl.load(base_ptr + 2 * S + cells, mask=both, other=0.0) + mix * root
    mix = tl.where(both, mix, float("-inf"))
    # padded rows have no finite value; zero keeps them out of the difference
    top = tl.where(one, tl.max(mix, axis=1), 0.0)
    raw = tl.exp(mix - top[:, None])
    total = tl.where(one, tl.sum(raw, axis=1), 1.0)
    raw = tl.where(both, raw / total[:, None] + hc_eps, 0.0)
    rows = tl.zeros([BS], tl.float32) + 1.0
    columns = hc_eps + tl.sum(raw, axis=0)
    for _ in range(iterations - 1):
        rows = hc_eps * rows + tl.sum(raw * tl.where(one, 1.0 / columns, 0.0)[None, :], axis=1)
        columns = hc_eps * columns + tl.sum(raw * tl.where(one, 1.0 / rows, 0.0)[:, None], axis=0)
    tl.store(comb_ptr + row * S * S + cells, raw / (rows[:, None] * columns[None, :]), mask=both)


@triton.jit
def _mix_rows(
    x_ptr,
    fn_ptr,
    base_ptr,
    pre_ptr,
    post_ptr,
    comb_ptr,
    iterations,
    hc_eps,
    rms_eps,
    S: tl.constexpr,
    BS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    read, write, mix, squares = _products(x_ptr, fn_ptr, row, 0, WIDTH, S, BS, WIDTH, BLOCK)
    _finish(
        read, write, mix, squares, base_ptr, pre_ptr, post_ptr, comb_ptr, row, iterations, hc_eps, rms_eps, S, BS, WIDTH
    )


@triton.jit
def _partial_rows(
    x_ptr,
    fn_ptr,
    partial_ptr,
    S: tl.constexpr,
    BS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    first = split * SPAN
    last = tl.minimum(first + SPAN, WIDTH)
    read, write, mix, squares = _products(x_ptr, fn_ptr, row, first, last, S, BS, WIDTH, BLOCK)
    outputs: tl.constexpr = S * (S + 2)
    found = partial_ptr + (row * tl.num_programs(1) + split) * (outputs + 1)
    i = tl.arange(0, BS)
    one = i < S
    tl.store(found + i, read, mask=one)
    tl.store(found + S + i, write, mask=one)
    tl.store(found + 2 * S + i[:, None] * S + i[None, :], mix, mask=one[:, None] & one[None, :])
    tl.store(found + outputs, squares)


@triton.jit
def _finish_rows(
    partial_ptr,
    base_ptr,
    pre_ptr,
    post_ptr,
    comb_ptr,
    iterations,
    hc_eps,
    rms_eps,
    S: tl.constexpr,
    BS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    outputs: tl.constexpr = S * (S + 2)
    i = tl.arange(0, BS)
    one = i < S
    cells = 2 * S + i[:, None] * S + i[None, :]
    read = tl.zeros([BS], tl.float32)
    write = tl.zeros([BS], tl.float32)
    mix = tl.zeros([BS, BS], tl.float32)
    squares = 0.0
    for split in range(SPLITS):
        found = partial_ptr + (row * SPLITS + split) * (outputs + 1)
        read += tl.load(found + i, mask=one, other=0.0)
        write += tl.load(found + S + i, mask=one, other=0.0)
        mix += tl.load(found + cells, mask=one[:, None] & one[None, :], other=0.0)
        squares += tl.load(found + outputs)
    _finish(
        read, write, mix, squares, base_ptr, pre_ptr, post_ptr, comb_ptr, row, iterations, hc_eps, rms_eps, S, BS, WIDTH
    )


@triton.jit(do_not_specialize=["pre_row"])
def _collapse_rows(
    x_ptr, pre_ptr, out_ptr, pre_row, pre_stream, S: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < HIDDEN
    total = tl.zeros([BLOCK], tl.float32)
    for s in tl.static_range(S):
        weight = tl.load(pre_ptr + row * pre_row + s * pre_stream)
        total += weight * tl.load(x_ptr + (row * S + s) * HIDDEN + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * HIDDEN + at, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _expand_rows(
    x_ptr,
    y_ptr,
    post_ptr,
    comb_ptr,
    out_ptr,
    S: tl.constexpr,
    BS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < HIDDEN
    j = tl.arange(0, BS)
    one = j < S
    y = tl.load(y_ptr + row * HIDDEN + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(post_ptr + row * S + j, mask=one, other=0.0)[:, None] * y[None, :]
    for i in tl.static_range(S):
        weights = tl.load(comb_ptr + (row * S + i) * S + j, mask=one, other=0.0)
        x = tl.load(x_ptr + (row * S + i) * HIDDEN + at, mask=inside, other=0.0).to(tl.float32)
        total += weights[:, None] * x[None, :]
    target = out_ptr + (row * S + j[:, None]) * HIDDEN + at[None, :]
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=one[:, None] & inside[None, :])
