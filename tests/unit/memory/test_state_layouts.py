"""Layouts that are known before anything is loaded equal those of the loaded model."""

from __future__ import annotations

import pytest
from attrs import evolve

from specdec.checkpoint.accepted import open_checkpoint
from specdec.memory_plan import state_layouts
from specdec.preparation import PreparationConfig
from specdec.recipes import recipe_book
from specdec.serving.model import LoadedModel


@pytest.mark.parametrize("speculative", [True, False])
@pytest.mark.parametrize("name", ["qwen3.8-flash", "glm-5.3-flash", "deepseek-v4.1-flash"])
def test_layouts_of_a_checkpoint(name: str, speculative: bool) -> None:
    recipe = recipe_book().recipe(name)
    config = PreparationConfig.for_recipe(recipe, concurrency=1, context=128, speculative=speculative)
    with open_checkpoint(recipe) as checkpoint:
        found = state_layouts(recipe, config, settings=checkpoint.config, checkpoint=checkpoint, dtype="float32")
    model = LoadedModel.prepare(recipe, config)
    assert found == tuple(store.layout for store in model.stores)
    assert found != (recipe.target_layout, recipe.drafter_layout)[: len(found)]


def test_a_recipe_without_declared_memory_has_those_that_it_declares() -> None:
    recipe = evolve(recipe_book().recipe("qwen3.8-flash"), memory=None)
    config = PreparationConfig.for_recipe(recipe)
    assert state_layouts(recipe, config) == (recipe.target_layout, recipe.drafter_layout)
