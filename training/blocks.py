"""Differentiable blocks that several architectures use, as functions of tensors.

Shapes: B sequences, T tokens, C chunk length.  Matrix products run in the dtype of their input; recurrences in float32.
No function changes its inputs.
"""

import math

import torch
import torch.nn.functional as F

from training.storage import nvfp4


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight.to(x.dtype))


def causal_convolution(u, weight, dilation: int = 1):
    """Depthwise causal convolution ``[B, T, channels]`` with zero history; the last tap is the current token."""
    taps = weight.shape[-1]
    padded = F.pad(u, (0, 0, (taps - 1) * dilation, 0))
    length = u.shape[1]
    total = padded[:, :length] * weight[:, 0, 0]
    for j in range(1, taps):
        total = total + padded[:, j * dilation : j * dilation + length] * weight[:, 0, j]
    return total


def unit_lower_inverse(a: torch.Tensor) -> torch.Tensor:
    """Inverse of ``I + a`` for strictly lower triangular ``a [..., C, C]``, C a power of two ≥ 8.

    Blocks of eight by the terminating Neumann product, then 2×2 block merges (numerically a forward substitution; the
    plain Neumann product over the whole chunk would cancel catastrophically for repeated keys).  The differentiable last
    step has the inverse's value and derivative.
    """
    size = a.shape[-1]
    lead = a.shape[:-2]
    with torch.no_grad():
        block = min(8, size)
        count = size // block
        d = a.reshape(*lead, count, block, count, block).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
        eye = torch.eye(block, dtype=a.dtype, device=a.device)
        d2 = d @ d
        inverse = (eye - d) @ (eye + d2) @ (eye + d2 @ d2)
        while block < size:
            count //= 2
            whole = a.reshape(*lead, count, 2, block, count, 2, block)
            corner = whole[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
            pairs = inverse.reshape(*lead, count, 2, block, block)
            first, second = pairs[..., 0, :, :], pairs[..., 1, :, :]
            lower = -(second @ corner @ first)
            top = torch.cat([first, torch.zeros_like(first)], -1)
            inverse = torch.cat([top, torch.cat([lower, second], -1)], -2)
            block *= 2
        inverse = inverse.reshape(a.shape)
    return inverse - inverse @ ((a - a.detach()) @ inverse)


def chunk_states(p: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """The state before every chunk, for chunks that map the state S to P·S + R, from S = 0.

    ``p [B, heads, chunks, dk, dk]``, ``r [B, heads, chunks, dk, dv]``; returns ``[B, heads, chunks, dk, dv]``.  A log-depth
    scan over the affine maps: nothing is sequential in the number of chunks.
    """
    dk, chunks, shift = p.shape[-1], p.shape[2], 1
    pr = torch.cat([p, r], -1)
    while shift < chunks:
        here, before = pr[:, :, shift:], pr[:, :, :-shift]
        step = here[..., :dk] @ before
        step = torch.cat([step[..., :dk], step[..., dk:] + here[..., dk:]], -1)
        pr = torch.cat([pr[:, :, :shift], step], 2)
        shift *= 2
    return F.pad(pr[:, :, :-1, :, dk:], (0, 0, 0, 0, 1, 0))


def attend(q, k, v, mask=None):
    """Causal grouped-query attention, or attention under a boolean ``mask [B, 1, T, T]`` (True = visible).

    Returns ``[B, T, heads·d]``.
    """
    repeat = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(repeat, 1) for t in (k, v))
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    return o.transpose(1, 2).contiguous().flatten(-2)


def attend_chain(q, k, v, chain_k, chain_v, seen: int):
    """Attention of one draft depth: committed keys ≤ own row plus the chain's own proposal rows.

    ``q [B, heads, T, d]``; ``k, v [B, kv, T, d]`` of depth one; ``chain_k, chain_v [B, kv, T, M, d]`` proposal rows of the
    chain that starts at the same row, of which the first ``seen`` exist.  Returns ``[B, T, heads·d]``.
    """
    _batch, _heads, length, dim = q.shape
    grouped = q.unflatten(1, (k.shape[1], -1))  # [B, kv, group, T, d]
    scores = (grouped.flatten(2, 3) @ k.transpose(-1, -2)).unflatten(2, (-1, length)).float()
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(hidden, -math.inf)
    own = (grouped.unsqueeze(-2) * chain_k.unsqueeze(2)).float().sum(-1)  # [B, kv, group, T, M]
    absent = torch.arange(chain_k.shape[-2], device=q.device) >= seen
    own = own.masked_fill(absent, -math.inf)
    probabilities = torch.softmax(torch.cat([scores, own], -1) * dim**-0.5, -1).to(q.dtype)
    committed, proposed = probabilities.split([length, chain_k.shape[-2]], -1)
    out = (committed.flatten(2, 3) @ v).unflatten(2, (-1, length))
    out = out + (proposed.unsqueeze(-1) * chain_v.unsqueeze(2)).sum(-2)
    return out.flatten(1, 2).transpose(1, 2).contiguous().flatten(-2)


def fake_activation(a, scale):
    """NVFP4 activation quantise-dequantise with a straight-through gradient."""
    return a + (nvfp4.quantise_activation(a.detach(), scale).to(a.dtype) - a.detach())
