"""Rounds with penalties, biases and log-probabilities as one CUDA graph: replays give the records and counts of eager runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from captured_rounds import CapturedRun, Case, captured, folders

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROUNDS = 20
BUDGET = 8 * ROUNDS + 8
OPTIONS: list[dict[str, Any]] = [
    {"frequency_penalty": 0.5, "repetition_penalty": 1.5},
    {},
    {"presence_penalty": 1.0, "logit_bias": {3: 1.5, 7: -2.0}, "min_new_tokens": BUDGET, "stops": (2, 5)},
    {"temperature": 1.5, "top_k": 9, "frequency_penalty": -0.25},
]
CASES = [
    *(Case(recipe="qwen3.8-flash", batch=4, drafts=drafts) for drafts in (0, 3, 7)),
    Case(recipe="deepseek-v4.1-flash", batch=1, drafts=7),
    Case(recipe="deepseek-v4.1-flash", batch=4, drafts=7, rows=13),
]

folders = pytest.fixture(folders, scope="module")


@torch.inference_mode()
@pytest.mark.parametrize("case", CASES, ids=str)
def test_replayed_extended_rounds_equal_eager_ones(folders: dict[str, Path], case: Case) -> None:
    eager, ours = (
        CapturedRun(
            case, folders[case.recipe], budget=BUDGET, dtype="float32", device="cuda", options=OPTIONS[: case.batch]
        )
        for _ in range(2)
    )
    wanted = [eager.bench.arena.read_logprobs(frame, eager.slots) for frame in eager.play(ROUNDS, eager.run)]

    # nothing is staged yet: every lane is the spare slot, so no request advances
    graph = captured(ours.run)
    allocated = torch.cuda.memory_allocated()
    for number, frame in enumerate(ours.play(ROUNDS, graph.replay)):
        assert ours.played[number] == eager.played[number]
        found = ours.bench.arena.read_logprobs(frame, ours.slots)
        for slot, record in zip(ours.slots, ours.played[number], strict=True):
            assert found[slot][: record.emitted] == wanted[number][slot][: record.emitted]
    assert torch.cuda.memory_allocated() == allocated
    table = ours.bench.arena.requests.options
    assert table is not None
    assert torch.equal(table.counts, eager.bench.arena.requests.options.counts)  # type: ignore[union-attr]
    for slot in ours.slots:
        # rows of requests without penalties are counted too, for nothing
        tokens = torch.tensor(ours.tokens(slot)).bincount(minlength=table.vocab_size)
        assert torch.equal(table.counts[slot].cpu().long(), tokens)
    assert not table.counts[case.batch].any()
