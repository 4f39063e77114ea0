"""A small Qwen3.8 in float64 for tests of sampling options, and the logits that its target gives after a prompt."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from attrs import evolve, frozen
from options_oracle import LogitsOf
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

        @cache
        def logits_of(sequence: tuple[int, ...]) -> tuple[float, ...]:
            with torch.inference_mode():
                reference.admit(0, list(sequence))
                return tuple(reference.target.first_logits(torch.tensor([0]))[0].tolist())

        return cls(model=prepare(directory, dtype="float64", context=64), logits_of=logits_of)


def drafts_for(output: list[int], done: int, accepted: int, drafts: int, vocab: int) -> list[int]:
    """The next tokens of the output after its first ``done``, wrong from draft ``accepted`` on."""
    future = (output[done : done + drafts] + [0] * drafts)[:drafts]
    return [token if depth < accepted else (token + 1 + depth) % vocab for depth, token in enumerate(future)]
