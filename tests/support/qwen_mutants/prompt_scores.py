"""Faults of prompt scoring."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from mutants import mutant
from torch import Tensor

from specdec.testing.conformance import Bench


@mutant("test_prompt_scores_do_not_depend_on_chunking")
def prompt_scores_read_the_rows_the_drafter_overwrites(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    target = bench.target
    prefill, last = target.prefill, []

    def keeping(tokens: Tensor, slot: Tensor, start: int) -> Tensor:
        last[:] = [prefill(tokens, slot, start)]
        return last[0]

    def late(rows: int, first: int = 0) -> Tensor:
        streams = last[0][first : first + rows].unflatten(1, (target.geometry.hc_count, -1))
        return F.linear(target.final_mixer.mix(streams)[0], target.head)

    target.prefill, target.prefill_logits = keeping, late


@mutant("test_prompt_scores_do_not_depend_on_chunking")
def prompt_slices_begin_at_the_first_row(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    compute = bench.target.prefill_logits
    bench.target.prefill_logits = lambda rows, first=0: compute(rows, 0)


@mutant("test_prompt_scores_are_those_of_verification")
def prompt_rows_belong_to_the_token_before(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    compute = bench.target.prefill_logits
    bench.target.prefill_logits = lambda rows, first=0: compute(rows, first).roll(1, 0)
