"""The plan against what is really allocated: on a CPU, to the byte, item by item and as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from captured_rounds import WRITERS
from held_storage import held_bytes, tensors

from specdec.checkpoint.accepted import embedded_checkpoint
from specdec.checkpoint.reader import Checkpoint
from specdec.declaration import StateKind
from specdec.memory import MemoryPlan
from specdec.memory_plan import plan_memory
from specdec.preparation import PreparationConfig
from specdec.recipes import recipe_book
from specdec.serving.model import STOP_IDS, LoadedModel

RECIPES = sorted(WRITERS)
SMALL: dict[str, Any] = {"concurrency": 2, "context": 96, "prefill_tokens": (16,)}
#: Options that change what is allocated; each on a model of every recipe.
OPTIONS: dict[str, dict[str, Any]] = {
    "ordinary": {},
    "no drafter": {"speculative": False},
    "zero drafts": {"max_draft_tokens": 0},
    "few rows for many lanes": {"concurrency": 5, "speculative_token_capacity": 8},
    "every option": {"extended_sampling": True, "grammar": True, "snapshot_bytes": 4 << 20, "concurrency": 1},
    "few pages and a long chunk": {"pages": 3, "prefill_tokens": (8, 64), "context": 200},
}


def planned(config: PreparationConfig, directory: Path, dtype: str, **options: Any) -> MemoryPlan:
    with Checkpoint.open(directory) as checkpoint:
        return plan_memory(
            recipe_book().recipe(config.recipe),
            config,
            settings=checkpoint.config,
            checkpoint=checkpoint,
            dtype=dtype,
            device="cpu",
            **options,
        )


def prepared(
    name: str, directory: Path | None, dtype: str, **options: Any
) -> tuple[LoadedModel, MemoryPlan, PreparationConfig]:
    recipe = recipe_book().recipe(name)
    config = PreparationConfig.for_recipe(recipe, **{**SMALL, **options})
    model = LoadedModel.prepare(recipe, config, directory=directory, dtype=dtype)
    return model, planned(config, directory or embedded_checkpoint(recipe), dtype), config


def check_weights(model: LoadedModel, plan: MemoryPlan) -> None:
    for owner, held, without in (
        ("target", model.target, (model.target.store,)),
        ("drafter", model.drafter, (model.target, None if model.drafter is None else model.drafter.store)),
    ):
        items = [item for item in plan.items if item.kind == "weights" and item.name.startswith(owner)]
        assert sum(item.bytes for item in items) == held_bytes(held, without=without), owner


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", RECIPES)
def test_weights_of_the_embedded_checkpoint(name: str, dtype: str) -> None:
    model, plan, _ = prepared(name, None, dtype)
    check_weights(model, plan)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", RECIPES)
def test_weights_of_a_checkpoint_of_plain_floats(name: str, dtype: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / "checkpoint")
    model, plan, _ = prepared_without_tokenizer(name, tmp_path / "checkpoint", dtype)
    check_weights(model, plan)


def prepared_without_tokenizer(
    name: str, directory: Path, dtype: str
) -> tuple[LoadedModel, MemoryPlan, PreparationConfig]:
    """As ``prepared``; written checkpoints have no tokenizer, and no plan needs one."""
    recipe = recipe_book().recipe(name)
    (directory / "tokenizer.json").write_bytes((embedded_checkpoint(recipe) / "tokenizer.json").read_bytes())
    return prepared(name, directory, dtype)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", RECIPES)
def test_everything_that_is_held(name: str, options: dict[str, Any]) -> None:
    model, plan, config = prepared(name, None, "float32", **options)
    check_weights(model, plan)
    items = {item.name: item.bytes for item in plan.items}
    for owner, store in zip(("target", "drafter"), model.stores, strict=False):
        fields = {field.name: field for field in store.layout.fields}
        for field, tensor in store.tensors.items():
            kind = "pages" if fields[field].kind is StateKind.PAGED else "state"
            assert [(i.bytes, i.kind) for i in plan.items if i.name == f"{owner} {field}"] == [(tensor.nbytes, kind)]
        assert sum(items[f"{owner} {field}"] for field in store.tensors) == store.nbytes
        tables = [store.page_table, store.selected, store.faults]
        assert items[f"{owner} store tables"] >= sum(table.nbytes for table in tables)
    assert plan.of("state", "pages") == sum(store.nbytes for store in model.stores)

    arena = model.arena
    table = arena.requests
    assert items["request table"] == table.integers.nbytes + table.floats.nbytes + table.stops.nbytes
    assert table.stops.shape[1] == STOP_IDS
    assert items["completion frames"] == arena.frames.nbytes
    assert items.get("forecast frames", 0) == (0 if arena.forecasts is None else arena.forecasts.values.nbytes)
    assert items.get("log-probability frames", 0) == (0 if arena.logprobs is None else arena.logprobs.nbytes)
    assert items.get("grammar masks", 0) == (0 if arena.masks is None else arena.masks.words.nbytes)
    neutral = 3 * 4
    assert items.get("option tables", 0) == (0 if table.options is None else table.options.nbytes + neutral)

    # nothing is left out: every storage behind the loaded model is an item
    assert not any(item.estimated for item in plan.items)
    whole = held_bytes(
        [
            model.target,
            model.drafter,
            model.rounds,
            model.first_tokens,
            model.arena,
            model.prompts,
            model.ordinary,
        ]
    )
    assert whole == plan.allocated + plan.of("host")
    assert plan.total == plan.allocated + plan.of("snapshots")
    if config.snapshot_bytes:
        extra = model.capacities.pages - (config.pages or model.capacities.slots * 2)
        assert extra > 0
        assert plan.of("snapshots") == config.snapshot_bytes - sum(s.layout.bytes(0, extra) for s in model.stores)


def test_the_walk_sees_closures_and_counts_a_storage_once() -> None:
    """The negative control of everything above: a tensor that only a closure holds, and two views of one storage."""
    one = torch.zeros(10)

    def holder() -> Any:
        hidden = torch.zeros(7)
        return lambda: hidden

    assert held_bytes({"a": one[:5], "b": [one[2:]], "c": holder()}) == 4 * 17
    assert len(list(tensors({"a": one[:5], "b": [one[2:]]}))) == 2


@pytest.mark.parametrize("name", RECIPES)
def test_shapes_share_what_the_greatest_needs(name: str) -> None:
    model, plan, config = prepared(name, None, "float32", concurrency=4, context=64)
    assert [(s.batch, s.draft_tokens, s.target_rows) for s in plan.shapes] == [
        (s.batch, s.draft_tokens, s.target_rows) for s in LoadedModel.shapes(config)
    ]
    assert plan.of("scratch") == sum(tensor.nbytes for tensor in model.arena._scratch.values())
    assert max(shape.scratch for shape in plan.shapes) == plan.of("scratch")
    for shape in plan.shapes:
        staging = model.rounds[shape.batch, shape.verify_width].staging  # type: ignore[attr-defined]
        assert staging._device.nbytes == shape.staging
