"""Every prepared program of the shipped checkpoints as a CUDA graph: what it consists of, and what replaying it leaves alone."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cuda_graphs import allocations, node_kinds, nothing_allocated_nor_synchronised
from gpu_results import record

from specdec.errors import CaptureError, UsageError
from specdec.preparation import PreparationConfig
from specdec.recipes import recipe_book
from specdec.round.graphs import Program, Variant
from specdec.serving.engine import Engine
from specdec.serving.model import LoadedModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RECIPES = ["qwen3.8-flash", "glm-5.3-flash", "deepseek-v4.1-flash"]
REPLAYS = int(os.environ.get("SPECDEC_REPLAYS", "10000"))


def prepared(name: str, **options: Any) -> LoadedModel:
    recipe = recipe_book().recipe(name)
    config = PreparationConfig.for_recipe(recipe, concurrency=4, context=256, prefill_tokens=(64,), **options)
    return LoadedModel.prepare(recipe, config, device="cuda", dtype="bfloat16")


#: The whole catalog with prefix checkpoints, and two widths of it in every variant.
PREPARATIONS: dict[str, dict[str, Any]] = {
    "catalog": {"snapshot_bytes": 1 << 22},
    "variants": {
        "snapshot_bytes": 1 << 22,
        "speculative_widths": (1, 4),
        "extended_sampling": True,
        "grammar": True,
    },
}


@pytest.fixture(scope="module", params=[(name, which) for name in RECIPES for which in PREPARATIONS], ids="-".join)
def model(request: pytest.FixtureRequest) -> Iterator[LoadedModel]:
    """Graphs keep their definitions."""
    name, which = request.param
    options = PREPARATIONS[which]
    if name.startswith("deepseek") and which == "variants":
        # the only width with drafts of a block drafter is that of its block
        options = options | {"speculative_widths": (1, 8)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "CUDAGraph", lambda: _CUDA_GRAPH(keep_graph=True))
        yield prepared(name, **options)
    torch.cuda.empty_cache()


_CUDA_GRAPH = torch.cuda.CUDAGraph


def programs(model: LoadedModel) -> dict[str, Program]:
    assert model.ordinary is not None
    found = {f"B{batch} W{width}": one.program for (batch, width), one in model.rounds.items()}
    found |= {f"ordinary B{batch}": one.program for (batch, _), one in model.ordinary.rounds.items()}
    return found | {f"first tokens B{batch}": one.program for batch, one in model.first_tokens.items()}


def test_every_shape_is_captured_in_every_variant(model: LoadedModel) -> None:
    """One graph each, of kernels, copies and fills alone: no host callback, no allocation, no conditional part."""
    config = model.config
    assert set(model.rounds) == {(shape.batch, shape.verify_width) for shape in config.shapes()}
    for name, program in programs(model).items():
        variants = 2 ** (config.extended_sampling + config.grammar)
        assert len(program.graphs) == (variants if name.startswith("first") else 2 * variants), name
        for variant, graph in program.graphs.items():
            kinds = node_kinds(graph)
            assert set(kinds) <= {"kernel", "memcpy", "memset", "empty"}, (name, variant, kinds)
            if variant == Variant():
                record(test="graph_nodes", recipe=model.recipe.name, program=name, dtype="bfloat16", **kinds)
    assert model.graphs is not None
    record(
        test="graph_pool",
        recipe=model.recipe.name,
        dtype="bfloat16",
        graphs=model.graphs.graphs,
        bytes=model.graphs.bytes,
        nodes=sum(node_kinds(graph)["kernel"] for p in programs(model).values() for graph in p.graphs.values()),
    )


def test_every_operation_of_serving_is_captured(model: LoadedModel) -> None:
    """Prompts, snapshots and restores, with and without drafts, and decoding without drafts."""
    assert model.ordinary is not None
    assert model.prompts.captured and model.ordinary.prompts.captured
    assert model.slot_state.captured and model.ordinary.slot_state.captured
    assert all(one.program.captured for one in (*model.rounds.values(), *model.ordinary.rounds.values()))


def test_replays_allocate_and_wait_for_nothing(model: LoadedModel) -> None:
    for program in programs(model).values():
        for variant, graph in program.graphs.items():
            graph.replay()
            torch.cuda.synchronize()
            with nothing_allocated_nor_synchronised():
                program(**variant._asdict())
                program(**variant._asdict())
            torch.cuda.synchronize()


def test_many_replays_leave_memory_as_it_was(model: LoadedModel) -> None:
    """All shapes in turn, all lanes dead."""
    plain = [program for name, program in programs(model).items() if name.startswith("B")]
    for program in plain:
        program()
    torch.cuda.synchronize()
    gc.collect()  # garbage of the preparation, collected in between, would look like memory given back
    before, free = allocations(), torch.cuda.mem_get_info()[0]
    for number in range(REPLAYS):
        plain[number % len(plain)]()
        if number % 100 == 99:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    assert allocations() == before
    assert torch.cuda.mem_get_info()[0] == free
    record(test="many_replays", recipe=model.recipe.name, replays=REPLAYS, reserved=before[2], free=free)


def test_what_was_not_captured_is_refused() -> None:
    """Never an eager round in its place."""
    model = prepared("qwen3.8-flash", max_draft_tokens=1)
    with pytest.raises(CaptureError, match="without its variant extended"):
        model.rounds[1, 1].program(extended=True)
    with pytest.raises(UsageError, match="snapshot_bytes above 0"):
        Engine(model, prefixes=True)
