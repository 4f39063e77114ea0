"""Selection of compressed rows: scores, the best rows, candidate blocks, and the loss that trains the scores.

Shapes: B sequences, T tokens, G compressed rows, h index heads, d index head size.  Scores are float32 ``[B, T, G]`` without
causal masking; ``seen`` boolean ``[T, G]`` or ``[B, T, G]`` says which rows a query may see.
"""

import math

import torch
import torch.nn.functional as F
from training.blocks import linear

from plugins.deepseek_v41.training.layers import norm, quantised_linear, rotate, visible_rows
from plugins.deepseek_v41.training.rounding import fp4_32, wide


def keys(latent, wk, weight, cos, sin, caches: bool):
    """Index keys ``[B, G, d]`` of latents ``[B, G, D]``; ``cos, sin [1, G, pairs]`` as for the compressed rows."""
    k = rotate(norm(linear(latent, wk), weight), cos, sin)
    return fp4_32(k) if caches else k


def scores(m, query_latent, key, wq_b, weights_proj, cos, sin, caches: bool, inputs: bool):
    """``m [B, T, H]`` block inputs, ``query_latent [B, T, rank]``, ``key [B, G, d]`` → scores."""
    heads, dim = weights_proj.shape[0], key.shape[-1]
    q = quantised_linear(query_latent, wq_b, inputs).unflatten(-1, (heads, dim))
    q = rotate(q, cos.unsqueeze(-2), sin.unsqueeze(-2))
    q = fp4_32(q) if caches else q
    weight = wide(linear(m, weights_proj)) * (dim * heads) ** -0.5
    dots = torch.relu(wide(q.flatten(1, 2) @ key.mT)).unflatten(1, (-1, heads))
    return (dots * weight.unsqueeze(-1)).sum(2)


def best(values, seen, count: int):
    """Boolean ``[..., n]``: the ``count`` largest of ``values`` among ``seen``; equal values: the lower index first."""
    order = torch.sort(values.masked_fill(~seen, -math.inf), dim=-1, descending=True, stable=True).indices
    chosen = torch.zeros_like(values, dtype=torch.bool).scatter(-1, order[..., :count], True)
    return chosen & seen


def candidates(values, ratio: int, blocks: int, size: int):
    """Boolean ``[B, T, G]``: rows of the best ``blocks`` blocks of ``size`` rows; the newest visible block is always kept."""
    length, groups = values.shape[1:]
    seen = visible_rows(length, groups, ratio, values.device)
    padded = F.pad(values.masked_fill(~seen, -math.inf), (0, -groups % size), value=-math.inf)
    largest = padded.unflatten(-1, (-1, size)).amax(-1)
    newest = ((torch.arange(length, device=values.device) + 1) // ratio - 1).div(size, rounding_mode="floor")
    index = torch.arange(largest.shape[-1], device=values.device)
    largest = largest.masked_fill(index == newest.unsqueeze(-1), math.inf)
    kept = best(largest, largest > -math.inf, blocks)
    return kept.repeat_interleave(size, -1)[..., :groups]


def loss(values, mass, ratio: int):
    """Cross entropy of the scores against the attention mass ``[B, T, G]`` of visible rows; queries that see one count."""
    seen = visible_rows(values.shape[1], values.shape[2], ratio, values.device)
    goal = mass * seen
    goal = goal / goal.sum(-1, keepdim=True).clamp_min(1e-9)
    logs = values.masked_fill(~seen, -1e4).log_softmax(-1)
    return -(goal * logs).sum(-1).mean()
