"""Delta rule with a decay for every key channel (Kimi delta attention): row by row, and in chunks for prompts.

Per head with state S [key, value], log decay g ≤ 0 for each key channel, write strength β:

    S ← diag(exp g) S;   δ = β (v − Sᵀ k);   S ← S + k δᵀ;   o = Sᵀ q

Source: Kimi Team, "Kimi Linear" (arXiv:2510.26692), section 3; the chunked (WY) form: the same section. Heads do not interact,
so a shard of them can be handed in alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.ops.select import uses_cuda

# Rows per chunk: the decays between two rows of a chunk differ by channel, so a chunk of C rows costs C² · key numbers.
CHUNK = 16
# Chunks whose inner part is computed at once, which bounds that memory whatever the prompt's length.
_CHUNKS_AT_ONCE = 16


def channel_delta_rule_rows(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Runs T rows one after the other and keeps the state after each.

    state: [B, H, key, value]; q, k: [B, T, H, key], normalised and scaled; v: [B, T, H, value]; log_decay: [B, T, H, key];
    beta: [B, T, H]; all in the dtype of ``state``, none is changed. Returns outputs [B, T, H, value] and states
    [B, T, H, key, value]. Each row uses operators of the same shape whatever T is, so a row's result does not depend on the
    width of its round.
    """
    if state.dtype is torch.float32 and uses_cuda("channel_delta_rule_rows", state, q, k, v, log_decay, beta):
        from specdec.ops.cuda.channel_delta_rule import channel_delta_rule_rows as fast

        return fast(state, q, k, v, log_decay, beta)
    batch, rows, heads, width = v.shape
    dim = state.shape[-2]
    lanes = batch * heads

    def split(x: Tensor, *shape: int) -> tuple[Tensor, ...]:
        return x.transpose(1, 2).reshape(lanes, rows, *shape).unbind(1)

    strength = beta.unsqueeze(-1)
    # β (v − Sᵀk) as one product: βv − (βk)ᵀ S
    written = split(strength * v, 1, width)
    readers = split(strength * k, 1, dim)
    keys, queries, decays = split(k, dim, 1), split(q, 1, dim), split(log_decay.exp(), dim, 1)
    current = state.reshape(lanes, dim, width)
    outputs, states = [], []
    for key, reader, query, value, decay in zip(keys, readers, queries, written, decays, strict=True):
        current = current * decay
        current = torch.addcmul(current, key, torch.baddbmm(value, reader, current, alpha=-1))
        outputs.append(torch.bmm(query, current))
        states.append(current)
    return (
        torch.cat(outputs, dim=1).view(batch, heads, rows, width).transpose(1, 2),
        torch.stack([state.view(batch, heads, dim, width) for state in states], dim=1),
    )


def channel_delta_rule_chunks(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """The same recurrence for a whole prompt piece; only the state after the last row is returned.

    Shapes as ``channel_delta_rule_rows``, any T ≥ 1. Returns outputs [B, T, H, value] and the state [B, H, key, value]. Equal to
    the row form up to rounding; never mix the two where bit equality across widths is claimed.
    """
    rows = v.shape[1]
    span = chunk * _CHUNKS_AT_ONCE
    outputs = []
    for start in range(0, rows, span):
        piece = slice(start, min(start + span, rows))
        out, state = _span(state, q[:, piece], k[:, piece], v[:, piece], log_decay[:, piece], beta[:, piece], chunk)
        outputs.append(out)
    return torch.cat(outputs, dim=1), state


def _span(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """At most ``_CHUNKS_AT_ONCE`` chunks: what lies within a chunk for all of them, then the state from chunk to chunk."""
    batch, rows, heads, width = v.shape
    count = -(-rows // chunk)
    missing = count * chunk - rows

    def cut(x: Tensor) -> Tensor:
        """[B, T, H, ·] → [B, H, chunks, rows, ·]; rows of zeros at the end neither decay, write nor read anything."""
        return F.pad(x, (0, 0, 0, 0, 0, missing)).view(batch, count, chunk, heads, -1).permute(0, 3, 1, 2, 4)

    q, k, v, beta = cut(q), cut(k), cut(v), cut(beta.unsqueeze(-1))
    total = cut(log_decay).cumsum(-2)  # G
    grown = total.exp()
    within, mixed = _within_chunk(total, k, torch.stack([beta * k, q], dim=-1))
    # (I + L)⁻¹ applied to what the rows write and to what they read of the incoming state; only the part below L's diagonal
    # is referenced
    solved = torch.linalg.solve_triangular(
        within, torch.cat([beta * v, beta * grown * k], dim=-1), upper=False, unitriangular=True
    )
    writes, reads = solved.split([width, k.shape[-1]], dim=-1)
    last = total[..., -1:, :]
    carried = ((last - total).exp() * k).transpose(-1, -2)
    kept = last.exp().transpose(-1, -2)
    states, corrections = [], []
    for index in range(count):
        states.append(state)
        correction = writes[:, :, index] - reads[:, :, index] @ state
        state = kept[:, :, index] * state + carried[:, :, index] @ correction
        corrections.append(correction)
    out = (grown * q) @ torch.stack(states, dim=2) + mixed @ torch.stack(corrections, dim=2)
    return out.permute(0, 2, 3, 1, 4).reshape(batch, count * chunk, heads, width)[:, :rows], state


def _within_chunk(total: Tensor, k: Tensor, readers: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_c reader_i[c] k_j[c] exp(G_i[c] − G_j[c]) for rows j ≤ i of a chunk, zero above the diagonal.

    total, k: [..., C, key]; readers: [..., C, key, 2]. Returns [..., C, C] for each of the two readers.
    """
    size = total.shape[-2]
    causal = torch.ones(size, size, dtype=torch.bool, device=total.device).tril().unsqueeze(-1)
    # the difference is formed before the exponential and is never positive below the diagonal: 64 rows at a log decay of −5
    # would overflow exp(−G_j) alone
    between = total.unsqueeze(-2) - total.unsqueeze(-3)
    decayed = between.masked_fill(~causal, -torch.inf).exp() * k.unsqueeze(-3)
    first, second = (decayed @ readers).unbind(-1)
    return first, second
