"""Held-out measures of a DSpark checkpoint: loss by stored form, acceptance by slot, calibration, selection."""

import math

import torch
from training.storage import calibration as scaling

from plugins.deepseek_v41.training import layers, objectives
from plugins.deepseek_v41.training.model import Model
from training import evaluation

# Rows of each window that are left out, and tokens for each anchor.
_SKIP, _SPACING = 32, 8


@torch.no_grad()
def block_outcomes(model: Model, text: torch.Tensor, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Acceptances and confidence logits ``[n, L]`` of blocks over ``text [n, T + 1]``, teacher-forced at temperature 1."""
    length, found = model.config["dspark_block_size"], []
    for part in text.split(batch):
        logits, features, _ = model.target(part[:, :-1])
        anchors = torch.arange(min(_SKIP, logits.shape[1] // 2), logits.shape[1] - length + 1, _SPACING)
        anchors = anchors.to(part.device).expand(part.shape[0], -1)
        h, base = model.draft(features, part, anchors, length)
        bias, confidence = model.correct(h, objectives.at_slots(part, anchors, length))
        following = objectives.at_slots(part, anchors + 1, length)
        terms = objectives.slot_terms(objectives.at_slots(logits, anchors, length), base, bias, confidence, following)
        found.append(torch.stack([terms.acceptance, confidence]).flatten(1, 2))
    return tuple(torch.cat(found, 1).clamp_max(30).unbind(0))


def acceptance(accepted: torch.Tensor) -> dict:
    """Expected acceptance by slot of ``accepted [n, L]``; the keys are those of the card."""
    reached = accepted.cumprod(-1).mean(0).tolist()
    conditional = [b / max(a, 1e-9) for a, b in zip([1.0, *reached], reached, strict=False)]
    return {
        "by_depth": [round(v, 4) for v in accepted.mean(0).tolist()],
        "conditional": [round(v, 4) for v in conditional],
        "tokens_per_round": round(1 + sum(reached), 4),
        "rows": accepted.shape[0],
    }


def calibration_error(forecast: torch.Tensor, survival: torch.Tensor) -> float:
    """Expected calibration error of ``forecast [n]`` against the probability of the event, over equal bins."""
    bins = (forecast * scaling.BINS).long().clamp_max(scaling.BINS - 1)
    gap = torch.zeros_like(forecast[:1]).repeat(scaling.BINS).scatter_add(0, bins, forecast - survival)
    return float(gap.abs().sum() / forecast.numel())


def calibration(accepted: torch.Tensor, confidence: torch.Tensor) -> dict:
    """Temperatures of the confidences ``[n, L]``, fitted slot after slot to the survival of the block's prefixes.

    The fit of ``specdec.control.calibration`` with its grid and bins, in tensors and for probabilities of acceptance: rounds have
    outcomes, teacher-forced text has what they are drawn from.
    """
    survival, before = accepted.cumprod(-1), torch.sigmoid(confidence).cumprod(-1)
    running, temperatures, errors = torch.ones_like(survival[:, 0]), [], []
    for slot in range(accepted.shape[1]):
        forecasts = {t: running * torch.sigmoid(confidence[:, slot] / t) for t in scaling.GRID}
        found = {t: calibration_error(forecast, survival[:, slot]) for t, forecast in forecasts.items()}
        best = min(sorted(scaling.GRID, key=lambda t: abs(math.log(t))), key=lambda t: found[t])
        running = forecasts[best]
        temperatures.append(round(best, 6))
        errors.append(found[best])
    plain = [calibration_error(before[:, slot], survival[:, slot]) for slot in range(accepted.shape[1])]
    return {
        "temperatures": temperatures,
        "error_uncalibrated": [round(e, 4) for e in plain],
        "error": [round(e, 4) for e in errors],
    }


@torch.no_grad()
def selected_mass(model: Model, text: torch.Tensor, batch: int) -> float:
    """Share of the compressed rows' attention mass that the selection keeps, over queries that see more than it allows."""
    kept, whole = 0.0, 0.0
    for part in text.split(batch):
        state: dict = {}
        for layer, (source, *inputs) in model.target(part, keep=True)[2]["attention"].items():
            m, query_latent, latent, q, k, rows = inputs
            chosen = model.selected(layer, model.index_scores(layer, source, m, query_latent, latent), state)
            mass = model.attention_mass(layer, q, k, rows)
            seen = layers.visible_rows(*mass.shape[1:], model.config["compress_ratios"][layer], mass.device)
            mass = mass * (seen.sum(-1, keepdim=True) > model.budget)
            kept, whole = kept + float((mass * chosen).sum()), whole + float(mass.sum())
    return kept / max(whole, 1e-9)


def report(make_model, checkpoint_values, losses, parameters, scales, text, batch: int, long_text) -> dict:
    """Everything the card states, from the values a checkpoint holds; ``text [n, T + 1]``, ``long_text [n, T' + 1]``."""

    def evaluated(values, roundings: tuple[str, ...] = ()) -> Model:
        model = make_model(values)
        model.quantised = frozenset(roundings)
        return model

    stored = checkpoint_values(parameters)
    full = evaluated(stored, ("caches", "inputs"))
    forms = {
        "bfloat16": evaluated(checkpoint_values(parameters, experts=False)),
        "weights": evaluated(stored),
        "weights_and_caches": evaluated(stored, ("caches",)),
        "weights_caches_and_inputs": full,
    }
    loss = {name: evaluation.language(model, text, batch) for name, model in forms.items()}
    accepted, confidence = block_outcomes(full, text, batch)
    result = {
        "heldout_loss": {k: round(v, 4) for k, v in loss.items()},
        "heldout_perplexity": {k: round(math.exp(v), 4) for k, v in loss.items()},
        "acceptance": acceptance(accepted),
        "calibration": calibration(accepted, confidence),
    }
    if long_text is not None:
        small = max(1, batch // 8)
        dense, sparse = (evaluation.language(full, long_text, small, select) for select in (False, True))
        result["long_context"] = {
            "tokens": long_text.shape[1] - 1,
            "loss_dense": round(dense, 4),
            "loss_selected": round(sparse, 4),
            "attention_mass_selected": round(selected_mass(full, long_text[:8, :-1], small), 4),
        }
    return result
