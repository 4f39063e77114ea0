"""Running requests through the generation loop and looking at what came out."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import evolve

from specdec.serving.generate import Generator
from specdec.serving.request import Emission, Request
from specdec_qwen38.geometry import TINY

#: Six tokens and two layers: quick, and a random drafter is right often enough that drafts are accepted.
FEW_TOKENS = evolve(
    TINY,
    vocab_size=6,
    eos_token_id=5,
    num_hidden_layers=2,
    layer_types=("linear_attention", "full_attention"),
    ple_layer_ids=(1,),
    num_experts=4,
    num_experts_per_tok=2,
)
#: A seed whose greedy output does not fall into one token and whose drafts are accepted up to depth four.
FEW_TOKENS_SEED = 1


def run_all(generator: Generator, requests: Iterable[Request]) -> dict[int, list[Emission]]:
    """Runs the requests to their ends: emissions by request number."""
    emissions: dict[int, list[Emission]] = {}
    for event in generator.run(requests):
        if isinstance(event, Emission):
            emissions.setdefault(event.request, []).append(event)
    return emissions


def tokens_of(emissions: Iterable[Emission]) -> list[int]:
    """All tokens of one request in order."""
    return [token for emission in emissions for token in emission.tokens]
