"""The wheel of the n-gram example: beside the core alone, and beside the plugin whose target it drafts for."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from example_env import EXAMPLES, example_env, execute
from wheels import ROOT, names, run

pytest.importorskip("hatchling")
EXAMPLE = EXAMPLES / "specdec_ngram"
RECIPE, TARGET = "qwen3.8-ngram", "qwen3.8-flash"
#: Ends in the middle of what it has twice, so that there is something to look up.
PROMPT = "def total(values):\n    return sum(values)\n\n\ndef total(values):\n    ret"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return example_env(tmp_path_factory.mktemp("alone"), ["specdec_ngram"])


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return example_env(tmp_path_factory.mktemp("beside"), ["specdec_ngram"], ["qwen38"])


def generated(environment: Path, cwd: Path, *options: object) -> dict[str, object]:
    command = (environment / "bin" / "specdec", "run", RECIPE, "--prompt", PROMPT, "--max-new-tokens", 48, "--json")
    return json.loads(run(*command, "--greedy", "--dtype", "float64", *options, cwd=cwd))


def test_the_wheel_holds_the_package_alone(alone: Path) -> None:
    wheel = next((alone.parent / "examples").glob("specdec_ngram-*.whl"))
    info = "specdec_ngram-0.1.0.dist-info"
    assert {name for name in names(wheel) if name.endswith(".py")} == {
        f"specdec_ngram/{path.name}" for path in (EXAMPLE / "specdec_ngram").glob("*.py")
    }
    assert {name.split("/")[0] for name in names(wheel)} == {"specdec_ngram", info}
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        assert "[specdec]\nngram = specdec_ngram.plugin" in archive.read(f"{info}/entry_points.txt").decode()
        required = [line for line in archive.read(f"{info}/METADATA").decode().splitlines() if "Requires-Dist" in line]
    assert [line for line in required if "extra ==" not in line] == ["Requires-Dist: specdec-core<0.2,>=0.1"]


def test_beside_the_core_alone_it_says_what_is_missing(alone: Path, tmp_path: Path) -> None:
    specdec = alone / "bin" / "specdec"
    (plugin,) = json.loads(run(specdec, "plugins", "--json", cwd=tmp_path))
    assert (plugin["distribution"], plugin["status"], plugin["recipes"]) == ("specdec-ngram", "loaded", [RECIPE])
    assert TARGET in plugin["reason"] and "specdec-qwen38" in plugin["reason"]
    assert run(specdec, "recipes", "--json", cwd=tmp_path).strip() == "[]"
    asked = execute((specdec, "run", RECIPE, "--prompt", "x"), cwd=tmp_path)
    assert asked.returncode == 3 and not asked.stdout, asked
    assert asked.stderr.startswith("specdec: error: ") and asked.stderr.count("\n") == 1
    for named in (RECIPE, TARGET, "specdec-ngram", "install specdec-qwen38"):
        assert named in asked.stderr, asked.stderr


def test_beside_its_target_it_drafts_and_changes_no_text(beside: Path, tmp_path: Path) -> None:
    plugins = json.loads(run(beside / "bin" / "specdec", "plugins", "--json", cwd=tmp_path))
    assert [(one["distribution"], one["status"], one["reason"]) for one in plugins] == [
        ("specdec-ngram", "loaded", ""),
        ("specdec-qwen38", "loaded", ""),
    ]
    drafts, plain = (
        generated(beside, tmp_path, "--mtp-draft-tokens", 5, "--seed", 1),
        generated(beside, tmp_path, "--no-mtp"),
    )
    assert drafts["text"] == plain["text"]
    assert drafts["summary"]["tokens"] == plain["summary"]["tokens"] == 48
    assert drafts["summary"]["rounds"] < plain["summary"]["rounds"]


def test_history_drafts_are_copied_in_front_of_its_own(beside: Path, tmp_path: Path) -> None:
    plain = generated(beside, tmp_path, "--no-mtp")
    assert generated(beside, tmp_path, "--history-drafts")["text"] == plain["text"]


def test_its_memory_is_planned(beside: Path, tmp_path: Path) -> None:
    """Nothing is held beside the declared state: preparation compares its plan with what is there."""
    plan = json.loads(run(beside / "bin" / "specdec", "plan", RECIPE, "--json", cwd=tmp_path))
    assert plan["recipe"] == RECIPE


def test_listing_it_loads_no_torch(beside: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from specdec.recipes import recipe_book\n"
        f"recipe_book().recipe({RECIPE!r}); print('torch' in sys.modules)"
    )
    assert run(beside / "bin" / "python", "-c", code, cwd=tmp_path) == "False\n"
