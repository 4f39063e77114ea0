"""Decays and write strengths of the delta rules in one kernel each; see ``specdec.ops.delta_gates``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .norms import rows_of


def head_gates(a: Tensor, b: Tensor, rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """See ``specdec.ops.delta_gates.head_gates``; contiguous results."""
    heads = a.shape[-1]
    log_decay = torch.empty(a.shape, dtype=torch.float32, device=a.device)
    beta = torch.empty_like(log_decay)
    a, *a_steps = rows_of(a)
    b, *b_steps = rows_of(b)
    _head_rows[(beta.numel() // heads,)](
        a,
        b,
        rate.contiguous(),
        bias.contiguous(),
        log_decay,
        beta,
        *a_steps,
        *b_steps,
        HEADS=heads,
        BLOCK=triton.next_power_of_2(heads),
        num_warps=1,
    )
    return log_decay, beta


def channel_gates(raw: Tensor, b: Tensor, rate: Tensor, shift: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """See ``specdec.ops.delta_gates.channel_gates``; contiguous results."""
    heads, dim = raw.shape[-2:]
    log_decay = torch.empty(raw.shape, dtype=torch.float32, device=raw.device)
    beta = torch.empty(raw.shape[:-1], dtype=torch.float32, device=raw.device)
    b, *b_steps = rows_of(b)
    _channel_rows[(beta.numel(),)](
        raw.contiguous(),
        b,
        rate.contiguous(),
        shift.contiguous(),
        log_decay,
        beta,
        bound,
        *b_steps,
        HEADS=heads,
        DIM=dim,
        BLOCK=triton.next_power_of_2(dim),
        num_warps=1,
    )
    return log_decay, beta


@triton.jit(do_not_specialize=["a_inner", "a_outer", "a_step", "b_inner", "b_outer", "b_step"])
def _head_rows(
    a_ptr,
    b_ptr,
    rate_ptr,
    bias_ptr,
    log_decay_ptr,
    beta_ptr,
    a_inner,
    a_outer,
    a_step,
    b_inner,
    b_outer,
    b_step,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK)
    inside = head < HEADS
    a = tl.load(a_ptr + (row // a_inner) * a_outer + (row % a_inner) * a_step + head, mask=inside, other=0.0)
    b = tl.load(b_ptr + (row // b_inner) * b_outer + (row % b_inner) * b_step + head, mask=inside, other=0.0)
    x = a.to(tl.float32) + tl.load(bias_ptr + head, mask=inside, other=0.0)
    # softplus, linear above 20 as in torch; the quotient gives back what 1 + e loses of a small e
    e = tl.exp(tl.where(x > 20.0, 0.0, x))
    u = 1.0 + e
    soft = tl.where(x > 20.0, x, tl.where(u == 1.0, e, tl.log(u) * tl.div_rn(e, tl.where(u == 1.0, 1.0, u - 1.0))))
    rate = tl.load(rate_ptr + head, mask=inside, other=0.0)
    tl.store(log_decay_ptr + row * HEADS + head, rate * soft, mask=inside)
    strength = tl.div_rn(1.0, 1.0 + tl.exp(-b.to(tl.float32))).to(b_ptr.dtype.element_ty)
    tl.store(beta_ptr + row * HEADS + head, strength.to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["b_inner", "b_outer", "b_step"])
def _channel_rows(
    raw_ptr,
    b_ptr,
    rate_ptr,
    shift_ptr,
    log_decay_ptr,
    beta_ptr,
    bound,
    b_inner,
    b_outer,
    b_step,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row, head = program // HEADS, program % HEADS
    at = tl.arange(0, BLOCK)
    inside = at < DIM
    raw = tl.load(raw_ptr + program * DIM + at, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + head * DIM + at, mask=inside, other=0.0)
    x = shift + raw * tl.load(rate_ptr + head)
    tl.store(log_decay_ptr + program * DIM + at, bound * tl.div_rn(1.0, 1.0 + tl.exp(-x)), mask=inside)
    b = tl.load(b_ptr + (row // b_inner) * b_outer + (row % b_inner) * b_step + head).to(tl.float32)
    tl.store(beta_ptr + program, tl.div_rn(1.0, 1.0 + tl.exp(-b)))
