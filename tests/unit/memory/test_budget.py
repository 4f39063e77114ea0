"""A plan that does not fit is refused before anything is allocated, with options that make it fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

from specdec.errors import CapacityError, DeclarationError, UsageError
from specdec.memory import MemoryItem, MemoryPlan, sized
from specdec.memory_plan import plan_memory
from specdec.memory_remedies import changed
from specdec.preparation import PreparationConfig
from specdec.recipes import RecipeHooks, recipe_book
from specdec.serving.model import LoadedModel

GIB = 1 << 30
RECIPES = ("deepseek-v4.1-flash", "glm-5.3-flash", "qwen3.8-flash")


def config(name: str = "qwen3.8-flash", **options: Any) -> PreparationConfig:
    return PreparationConfig.for_recipe(recipe_book().recipe(name), **options)


def plan(made: PreparationConfig, budget: int | None = None) -> MemoryPlan:
    return plan_memory(recipe_book().recipe(made.recipe), made, budget=budget)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(
    "options",
    [
        {"context": 131_072, "concurrency": 8},
        {"context": 32_768, "snapshot_bytes": 20 * GIB, "headroom_bytes": 2 * GIB},
        {"concurrency": 32, "extended_sampling": True, "prefill_tokens": (128, 4096)},
    ],
    ids=["long contexts", "prefix checkpoints", "many lanes"],
)
@pytest.mark.parametrize("missing", [1, 300_000_000])
def test_every_remedy_fits_and_the_next_value_does_not(name: str, options: dict[str, Any], missing: int) -> None:
    made = config(name, **options)
    budget = plan(made).total - missing
    short = plan(made, budget)
    assert short.shortage == missing
    remedies = dict(short.remedies)
    assert remedies
    for option, value in remedies.items():
        assert not plan(changed(made, option, value), budget).shortage, option
        if option in ("context", "pages", "headroom_bytes"):
            assert plan(changed(made, option, value + 1), budget).shortage, option
        elif option in ("concurrency", "prefill_tokens"):
            present = made.concurrency if option == "concurrency" else made.prefill_tokens[-1]
            assert value * 2 >= present or plan(changed(made, option, value * 2), budget).shortage, option
    with pytest.raises(CapacityError) as refused:
        short.check()
    text = str(refused.value)
    assert f"{missing} bytes short" in text and f"a budget of {short.total} bytes" in text
    assert all(f"{option} {value}" in text for option, value in remedies.items())
    assert "\n" not in text
    plan(made, short.total).check()


def test_without_a_remedy_the_message_says_so() -> None:
    short = plan(config(concurrency=1, context=64), 10 * GIB)
    assert short.remedies == ()
    with pytest.raises(
        CapacityError, match=r"no single option makes it fit, weights alone take \d+; raise memory_bytes"
    ):
        short.check()


def test_a_snapshot_budget_too_small_for_one_checkpoint_is_no_remedy() -> None:
    made = config(concurrency=1, context=64, snapshot_bytes=GIB)
    least = plan(evolve(made, snapshot_bytes=0)).total
    remedies = dict(plan(made, least).remedies)
    assert remedies["snapshot_bytes"] == 0
    with pytest.raises(CapacityError, match="one prefix checkpoint takes"):
        plan(evolve(made, snapshot_bytes=1 << 20))


def test_more_than_the_checkpoint_was_made_for_is_refused() -> None:
    with pytest.raises(UsageError, match="context is 262145; the model's max_position_embeddings is 262144"):
        plan(config(context=262_145))


def test_measured_bytes_take_the_place_of_estimates() -> None:
    made = plan(config())
    measured = made.measured(graphs=12_345)
    assert measured.of("graphs") == 12_345
    assert [item.name for item in measured.items if item.estimated] == ["library workspaces"]
    assert measured.total - made.total == 12_345 - made.of("graphs")
    assert measured.allocated == made.allocated


@pytest.mark.parametrize("name", RECIPES)
def test_preparation_refuses_before_any_hook_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("allocated before the plan was checked")

    monkeypatch.setattr(RecipeHooks, "build_target_state", never)
    made = config(name, concurrency=2, context=128, memory_bytes=1 << 20)
    with pytest.raises(CapacityError, match=rf"recipe '{name}' .* needs \d+ bytes .* memory_bytes is 1048576"):
        LoadedModel.prepare(recipe_book().recipe(name), made)


@pytest.mark.parametrize("name", RECIPES)
def test_a_budget_of_exactly_the_plan_is_enough(name: str) -> None:
    recipe = recipe_book().recipe(name)
    made = config(name, concurrency=1, context=128, prefill_tokens=(16,), memory_bytes=1 << 40)
    model = LoadedModel.prepare(recipe, made)
    assert model.memory is not None
    exact = model.memory.total
    assert LoadedModel.prepare(recipe, evolve(made, memory_bytes=exact)).memory is not None
    with pytest.raises(CapacityError, match="1 bytes short"):
        LoadedModel.prepare(recipe, evolve(made, memory_bytes=exact - 1))


def test_without_a_budget_nothing_is_planned() -> None:
    model = LoadedModel.prepare(recipe_book().recipe("qwen3.8-flash"), config(concurrency=1, context=64))
    assert model.memory is None


def test_a_recipe_without_a_declaration_has_no_plan() -> None:
    recipe = evolve(recipe_book().recipe("qwen3.8-flash"), memory=None)
    with pytest.raises(UsageError, match=r"declares no memory, so nothing can be planned; .* Recipe\.memory"):
        plan_memory(recipe, config())
    with pytest.raises(UsageError, match=r"memory_bytes is 5, but recipe 'qwen3\.8-flash' declares no memory"):
        LoadedModel.prepare(recipe, config(memory_bytes=5))
    with pytest.raises(DeclarationError, match="memory must look like 'module:function'"):
        evolve(recipe, memory="module")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.500 KiB"), (528 << 20, "528.000 MiB"), (3 * GIB, "3.000 GiB")],
)
def test_sizes_for_people(count: int, text: str) -> None:
    assert sized(count) == text


def test_items_are_checked() -> None:
    with pytest.raises(DeclarationError, match=r"MemoryItem 'x'\.bytes must be at least 0, got -1"):
        MemoryItem(name="x", bytes=-1, kind="state")
    with pytest.raises(DeclarationError, match=r"kind must be one of 'weights'"):
        MemoryItem(name="x", bytes=1, kind="other")


def test_constants_of_modules_that_need_torch() -> None:
    """The plan repeats them because it must not import these modules."""
    from specdec import memory_plan
    from specdec.round.completion import METADATA_FIELDS
    from specdec.sampling.masks import mask_words
    from specdec.sampling.options import MAX_LOGPROBS
    from specdec.serving.model import STOP_IDS
    from specdec.state.options import OptionTable
    from specdec.state.requests import FLOAT_COLUMNS, INTEGER_COLUMNS

    assert memory_plan._METADATA == METADATA_FIELDS
    assert memory_plan._MAX_LOGPROBS == MAX_LOGPROBS
    assert memory_plan._STOP_IDS == STOP_IDS
    assert (memory_plan._INTEGERS, memory_plan._FLOATS) == (INTEGER_COLUMNS, FLOAT_COLUMNS)
    assert mask_words(memory_plan._MASK_BITS) == 1
    table = OptionTable(slots=1, vocab_size=4, device=torch.device("cpu"))
    assert table.factors.shape[1] == memory_plan._FACTORS
