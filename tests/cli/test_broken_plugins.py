"""One bad plugin is one line of output: help, lists and other recipes work, and each is named with version and reason."""

import json
from collections.abc import Callable
from typing import Any

import pytest


def install_broken(site: Any) -> dict[str, str]:
    """Installs every way to be broken; returns, by distribution and version, words that the reason must contain."""
    site.healthy("healthy_plugin", "healthy-toy")
    site.distribution("specdec-healthy", plugins={"healthy": "healthy_plugin"})

    site.module("raises_plugin", "print('noise')\nraise RuntimeError('no such\\nlibrary')\n")
    site.distribution("specdec-raises", version="1.1", plugins={"raises": "raises_plugin"})

    site.module("exits_plugin", "import sys\nsys.exit('leaving')\n")
    site.distribution("specdec-exits", version="1.2", plugins={"exits": "exits_plugin"})

    site.healthy("typo_plugin", "typo-toy")
    with (site.path / "typo_plugin.py").open("a") as file:
        file.write("\n\n@hookimpl\ndef load_draftr(recipe):\n    return None\n")
    site.distribution("specdec-typo", version="1.3", plugins={"typo": "typo_plugin"})

    for number in ("one", "two"):
        site.healthy(f"same_name_{number}", f"same-name-{number}")
        site.distribution(f"specdec-name-{number}", version="1.4", plugins={"samename": f"same_name_{number}"})
        site.healthy(f"same_recipe_{number}", "same-recipe")
        site.distribution(
            f"specdec-recipe-{number}", version="1.5", plugins={f"recipe-{number}": f"same_recipe_{number}"}
        )

    site.module("future_plugin", "raise AssertionError('must not be imported')\n")
    site.distribution(
        "specdec-future",
        version="1.6",
        plugins={"future": "future_plugin"},
        requires=["specdec_core >=99,<100", "torch>=2"],
    )
    site.distribution("specdec-absent", version="1.7", plugins={"absent": "absent_plugin"})
    site.module(
        "declares_plugin", "from specdec import hookimpl\n\n\n@hookimpl\ndef declare_speculation():\n    return ['x']\n"
    )
    site.distribution("specdec-declares", version="1.8", plugins={"declares": "declares_plugin"})
    site.distribution(
        "specdec-metadata", version="1.9", plugins={"metadata": "healthy_plugin"}, requires=["specdec-core ~~ 3"]
    )
    return {
        "specdec-raises 1.1": "RuntimeError: no such / library",
        "specdec-exits 1.2": "called sys.exit('leaving')",
        "specdec-typo 1.3": "did you mean 'load_drafter'?",
        "specdec-name-one 1.4": "provided by specdec-name-one 1.4 and specdec-name-two 1.4",
        "specdec-name-two 1.4": "provided by specdec-name-one 1.4 and specdec-name-two 1.4",
        "specdec-recipe-one 1.5": "recipe-one (specdec-recipe-one 1.5) and recipe-two (specdec-recipe-two 1.5)",
        "specdec-recipe-two 1.5": "recipe-one (specdec-recipe-one 1.5) and recipe-two (specdec-recipe-two 1.5)",
        "specdec-future 1.6": "requires specdec-core<100,>=99, found 0.1",
        "specdec-absent 1.7": "No module named 'absent_plugin'",
        "specdec-declares 1.8": "must yield Recipe records, got str",
        "specdec-metadata 1.9": "specdec-core ~~ 3",
    }


@pytest.mark.parametrize("command", [("recipes", "--help"), ("recipes",), ("plugins",)])
def test_each_is_named_with_distribution_version_and_reason(site: Any, command: tuple[str, ...]) -> None:
    broken = install_broken(site)
    result = site.specdec(*command)
    assert result.code == 0, result
    # the list itself is data; what went wrong belongs to it only where a person asked for help or for plugins
    where = result.stderr if command == ("recipes",) else result.stdout
    for label, words in broken.items():
        lines = [line for line in where.splitlines() if label in line and words in line]
        assert lines, (label, words, result)
    assert "healthy-toy" in result.stdout, result
    assert "qwen3.8-flash" in result.stdout, result
    assert "same-recipe " not in result.stdout.split("not loaded")[0].split("plugin ")[0], result
    assert "noise" not in result.stdout, result
    assert "Traceback" not in result.stderr, result


def test_json_stays_json(site: Any) -> None:
    broken = install_broken(site)
    recipes = json.loads(site.specdec("recipes", "--json").stdout)
    assert {recipe["name"] for recipe in recipes} == {
        "deepseek-v4.1-flash",
        "glm-5.3-flash",
        "qwen3.8-flash",
        "healthy-toy",
    }
    plugins = json.loads(site.specdec("plugins", "--json").stdout)
    found = {f"{plugin['distribution']} {plugin['version']}": plugin for plugin in plugins}
    statuses = {label: found[label]["status"] for label in broken}
    assert statuses == {
        "specdec-raises 1.1": "failed",
        "specdec-exits 1.2": "failed",
        "specdec-typo 1.3": "failed",
        "specdec-name-one 1.4": "conflict",
        "specdec-name-two 1.4": "conflict",
        "specdec-recipe-one 1.5": "conflict",
        "specdec-recipe-two 1.5": "conflict",
        "specdec-future 1.6": "incompatible",
        "specdec-absent 1.7": "failed",
        "specdec-declares 1.8": "failed",
        "specdec-metadata 1.9": "failed",
    }
    for label, words in broken.items():
        assert words in found[label]["reason"], found[label]
    assert found["specdec-healthy 1.0"] == {
        "name": "healthy",
        "distribution": "specdec-healthy",
        "version": "1.0",
        "status": "loaded",
        "reason": "",
        "recipes": ["healthy-toy"],
    }


def test_the_reason_points_at_the_plugins_line(site: Any) -> None:
    install_broken(site)
    for plugin in json.loads(site.specdec("plugins", "--json").stdout):
        if plugin["name"] in ("raises", "exits"):
            assert plugin["reason"].endswith(f"{plugin['name']}_plugin.py:2)"), plugin


def test_a_refused_recipe_fails_with_the_recorded_reason(site: Any, one_line: Callable[[Any], str]) -> None:
    install_broken(site)
    result = site.specdec("recipes", "same-recipe")
    assert result.code == 3
    # what a plugin prints while it is imported goes to stderr
    result.stderr = result.stderr.removeprefix("noise\n")
    assert "recipe 'same-recipe' is declared by recipe-one (specdec-recipe-one 1.5) and recipe-two" in one_line(result)


def test_the_recipe_of_a_plugin_that_failed_early(site: Any, one_line: Callable[[Any], str]) -> None:
    site.module("raises_plugin", "raise RuntimeError('no such library')\n")
    site.distribution("specdec-raises", version="1.1", plugins={"raises": "raises_plugin"})
    result = site.specdec("recipes", "elephant")
    assert result.code == 3
    assert "raises (specdec-raises 1.1): RuntimeError: no such library" in one_line(result)


def test_traceback_on_request(site: Any) -> None:
    site.module("raises_plugin", "raise RuntimeError('no such library')\n")
    site.distribution("specdec-raises", version="1.1", plugins={"raises": "raises_plugin"})
    result = site.specdec("recipes", "elephant", SPECDEC_TRACEBACK="1")
    assert result.code == 3
    assert "Traceback" in result.stderr
    assert "raises_plugin.py" in result.stderr


@pytest.mark.parametrize(
    ("selection", "expected"),
    [("", {}), ("healthy", {"healthy"}), ("healthy,qwen38", {"healthy", "qwen38"}), (" healthy , ", {"healthy"})],
)
def test_selection(site: Any, selection: str, expected: set[str]) -> None:
    install_broken(site)
    result = site.specdec("plugins", "--json", SPECDEC_PLUGINS=selection)
    plugins = json.loads(result.stdout)
    assert {p["name"] for p in plugins if p["status"] == "loaded"} == set(expected)
    assert {p["status"] for p in plugins if p["name"] not in expected} == {"skipped"}
    assert result.stderr == "", result


def test_selection_resolves_a_clash(site: Any) -> None:
    install_broken(site)
    recipes = json.loads(site.specdec("recipes", "--json", SPECDEC_PLUGINS="recipe-one").stdout)
    assert [(recipe["name"], recipe["plugin"]["distribution"]) for recipe in recipes] == [
        ("same-recipe", "specdec-recipe-one")
    ]


def test_unknown_selection_offers_close_matches(site: Any) -> None:
    result = site.specdec("plugins", SPECDEC_PLUGINS="qwen83,elephant")
    assert result.code == 0
    assert "SPECDEC_PLUGINS names 'qwen83', which is not installed; did you mean qwen38?" in result.stderr
    assert "SPECDEC_PLUGINS names 'elephant', which is not installed; installed: " in result.stderr


def test_metadata_that_cannot_be_read_is_passed_over(site: Any) -> None:
    info = site.path / "specdec_broken-1.0.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text("[specdec]\nbroken = healthy_plugin\n")
    (site.path / "empty-1.0.dist-info").mkdir()
    result = site.specdec("recipes")
    assert result.code == 0, result
    assert "qwen3.8-flash" in result.stdout, result


def test_a_shadowed_distribution_is_not_a_rival(site: Any) -> None:
    other = site.path / "later"
    other.mkdir()
    site.healthy("healthy_plugin", "healthy-toy")
    site.distribution("specdec-healthy", plugins={"healthy": "healthy_plugin"})
    type(site)(path=other).distribution("Specdec_Healthy", version="0.9", plugins={"healthy": "healthy_plugin"})
    result = site.python(
        "-c",
        f"import sys; sys.path.append({str(other)!r})\n"
        "from specdec.plugins import discover\n"
        "print([(p.name, p.version, p.status) for p in discover().plugins if p.name == 'healthy'])",
    )
    assert result.stdout.strip() == "[('healthy', '1.0', 'loaded')]", result


def test_what_a_recipe_lacks_is_not_taken_for_an_option(site: Any, one_line: Callable[[Any], str]) -> None:
    site.healthy("unsourced_plugin", "unsourced-toy")
    text = (site.path / "unsourced_plugin.py").read_text()
    site.module("unsourced_plugin", text.replace(', "speculative_token_capacity")', ")"))
    site.distribution("specdec-unsourced", plugins={"unsourced": "unsourced_plugin"})
    line = one_line(site.specdec("run", "unsourced-toy", "--prompt", "x"))
    assert "no source given for speculative_token_capacity" in line and "--speculative" not in line
