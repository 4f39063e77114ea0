"""Gated delta rule: the recurrence row by row, and its chunked form for prompts.

Per value head with state S [v, k], decay α in (0, 1], write strength β:

    S ← α S;   δ = β (v − S k);   S ← S + δ kᵀ;   o = S q

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv:2412.06464); chunked (WY) form: the same paper, section 3.3.
Value heads that share a key head are stacked: with G value heads per key head, the state of a key head is [G·v, k].
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from specdec.ops.select import uses_cuda


@frozen(kw_only=True, eq=False)
class DeltaRows:
    """Outcome of T rows. outputs: [B, T, Hk, G·v]; corrections: δ of every row, [B, T, Hk, G·v]; states: the state after each
    row, T tensors [B, Hk, G·v, d], or none where they were not asked for."""

    outputs: Tensor
    corrections: Tensor
    states: list[Tensor]


def delta_rule_rows(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, *, keep_states: bool = True
) -> DeltaRows:
    """Runs T rows one after the other.

    state: [B, Hk, G·v, d]; q, k: [B, T, Hk, d], normalised and scaled; v: [B, T, Hk, G·v]; decay, beta: [B, T, Hk, G]; results
    are in the dtype of ``state``, which is not changed. keep_states: False where corrections are recorded instead, which saves
    writing T matrices. Each row uses operators of the same shape whatever T is, so a row's result does not depend on the width
    of its round.
    """
    if state.dtype is torch.float32 and uses_cuda("delta_rule_rows", state, q, k, v, decay, beta):
        from specdec.ops.cuda.delta_rule import delta_rule_rows as fast

        found = fast(state, q, k, v, decay, beta, keep_states=keep_states)
        return DeltaRows(outputs=found[0], corrections=found[1], states=found[2])
    batch, rows, heads, width = v.shape
    group = decay.shape[-1]
    dim = state.shape[-1]
    per_row = (batch * heads, rows)
    keys = k.transpose(1, 2).reshape(*per_row, dim, 1).unbind(1)
    queries = q.transpose(1, 2).reshape(*per_row, dim, 1).unbind(1)
    values = v.transpose(1, 2).reshape(*per_row, group, width // group).unbind(1)
    decays = decay.transpose(1, 2).reshape(*per_row, group, 1).unbind(1)
    betas = beta.transpose(1, 2).reshape(*per_row, group, 1).unbind(1)
    current = state.reshape(batch * heads, width, dim)
    outputs, corrections, states = [], [], []
    for key, query, value, alpha, strength in zip(keys, queries, values, decays, betas, strict=True):
        current = (current.view(batch * heads, group, -1) * alpha).view(batch * heads, width, dim)
        read = torch.bmm(current, key).view(batch * heads, group, -1)
        correction = (strength * (value - read)).view(batch * heads, width, 1)
        current = torch.addcmul(current, correction, key.transpose(1, 2))
        outputs.append(torch.bmm(current, query))
        corrections.append(correction)
        if keep_states:
            states.append(current.view(batch, heads, width, dim))
    return DeltaRows(
        outputs=torch.stack(outputs, dim=1).view(batch, heads, rows, width).transpose(1, 2),
        corrections=torch.stack(corrections, dim=1).view(batch, heads, rows, width).transpose(1, 2),
        states=states,
    )


def delta_rule_replay(
    state: Tensor, corrections: Tensor, keys: Tensor, decays: Tensor, taken: Tensor, rows: int
) -> Tensor:
    """State after the first ``taken`` of ``rows`` recorded rows: S ← α S; S ← S + δ kᵀ, row by row.

    state: [L, B, Hk, G·v, d]; corrections: [L, B, ≥ rows, Hk, G·v]; keys: [L, B, ≥ rows, Hk, d]; decays: [L, B, ≥ rows, Hk, G];
    taken: [B] int64. Returns [L, B, Hk, G·v, d]; does not change its inputs. The two products and the sum are those of
    ``delta_rule_rows``, so the result equals the state that it had, bit for bit.
    """
    if state.dtype is torch.float32 and uses_cuda("delta_rule_replay", state, corrections, keys, decays):
        from specdec.ops.cuda.delta_rule import delta_rule_replay as fast

        return fast(state, corrections, keys, decays, taken, rows)
    layers, batch, heads, width, dim = state.shape
    group = decays.shape[-1]
    lanes = layers * batch * heads
    # a row that was not taken becomes the identity, S · 1 + 0 · 0; its record may hold anything
    kept = (torch.arange(rows, device=taken.device) < taken.unsqueeze(1)).view(1, batch, rows, 1, 1)
    taken_decays = torch.where(kept, decays[:, :, :rows], 1).unbind(2)
    taken_corrections = torch.where(kept, corrections[:, :, :rows], 0).unbind(2)
    taken_keys = torch.where(kept, keys[:, :, :rows], 0).unbind(2)
    current = state.reshape(lanes, width, dim)
    for alpha, correction, key in zip(taken_decays, taken_corrections, taken_keys, strict=True):
        current = (current.view(lanes, group, -1) * alpha.reshape(lanes, group, 1)).view(lanes, width, dim)
        current = torch.addcmul(current, correction.reshape(lanes, width, 1), key.reshape(lanes, 1, dim))
    return current.view(state.shape)


def delta_rule_chunks(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, chunk: int = 64
) -> tuple[Tensor, Tensor]:
    """The same recurrence for a whole prompt piece, in chunks; only the state after the last row is returned.

    Shapes as ``delta_rule_rows`` with ``log_decay`` = ln α. Returns (outputs [B, T, Hk, G·v], state [B, Hk, G·v, d]).
    Equal to the row form up to rounding; never mix the two where bit equality across widths is claimed.
    """
    batch, rows, heads, width = v.shape
    group = log_decay.shape[-1]
    dim, value_dim = state.shape[-1], width // group
    current = state.view(batch, heads, group, value_dim, dim).transpose(-1, -2)  # [B, Hk, G, d, v]
    outputs = []
    for start in range(0, rows, chunk):
        piece = slice(start, min(start + chunk, rows))
        kq = k[:, piece].transpose(1, 2).unsqueeze(2)  # [B, Hk, 1, C, d]
        qq = q[:, piece].transpose(1, 2).unsqueeze(2)
        vv = v[:, piece].view(batch, -1, heads, group, value_dim).permute(0, 2, 3, 1, 4)  # [B, Hk, G, C, v]
        bb = beta[:, piece].permute(0, 2, 3, 1).unsqueeze(-1)  # [B, Hk, G, C, 1]
        cum = log_decay[:, piece].permute(0, 2, 3, 1).cumsum(-1)  # [B, Hk, G, C]
        size = cum.shape[-1]
        causal = torch.ones(size, size, dtype=torch.bool, device=v.device).tril()
        # masked before exp: above the diagonal the difference is positive and may overflow
        gamma = (cum.unsqueeze(-1) - cum.unsqueeze(-2)).masked_fill(~causal, -torch.inf).exp()
        strict = bb * (kq @ kq.transpose(-1, -2)) * gamma
        lower = torch.eye(size, dtype=v.dtype, device=v.device) + strict.tril(-1)
        grown = cum.exp().unsqueeze(-1)
        solved = torch.linalg.solve_triangular(
            lower, torch.cat([bb * vv, bb * grown * kq.expand(-1, -1, group, -1, -1)], dim=-1), upper=False
        )
        corrected = solved[..., :value_dim] - solved[..., value_dim:] @ current
        out = (grown * qq) @ current + ((qq @ kq.transpose(-1, -2)) * gamma) @ corrected
        last = cum[..., -1:]
        carry = (last - cum).exp().unsqueeze(-1) * kq
        current = last.exp().unsqueeze(-1) * current + carry.transpose(-1, -2) @ corrected
        outputs.append(out.permute(0, 3, 1, 2, 4).reshape(batch, size, heads, width))
    return torch.cat(outputs, dim=1), current.transpose(-1, -2).reshape(batch, heads, width, dim)
