"""Attention of planned rows to tokens of chosen groups in a paged store: the kernel finds every entry itself.

How far a row's program runs depends on its position, so short contexts cost little whatever was prepared.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.cuda.online_softmax import SPAN, add_spans, finish, fold, shape_of
from specdec.ops.grouped_rows import Chosen, RowPlan


def attend_groups(
    q: Tensor, entries: Tensor, plan: RowPlan, chosen: Chosen | None, *, scale: float, shared: bool
) -> Tensor:
    """Attention of the rows of a plan to tokens of chosen groups and the open tail, or to all tokens up to their own.

    q: [B, T, heads, D]; entries: flat paged entries, [·, D] that are keys and values of all heads if shared, else [·, 2, kv
    heads, D] keys and values. Returns [B, T, heads, D] in the dtype of q and, where it has no holes, in its memory order.
    """
    batch, rows, heads, width = q.shape
    out = torch.empty_like(q)
    kv_heads = 1 if shared else entries.shape[2]
    repeat = heads // kv_heads
    layout, table = plan.store.layout, plan.store.page_table
    tokens = plan.causal.shape[-1]
    budget = 0 if chosen is None else chosen.ids.shape[-1]
    ids = plan.slots if chosen is None else chosen.ids.contiguous()
    most = tokens if chosen is None else plan.ratio * (budget + 1) - 1
    lanes, block, columns, size, splits, parts = shape_of(q, batch * rows, repeat, width, most)
    _attend_groups[(batch * rows, kv_heads * lanes, splits)](
        q,
        entries,
        out,
        *parts,
        table,
        plan.slots,
        plan.positions,
        ids,
        *(q.stride(axis) for axis in range(3)),
        *(out.stride(axis) for axis in range(3)),
        entries.stride(0),
        0 if shared else entries.stride(1),
        0 if shared else entries.stride(2),
        table.stride(0),
        plan.slots.stride(0),
        plan.positions.stride(0),
        plan.positions.stride(1),
        rows,
        heads,
        repeat,
        width,
        lanes,
        budget,
        plan.ratio,
        layout.page_tokens,
        table.shape[1],
        tokens,
        scale,
        splits,
        CHOSEN=chosen is not None,
        SHARED=shared,
        SPLIT=splits > 1,
        SPAN=SPAN,
        HEADS=block,
        WIDTH=columns,
        SIZE=size,
        num_warps=4,
    )
    if splits > 1:
        add_spans(out, parts, batch * rows, splits, rows, (out.stride(0), out.stride(1), out.stride(2)))
    return out


@triton.jit
def _attend_groups(
    q,
    entries,
    out,
    tops,
    masses,
    sums,
    table,
    slots,
    positions,
    ids,
    q_lane,
    q_row,
    q_head,
    out_lane,
    out_row,
    out_head,
    entry_stride,
    value_offset,
    head_stride,
    table_stride,
    slot_stride,
    position_lane,
    position_row,
    rows,
    heads,
    repeat,
    width,
    blocks,
    budget,
    ratio,
    page_tokens,
    pages,
    tokens,
    scale,
    splits,
    CHOSEN: tl.constexpr,
    SHARED: tl.constexpr,
    SPLIT: tl.constexpr,
    SPAN: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    lane, row = index // rows, index % rows
    kv_head = tl.program_id(1) // blocks
    own = (tl.program_id(1) % blocks) * HEADS + tl.arange(0, HEADS)
    mask = own < repeat
    head = kv_head * repeat + own
    columns = tl.arange(0, WIDTH)
    slot = tl.load(slots + lane * slot_stride)
    position = tl.load(positions + lane * position_lane + row * position_row)
    here = q + lane * q_lane + row * q_row + head[:, None] * q_head + columns[None, :]
    query = tl.load(here, mask=mask[:, None] & (columns < width)[None, :], other=0)
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    mass = tl.zeros((HEADS,), tl.float32)
    total = tl.zeros((HEADS, WIDTH), tl.float32)
    # positions of a lane that is nobody's may lie behind the context
    position = tl.minimum(position, tokens - 1)
    extent = position + 1
    tail = extent // ratio * ratio
    listed = tl.minimum(extent // ratio, budget) * ratio
    if CHOSEN:
        extent = listed + extent - tail
    first = tl.program_id(2).to(tl.int64) * SPAN
    for start in range(first, tl.minimum(first + SPAN, extent), SIZE):
        place = start + tl.arange(0, SIZE)
        seen = (place < extent) & (place < first + SPAN)
        token = place
        if CHOSEN:
            group = tl.load(ids + index * budget + place // ratio, mask=place < listed, other=0)
            token = tl.where(place < listed, group * ratio + place % ratio, tail + place - listed)
        page = tl.load(table + slot * table_stride + tl.minimum(token // page_tokens, pages - 1), mask=seen, other=0)
        entry = page.to(tl.int64) * page_tokens + token % page_tokens
        at = entries + entry[:, None] * entry_stride + kv_head * head_stride + columns[None, :]
        inside = seen[:, None] & (columns < width)[None, :]
        keys = tl.load(at, mask=inside, other=0).to(query.dtype)
        values = keys
        if not SHARED:
            values = tl.load(at + value_offset, mask=inside, other=0).to(query.dtype)
        bias = tl.where(seen, 0.0, float("-inf"))
        top, mass, total = fold(query, keys, values, bias, top, mass, total, scale)
    at = lane * out_lane + row * out_row + head * out_head
    part = (index * heads + head) * splits + tl.program_id(2)
    finish(out, tops, masses, sums, at, part, heads, columns, mask, top, mass, total, width, SPLIT)
