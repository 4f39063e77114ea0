"""How drafts are drawn, recomputed without the code under test: which law, and which words of the request's stream.

Placed drafts have the point mass at their token for a law and take no words.
"""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from specdec.testing.conformance.oracles import DOMAIN_SPAN, DRAFT, drawn_by, philox_block, softmax, uniform

#: See ``Conformance.proposals``.
Proposals = Literal["filtered", "temperature", "placed"]

#: Noise of drafts has a domain behind the target's and the drafts', and a word per token id.
NOISE, TOKEN_SPAN = 2, 1 << 18
#: Tokens that the law of a round of several lanes keeps.
BOUND = 64


def draft_law(proposals: Proposals, logits: Tensor, *, lanes: int = 1, temperature: float, top_k: int = 0) -> Tensor:
    """float64 law [..., V] that drafts are drawn from. lanes: of the round."""
    if proposals == "filtered":
        return softmax(logits, temperature=temperature, top_k=top_k)
    return softmax(logits, temperature=temperature, top_k=min(BOUND, logits.shape[-1]) if lanes > 1 else 0)


def drafted_by(
    proposals: Proposals,
    logits: Tensor,
    token: int,
    *,
    lanes: int,
    seed: int,
    consumed: int,
    depth: int,
    max_draft_tokens: int,
    temperature: float,
    top_k: int = 0,
) -> bool:
    """Whether ``token`` is the draft that the words of this depth give for logits [V]."""
    if proposals == "temperature" and lanes == 1:
        first = NOISE * DOMAIN_SPAN + (consumed * (max_draft_tokens + 2) + depth) * TOKEN_SPAN
        scores = [
            float(value) / temperature + _gumbel(seed, first + number) for number, value in enumerate(logits.tolist())
        ]
        return scores[token] >= max(scores) - 1e-5
    law = draft_law(proposals, logits, lanes=lanes, temperature=temperature, top_k=top_k)
    return drawn_by(law, uniform(seed, consumed, depth, max_draft_tokens=max_draft_tokens, domain=DRAFT), token)


def _gumbel(seed: int, word: int) -> float:
    """−ln of an exponential number made from one word."""
    u = philox_block(seed, word // 4)[word % 4] * 2.0**-32 + 2.0**-33
    return -math.log(-math.log1p(-u)) if u < 1 else -math.inf
