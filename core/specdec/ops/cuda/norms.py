"""Root-mean-square norms, one program and one pass for each row; see ``specdec.ops.norms``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms(x: Tensor, eps: float) -> Tensor:
    """See ``specdec.ops.norms.rms``; float32 result, contiguous."""
    return _norm(x, None, eps, torch.float32, mean=True)


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """See ``specdec.ops.norms.rms_norm``; contiguous result."""
    return _norm(x, scale, eps, x.dtype, mean=True)


def unit_norm(x: Tensor, eps: float) -> Tensor:
    """See ``specdec.ops.norms.unit_norm``; float32 result, contiguous."""
    return _norm(x, None, eps, torch.float32, mean=False)


def gated_rms_norm(x: Tensor, gate: Tensor, scale: Tensor, eps: float, activation: str) -> Tensor:
    """See ``specdec.ops.norms.gated_rms_norm``; contiguous result."""
    width = x.shape[-1]
    out = torch.empty(x.shape, dtype=gate.dtype, device=x.device)
    x, *x_steps = rows_of(x)
    gate, *gate_steps = rows_of(gate)
    block = triton.next_power_of_2(width)
    _gated_rows[(out.numel() // width,)](
        x,
        gate,
        scale.contiguous(),
        out,
        *x_steps,
        *gate_steps,
        eps,
        WIDTH=width,
        BLOCK=block,
        SILU=activation == "silu",
        num_warps=min(max(block // 512, 1), 16),
        enable_fp_fusion=False,
    )
    return out


def _norm(x: Tensor, scale: Tensor | None, eps: float, dtype: torch.dtype, *, mean: bool) -> Tensor:
    width = x.shape[-1]
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    rows = x.numel() // max(width, 1)
    if rows == 0:
        return out
    x, inner, outer_stride, inner_stride = rows_of(x)
    period = 1
    if scale is not None:
        if scale.shape != out.shape[out.dim() - scale.dim() :] or not scale.is_contiguous():
            scale = scale.expand(out.shape).contiguous()
        period = scale.numel() // width
    block = triton.next_power_of_2(width)
    _norm_rows[(rows,)](
        x,
        x if scale is None else scale,
        out,
        inner,
        outer_stride,
        inner_stride,
        period,
        eps,
        WIDTH=width,
        BLOCK=block,
        MEAN=mean,
        SCALED=scale is not None,
        num_warps=min(max(block // 512, 1), 16),
    )
    return out


def rows_of(x: Tensor) -> tuple[Tensor, int, int, int]:
    """x as rows of its last axis: the tensor, rows per outer step, strides of the outer step and of a row within it.

    Row r starts at (r // inner) · outer_stride + (r % inner) · inner_stride. Copies x only if its rows need a third stride or
    are not contiguous themselves.
    """
    steps: list[list[int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if steps and steps[-1][1] == size * stride:
            steps[-1] = [steps[-1][0] * size, stride]
        else:
            steps.append([size, stride])
    if len(steps) > 2 or (x.stride(-1) != 1 and x.shape[-1] > 1):
        return x.contiguous(), 1, x.shape[-1], 0
    if not steps:
        return x, 1, 0, 0
    if len(steps) == 1:
        return x, 1, steps[0][1], 0
    return x, steps[1][0], steps[0][1], steps[1][1]


# numbers that depend on the batch are not specialised: a row must not get other code because of its neighbours
@triton.jit(do_not_specialize=["inner", "outer_stride", "inner_stride"])
def _norm_rows(
    x_ptr,
    scale_ptr,
    out_ptr,
    inner,
    outer_stride,
    inner_stride,
    period,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    MEAN: tl.constexpr,
    SCALED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    start = (row // inner) * outer_stride + (row % inner) * inner_stride
    x = tl.load(x_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
    total = tl.sum(x * x, axis=0)
    if MEAN:
        total = total / WIDTH
    y = x * tl.rsqrt(total + eps)
    if SCALED:
        scale = tl.load(scale_ptr + (row % period) * WIDTH + columns, mask=inside, other=0.0)
        y = y * scale.to(tl.float32)
    tl.store(out_ptr + row * WIDTH + columns, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["x_inner", "x_outer", "x_step", "gate_inner", "gate_outer", "gate_step"])
def _gated_rows(
    x_ptr,
    gate_ptr,
    scale_ptr,
    out_ptr,
    x_inner,
    x_outer,
    x_step,
    gate_inner,
    gate_outer,
    gate_step,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SILU: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    kind = out_ptr.dtype.element_ty
    scale_kind = scale_ptr.dtype.element_ty
    x_start = (row // x_inner) * x_outer + (row % x_inner) * x_step
    gate_start = (row // gate_inner) * gate_outer + (row % gate_inner) * gate_step
    x = tl.load(x_ptr + x_start + columns, mask=inside, other=0.0).to(kind).to(tl.float32)
    gate = tl.load(gate_ptr + gate_start + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    normed = (x * tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)).to(scale_kind).to(tl.float32)
    scaled = (normed * scale).to(scale_kind).to(tl.float32)
    opened = tl.div_rn(1.0, 1.0 + tl.exp(-gate))
    if SILU:
        opened = tl.div_rn(gate, 1.0 + tl.exp(-gate))
    tl.store(out_ptr + row * WIDTH + columns, (scaled * opened).to(kind), mask=inside)
