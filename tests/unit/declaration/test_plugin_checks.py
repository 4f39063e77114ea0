"""What a plugin object must be, and which hooks are called for a recipe; nothing is discovered here."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from stand_ins import stand_in_round, stand_in_target

import specdec
from specdec import hookimpl
from specdec.declaration import Recipe
from specdec.errors import CheckpointError, PluginError, RecipeError
from specdec.plugins import Discovery, Plugin, PluginRecord, inspect_plugin
from specdec.recipes import DEFAULT_ROUND_MODULE, RecipeBook


def plugin(**hooks: Callable[..., Any]) -> SimpleNamespace:
    return SimpleNamespace(**{name: hookimpl(function) for name, function in hooks.items()})


def refusal(candidate: object) -> PluginRecord:
    outcome = inspect_plugin(candidate, name="toy", distribution="specdec-toy", version="1.2")
    assert isinstance(outcome, PluginRecord)
    assert (outcome.status, outcome.label) == ("failed", "toy (specdec-toy 1.2)")
    assert "\n" not in outcome.reason
    return outcome


def test_healthy(recipe: Recipe) -> None:
    outcome = inspect_plugin(plugin(declare_speculation=lambda: iter([recipe])), name="toy")
    assert isinstance(outcome, Plugin)
    assert (outcome.record.status, outcome.record.recipes, outcome.recipes) == ("loaded", ("toy",), (recipe,))


def raising(error: BaseException) -> Callable[[], Any]:
    def hook() -> Any:
        raise error

    return hook


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (raising(RuntimeError("first\nsecond")), "RuntimeError: first / second"),
        (raising(SystemExit(3)), r"called sys.exit(3)"),
        (lambda: None, "returned no recipe"),
        (lambda: (), "returned no recipe"),
        (lambda: 7, "must return an iterable of Recipe, got int"),
        (lambda: "toy", "must return an iterable of Recipe, got str"),
        (lambda: ["toy"], "must yield Recipe records, got str"),
    ],
)
def test_bad_declarations(hook: Callable[[], Any], words: str) -> None:
    assert words in refusal(plugin(declare_speculation=hook)).reason


def test_the_reason_names_the_plugins_line() -> None:
    # a plugin installed beside the core, whose folder starts with the same letters
    place = f"{Path(specdec.__file__).parent}_toy/plugin.py"
    names: dict[str, Any] = {}
    exec(compile("def hook():\n    raise RuntimeError('x')\n", place, "exec"), names)
    assert refusal(plugin(declare_speculation=names["hook"])).reason == f"RuntimeError: x ({place}:2)"


def test_one_recipe_is_not_an_iterable(recipe: Recipe) -> None:
    assert "must return an iterable of Recipe, got Recipe" in refusal(plugin(declare_speculation=lambda: recipe)).reason


def test_recipe_twice_in_one_plugin(recipe: Recipe) -> None:
    assert "yields recipe 'toy' twice" in refusal(plugin(declare_speculation=lambda: [recipe, recipe])).reason


def test_a_generator_that_fails_half_way(recipe: Recipe) -> None:
    def hook() -> Iterator[Recipe]:
        yield recipe
        raise OSError("disk")

    assert "OSError: disk" in refusal(plugin(declare_speculation=hook)).reason


def test_unknown_hook_and_unknown_argument(recipe: Recipe) -> None:
    good = {"declare_speculation": lambda: [recipe]}
    assert "load_draftr" in refusal(plugin(**good, load_draftr=lambda recipe: None)).reason
    assert "weights" in refusal(plugin(**good, load_drafter=lambda recipe, weights: None)).reason


def test_no_hooks_at_all() -> None:
    assert "does not implement declare_speculation" in refusal(SimpleNamespace()).reason


def test_keyboard_interrupt_passes() -> None:
    with pytest.raises(KeyboardInterrupt):
        inspect_plugin(plugin(declare_speculation=raising(KeyboardInterrupt())), name="toy")


def book(*plugins: Plugin, troubled: tuple[PluginRecord, ...] = ()) -> RecipeBook:
    records = tuple(item.record for item in plugins)
    return RecipeBook(discovery=Discovery(plugins=records + troubled, loaded=plugins))


def loaded(name: str, **hooks: Callable[..., Any]) -> Plugin:
    outcome = inspect_plugin(plugin(**hooks), name=name, distribution=f"specdec-{name}", version="1.0")
    assert isinstance(outcome, Plugin), outcome
    return outcome


def test_only_the_owner_is_called(make_recipe: Callable[..., Recipe]) -> None:
    first, second = make_recipe(name="first"), make_recipe(name="second")
    calls: list[str] = []

    def hooks(recipe: Recipe) -> dict[str, Callable[..., Any]]:
        def build_target_state(recipe: Recipe, device: str) -> Any:
            calls.append(f"{recipe.name} on {device}")
            return stand_in_target(owner=recipe.name)

        return {"declare_speculation": lambda: [recipe], "build_target_state": build_target_state}

    recipes = book(loaded("one", **hooks(first)), loaded("two", **hooks(second)))
    target: Any = recipes.hooks_for("second").build_target_state(checkpoint=None, capacities=None, device="cpu")  # type: ignore[arg-type]
    assert target.owner == "second"
    assert calls == ["second on cpu"]
    assert recipes.hooks_for(first).plugin.record.name == "one"


def test_hook_errors_name_the_plugin(recipe: Recipe) -> None:
    def build_target_state() -> Any:
        raise KeyError("weight")

    def load_drafter() -> Any:
        raise CheckpointError("tensor is missing")

    hooks = book(
        loaded(
            "toy",
            declare_speculation=lambda: [recipe],
            build_target_state=build_target_state,
            load_drafter=load_drafter,
        )
    ).hooks_for("toy")
    with pytest.raises(
        PluginError, match=r"plugin toy \(specdec-toy 1\.0\): build_target_state .* KeyError: 'weight'"
    ) as caught:
        hooks.build_target_state(checkpoint=None, capacities=None, device=None)  # type: ignore[arg-type]
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(CheckpointError, match="tensor is missing"):
        hooks.load_drafter(checkpoint=None, target=None, capacities=None)  # type: ignore[arg-type]


def test_a_missing_hook_is_reported_when_needed(recipe: Recipe) -> None:
    hooks = book(loaded("toy", declare_speculation=lambda: [recipe])).hooks_for("toy")
    with pytest.raises(PluginError, match="returns nothing from load_drafter"):
        hooks.load_drafter(checkpoint=None, target=None, capacities=None)  # type: ignore[arg-type]


def test_the_core_round_is_tried_last(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    core = ModuleType(DEFAULT_ROUND_MODULE)
    core.capture_round = hookimpl(trylast=True)(lambda shape: stand_in_round(made=f"core {shape}"))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, DEFAULT_ROUND_MODULE, core)
    own = loaded(
        "toy",
        declare_speculation=lambda: [recipe],
        capture_round=lambda shape: None if shape == "narrow" else stand_in_round(made=f"own {shape}"),
    )
    hooks = book(own).hooks_for("toy")
    made: list[Any] = [
        hooks.capture_round(target=None, drafter=None, shape=shape, arena=None)  # type: ignore[arg-type]
        for shape in ("narrow", "wide")
    ]
    assert [one.made for one in made] == ["core narrow", "own wide"]


def failed(name: str, status: str = "failed", recipes: tuple[str, ...] = ()) -> PluginRecord:
    return PluginRecord(
        name=name,
        distribution=f"specdec-{name}",
        version="2.0",
        status=status,
        reason="ImportError: no lib",
        recipes=recipes,
        error=ImportError("no lib") if status == "failed" else None,
    )


def test_unknown_recipe_offers_close_matches(recipe: Recipe) -> None:
    recipes = book(loaded("toy", declare_speculation=lambda: [recipe]))
    with pytest.raises(RecipeError, match="unknown recipe 'toi'; did you mean toy"):
        recipes.recipe("toi")
    with pytest.raises(RecipeError, match="unknown recipe 'elephant'; known recipes: toy"):
        recipes.recipe("elephant")
    with pytest.raises(RecipeError, match="known recipes: none"):
        book().recipe("toy")


def test_the_recorded_reason_is_raised(recipe: Recipe) -> None:
    toy = loaded("toy", declare_speculation=lambda: [recipe])
    reason = r"plugin bad \(specdec-bad 2\.0\): ImportError: no lib"
    with pytest.raises(PluginError, match=f"recipe 'elephant' is declared by no loaded plugin.*{reason}") as caught:
        book(toy, troubled=(failed("bad"),)).recipe("elephant")
    assert isinstance(caught.value.__cause__, ImportError)
    with pytest.raises(PluginError, match=f"recipe 'elephant' is not usable: {reason}"):
        book(toy, troubled=(failed("bad", "conflict", ("elephant",)),)).recipe("elephant")
    with pytest.raises(RecipeError, match=f"did you mean toy.*{reason}"):
        book(toy, troubled=(failed("bad"),)).recipe("toyy")
    # a healthy recipe is not touched by any of it
    assert book(toy, troubled=(failed("bad"),)).recipe("toy") is recipe


def test_skipped_plugins_are_mentioned(recipe: Recipe) -> None:
    with pytest.raises(RecipeError, match="plugins left out by SPECDEC_PLUGINS: other"):
        book(troubled=(failed("other", "skipped"),)).recipe("toy")
