"""Choice of groups in two kernels: scores of a row's complete groups, read from their pages, and the rank of each among them.

A group's place in the choice is the number of complete groups that come before it: those of greater score, and of equal score
those of lower number. Every place is written once, so the order is that of a stable sort. Comparing all pairs costs the square
of the groups, which is little up to some thousands.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.grouped_rows import Chosen, RowPlan


def choose_groups(q: Tensor, weights: Tensor | None, keys: Tensor, plan: RowPlan, *, factor: float) -> Chosen:
    """See ``RowPlan.choose_scored``. keys: flat paged group entries [·, D]."""
    batch, rows, heads, width = q.shape
    groups = plan.causal.shape[-1] // plan.ratio
    device, count = q.device, batch * rows
    scores = torch.empty(count, groups, dtype=torch.float32, device=device)
    ids = torch.empty(batch, rows, plan.budget, dtype=torch.int64, device=device)
    counted = torch.empty(ids.shape, dtype=torch.bool, device=device)
    columns = max(triton.next_power_of_2(width), 16)
    block = max(triton.next_power_of_2(heads), 16)
    size = max(16, min(128, 8192 // columns))
    store = plan.store
    positions = (plan.positions, plan.positions.stride(0), plan.positions.stride(1))
    _score_groups[(count, triton.cdiv(groups, size))](
        q,
        q if weights is None else weights,
        keys,
        scores,
        store.page_table,
        plan.slots,
        *positions,
        *(q.stride(axis) for axis in range(3)),
        0 if weights is None else weights.stride(0),
        keys.stride(0),
        store.page_table.stride(0),
        plan.slots.stride(0),
        rows,
        heads,
        width,
        groups,
        plan.ratio,
        store.layout.page_tokens // plan.ratio,
        store.page_table.shape[1],
        factor,
        WEIGHTED=weights is not None,
        HEADS=block,
        WIDTH=columns,
        SIZE=size,
        num_warps=4,
    )
    size = 64
    _rank_groups[(count, triton.cdiv(groups, size))](
        scores,
        ids,
        counted.view(torch.uint8),
        *positions,
        rows,
        groups,
        plan.budget,
        plan.ratio,
        SIZE=size,
        TILE=128,
        num_warps=4,
    )
    return Chosen(ids=ids, counted=counted)


@triton.jit
def _score_groups(
    q,
    weights,
    keys,
    scores,
    table,
    slots,
    positions,
    position_lane,
    position_row,
    q_lane,
    q_row,
    q_head,
    weight_stride,
    key_stride,
    table_stride,
    slot_stride,
    rows,
    heads,
    width,
    groups,
    ratio,
    page_groups,
    pages,
    factor,
    WEIGHTED: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    lane, row = index // rows, index % rows
    slot = tl.load(slots + lane * slot_stride)
    complete = (tl.load(positions + lane * position_lane + row * position_row) + 1) // ratio
    complete = tl.minimum(complete, groups)
    group = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    if tl.program_id(1) * SIZE < complete:
        head = tl.arange(0, HEADS)
        columns = tl.arange(0, WIDTH)
        known = group < complete
        here = q + lane * q_lane + row * q_row + head[:, None] * q_head + columns[None, :]
        query = tl.load(here, mask=(head < heads)[:, None] & (columns < width)[None, :], other=0)
        leaf = tl.minimum(group // page_groups, pages - 1)
        page = tl.load(table + slot * table_stride + leaf, mask=known, other=0).to(tl.int64)
        entry = page * page_groups + group % page_groups
        at = keys + entry[:, None] * key_stride + columns[None, :]
        read = tl.load(at, mask=known[:, None] & (columns < width)[None, :], other=0).to(query.dtype)
        if query.dtype == tl.float32:
            matched = tl.dot(query, tl.trans(read), input_precision="ieee")
        else:
            # products of half-precision values are exact in float32
            matched = tl.dot(query, tl.trans(read))
        matched = tl.where(matched < 0, 0.0, matched)
        if WEIGHTED:
            factors = tl.load(weights + index * weight_stride + head, mask=head < heads, other=0).to(tl.float32)
            matched = matched * factors[:, None]
        tl.store(scores + index * groups + group, tl.sum(matched, axis=0) * factor, mask=known)


@triton.jit
def _rank_groups(
    scores,
    ids,
    counted,
    positions,
    position_lane,
    position_row,
    rows,
    groups,
    budget,
    ratio,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    complete = (tl.load(positions + index // rows * position_lane + index % rows * position_row) + 1) // ratio
    complete = tl.minimum(complete, groups)
    own = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    known = own < complete
    mine = tl.load(scores + index * groups + own, mask=known, other=0)
    # a score that is no number would be before nothing and behind nothing
    mine = tl.where(mine != mine, float("inf"), mine)
    before = tl.zeros((SIZE,), tl.int32)
    if tl.program_id(1) * SIZE < complete:
        for start in range(0, complete, TILE):
            other = start + tl.arange(0, TILE)
            inside = other < complete
            theirs = tl.load(scores + index * groups + other, mask=inside, other=0)
            theirs = tl.where(theirs != theirs, float("inf"), theirs)
            ahead = theirs[None, :] > mine[:, None]
            ahead = ahead | ((theirs[None, :] == mine[:, None]) & (other[None, :] < own[:, None]))
            before += tl.sum((ahead & inside[None, :]).to(tl.int32), axis=1)
    # groups that are not complete come behind all others, in their order
    place = tl.where(known, before, own)
    kept = (own < groups) & (place < budget)
    tl.store(ids + index * budget + place, own.to(tl.int64), mask=kept)
    tl.store(counted + index * budget + place, known.to(tl.uint8), mask=kept)
