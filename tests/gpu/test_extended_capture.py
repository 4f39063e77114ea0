"""Rounds with penalties, biases and log-probabilities as one CUDA graph: replays give the records and counts of eager runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from options_bench import GEOMETRY, PROMPTS
from qwen_models import prepare, write_random_checkpoint
from round_driver import Driver

from specdec.catalog import RoundShape
from specdec.round.completion import Completion
from specdec.round.transaction import ChainRound

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


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("options"), 8, GEOMETRY)


def started(directory):
    model = prepare(directory, slots=4, context=512, device="cuda")
    for slot in range(4):
        model.admit(slot, PROMPTS[slot], budget=BUDGET, seed=40 + slot, **OPTIONS[slot])
    driver = Driver(model)
    driver.start([0, 1, 2, 3], extended=True)
    return model, driver


@torch.inference_mode()
@pytest.mark.parametrize("width", [1, 4, 8])
def test_replayed_extended_rounds_equal_eager_ones(directory, width):
    slots = [0, 1, 2, 3]
    eager, driver = started(directory)
    expected, wanted = [], []
    for _ in range(ROUNDS):
        expected.append(driver.round(slots, width - 1, extended=True))
        wanted.append(eager.arena.read_logprobs((driver.number - 1) % 2, slots))

    model, _ = started(directory)
    shape = RoundShape(batch=4, draft_tokens=width - 1, verify_width=width)
    runner = ChainRound(target=model.target, drafter=model.drafter, shape=shape, arena=model.arena, max_draft_tokens=7)
    # warm up on dead lanes only: every lane is the spare slot, so no request advances
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            runner.run(extended=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        runner.run(extended=True)
    allocated = torch.cuda.memory_allocated()
    for number in range(1, ROUNDS + 1):
        runner.staging.write(slots, [width - 1] * 4, number)
        graph.replay()
        records = [Completion.parse(row) for row in model.arena.read_frame(number % 2, slots)]
        assert records == expected[number - 1]
        found = model.arena.read_logprobs(number % 2, slots)
        for slot, record in zip(slots, records, strict=True):
            assert found[slot][: record.emitted] == wanted[number - 1][slot][: record.emitted]
    assert torch.cuda.memory_allocated() == allocated
    table = model.arena.requests.options
    assert torch.equal(table.counts, eager.arena.requests.options.counts)
    for slot in (0, 2, 3):
        tokens = torch.tensor(driver.tokens(slot)).bincount(minlength=table.vocab_size)
        assert torch.equal(table.counts[slot].cpu().long(), tokens)
    assert not table.counts[4].any()
