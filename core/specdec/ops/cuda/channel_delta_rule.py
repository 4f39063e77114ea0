"""Delta rule with channel decays in one kernel for all rows of a verification; see ``specdec.ops.channel_delta_rule``.

The columns of a state matrix (value channels) do not interact, so a program keeps some of them in registers from the first row
to the last. The commit selects one of the states that it writes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Value channels of one program, a warp of its own: the sum over the key channels stays within the warp.
_CHANNELS = 16


def channel_delta_rule_rows(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """See ``specdec.ops.channel_delta_rule.channel_delta_rule_rows``; all operands float32."""
    batch, rows, heads, width = v.shape
    dim = state.shape[-2]
    outputs = torch.empty(batch, rows, heads, width, dtype=torch.float32, device=v.device)
    states = torch.empty(batch, rows, heads, dim, width, dtype=torch.float32, device=v.device)
    q, k, v, log_decay = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, log_decay))
    _verify_rows[(batch * heads, triton.cdiv(width, _CHANNELS))](
        state.contiguous(),
        q,
        k,
        v,
        log_decay,
        beta,
        outputs,
        states,
        rows,
        *(stride for x in (q, k, v, log_decay, beta) for stride in x.stride()[:3]),
        HEADS=heads,
        WIDTH=width,
        DIM=dim,
        BLOCK=_CHANNELS,
        BD=triton.next_power_of_2(dim),
        num_warps=1,
        enable_fp_fusion=False,
    )
    return outputs, states


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
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BD: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    lane, head = program // HEADS, program % HEADS
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.arange(0, BD)
    own, inside = channel < WIDTH, at < DIM
    both = inside[:, None] & own[None, :]
    cells = at[:, None] * WIDTH + channel[None, :]
    state = tl.load(state_ptr + program * DIM * WIDTH + cells, mask=both, other=0.0)
    for row in range(rows):
        key = tl.load(k_ptr + lane * k_lane + row * k_row + head * k_head + at, mask=inside, other=0.0)
        query = tl.load(q_ptr + lane * q_lane + row * q_row + head * q_head + at, mask=inside, other=0.0)
        decay = tl.load(
            decay_ptr + lane * decay_lane + row * decay_row + head * decay_head + at, mask=inside, other=0.0
        )
        value = tl.load(v_ptr + lane * v_lane + row * v_row + head * v_head + channel, mask=own, other=0.0)
        strength = tl.load(beta_ptr + lane * beta_lane + row * beta_row + head * beta_head)
        state = state * tl.exp(decay)[:, None]
        reader = strength * key
        correction = strength * value - tl.sum(reader[:, None] * state, axis=0)
        state = state + key[:, None] * correction[None, :]
        found = (lane * rows + row) * HEADS + head
        tl.store(out_ptr + found * WIDTH + channel, tl.sum(query[:, None] * state, axis=0), mask=own)
        tl.store(states_ptr + found * DIM * WIDTH + cells, state, mask=both)
