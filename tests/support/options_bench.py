"""Small models in float64 for tests of sampling options, the logits that a target gives after a prompt, and combined options."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen
from options_oracle import LogitsOf, plain_greedy
from qwen_models import Prepared, prepare, write_random_checkpoint

from specdec_qwen38.geometry import TINY

VOCAB = 16
PROMPTS = [[3, 9, 1, 14, 6, 6, 2], [5], [11, 0, 0, 13, 7, 2, 2, 2, 10], [8, 4, 12]]
GEOMETRY = evolve(
    TINY,
    vocab_size=VOCAB,
    eos_token_id=VOCAB - 1,
    num_hidden_layers=2,
    layer_types=("linear_attention", "full_attention"),
    ple_layer_ids=(1,),
    num_experts=4,
    num_experts_per_tok=2,
)


STOPS = (1, 6, 12)
#: Values that float32 holds exactly.
OPTIONS: dict[str, Any] = {
    "presence_penalty": 0.75,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": ((2, -1.5), (6, 1.25), (9, 0.5)),
    "min_new_tokens": 6,
    "stops": STOPS,
}
COMBINATIONS = [
    {name: OPTIONS[name] for name in names}
    for size in range(len(OPTIONS) + 1)
    for names in itertools.combinations(OPTIONS, size)
]


def logits_after(reference: Any) -> LogitsOf:
    """Raw logits after a sequence, from a prompt pass over all of it in slot 0 of a model that nothing else uses."""

    @cache
    def logits_of(sequence: tuple[int, ...]) -> tuple[float, ...]:
        with torch.inference_mode():
            reference.admit(0, list(sequence))
            return tuple(reference.target.first_logits(torch.tensor([0]))[0].tolist())

    return logits_of


def assert_combinations_matter(logits_of: LogitsOf, budget: int, expected: list[list[int]]) -> None:
    """Each option alone changes some output, and outputs are not all alike; else equality with them would say little.

    expected: oracle output of each combination.
    """
    for name in OPTIONS:
        alone = {name: OPTIONS[name]}
        if name == "min_new_tokens":
            alone["stops"] = STOPS
        neutral = {"stops": STOPS} if name == "min_new_tokens" else {}
        outputs = [
            [plain_greedy(logits_of, prompt, budget, **options) for prompt in PROMPTS] for options in (alone, neutral)
        ]
        assert outputs[0] != outputs[1], name
    assert len({tuple(output) for output in expected}) > 24
    assert {len(output) for output in expected} > {budget}


def assert_counted(model: Any, driver: Any, slots: list[int]) -> None:
    """Counts of running lanes are histograms of what they emitted; dead lanes left nothing on the spare row."""
    table = model.arena.requests.options
    for slot in driver.running(slots):
        histogram = [driver.tokens(slot).count(token) for token in range(table.vocab_size)]
        assert table.counts[slot].tolist() == histogram
    spare = model.arena.slots
    assert not table.counts[spare].any() and not table.prompt[spare].any() and not table.bias[spare].any()


@frozen(kw_only=True, eq=False)
class Bench:
    """model: what is tested. logits_of: raw logits after a sequence, from a prompt pass of a second model over all of it."""

    model: Prepared
    logits_of: LogitsOf

    @classmethod
    def build(cls, directory: Path) -> Bench:
        """Writes a random checkpoint to the directory and loads it twice."""
        torch.set_num_threads(1)
        write_random_checkpoint(directory, 8, GEOMETRY)
        reference = prepare(directory, dtype="float64", slots=1, context=64)
        return cls(model=prepare(directory, dtype="float64", context=64), logits_of=logits_after(reference))


def drafts_for(output: list[int], done: int, accepted: int, drafts: int, vocab: int) -> list[int]:
    """The next tokens of the output after its first ``done``, wrong from draft ``accepted`` on."""
    future = (output[done : done + drafts] + [0] * drafts)[:drafts]
    return [token if depth < accepted else (token + 1 + depth) % vocab for depth, token in enumerate(future)]
