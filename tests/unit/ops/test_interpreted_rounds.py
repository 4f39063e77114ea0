"""Whole rounds of the three models, kernels of experts and attention interpreted; how to run: ``test_interpreted_kernels``.

Minutes: an interpreted program runs once for each row, block and layer.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from captured_rounds import WRITERS, CapturedRun, Case

from specdec.checkpoint import mixtures
from specdec.ops import grouped_rows, moe, sink_attention

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")


@torch.inference_mode()
@pytest.mark.parametrize("recipe", WRITERS)
def test_tokens_and_state_are_those_of_the_references(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recipe: str
) -> None:
    folder = WRITERS[recipe](tmp_path)
    case, asked = Case(recipe=recipe, batch=2, drafts=1), set()

    def run() -> CapturedRun:
        made = CapturedRun(case, folder, budget=40, dtype="float32", device="cpu")
        for _ in made.play(2, made.run):
            pass
        return made

    def interpreted(name: str, *tensors: torch.Tensor) -> bool:
        asked.add(name)
        return True

    plain = run()
    for module in (mixtures, moe, grouped_rows, sink_attention):
        monkeypatch.setattr(module, "uses_cuda", interpreted)
    fused = run()
    assert {"mixture"} < asked
    assert fused.played == plain.played
    for ours, theirs in zip(fused.bench.stores, plain.bench.stores, strict=True):
        for name, tensor in ours.tensors.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-4, equal_nan=True, msg=name)
