"""Profiles that ship: every number has a source, and those that can be computed again are."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from attrs import evolve

from specdec.declaration import Recipe
from specdec.errors import UsageError
from specdec.recipes import recipe_book
from specdec.simulation.acceptance import survival
from specdec.simulation.profiles import Kind, profiles_of_file, shipped_profiles

ROOT = Path(__file__).parents[3]
RECIPES = recipe_book().discovery.recipes
BOOK = shipped_profiles(RECIPES)
SHIPPED = ROOT / "core" / "specdec" / "simulation" / "profiles.json"

#: Accepted by position as their sources print them.
REPORTED = {
    "qwen3-next": (0.9323, 0.8153, 0.6440),
    "deepseek-v3.2": (0.9393, 0.6789, 0.3387),
    "eight-layer-gsm8k": (0.7568, 0.6011, 0.4976, 0.4113, 0.3538, 0.2980, 0.2608, 0.2229),
    "block-prose": (0.579, 0.447, 0.316, 0.237, 0.158),
    "glm-repetitive": (1.0, 1.0, 1.0, 1.0),
}
#: Drafts and accepted drafts per round, as reported or implied by tokens per round.
MEANS = {
    "qwen-code": (3, 3 * 0.9215),
    "qwen-extract": (3, 3 * 0.9107),
    "qwen-story": (3, 3 * 0.4658),
    "deepseek-gsm8k": (5, 2.82 - 1),
    "glm-gsm8k": (5, 2.9 - 1),
}
DEPTH_ONE = {"domain-code": 0.9076, "domain-factual": 0.6058, "domain-prose": 0.4918, "domain-technical": 0.4797}
SMALL = {
    "qwen-small": "qwen3.8-flash",
    "glm-small": "glm-5.3-flash",
    "deepseek-small": "deepseek-v4.1-flash",
}


def test_every_curve_is_checked_below() -> None:
    assert set(BOOK.curves) == {*REPORTED, *MEANS, *DEPTH_ONE, *SMALL, "qwen-agent"}
    kinds = {name: curve.kind for name, curve in BOOK.curves.items()}
    assert all(kinds[name] == Kind.PUBLISHED for name in REPORTED)
    assert all(kinds[name] == Kind.DERIVED for name in (*MEANS, *DEPTH_ONE, "qwen-agent"))
    assert all(kinds[name] == Kind.MEASURED for name in SMALL)


def test_every_number_has_a_source_and_a_note() -> None:
    for entry in (*BOOK.curves.values(), *BOOK.costs.values()):
        assert len(entry.note) > 40
        if entry.kind == Kind.MEASURED:
            assert (ROOT / entry.source).is_file()
        elif entry.kind == Kind.QUALITATIVE:
            # nobody may take these for measurements
            assert "every number is ours" in entry.note
        else:
            assert entry.source.startswith("https://")


@pytest.mark.parametrize("name", REPORTED)
def test_reported_prefixes(name: str) -> None:
    conditional = BOOK.curves[name].category.conditional
    assert survival(conditional, len(REPORTED[name])) == pytest.approx(REPORTED[name], abs=2e-4)


@pytest.mark.parametrize("name", MEANS)
def test_reported_means(name: str) -> None:
    drafts, accepted = MEANS[name]
    assert sum(survival(BOOK.curves[name].category.conditional, drafts)) == pytest.approx(accepted, rel=2e-3)


@pytest.mark.parametrize("name", DEPTH_ONE)
def test_reported_first_depths(name: str) -> None:
    assert BOOK.curves[name].category.conditional == (DEPTH_ONE[name],)


def test_copies_have_the_means_of_the_scheme() -> None:
    """26.1 % of rounds, 13.8 % by eight tokens alone; 4.46 accepted after eight, 3.79 over both."""
    copies = BOOK.curves["qwen-agent"].category.copies
    assert copies is not None and copies.rate == 0.261
    assert copies.long_share == pytest.approx(0.138 / 0.261, abs=1e-3)
    long, short = sum(survival(copies.long, 7)), sum(survival(copies.short, 7))
    assert long == pytest.approx(4.46, rel=2e-3)
    assert copies.long_share * long + (1 - copies.long_share) * short == pytest.approx(3.79, rel=2e-3)


@pytest.mark.parametrize(("name", "recipe"), SMALL.items())
def test_measured_numbers_are_those_of_the_result_files(name: str, recipe: str) -> None:
    path = ROOT / "tests" / "benchmarks" / "results" / f"{recipe}_cpu.json"
    arms = {arm["draft_tokens"]: arm for arm in json.loads(path.read_text())["arms"]}
    assert BOOK.curves[name].category.conditional == pytest.approx(arms[7]["acceptance_by_depth"], abs=6e-5)
    seconds = {key: arm["seconds"] / arm["rounds"] for key, arm in arms.items()}
    model = BOOK.costs[f"{name}-cpu"].model
    assert model.round(1, 1, plain=True) == pytest.approx(seconds[None], rel=0.04)
    for drafts in range(8):
        assert model.round(1, drafts + 1) == pytest.approx(seconds[drafts], rel=0.08), drafts


def test_profiles_of_recipes_prepare_widths_that_the_recipe_has() -> None:
    assert BOOK.unread == {}
    # the profile of a recipe has its name, and those of recipes come first
    assert BOOK.by_recipe == {name: name for name in SMALL.values()}
    assert [profile.recipe is None for profile in BOOK.profiles.values()] == [False] * 6 + [True] * 3
    for name, profile in BOOK.profiles.items():
        assert all(weight > 0 for weight in profile.mix.values()), name
        if profile.recipe is not None:
            recipe = recipe_book().recipe(profile.recipe)
            assert set(profile.widths) <= set(recipe.widths.widths), name
            assert profile.token_capacity == recipe.speculative_token_capacity


def test_the_core_stands_for_no_recipe() -> None:
    core = shipped_profiles([])
    assert set(core.profiles) == {"mixed-domains", "eight-drafts", "slow-verify"} and core.by_recipe == {}
    assert set(core.profiles) == {name for name, profile in BOOK.profiles.items() if profile.recipe is None}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_the_file_of_a_plugin_can_be_read_as_ones_own(recipe: Recipe) -> None:
    """As its author does before a recipe names it; curves and costs of the core are there too."""
    assert recipe.profiles is not None
    package, _, name = recipe.profiles.partition(":")
    [path] = (ROOT / "plugins").glob(f"*/{package}/{name}")
    own = profiles_of_file(path)
    assert own.by_recipe == {recipe.name: recipe.name}
    assert all(BOOK.profiles[key] == profile for key, profile in own.profiles.items())
    assert own.costs[own.profiles[recipe.name].costs].kind == Kind.QUALITATIVE


def test_names_of_ones_own_file_come_first(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(_with(lambda data: data["costs"]["slow-verify"]["model"].update(base=7.0)), encoding="utf-8")
    assert profiles_of_file(path).costs["slow-verify"].model.base == 7.0
    assert BOOK.costs["slow-verify"].model.base == 0.1823


#: Half of a plugin file: a profile of the core's curves and costs.
MINE = {
    "summary": "mine",
    "recipe": "qwen3.8-flash",
    "costs": "eight-row-band",
    "mix": {"block-prose": 1},
    "widths": [1, 2],
    "concurrency": 2,
    "rate": 0.1,
    "prompt": {"low": 1, "high": 1},
    "output": {"low": 3, "high": 3},
}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"profiles": {"mine": MINE}}, None),
        (None, "No such file"),
        ("{", "not valid JSON"),
        ({}, "profiles: missing"),
        ({"profiles": {"mine": {**MINE, "costs": "none"}}}, "names costs 'none'"),
        ({"profiles": {"mixed-domains": MINE}}, "profile 'mixed-domains' is in another file too; rename it"),
        ({"profiles": {"glm-small": MINE}}, "profile 'glm-small' is in another file too"),
        ({"profiles": {"mine": {**MINE, "recipe": "glm-5.3-flash"}}}, "those that do: qwen3.8-flash"),
    ],
)
def test_a_bad_plugin_file_hinders_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: object, reason: str | None
) -> None:
    package = tmp_path / "profiled_package"
    package.mkdir()
    (package / "__init__.py").touch()
    if content is not None:
        text = content if isinstance(content, str) else json.dumps({"curves": {}, "costs": {}, **content})  # type: ignore[dict-item]
        (package / "p.json").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "profiled_package", raising=False)
    others = [recipe for recipe in RECIPES if recipe.name != "qwen3.8-flash"]
    mine = evolve(recipe_book().recipe("qwen3.8-flash"), profiles="profiled_package:p.json")
    book = shipped_profiles([*others, mine])
    others_alone = shipped_profiles(others)
    assert others_alone.profiles.items() <= book.profiles.items()
    if reason is None:
        assert book.unread == {} and book.by_recipe["qwen3.8-flash"] == "mine"
    else:
        assert list(book.unread) == ["profiled_package:p.json"] and book.profiles == others_alone.profiles
        assert book.unread["profiled_package:p.json"].startswith("profiled_package:p.json:")
        assert reason in book.unread["profiled_package:p.json"]


def test_a_package_that_is_not_there_is_left_out() -> None:
    gone = evolve(RECIPES[0], profiles="no_such_package:p.json")
    assert "No module named 'no_such_package'" in shipped_profiles([gone]).unread["no_such_package:p.json"]


def test_a_cost_step_lies_behind_eight_rows() -> None:
    for name in ("eight-row-band", "eight-row-band-block"):
        rows = [BOOK.costs[name].model.round(batch, 1, plain=True) for batch in range(1, 12)]
        steps = [later - earlier for earlier, later in zip(rows, rows[1:])]
        assert steps.index(max(steps)) == 7  # from eight rows to nine


def _with(change: object) -> str:
    data = json.loads(SHIPPED.read_text(encoding="utf-8"))
    change(data)  # type: ignore[operator]
    return json.dumps(data)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda data: data.pop("costs"), "costs: missing"),
        (
            lambda data: data["profiles"]["eight-drafts"].update(costs="none"),
            "profile 'eight-drafts' names costs 'none'",
        ),
        (lambda data: data["profiles"]["eight-drafts"].update(mix={"none": 1}), "names curve 'none'"),
        (lambda data: data["profiles"]["eight-drafts"].update(mix={}), "names no curve"),
        (lambda data: data["profiles"]["eight-drafts"].update(color=1), "unknown key 'color'"),
        (lambda data: data["curves"]["block-prose"].update(kind="guess"), "kind is 'guess'"),
        (lambda data: data["curves"]["block-prose"].pop("source"), "source: missing"),
        (lambda data: data["curves"]["block-prose"]["category"].update(conditional=[1.5]), "conditional is 1.5"),
        (lambda data: data["costs"]["slow-verify"]["model"].update(base=-1), "base is -1.0"),
    ],
)
def test_files_of_ones_own_are_checked(tmp_path: Path, change: object, part: str) -> None:
    path = tmp_path / "own.json"
    path.write_text(_with(change), encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        profiles_of_file(path)
    assert part in str(caught.value) and str(caught.value).startswith(str(path))


def test_bad_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    for content, part in ((None, "No such file"), (b"\xff", "not UTF-8"), (b"{", "not valid JSON"), (b"[]", "object")):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(UsageError, match=part):
            profiles_of_file(path)
