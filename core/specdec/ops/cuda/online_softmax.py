"""An online softmax over entries that kernels of attention find for themselves, and its parts where one program is not enough.

A program runs through at most ``SPAN`` entries; a second kernel adds the parts of a longer range in order. Everything is summed
in float32 in one order, so a row's result depends neither on other rows nor on their number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Entries that one program runs through.
SPAN = 640


def shape_of(
    q: Tensor, rows: int, heads: int, width: int, most: int
) -> tuple[int, int, int, int, int, tuple[Tensor, Tensor, Tensor]]:
    """Blocks of heads, heads and columns of a block, entries at once, spans, and what the spans leave: greatest logits, masses
    and sums."""
    block = 16
    columns = max(triton.next_power_of_2(width), 16)
    size = max(16, min(128, 8192 // columns))
    splits = triton.cdiv(most, SPAN)
    if splits == 1:
        return triton.cdiv(heads, block), block, columns, size, 1, (q, q, q)
    total = q.shape[-2]
    shape = (rows, total, splits)
    tops, masses = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
    sums = torch.empty(*shape, width, dtype=torch.float32, device=q.device)
    return triton.cdiv(heads, block), block, columns, size, splits, (tops, masses, sums)


def add_spans(
    out: Tensor,
    parts: tuple[Tensor, Tensor, Tensor],
    count: int,
    splits: int,
    rows: int,
    strides: tuple[int, int, int],
) -> None:
    """Adds the spans of ``count`` rows. strides: of out for rows // ``rows``, rows % ``rows`` and the head."""
    heads, width = out.shape[-2:]
    _add_spans[(count, heads)](
        *parts,
        out,
        *strides,
        rows,
        heads,
        width,
        splits,
        SPLITS=triton.next_power_of_2(splits),
        WIDTH=max(triton.next_power_of_2(width), 16),
        num_warps=4,
    )


@triton.jit
def fold(q, keys, values, bias, top, mass, total, scale):
    """One step of the online softmax. q: [HEADS, WIDTH]; keys, values: [SIZE, WIDTH] in the dtype of q, zero where not seen;
    bias: [SIZE] float32, −∞ where not seen.

    Products of half-precision values are exact in float32. Weights are not rounded to half precision: they enter as the sum of
    two such values, which leaves 2^-17 of them.
    """
    if q.dtype == tl.float32:
        logits = tl.dot(q, tl.trans(keys), input_precision="ieee")
    else:
        logits = tl.dot(q, tl.trans(keys))
    logits = logits * scale + bias[None, :]
    greater = tl.maximum(top, tl.max(logits, axis=1))
    base = tl.where(greater == float("-inf"), 0.0, greater)
    shrink = tl.exp(top - base)
    powers = tl.exp(logits - base[:, None])
    mass = mass * shrink + tl.sum(powers, axis=1)
    if q.dtype == tl.float32:
        added = tl.dot(powers, values, input_precision="ieee")
    else:
        main = powers.to(q.dtype)
        rest = (powers - main.to(tl.float32)).to(q.dtype)
        added = tl.dot(main, values) + tl.dot(rest, values)
    return greater, mass, total * shrink[:, None] + added


@triton.jit
def finish(out, tops, masses, sums, at, part, heads, columns, mask, top, mass, total, width, SPLIT: tl.constexpr):
    """Writes a row's result, or what one of its spans leaves. at: offsets [HEADS] in out; part: [HEADS] numbers of the parts."""
    both = mask[:, None] & (columns < width)[None, :]
    if SPLIT:
        tl.store(tops + part, top, mask=mask)
        tl.store(masses + part, mass, mask=mask)
        tl.store(sums + part[:, None] * width + columns[None, :], total, mask=both)
    else:
        result = tl.div_rn(total, mass[:, None])
        tl.store(out + at[:, None] + columns[None, :], result.to(out.dtype.element_ty), mask=both)


@triton.jit
def _add_spans(
    tops,
    masses,
    sums,
    out,
    out_lane,
    out_row,
    out_head,
    rows,
    heads,
    width,
    splits,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, WIDTH)
    part = (index * heads + head) * splits + tl.arange(0, SPLITS)
    mask = tl.arange(0, SPLITS) < splits
    top = tl.load(tops + part, mask=mask, other=float("-inf"))
    factor = tl.exp(top - tl.max(top, axis=0))
    mass = tl.sum(tl.load(masses + part, mask=mask, other=0) * factor, axis=0)
    inside = mask[:, None] & (columns < width)[None, :]
    total = tl.load(sums + part[:, None] * width + columns[None, :], mask=inside, other=0)
    result = tl.div_rn(tl.sum(total * factor[:, None], axis=0), mass)
    at = out + (index // rows) * out_lane + (index % rows) * out_row + head * out_head + columns
    tl.store(at, result.to(out.dtype.element_ty), mask=columns < width)
