"""Attention over shared rows with a sink; see ``specdec.ops.sink_attention``.

The sink starts the online softmax: it has weight and adds nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.cuda.online_softmax import SPAN, add_spans, finish, fold, shape_of
from specdec.ops.sink_attention import Groups


def attend_window(
    q: Tensor, window: Tensor, last: Tensor, positions: Tensor, extent: int, sink: Tensor, groups: Groups | None
) -> Tensor:
    """See ``specdec.ops.sink_attention.attend_window``."""
    rows, heads, width = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    most = 0 if groups is None else groups.most
    lanes, block, columns, size, splits, parts = shape_of(q, rows, heads, width, extent + most)
    # what is not read is any tensor
    entries = complete = ids = counted = table = slots = positions
    if groups is not None:
        entries, complete, slots, table = groups.entries, groups.complete, groups.slots, groups.store.page_table
        if groups.ids is not None and groups.counted is not None:
            ids, counted = groups.ids.contiguous(), groups.counted.contiguous().view(torch.uint8)
    _attend_window[(rows, lanes, splits)](
        q,
        window,
        entries,
        out,
        *parts,
        last,
        positions,
        sink,
        complete,
        ids,
        counted,
        table,
        slots,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        window.stride(0),
        entries.stride(0),
        table.stride(0),
        # what repeats for all rows of a lane may be one number expanded
        last.stride(0),
        positions.stride(0),
        complete.stride(0),
        slots.stride(0),
        heads,
        width,
        extent,
        most,
        1 if groups is None else groups.store.layout.page_tokens,
        table.shape[-1],
        1 if groups is None else groups.ratio,
        width**-0.5,
        splits,
        SELECTS=groups is not None,
        LISTED=groups is not None and groups.ids is not None,
        SPLIT=splits > 1,
        SPAN=SPAN,
        HEADS=block,
        WIDTH=columns,
        SIZE=size,
        num_warps=4,
    )
    if splits > 1:
        add_spans(out, parts, rows, splits, 1, (out.stride(0), 0, out.stride(1)))
    return out


def attend_sink(q: Tensor, keys: Tensor, bias: Tensor, sink: Tensor) -> Tensor:
    """See ``specdec.ops.sink_attention.attend``."""
    groups, queries, heads, width = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lanes, block, columns, size, _, _ = shape_of(q, 0, heads, width, 1)
    keys = keys if keys.stride(-1) == 1 else keys.contiguous()
    _attend_sink[(groups * queries, lanes)](
        q,
        keys,
        bias,
        sink,
        out,
        *(q.stride(axis) for axis in range(3)),
        *(out.stride(axis) for axis in range(3)),
        keys.stride(0),
        keys.stride(1),
        bias.stride(0),
        bias.stride(2),
        queries,
        heads,
        width,
        keys.shape[1],
        width**-0.5,
        HEADS=block,
        WIDTH=columns,
        SIZE=size,
        num_warps=4,
    )
    return out


@triton.jit
def _attend_window(
    q,
    window,
    entries,
    out,
    tops,
    masses,
    sums,
    lasts,
    positions,
    sink,
    complete,
    ids,
    counted,
    table,
    slots,
    q_row,
    q_head,
    out_row,
    out_head,
    window_stride,
    entry_stride,
    table_stride,
    last_stride,
    position_stride,
    complete_stride,
    slot_stride,
    heads,
    width,
    extent,
    most,
    page_tokens,
    pages,
    ratio,
    scale,
    splits,
    SELECTS: tl.constexpr,
    LISTED: tl.constexpr,
    SPLIT: tl.constexpr,
    SPAN: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Places 0 … extent − 1 are the window, those after it the selection."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    mask = head < heads
    columns = tl.arange(0, WIDTH)
    here = q + row * q_row + head[:, None] * q_head + columns[None, :]
    query = tl.load(here, mask=mask[:, None] & (columns < width)[None, :], other=0)
    position = tl.load(positions + row * position_stride)
    last = tl.load(lasts + row * last_stride)
    total = tl.zeros((HEADS, WIDTH), tl.float32)
    # the first span carries the sink: it takes weight and adds nothing
    taken = tl.load(sink + head, mask=mask, other=0).to(tl.float32)
    top = tl.where(tl.program_id(2) == 0, taken, float("-inf"))
    mass = tl.where(tl.program_id(2) == 0, 1.0, 0.0) + tl.zeros((HEADS,), tl.float32)
    end = tl.zeros((), tl.int64) + extent
    slot = tl.zeros((), tl.int64)
    if SELECTS:
        end += tl.minimum(tl.load(complete + row * complete_stride), most)
        slot += tl.load(slots + row * slot_stride)
    first = tl.program_id(2).to(tl.int64) * SPAN
    for start in range(first, tl.minimum(first + SPAN, end), SIZE):
        place = start + tl.arange(0, SIZE)
        within = place < first + SPAN
        inside = within & (place < extent) & (place >= extent - 1 - position)
        at = window + (last - (extent - 1) + place)[:, None] * window_stride + columns[None, :]
        keys = tl.load(at, mask=inside[:, None] & (columns < width)[None, :], other=0).to(query.dtype)
        seen = inside
        if SELECTS:
            chosen = place - extent
            picked = within & (chosen >= 0) & (place < end)
            group = chosen
            if LISTED:
                group = tl.load(ids + row * most + chosen, mask=picked, other=0)
                picked = picked & (tl.load(counted + row * most + chosen, mask=picked, other=0) != 0)
            token = group * ratio
            leaf = tl.minimum(token // page_tokens, pages - 1)
            page = tl.load(table + slot * table_stride + leaf, mask=picked, other=0).to(tl.int64)
            entry = page * (page_tokens // ratio) + token % page_tokens // ratio
            at = entries + entry[:, None] * entry_stride + columns[None, :]
            other = tl.load(at, mask=picked[:, None] & (columns < width)[None, :], other=0).to(query.dtype)
            keys = tl.where(picked[:, None], other, keys)
            seen = inside | picked
        bias = tl.where(seen, 0.0, float("-inf"))
        top, mass, total = fold(query, keys, keys, bias, top, mass, total, scale)
    at = row * out_row + head * out_head
    part = (row * heads + head) * splits + tl.program_id(2)
    finish(out, tops, masses, sums, at, part, heads, columns, mask, top, mass, total, width, SPLIT)


@triton.jit
def _attend_sink(
    q,
    keys,
    bias,
    sink,
    out,
    q_group,
    q_row,
    q_head,
    out_group,
    out_row,
    out_head,
    key_group,
    key_stride,
    bias_group,
    bias_stride,
    queries,
    heads,
    width,
    count,
    scale,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    group, row = index // queries, index % queries
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    mask = head < heads
    columns = tl.arange(0, WIDTH)
    both = mask[:, None] & (columns < width)[None, :]
    here = q + group * q_group + row * q_row + head[:, None] * q_head + columns[None, :]
    query = tl.load(here, mask=both, other=0)
    top = tl.load(sink + head, mask=mask, other=0).to(tl.float32)
    mass = tl.full((HEADS,), 1.0, tl.float32)
    total = tl.zeros((HEADS, WIDTH), tl.float32)
    for start in range(0, count, SIZE):
        place = start + tl.arange(0, SIZE)
        seen = place < count
        at = keys + group * key_group + place[:, None] * key_stride + columns[None, :]
        read = tl.load(at, mask=seen[:, None] & (columns < width)[None, :], other=0).to(query.dtype)
        added = tl.load(bias + group * bias_group + place * bias_stride, mask=seen, other=float("-inf"))
        top, mass, total = fold(query, read, read, added.to(tl.float32), top, mass, total, scale)
    result = tl.div_rn(total, mass[:, None])
    at = group * out_group + row * out_row + head * out_head
    tl.store(out + at[:, None] + columns[None, :], result.to(out.dtype.element_ty), mask=both)
