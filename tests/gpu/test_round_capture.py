"""Each model's round as one CUDA graph: fifty replays give the tokens and the state of the eager run."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import glm_models
import pytest
import qwen_models
import torch
from round_driver import Driver

from specdec.catalog import RoundShape
from specdec.declaration import StateKind
from specdec.round.completion import Completion
from specdec.round.transaction import ChainRound

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = [[5, 9, 300, 17, 44, 500, 3], [411, 2, 2, 8, 77, 130, 256, 19, 73, 6, 41], [7], list(range(60, 125))]
ROUNDS = 50
# every round emits at most eight tokens, so no request ends
BUDGET = 8 * ROUNDS + 8


MODELS = {"qwen3.8-flash": qwen_models, "glm-5.3-flash": glm_models}


@pytest.fixture(scope="module", params=MODELS)
def recipe(request):
    return request.param


@pytest.fixture(scope="module")
def directory(recipe, tmp_path_factory):
    return MODELS[recipe].write_random_checkpoint(tmp_path_factory.mktemp("tiny"), 5)


def started(recipe: str, directory, batch: int, dtype: str):
    model = MODELS[recipe].prepare(directory, dtype=dtype, slots=batch, context=512, device="cuda")
    for slot in range(batch):
        model.admit(slot, PROMPTS[slot], budget=BUDGET, top_k=20, top_p=0.95, seed=40 + slot)
    driver = Driver(model)
    driver.start(list(range(batch)))
    return model, driver


def record(**row) -> None:
    """Appends one raw result line to the file named by SPECDEC_RESULTS, if any."""
    path = os.environ.get("SPECDEC_RESULTS")
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


@torch.inference_mode()
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("width", [1, 6])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replayed_rounds_equal_eager_rounds(recipe, directory, batch, width, dtype):
    slots = list(range(batch))
    eager, driver = started(recipe, directory, batch, dtype)
    begun = time.perf_counter()
    expected = [driver.round(slots, width - 1) for _ in range(ROUNDS)]
    eager_seconds = time.perf_counter() - begun

    model, _ = started(recipe, directory, batch, dtype)
    shape = RoundShape(batch=batch, draft_tokens=width - 1, verify_width=width)
    runner = ChainRound(target=model.target, drafter=model.drafter, shape=shape, arena=model.arena, max_draft_tokens=7)
    # warm up on dead lanes only: every lane is the spare slot, so no request advances
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            runner.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        runner.run()

    ceilings = [width - 1] * batch
    allocated = torch.cuda.memory_allocated()
    begun = time.perf_counter()
    found = []
    for number in range(1, ROUNDS + 1):
        runner.staging.write(slots, ceilings, number)
        graph.replay()
        records = model.arena.read_frame(number % 2, slots)
        found.append([Completion.parse(row) for row in records])
    captured_seconds = time.perf_counter() - begun
    assert torch.cuda.memory_allocated() == allocated

    assert found == expected
    assert all(c.faults == 0 for completions in found for c in completions)
    for ours, theirs in ((model.target.store, eager.target.store), (model.drafter.store, eager.drafter.store)):
        assert torch.equal(ours.selected[:batch], theirs.selected[:batch])
        for name, tensor in ours.tensors.items():
            # page 0 and the spare slot are trash: warm-up rounds wrote there
            kept = slice(1, None) if ours.fields[name].kind is StateKind.PAGED else slice(0, batch)
            assert torch.equal(tensor[:, kept], theirs[name][:, kept]), name
    assert torch.equal(model.arena.requests.integers, eager.arena.requests.integers)
    tokens = sum(c.emitted for completions in found for c in completions)
    record(
        test="round_capture",
        recipe=recipe,
        device=torch.cuda.get_device_name(),
        torch=torch.__version__,
        source=os.environ.get("SPECDEC_COMMIT", "unknown"),
        dtype=dtype,
        batch=batch,
        width=width,
        rounds=ROUNDS,
        tokens=tokens,
        tokens_equal=found == expected,
        state_equal=True,
        eager_ms_per_round=1000 * eager_seconds / ROUNDS,
        captured_ms_per_round=1000 * captured_seconds / ROUNDS,
    )
