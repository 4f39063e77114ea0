"""Training objectives and acceptance measures.

The sampling law of a checkpoint's defaults is temperature 1, top-k where it has one, then top-p on the renormalised rest.
A draft from q is accepted by chain speculative sampling with probability Σ_v min(p_v, q_v); p and q both pass the law.
"""

import torch
import torch.nn.functional as F


@torch.no_grad()
def threshold(logits: torch.Tensor, top_k: int | None = None, top_p: float = 0.95) -> torch.Tensor:
    """The smallest kept logit ``[..., 1]`` under top-k and then top-p."""
    values = logits.sort(-1, descending=True).values if top_k is None else logits.topk(top_k, -1).values
    probabilities = torch.softmax(values.float(), -1)
    before = probabilities.cumsum(-1) - probabilities
    last = ((before < top_p).sum(-1, keepdim=True) - 1).clamp_min(0)
    return values.gather(-1, last)


def truncated(logits: torch.Tensor, smallest: torch.Tensor) -> torch.Tensor:
    """Probabilities of the logits that reach ``smallest [..., 1]``; differentiable on the kept support."""
    return torch.softmax(logits.float().masked_fill(logits < smallest, float("-inf")), -1)


def lawful(logits: torch.Tensor, top_k: int | None = None, top_p: float = 0.95) -> torch.Tensor:
    """Probabilities ``[..., V]`` float32 under top-k and top-p.

    Ties at the threshold are kept, as renormalising samplers do.
    """
    return truncated(logits, threshold(logits, top_k, top_p))


def overlap(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Acceptance probability Σ min(p, q) over the last axis."""
    return torch.minimum(p, q).sum(-1)


def language_loss(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Mean next-token cross entropy; ``logits [B, T, V]``, ``following [B, T]``."""
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def divergence(target_logits: torch.Tensor, draft_logits: torch.Tensor) -> torch.Tensor:
    """KL(p‖q) of the unfiltered laws per row, ``[...]``; the target side is constant."""
    logs = target_logits.detach().log_softmax(-1)
    return (logs.exp() * (logs - draft_logits.log_softmax(-1))).sum(-1)


def row_terms(target_logits, draft_logits, target_law, smallest):
    """KL and acceptance of draft rows whose smallest kept logit is ``smallest``."""
    return divergence(target_logits, draft_logits), overlap(target_law, truncated(draft_logits, smallest))


class Objectives:
    """The losses under one sampling law; ``compiled`` compiles what every step evaluates, except sorting."""

    def __init__(self, top_k: int | None, top_p: float, compiled: bool = False):
        self.top_k, self.top_p = top_k, top_p
        # Each sees one shape for all depths.
        self.language_loss, self.truncated, self.row_terms = (
            torch.compile(f, dynamic=False) if compiled else f for f in (language_loss, truncated, row_terms)
        )

    def law(self, logits: torch.Tensor) -> torch.Tensor:
        return self.truncated(logits, threshold(logits, self.top_k, self.top_p))

    def depth_terms(self, target_logits, draft_logits, target_law, depth: int):
        """KL and acceptance of draft depth k per row ``[B, T − k]``: draft row i predicts what target row i + k predicts."""
        keep, smallest = target_logits.shape[1] - depth, threshold(draft_logits.detach(), self.top_k, self.top_p)
        kl, accepted = self.row_terms(target_logits.roll(-depth, 1), draft_logits, target_law.roll(-depth, 1), smallest)
        return kl[:, :keep], accepted[:, :keep]
