"""A plugin that drafts for another plugin's target, with and without that plugin, as commands show it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import specdec_qwen38

TINY = Path(specdec_qwen38.__file__).parent / "tiny"

PLUGIN = """
from specdec import hookimpl
from specdec.declaration import DrafterRecipe, StateLayout, WidthCatalog

RECIPE = DrafterRecipe(
    name="toy-copies", summary="copies", target="TARGET", target_distribution="DISTRIBUTION", drafter_method="copies",
    default_draft_tokens=2, max_draft_tokens=DRAFTS, widths=WidthCatalog(widths=range(1, DRAFTS + 2)),
    supports_history_drafts=False, drafter_layout=StateLayout(owner="drafter", fields=(), max_draft_tokens=DRAFTS),
    sources=[(name, "test") for name in ("default_draft_tokens", "max_draft_tokens", "speculative_token_capacity")],
)


@hookimpl
def declare_speculation():
    return [RECIPE]


@hookimpl
def load_drafter(recipe, checkpoint, target, capacities):
    raise RuntimeError(f"the drafter's own hook, {type(target).__name__}")
"""


def install(site: Any, *, target: str = "qwen3.8-flash", distribution: str = "specdec-qwen38", drafts: int = 3) -> None:
    text = PLUGIN.replace("TARGET", target).replace("DISTRIBUTION", distribution).replace("DRAFTS", str(drafts))
    site.module("copies_plugin", text)
    site.distribution("specdec-copies", plugins={"copies": "copies_plugin"})


def test_the_recipe_is_one_of_all(site: Any) -> None:
    install(site)
    plugins = {one["name"]: one for one in json.loads(site.specdec("plugins", "--json").stdout)}
    assert (plugins["copies"]["status"], plugins["copies"]["reason"]) == ("loaded", "")
    recipe = json.loads(site.specdec("recipes", "toy-copies", "--json").stdout)
    assert (recipe["max_draft_tokens"], recipe["checkpoint"]) == (3, "nvidia/Qwen3.8-Flash-Next-FP4-Local")
    assert recipe["target_recipe"] == "qwen3.8-flash"


def test_its_drafter_meets_the_target_of_the_other_plugin(site: Any, one_line: Callable[[Any], str]) -> None:
    install(site)
    result = site.specdec("run", "toy-copies", "--prompt", "x")
    assert result.code == 3
    line = one_line(result)
    assert "plugin copies (specdec-copies 1.0): load_drafter" in line and "the drafter's own hook, QwenTarget" in line


def test_memory_is_the_target_s_without_its_own_drafter(site: Any) -> None:
    install(site)
    plans = [json.loads(site.specdec("plan", name, "--json").stdout) for name in ("qwen3.8-flash", "toy-copies")]
    weights = [{item["name"]: item["bytes"] for item in plan["items"] if item["kind"] == "weights"} for plan in plans]
    assert set(weights[1]) < set(weights[0])
    assert not [name for name in weights[1] if "drafter" in name or "mtp" in name]


MISSING = [
    ({"target": "other-toy", "distribution": "specdec-other"}, {}, "; install specdec-other"),
    (
        {},
        {"SPECDEC_PLUGINS": "copies"},
        ": qwen38 (specdec-qwen38 0.1.0) is left out; add qwen38 to SPECDEC_PLUGINS",
    ),
    (
        {"target": "qwen3.8-flsh"},
        {},
        ": qwen38 (specdec-qwen38 0.1.0) has no such recipe with a target of its own; did you mean 'qwen3.8-flash'?",
    ),
    (
        {"target": "broken-toy", "distribution": "Specdec.Broken"},
        {},
        ": broken (specdec-broken 1.0) is not loaded: RuntimeError: no such library",
    ),
]


@pytest.mark.parametrize(("declared", "variables", "why"), MISSING)
def test_without_its_target_it_is_loaded_and_says_what_would_help(
    site: Any, one_line: Callable[[Any], str], declared: dict[str, str], variables: dict[str, str], why: str
) -> None:
    site.module("broken_plugin", "raise RuntimeError('no such library')\n")
    site.distribution("specdec-broken", plugins={"broken": "broken_plugin"})
    install(site, **declared)
    target = declared.get("target", "qwen3.8-flash")
    wanted = f"recipe 'toy-copies' drafts for recipe '{target}', which no loaded plugin brings{why}"
    listed = site.specdec("plugins", **variables)
    assert f"loaded toy-copies ({wanted}" in " ".join(listed.stdout.split())
    assert "toy-copies" not in site.specdec("recipes", "--json").stdout
    result = site.specdec("run", "toy-copies", "--prompt", "x")
    assert result.code == 3
    assert f"plugin copies (specdec-copies 1.0): {wanted}" in one_line(result)


def test_a_recipe_that_sets_its_target_by_hand_is_refused(site: Any) -> None:
    site.healthy("forged_plugin", "forged-toy")
    with (site.path / "forged_plugin.py").open("a") as file:
        file.write("\nfrom attrs import evolve\n\nRECIPE = evolve(RECIPE, target_recipe='forged-toy')\n")
    site.distribution("specdec-forged", plugins={"forged": "forged_plugin"})
    plugins = {one["name"]: one for one in json.loads(site.specdec("plugins", "--json").stdout)}
    assert plugins["forged"]["status"] == "failed"
    assert "sets target_recipe; declare a DrafterRecipe" in plugins["forged"]["reason"]
    assert plugins["qwen38"]["status"] == "loaded"


def test_a_checkpoint_is_the_target_s_own_recipe_s(site: Any) -> None:
    install(site)
    shown = site.specdec("inspect", str(TINY))
    assert (shown.code, "qwen3.8-flash" in shown.stdout) == (0, True), shown


def test_torch_at_discovery_is_noticed(site: Any) -> None:
    install(site)
    assert "imports torch" not in site.specdec("plugins").stderr
    with (site.path / "copies_plugin.py").open("a") as file:
        file.write("\nimport torch\n")
    assert "plugin 'copies' of specdec-copies imports torch when it is discovered" in site.specdec("plugins").stderr


def test_a_target_that_cannot_be_loaded_is_the_reason(site: Any, one_line: Callable[[Any], str]) -> None:
    site.healthy("one_plugin", "shared-toy")
    site.healthy("two_plugin", "shared-toy")
    for name in ("one", "two"):
        site.distribution(f"specdec-{name}", plugins={name: f"{name}_plugin"})
    install(site, target="shared-toy")
    assert "is declared by one (specdec-one 1.0) and two" in one_line(
        site.specdec("run", "toy-copies", "--prompt", "x")
    )


def test_a_target_that_remembers_too_little_refuses_the_plugin(site: Any) -> None:
    install(site, drafts=12)
    plugins = {one["name"]: one for one in json.loads(site.specdec("plugins", "--json").stdout)}
    assert plugins["copies"]["status"] == "failed"
    assert "keeps a horizon of 7 draft tokens, but the recipe drafts up to 12" in plugins["copies"]["reason"]
    assert plugins["qwen38"]["status"] == "loaded"
