"""Training objectives and acceptance measures.

The sampling law of the checkpoint's defaults is temperature 1, top-k, then top-p on the renormalised rest.  A draft from
q is accepted by chain speculative sampling with probability Σ_v min(p_v, q_v); p and q both pass the law.
"""

import torch
import torch.nn.functional as F

TOP_K, TOP_P = 20, 0.95


def lawful(logits: torch.Tensor, top_k: int = TOP_K, top_p: float = TOP_P) -> torch.Tensor:
    """Probabilities ``[..., V]`` float32 under top-k and top-p; differentiable on the kept support.

    Ties at the threshold are kept, as renormalising samplers do.
    """
    logits = logits.float()
    values = logits.detach().topk(top_k, -1).values
    probabilities = torch.softmax(values, -1)
    before = probabilities.cumsum(-1) - probabilities
    last = (before < top_p).sum(-1, keepdim=True) - 1
    threshold = values.gather(-1, last)
    return torch.softmax(logits.masked_fill(logits < threshold, float("-inf")), -1)


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


def row_terms(target_logits, draft_logits, target_law):
    """KL(p‖q) and acceptance of drafts against the target rows they predict, each ``[B, T]``."""
    return divergence(target_logits, draft_logits), overlap(target_law, lawful(draft_logits))


def depth_terms(target_logits, draft_logits, target_law, depth: int, row_terms=row_terms):
    """KL and acceptance of draft depth k per row ``[B, T − k]``: draft row i predicts what target row i + k predicts.

    ``row_terms`` may be a compiled version; it sees one shape for all depths.
    """
    keep = target_logits.shape[1] - depth
    kl, accepted = row_terms(target_logits.roll(-depth, 1), draft_logits, target_law.roll(-depth, 1))
    return kl[:, :keep], accepted[:, :keep]
