"""A drafter for another plugin's target: how its recipe is completed, and whose hooks are called for it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve

from specdec import hookimpl
from specdec.declaration import DrafterRecipe, Recipe, StateLayout, WidthCatalog
from specdec.errors import DeclarationError, PluginError
from specdec.plugins import Discovery, Plugin, inspect_plugin
from specdec.recipes import RecipeBook

LAYOUT = StateLayout(owner="drafter", fields=(), max_draft_tokens=3)


def drafter(**changes: Any) -> DrafterRecipe:
    values: dict[str, Any] = {
        "name": "toy-copies",
        "summary": "copies for the toy",
        "target": "toy",
        "target_distribution": "specdec-toy",
        "drafter_method": "copies",
        "default_draft_tokens": 2,
        "max_draft_tokens": 3,
        "widths": WidthCatalog(widths=range(1, 5)),
        "supports_history_drafts": False,
        "drafter_layout": LAYOUT,
        "unsupported_options": ("stop",),
        "sources": [
            (name, "own") for name in ("default_draft_tokens", "max_draft_tokens", "speculative_token_capacity")
        ],
    }
    return DrafterRecipe(**{**values, **changes})


def test_the_drafts_are_its_own_and_the_rest_is_the_target_s(recipe: Recipe) -> None:
    made = drafter().completed(evolve(recipe, unsupported_options=("grammar",), embedded_checkpoint="toy:tiny"))
    assert (made.name, made.summary, made.drafter_method) == ("toy-copies", "copies for the toy", "copies")
    assert (made.default_draft_tokens, made.max_draft_tokens, made.widths.widths) == (2, 3, (1, 2, 3, 4))
    assert (made.drafter_layout, made.supports_history_drafts) == (LAYOUT, False)
    assert (made.checkpoint, made.sampling, made.target_layout) == (
        recipe.checkpoint,
        recipe.sampling,
        recipe.target_layout,
    )
    assert (made.embedded_checkpoint, made.target_recipe) == ("toy:tiny", "toy")
    assert made.unsupported_options == ("stop", "grammar")
    assert (made.source_of("max_draft_tokens"), made.source_of("sampling")) == ("own", "test")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"default_draft_tokens": 4}, r"max_draft_tokens \(3\) must be >= default_draft_tokens \(4\)"),
        ({"widths": WidthCatalog(widths=(1, 2, 3))}, r"the widest width \(3\) must be max_draft_tokens \+ 1"),
        ({"drafter_layout": StateLayout(owner="target", fields=(), max_draft_tokens=3)}, "whose owner is 'drafter'"),
        ({"sources": ()}, "no source given for default_draft_tokens, max_draft_tokens, speculative_token_capacity;"),
        ({"drafter_memory": "nowhere"}, "drafter_memory must look like 'module:function'"),
        ({"name": "Toy"}, "use lower-case letters"),
    ],
)
def test_its_numbers_are_checked_without_the_target(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(DeclarationError, match=words):
        drafter(**changes)


def test_the_target_must_be_the_declared_one_and_look_far_enough_back(recipe: Recipe) -> None:
    with pytest.raises(DeclarationError, match="got 'other'"):
        drafter().completed(evolve(recipe, name="other"))
    with pytest.raises(DeclarationError, match="a target of its own, got 'toy'"):
        drafter().completed(evolve(recipe, target_recipe="third"))
    wide = drafter(
        max_draft_tokens=9, widths=WidthCatalog(widths=range(1, 11)), drafter_layout=evolve(LAYOUT, max_draft_tokens=9)
    )
    with pytest.raises(
        DeclarationError, match="target_layout keeps a horizon of 7 draft tokens, but the recipe drafts up to 9"
    ):
        wide.completed(recipe)


def loaded(name: str, recipes: list[Recipe | DrafterRecipe], calls: list[str]) -> Plugin:
    def hook(which: str) -> Callable[..., Any]:
        def call(recipe: Recipe) -> str:
            calls.append(f"{name} {which} {recipe.name}")
            return which

        return hookimpl(call)

    hooks = {which: hook(which) for which in ("build_target_state", "load_drafter", "capture_round")}
    outcome = inspect_plugin(SimpleNamespace(declare_speculation=hookimpl(lambda: recipes), **hooks), name=name)
    assert isinstance(outcome, Plugin)
    return outcome


def test_an_undiscovered_plugin_waits_for_the_target() -> None:
    plugin = loaded("copies", [drafter()], [])
    assert (plugin.recipes, plugin.record.recipes) == ((), ("toy-copies",))
    assert [one.name for one in plugin.waiting] == ["toy-copies"]
    book = RecipeBook(discovery=Discovery(plugins=(plugin.record,), loaded=(plugin,)))
    with pytest.raises(PluginError, match=r"plugin copies .* drafts for recipe 'toy', .*; install specdec-toy$"):
        book.recipe("toy-copies")
