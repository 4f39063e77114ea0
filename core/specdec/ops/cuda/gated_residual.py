"""Gated residual in one kernel; see ``specdec.ops.gated_residual``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def read_streams(normed: Tensor, gate: Tensor, write: Tensor) -> tuple[Tensor, Tensor]:
    """See ``specdec.ops.gated_residual.read_streams``; contiguous results."""
    rows, count, hidden = normed.shape
    weights = write.shape[1]
    read = torch.empty(rows, hidden, dtype=normed.dtype, device=normed.device)
    inject = torch.empty(rows, weights, dtype=normed.dtype, device=normed.device)
    block = min(triton.next_power_of_2(hidden), 256)
    write = write if write.stride(-1) == 1 else write.contiguous()
    _read_rows[(rows, triton.cdiv(hidden, block))](
        normed.contiguous(),
        gate.contiguous(),
        write,
        read,
        inject,
        write.stride(0),
        S=count,
        HIDDEN=hidden,
        BLOCK=block,
        WEIGHTS=weights,
        BW=triton.next_power_of_2(max(weights, 1)),
        num_warps=2,
        enable_fp_fusion=False,
    )
    return read, inject


@triton.jit
def _read_rows(
    x_ptr,
    gate_ptr,
    write_ptr,
    read_ptr,
    inject_ptr,
    write_step,
    S: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BW: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < HIDDEN
    kind = read_ptr.dtype.element_ty
    total = tl.zeros([BLOCK], tl.float32)
    for s in tl.static_range(S):
        cells = (row * S + s) * HIDDEN + at
        x = tl.load(x_ptr + cells, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + cells, mask=inside, other=0.0).to(tl.float32)
        opened = tl.div_rn(1.0, 1.0 + tl.exp(-gate)).to(kind).to(tl.float32)
        total += (opened * x).to(kind).to(tl.float32)
    tl.store(read_ptr + row * HIDDEN + at, tl.div_rn(total, S * 1.0).to(kind), mask=inside)
    if WEIGHTS > 0:
        i = tl.arange(0, BW)
        # one of the programs of a row writes its weights
        held = (i < WEIGHTS) & (tl.program_id(1) == 0)
        weight = tl.load(write_ptr + row * write_step + i, mask=held, other=0.0).to(tl.float32)
        opened = tl.div_rn(1.0, 1.0 + tl.exp(-weight)).to(kind).to(tl.float32)
        tl.store(inject_ptr + row * WEIGHTS + i, (2.0 * opened).to(kind), mask=held)
