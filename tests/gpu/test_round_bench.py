"""Measuring captured rounds: marks inside a graph, and floors, engine and phases of each model's small checkpoint."""

from __future__ import annotations

import pytest
import torch

from specdec.preparation import PreparationConfig
from specdec.recipes import recipe_book
from specdec.round.graphs import GraphPool
from specdec.round.phases import PHASES, PhaseMarks
from specdec.serving.model import LoadedModel
from specdec.serving.round_bench import RoundBench
from specdec.serving.round_times import output_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROUNDS = 8
PROMPTS = [list(range(10, 42)), list(range(50, 82))]


def test_a_graph_leaves_marks_at_every_replay() -> None:
    """One phase has a hundred times the work of the others, and the clock says so at every replay."""
    device = torch.device("cuda")
    marks = PhaseMarks(device)
    large = torch.randn(4096, 4096, device=device)

    def run() -> None:
        marks.mark("begin")
        for phase in PHASES:
            for _ in range(100 if phase == "verify" else 1):
                large.copy_(large @ large.mul(1e-3))
            marks.mark(phase)

    graph = GraphPool(device).capture(run, "marks")
    found = []
    for _ in range(3):
        graph.replay()
        found.append(marks.seconds())
    for one in found:
        assert list(one) == list(PHASES)
        assert all(seconds > 0 for seconds in one.values())
        assert one["verify"] > 10 * max(one["draft"], one["accept"], one["commit"])
    assert found[0] != found[1] != found[2]


@pytest.mark.parametrize("name", ["qwen3.8-flash", "glm-5.3-flash", "deepseek-v4.1-flash"])
def test_phases_of_captured_rounds_add_up(name: str) -> None:
    recipe = recipe_book().recipe(name)
    context = 32 + output_tokens(ROUNDS, 3, 1)
    config = PreparationConfig.for_recipe(
        recipe, concurrency=1, max_draft_tokens=2, context=context, prefill_tokens=(32,)
    )
    model = LoadedModel.prepare(recipe, config, device="cuda")
    graphs = {key: dict(one.program.graphs) for key, one in model.rounds.items()}
    bench = RoundBench(model, PROMPTS, rounds=ROUNDS)
    bench.run(1, lambda _: None)
    assert model.arena.phases is None
    assert {key: dict(one.program.graphs) for key, one in model.rounds.items()} == graphs
    for shape in bench.shapes:
        data = shape.as_data()
        assert len(shape.phases) == ROUNDS and all(seconds > 0 for seconds in data["phases"].values())
        assert sum(data["phases"].values()) == pytest.approx(data["floor"], rel=0.5)
        assert data["engine_device"] == pytest.approx(data["floor"], rel=0.5)
    assert all(len(rounds) == ROUNDS for one in bench.adaptive for rounds in one.engine)
