"""The memory plan against a CUDA device's allocator: what preparation allocates, to the byte where that is stated."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from specdec.checkpoint.accepted import embedded_checkpoint
from specdec.checkpoint.reader import Checkpoint
from specdec.declaration import StateKind
from specdec.errors import CapacityError
from specdec.memory_plan import plan_memory
from specdec.preparation import PreparationConfig
from specdec.recipes import recipe_book
from specdec.serving.budget import free_bytes
from specdec.serving.model import LoadedModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RECIPES = ("qwen3.8-flash", "glm-5.3-flash", "deepseek-v4.1-flash")
OPTIONS: dict[str, Any] = {"concurrency": 2, "context": 512, "prefill_tokens": (64,), "max_draft_tokens": 2}
#: Bytes of pages: beside them, what the allocator cannot split off at the ends of segments is small.
POOLS = 4 << 30


def settled() -> None:
    """Drops what earlier tests and library calls left behind, workspaces of matrix products included."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def requested() -> int:
    """Bytes that live tensors asked for, before the allocator rounded them."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def record(**row: object) -> None:
    """Appends one raw result line to the file named by SPECDEC_RESULTS, if any."""
    path = os.environ.get("SPECDEC_RESULTS")
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def config(name: str, **options: Any) -> PreparationConfig:
    recipe = recipe_book().recipe(name)
    return PreparationConfig.for_recipe(recipe, **{**OPTIONS, **options})


def prepared(name: str, dtype: str, **options: Any) -> LoadedModel:
    return LoadedModel.prepare(recipe_book().recipe(name), config(name, **options), device="cuda", dtype=dtype)


def estimated(model: LoadedModel) -> int:
    """What the graph pool was taken for before it was measured."""
    with Checkpoint.open(embedded_checkpoint(model.recipe)) as checkpoint:
        plan = plan_memory(
            model.recipe,
            model.config,
            settings=checkpoint.config,
            checkpoint=checkpoint,
            dtype=model.capacities.dtype,
            device="cuda",
        )
    return plan.of("graphs")


CASES = {
    "eager, bfloat16": ("bfloat16", {"cuda_graphs": False, "extended_sampling": True, "grammar": True}),
    "eager, float32": ("float32", {"cuda_graphs": False, "extended_sampling": True, "grammar": True}),
    # every variant of every shape is captured, so only one beside the ordinary one
    "captured, bfloat16": ("bfloat16", {"snapshot_bytes": 64 << 20}),
}


@pytest.mark.parametrize(("dtype", "options"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", RECIPES)
def test_preparation_allocates_what_was_planned(name: str, dtype: str, options: dict[str, Any]) -> None:
    # libraries and kernels that are loaded at first use keep some memory for good
    rehearsal = prepared(name, dtype, **options)
    page = sum(store.layout.bytes(0, 1) for store in rehearsal.stores)
    del rehearsal
    settled()
    before, asked = torch.cuda.memory_allocated(), requested()
    model = prepared(name, dtype, pages=POOLS // page, **options)
    settled()
    assert model.memory is not None
    plan = model.memory
    allocated, wanted = torch.cuda.memory_allocated() - before, requested() - asked
    pool = 0
    if model.graphs is not None:
        assert plan.of("graphs") == model.graphs.bytes
        # results of a graph that live on in its pool are the pool's
        own = tuple(model.graphs.handle)
        segments = [one for one in torch.cuda.memory_snapshot() if tuple(one["segment_pool_id"]) == own]
        pool = sum(one["allocated_size"] for one in segments)
        blocks = [block for one in segments for block in one["blocks"] if block["state"] == "active_allocated"]
        wanted -= sum(block["requested_size"] for block in blocks)
    exact = plan.allocated - plan.of("rounding")
    record(
        test="plan_memory",
        recipe=name,
        device=torch.cuda.get_device_name(),
        torch=torch.__version__,
        source=os.environ.get("SPECDEC_COMMIT", "unknown"),
        dtype=dtype,
        captured=model.graphs is not None,
        planned_bytes=plan.allocated,
        allocated_bytes=allocated - pool,
        planned_before_rounding=exact,
        requested_bytes=wanted,
        totals=plan.totals(),
        pool_bytes=None if model.graphs is None else model.graphs.bytes,
        pool_live_bytes=pool,
        pool_estimate=None if model.graphs is None else estimated(model),
    )
    items = {item.name: item for item in plan.items}
    for owner, store in zip(("target", "drafter"), model.stores, strict=False):
        for field, tensor in store.tensors.items():
            assert tensor.device.type == "cuda"
            item = items[f"{owner} {field}"]
            assert item.bytes == tensor.untyped_storage().nbytes()
            assert item.kind == ("pages" if store.fields[field].kind is StateKind.PAGED else "state")
    assert plan.of("state", "pages") == sum(store.nbytes for store in model.stores)
    assert items["completion frames"].bytes == model.arena.frames.untyped_storage().nbytes()
    assert allocated - pool == pytest.approx(plan.allocated, rel=0.01)
    # the pages hide nothing: of what tensors asked for, all but a few small ones were planned
    assert abs(wanted - exact) <= 1 << 17, f"{wanted - exact} bytes were not planned"


@pytest.mark.parametrize("name", RECIPES)
def test_a_small_budget_is_refused_with_nothing_allocated(name: str) -> None:
    settled()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    small = evolve(config(name), memory_bytes=32 << 20)
    with pytest.raises(CapacityError, match=r"memory_bytes is 33554432 \(32\.000 MiB\), \d+ bytes short"):
        LoadedModel.prepare(recipe_book().recipe(name), small, device="cuda")
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.memory_reserved() == reserved


def test_more_than_the_device_has_free_is_refused() -> None:
    settled()
    before = torch.cuda.memory_allocated()
    recipe = recipe_book().recipe("qwen3.8-flash")
    free = free_bytes(torch.device("cuda"))
    greedy = config("qwen3.8-flash", headroom_bytes=free, memory_bytes=2 * free)
    with pytest.raises(CapacityError, match=r"what cuda has free is \d+ .* it fits with one of: .*headroom_bytes \d+"):
        LoadedModel.prepare(recipe, greedy, device="cuda")
    assert torch.cuda.memory_allocated() == before
