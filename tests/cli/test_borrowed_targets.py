"""A plugin that drafts for another plugin's target, with and without that plugin, as commands show it."""

import json
from collections.abc import Callable
from typing import Any

PLUGIN = """
from specdec import hookimpl
from specdec.declaration import DrafterRecipe, StateLayout, WidthCatalog

RECIPE = DrafterRecipe(
    name="toy-copies", summary="copies", target="TARGET", target_distribution="specdec-qwen38", drafter_method="copies",
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


def install(site: Any, *, target: str = "qwen3.8-flash", drafts: int = 3) -> None:
    site.module("copies_plugin", PLUGIN.replace("TARGET", target).replace("DRAFTS", str(drafts)))
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


def test_without_the_other_plugin_it_is_loaded_and_says_what_is_missing(
    site: Any, one_line: Callable[[Any], str]
) -> None:
    install(site)
    wanted = (
        "recipe 'toy-copies' drafts for recipe 'qwen3.8-flash', which no loaded plugin brings; install specdec-qwen38"
    )
    listed = site.specdec("plugins", SPECDEC_PLUGINS="copies")
    assert wanted in listed.stdout and "loaded" in listed.stdout
    assert "toy-copies" not in site.specdec("recipes", "--json").stdout
    result = site.specdec("run", "toy-copies", "--prompt", "x")
    assert result.code == 3
    assert one_line(result).endswith(f"plugin copies (specdec-copies 1.0): {wanted}")


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
