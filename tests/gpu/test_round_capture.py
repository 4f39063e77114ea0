"""Each model's rounds as one CUDA graph: fifty replays give the tokens and the state of the eager run."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import pytest
import torch
from captured_rounds import CASES, CapturedRun, Case, captured, folders
from gpu_results import record

from specdec.declaration import StateKind

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROUNDS = 50
# every round emits at most eight tokens, so no request ends
BUDGET = 8 * ROUNDS + 8


folders = pytest.fixture(folders, scope="module")


@torch.inference_mode()
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replayed_rounds_equal_eager_rounds(folders: dict[str, Path], case: Case, dtype: str) -> None:
    eager = CapturedRun(case, folders[case.recipe], budget=BUDGET, dtype=dtype, device="cuda")
    begun = time.perf_counter()
    for _ in eager.play(ROUNDS, eager.run):
        pass
    eager_seconds = time.perf_counter() - begun

    ours = CapturedRun(case, folders[case.recipe], budget=BUDGET, dtype=dtype, device="cuda")
    # nothing is staged yet: every lane is the spare slot, so no request advances
    graph = captured(ours.run)
    gc.collect()
    allocated = torch.cuda.memory_allocated()
    begun = time.perf_counter()
    for _ in ours.play(ROUNDS, graph.replay):
        pass
    captured_seconds = time.perf_counter() - begun
    gc.collect()
    assert torch.cuda.memory_allocated() == allocated

    assert ours.played == eager.played
    completions = [completion for records in ours.played for completion in records]
    assert all(completion.faults == 0 for completion in completions)
    for store, wanted in zip(ours.bench.stores, eager.bench.stores, strict=True):
        assert torch.equal(store.selected[: case.batch], wanted.selected[: case.batch])
        for name, tensor in store.tensors.items():
            # page 0 and the spare slot are trash: warm-up rounds wrote there
            kept = slice(1, None) if store.fields[name].kind is StateKind.PAGED else slice(0, case.batch)
            assert torch.equal(tensor[:, kept], wanted[name][:, kept]), name
    one, other = ours.bench.arena, eager.bench.arena
    assert torch.equal(one.requests.integers, other.requests.integers)
    if one.forecasts is not None:
        for frame in range(2):
            assert one.read_forecasts(frame, ours.slots) == other.read_forecasts(frame, ours.slots)
    if case.rows:
        assert any(completion.verified < completion.offered for completion in completions)
    record(
        test="round_capture",
        recipe=case.recipe,
        round=type(ours.round).__name__,
        dtype=dtype,
        batch=case.batch,
        width=case.drafts + 1,
        target_rows=ours.round.shape.target_rows,
        rounds=ROUNDS,
        tokens=sum(completion.emitted for completion in completions),
        verified=sum(completion.verified for completion in completions),
        accepted=sum(completion.accepted for completion in completions),
        tokens_equal=True,
        state_equal=True,
        eager_ms_per_round=1000 * eager_seconds / ROUNDS,
        captured_ms_per_round=1000 * captured_seconds / ROUNDS,
    )
