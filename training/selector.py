"""Selection of past tokens by compressed groups, and the loss that trains the selector.

``scores [B, T, groups]`` float32 are a selector's scores of every query and every group of ``ratio`` consecutive tokens,
without causal masking; a group is a candidate of a query once its last token is visible.
"""

import math

import torch
import torch.nn.functional as F


def complete_groups(length: int, groups: int, ratio: int, device) -> torch.Tensor:
    """Boolean ``[T, groups]``: which groups every query sees completely."""
    position = torch.arange(length, device=device)
    return torch.arange(groups, device=device) < ((position + 1) // ratio).unsqueeze(-1)


def selection_mask(scores: torch.Tensor, ratio: int, budget: int) -> torch.Tensor:
    """Boolean ``[B, 1, T, T]``: the tokens each query attends; the best ``budget`` tokens' groups and the open tail.

    Equal scores: the earlier group first.
    """
    length, groups = scores.shape[1], scores.shape[-1]
    position = torch.arange(length, device=scores.device)
    complete = complete_groups(length, groups, ratio, scores.device)
    order = torch.sort(scores.masked_fill(~complete, -math.inf), dim=-1, descending=True, stable=True).indices
    keep = min(budget // ratio, groups)
    picked = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order[..., :keep], True) & complete
    padded = F.pad(picked, (0, 1))  # tokens after the last complete group of the sequence
    chosen = padded[..., position // ratio]
    tail = position >= ((position + 1) // ratio * ratio).unsqueeze(-1)
    return ((chosen | tail) & (position <= position.unsqueeze(-1))).unsqueeze(1)


def attention_mass(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Dense causal attention probabilities ``[B, heads, T, T]`` float32 of ``q [B, heads, T, d]``, ``k [B, kv, T, d]``."""
    key = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = (q @ key.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    position = torch.arange(q.shape[2], device=q.device)
    return torch.softmax(scores.masked_fill(position > position.unsqueeze(-1), -math.inf), -1)


def selector_loss(scores: torch.Tensor, q: torch.Tensor, k: torch.Tensor, ratio: int) -> torch.Tensor:
    """Cross entropy of the selector's group scores against the attention mass of complete groups."""
    length, groups = scores.shape[1], scores.shape[-1]
    complete = complete_groups(length, groups, ratio, scores.device)
    with torch.no_grad():
        mass = attention_mass(q, k).sum(1)[..., : groups * ratio].unflatten(-1, (groups, ratio)).sum(-1)
        mass = mass * complete
        mass = mass / mass.sum(-1, keepdim=True).clamp_min(1e-9)
    logs = scores.masked_fill(~complete, -1e4).log_softmax(-1)
    return -(mass * logs).sum(-1).mean()
