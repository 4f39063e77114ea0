"""Held-out measures: loss in several storage forms, acceptance by draft depth, selector quality."""

import math

import torch

from training import objectives
from training.model import WholeSequenceModel
from training.selector import attention_mass


@torch.no_grad()
def language(model: WholeSequenceModel, text: torch.Tensor, batch: int, select: bool = False) -> float:
    """Mean next-token loss in nats over ``text [n, T + 1]``."""
    total = 0.0
    for part in text.split(batch):
        logits, _, _ = model.target(part[:, :-1], select=select)
        total += float(objectives.language_loss(logits, part[:, 1:])) * part.shape[0]
    return total / text.shape[0]


@torch.no_grad()
def acceptance(
    model: WholeSequenceModel,
    losses: objectives.Objectives,
    text: torch.Tensor,
    batch: int,
    depths: int = 5,
    skip: int = 32,
) -> dict:
    """Expected acceptance at the sampling defaults, teacher-forced over ``text [n, T]``.

    ``by_depth[k−1]`` is the mean Σ min(p', q'); ``conditional`` weights rows by the probability that the chain reaches the
    depth; ``tokens_per_round`` is 1 + Σ_k mean Π_{j ≤ k} a_j.  The first ``skip`` rows of each window are left out.
    """
    plain, reached, count = torch.zeros(depths, device=text.device), torch.zeros(depths, device=text.device), 0
    for part in text.split(batch):
        logits, h, _ = model.target(part)
        law = losses.law(logits)
        rows = part.shape[1] - depths - skip
        product = torch.ones(part.shape[0], rows, device=text.device)
        for depth, draft in enumerate(model.chain(h, part, depths), start=1):
            a = losses.depth_terms(logits, draft, law, depth)[1][:, skip : skip + rows]
            product = product * a
            plain[depth - 1] += a.sum()
            reached[depth - 1] += product.sum()
        count += part.shape[0] * rows
    plain, reached = (plain / count).tolist(), (reached / count).tolist()
    conditional = [reached[0]] + [reached[k] / max(reached[k - 1], 1e-9) for k in range(1, depths)]
    return {
        "by_depth": [round(v, 4) for v in plain],
        "conditional": [round(v, 4) for v in conditional],
        "tokens_per_round": round(1 + sum(reached), 4),
        "rows": count,
    }


@torch.no_grad()
def selector_coverage(model: WholeSequenceModel, text: torch.Tensor, batch: int) -> float:
    """Share of attention mass that the selector keeps, over rows past the budget (1 where attention is dense)."""
    kept, rows = 0.0, 0
    for part in text.split(batch):
        for p, (*inputs, q, k) in model.target(part, keep=True)[2]["attention"].items():
            share = (attention_mass(q, k) * model.selection(p, *inputs)).sum(-1)[..., model.budget + model.ratio :]
            kept, rows = kept + float(share.sum()), rows + share.numel()
    return kept / max(rows, 1)


def report(make_model, checkpoint_values, losses, parameters, scales, text, batch: int, long_text) -> dict:
    """Everything the card states, from the values a checkpoint holds; ``text [n, T + 1]``, ``long_text [n, T']``.

    ``make_model(values)`` builds a float32 model; ``checkpoint_values(parameters, experts=)`` the stored values.
    """

    def evaluated(values, active: bool) -> WholeSequenceModel:
        model = make_model(values)
        model.scales, model.quantised = scales, frozenset({"activations"} if active else ())
        return model

    plain = evaluated(checkpoint_values(parameters, experts=False), False)
    stored = checkpoint_values(parameters)
    weights, full = evaluated(stored, False), evaluated(stored, True)
    loss = {
        "bfloat16": language(plain, text, batch),
        "nvfp4_weights": language(weights, text, batch),
        "nvfp4_weights_and_activations": language(full, text, batch),
    }
    result = {
        "heldout_loss": {k: round(v, 4) for k, v in loss.items()},
        "heldout_perplexity": {k: round(math.exp(v), 4) for k, v in loss.items()},
        "acceptance": acceptance(full, losses, text[:, :-1], batch),
    }
    if long_text is not None:
        small = max(1, batch // 8)
        dense, sparse = (language(full, long_text, small, select) for select in (False, True))
        result["long_context"] = {
            "tokens": long_text.shape[1] - 1,
            "loss_dense": round(dense, 4),
            "loss_selected": round(sparse, 4),
            "attention_mass_selected": round(selector_coverage(full, long_text[:8, :-1], small), 4),
        }
    return result
