"""Gated delta rule in one kernel for all rows of a verification, and one for its commit; see ``specdec.ops.delta_rule``.

The rows of a state matrix (value channels) do not interact, so a program keeps some of them in registers from the first row to
the last. Products and sums are written so that no compiler may join them differently in the two kernels: the commit repeats the
bits of the verification.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Value channels of one program, a warp of its own: the sum over a key's channels stays within the warp.
_CHANNELS = 16


def delta_rule_rows(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, *, keep_states: bool = True
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Outputs, corrections and states of ``specdec.ops.delta_rule.DeltaRows``; all operands float32."""
    batch, rows, heads, width = v.shape
    dim = state.shape[-1]
    outputs = torch.empty(batch, rows, heads, width, dtype=torch.float32, device=v.device)
    corrections = torch.empty_like(outputs)
    states = torch.empty(rows if keep_states else 0, *state.shape, dtype=torch.float32, device=v.device)
    state = state.contiguous()
    q, k, v, decay, beta = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, decay, beta))
    _verify_rows[(batch * heads, triton.cdiv(width, _CHANNELS))](
        state,
        q,
        k,
        v,
        decay,
        beta,
        outputs,
        corrections,
        states,
        rows,
        *(stride for x in (q, k, v, decay, beta) for stride in x.stride()[:3]),
        HEADS=heads,
        WIDTH=width,
        VALUE=width // decay.shape[-1],
        DIM=dim,
        BLOCK=_CHANNELS,
        BD=triton.next_power_of_2(dim),
        KEEP=keep_states,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return outputs, corrections, list(states.unbind(0))


def delta_rule_replay(
    state: Tensor, corrections: Tensor, keys: Tensor, decays: Tensor, taken: Tensor, rows: int
) -> Tensor:
    """See ``specdec.ops.delta_rule.delta_rule_replay``; all operands float32, taken int64."""
    layers, batch, heads, width, dim = state.shape
    out = torch.empty(state.shape, dtype=torch.float32, device=state.device)
    corrections, keys, decays = corrections.contiguous(), keys.contiguous(), decays.contiguous()
    _replay_rows[(layers * batch * heads, triton.cdiv(width, _CHANNELS))](
        state.contiguous(),
        corrections,
        keys,
        decays,
        taken.contiguous(),
        out,
        rows,
        batch,
        corrections.shape[2],
        keys.shape[2],
        decays.shape[2],
        HEADS=heads,
        WIDTH=width,
        VALUE=width // decays.shape[-1],
        DIM=dim,
        BLOCK=_CHANNELS,
        BD=triton.next_power_of_2(dim),
        num_warps=1,
        enable_fp_fusion=False,
    )
    return out


@triton.jit(
    do_not_specialize=[
        *("rows", "q_lane", "k_lane", "v_lane", "decay_lane", "beta_lane"),
        *("q_row", "k_row", "v_row", "decay_row", "beta_row"),
        *("q_head", "k_head", "v_head", "decay_head", "beta_head"),
    ]
)
def _verify_rows(
    state_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,
    out_ptr,
    correction_ptr,
    states_ptr,
    rows,
    q_lane,
    q_row,
    q_head,
    k_lane,
    k_row,
    k_head,
    v_lane,
    v_row,
    v_head,
    decay_lane,
    decay_row,
    decay_head,
    beta_lane,
    beta_row,
    beta_head,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BD: tl.constexpr,
    KEEP: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    lane, head = program // HEADS, program % HEADS
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.arange(0, BD)
    own, inside = channel < WIDTH, at < DIM
    both = own[:, None] & inside[None, :]
    cells = (program * WIDTH + channel[:, None]) * DIM + at[None, :]
    group = channel // VALUE
    state = tl.load(state_ptr + cells, mask=both, other=0.0)
    for row in range(rows):
        alpha = tl.load(
            decay_ptr + lane * decay_lane + row * decay_row + head * decay_head + group, mask=own, other=0.0
        )
        strength = tl.load(beta_ptr + lane * beta_lane + row * beta_row + head * beta_head + group, mask=own, other=0.0)
        value = tl.load(v_ptr + lane * v_lane + row * v_row + head * v_head + channel, mask=own, other=0.0)
        key = tl.load(k_ptr + lane * k_lane + row * k_row + head * k_head + at, mask=inside, other=0.0)
        query = tl.load(q_ptr + lane * q_lane + row * q_row + head * q_head + at, mask=inside, other=0.0)
        state = state * alpha[:, None]
        correction = strength * (value - tl.sum(state * key[None, :], axis=1))
        state = state + correction[:, None] * key[None, :]
        found = ((lane * rows + row) * HEADS + head) * WIDTH + channel
        tl.store(out_ptr + found, tl.sum(state * query[None, :], axis=1), mask=own)
        tl.store(correction_ptr + found, correction, mask=own)
        if KEEP:
            after = ((row * tl.num_programs(0) + program) * WIDTH + channel[:, None]) * DIM + at[None, :]
            tl.store(states_ptr + after, state, mask=both)


@triton.jit(do_not_specialize=["rows", "batch", "correction_rows", "key_rows", "decay_rows"])
def _replay_rows(
    state_ptr,
    correction_ptr,
    key_ptr,
    decay_ptr,
    taken_ptr,
    out_ptr,
    rows,
    batch,
    correction_rows,
    key_rows,
    decay_rows,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BD: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    lane, head = program // HEADS, program % HEADS  # lane: of all layers
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.arange(0, BD)
    own, inside = channel < WIDTH, at < DIM
    both = own[:, None] & inside[None, :]
    cells = (program * WIDTH + channel[:, None]) * DIM + at[None, :]
    groups: tl.constexpr = WIDTH // VALUE
    state = tl.load(state_ptr + cells, mask=both, other=0.0)
    taken = tl.minimum(tl.load(taken_ptr + lane % batch), rows)
    # records after the taken ones may hold anything and are not read
    for row in range(taken):
        alpha = tl.load(
            decay_ptr + ((lane * decay_rows + row) * HEADS + head) * groups + channel // VALUE, mask=own, other=0.0
        )
        correction = tl.load(
            correction_ptr + ((lane * correction_rows + row) * HEADS + head) * WIDTH + channel, mask=own, other=0.0
        )
        key = tl.load(key_ptr + ((lane * key_rows + row) * HEADS + head) * DIM + at, mask=inside, other=0.0)
        state = state * alpha[:, None]
        state = state + correction[:, None] * key[None, :]
    tl.store(out_ptr + cells, state, mask=both)
