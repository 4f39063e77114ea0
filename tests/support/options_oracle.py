"""Plain decoding with sampling options, one token at a time, in Python numbers. Shares nothing with the code under test."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

#: Raw logits [V] after a sequence of tokens.
LogitsOf = Callable[[tuple[int, ...]], Sequence[float]]


def shaped(
    raw: Sequence[float],
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = (),
    min_new_tokens: int = 0,
    stops: Sequence[int] = (),
) -> list[float]:
    """Logits of the token after prompt and output."""
    bias = dict(logit_bias)
    result = []
    for token, logit in enumerate(float(x) for x in raw):
        count = list(output).count(token)
        if count or token in prompt:
            logit = logit / repetition_penalty if logit > 0 else logit * repetition_penalty
        logit -= frequency_penalty * count + presence_penalty * (count > 0)
        logit += bias.get(token, 0.0)
        if len(output) < min_new_tokens and token in stops:
            logit = -math.inf
        result.append(logit)
    return result


def plain_greedy(
    logits_of: LogitsOf, prompt: Sequence[int], budget: int, *, stops: Sequence[int] = (), **options: Any
) -> list[int]:
    """Greedy output: up to ``budget`` tokens, the first stop id included."""
    output: list[int] = []
    while len(output) < budget:
        logits = shaped(logits_of((*prompt, *output)), prompt, output, stops=stops, **options)
        output.append(logits.index(max(logits)))
        if output[-1] in stops:
            break
    return output


def plain_law(
    logits: Sequence[float], *, temperature: float = 1.0, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0
) -> np.ndarray:
    """Softmax, then min-p, top-k and top-p, each on the renormalised rest. Returns float64 [V]."""
    scaled = np.asarray(logits, np.float64) / temperature
    law = np.exp(scaled - scaled.max())
    law /= law.sum()
    law = np.where(law >= min_p * law.max(), law, 0)
    law /= law.sum()
    if top_k:
        law = np.where(law >= np.sort(law)[-top_k], law, 0)
        law /= law.sum()
    order = np.argsort(-law, kind="stable")
    reached = np.searchsorted(np.cumsum(law[order]), top_p - 1e-12)
    law = np.where(law >= law[order[min(reached, len(law) - 1)]], law, 0)
    return law / law.sum()


def ranked_logprobs(raw: Sequence[float], token: int, count: int) -> tuple[float, list[tuple[int, float]]]:
    """Log-softmax of raw logits: of a token, and (token, value) of the greatest, the lowest id first among equals."""
    top = max(raw)
    total = math.log(math.fsum(math.exp(x - top) for x in raw)) + top
    order = sorted(range(len(raw)), key=lambda t: (-raw[t], t))[:count]
    return raw[token] - total, [(t, raw[t] - total) for t in order]
