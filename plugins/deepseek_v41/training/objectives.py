"""Objective of the block drafter, and its measures.

Shapes: B sequences, A anchors, L slots of a block, V vocabulary.  Slot k (1 … L) of the block at anchor a predicts token
a + k; the target's law for it is that of row a + k − 1, the token before it that of position a + k − 1 (teacher forcing).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

# Weights of the cross entropy with the text and of the distance to the target's law.
_TEXT, _DISTANCE = 0.1, 0.9
_DECAY = 4.0
_REACH_FLOOR = 0.1


class SlotTerms(NamedTuple):
    """Per slot ``[B, A, L]`` float32: cross entropy with the text, KL(p‖q), acceptance Σ min(p, q), confidence loss."""

    text: torch.Tensor
    divergence: torch.Tensor
    acceptance: torch.Tensor
    confidence: torch.Tensor


def random_anchors(batch: int, count: int, last: int, generator: torch.Generator, device) -> torch.Tensor:
    """``[batch, count]`` int64 increasing positions in 0 … ``last``, one drawn in each of ``count`` equal parts."""
    drawn = torch.rand(batch, count, generator=generator, device=device)
    return ((torch.arange(count, device=device) + drawn) * ((last + 1) / count)).long().clamp_max(last)


def at_slots(values: torch.Tensor, anchors: torch.Tensor, length: int) -> torch.Tensor:
    """``values [B, T, …]`` at the rows anchor + 0 … anchor + L − 1 → ``[B, A, L, …]``."""
    rows = anchors.unsqueeze(-1) + torch.arange(length, device=anchors.device)
    return values[torch.arange(values.shape[0], device=anchors.device)[:, None, None], rows]


def slot_terms(target, base, bias, confidence, following) -> SlotTerms:
    """``target, base, bias [B, A, L, V]`` logits, ``confidence [B, A, L]`` logits, ``following [B, A, L]`` tokens of the text.

    The confidence's goal is the acceptance, as a constant.
    """
    wanted = target.detach().log_softmax(-1)
    drafted = (base + bias).log_softmax(-1)
    text = -drafted.gather(-1, following.unsqueeze(-1)).squeeze(-1)
    divergence = (wanted.exp() * (wanted - drafted)).sum(-1)
    acceptance = torch.minimum(wanted.exp(), drafted.exp()).sum(-1)
    goal = acceptance.detach().clamp(0, 1)
    return SlotTerms(
        text, divergence, acceptance, F.binary_cross_entropy_with_logits(confidence, goal, reduction="none")
    )


def block_loss(terms: SlotTerms, sharp: float) -> torch.Tensor:
    """Mean loss of a slot.

    ``sharp`` in [0, 1] moves from plain distillation with weights e^(−(k−1)/4) to the text's cross entropy and the distance
    ‖p − q‖₁ = 2 (1 − acceptance), each slot weighted by the probability that a round reaches it (with a floor, so that deep
    slots keep learning).
    """
    acceptance = terms.acceptance
    slot = torch.arange(acceptance.shape[-1], device=acceptance.device)
    fixed = torch.exp(-slot / _DECAY).expand_as(acceptance)
    reach = F.pad(acceptance.detach()[..., :-1].cumprod(-1), (1, 0), value=1.0).clamp_min(_REACH_FLOOR)
    weight = (1 - sharp) * fixed + sharp * reach
    close = _TEXT * terms.text + _DISTANCE * 2 * (1 - acceptance)
    loss = sharp * close + (1 - sharp) * terms.divergence + terms.confidence
    return (weight * loss).sum() / weight.sum()
