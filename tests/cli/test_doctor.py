"""``specdec doctor``: what it finds, and that nothing broken ends it."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command import specdec
from packaging.requirements import Requirement

from specdec.cli import findings
from specdec.cli.main import main
from specdec.recipes import recipe_book

ROOT = Path(__file__).parents[2]
RECIPES = ["deepseek-v4.1-flash", "glm-5.3-flash", "qwen3.8-flash"]


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Callable[[], dict[str, Any]]:
    """Findings of a run in this process, with what it said and its exit code."""

    def run() -> dict[str, Any]:
        outcome = specdec(capsys, "doctor", "--json")
        found = json.loads(outcome.stdout)
        assert outcome.code == found["exit_code"], outcome
        assert outcome.stderr == "".join(f"specdec: {line}\n" for line in found["problems"]), outcome
        return found

    return run


def named(found: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (one,) = [one for one in found if one["name"] == name]
    return one


# --- what it finds ---------------------------------------------------------------------------------------------------


def test_a_whole_installation(doctor: Callable[[], dict[str, Any]]) -> None:
    found = doctor()
    assert (found["exit_code"], found["problems"]) == (0, [])
    assert found["torch"]["works"] and found["torch"]["version"].startswith(metadata.version("torch").split("+")[0])
    assert found["python"]["version"] == ".".join(map(str, sys.version_info[:3]))
    assert [one["name"] for one in found["recipes"]] == RECIPES
    assert named(found["plugins"], "qwen38")["status"] == "loaded"
    assert found["devices"][0]["name"] == "cpu" and found["devices"][0]["free_bytes"] > 1 << 20
    for extra in ("chat", "completion", "grammar", "metrics", "testing"):
        assert named(found["extras"], extra)["state"] == "works"


def test_extras_are_those_of_the_distribution() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for extra in findings.EXTRAS:
        for text in declared.pop(extra.name):
            requirement = Requirement(text)
            (package,) = [one for one in extra.packages if one.name == requirement.name]
            assert str(requirement.specifier) == f">={package.floor}"
    assert not declared


def test_floors_are_those_that_the_code_demands() -> None:
    from specdec.checkpoint.chat import JINJA_FLOOR
    from specdec.sampling.flashinfer import VERSION_FLOOR

    floors = {package.name: package.floor for extra in findings.EXTRAS for package in extra.packages}
    assert (floors["flashinfer-python"], floors["jinja2"]) == (VERSION_FLOOR, JINJA_FLOOR)


@pytest.mark.parametrize("recipe", RECIPES)
def test_memory_is_what_the_plan_says(
    doctor: Callable[[], dict[str, Any]], capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    one = named(doctor()["recipes"], recipe)
    own = json.loads(specdec(capsys, "plan", recipe, "--json").stdout)
    small = json.loads(specdec(capsys, "plan", recipe, "--embedded", "--device", "cpu", "--json").stdout)
    assert (one["own"]["bytes"], one["own"]["where"]) == (own["total_bytes"], recipe_book().recipe(recipe).checkpoint)
    assert (one["embedded"]["bytes"], one["embedded"]["where"]) == (small["total_bytes"], small["subject"])
    assert one["embedded"]["runs_on"] == ["cpu"] and one["embedded"]["reason"] == ""


def test_text_is_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = specdec(capsys, "doctor")
    assert (outcome.code, outcome.stderr) == (0, ""), outcome
    sections = [part.splitlines() for part in outcome.stdout.rstrip().split("\n\n")]
    assert [title for title, *_ in sections] == ["installed", "devices", "extras", "plugins", "recipes"]
    for _, *rows in sections:
        assert all(row.startswith("  ") for row in rows)
        # some column begins at the same place in every row
        starts = [{found.start() for found in re.finditer(r"(?<=\s\s)\S", row)} - {2} for row in rows]
        assert set.intersection(*starts), rows
    assert sum("runs on cpu" in row for row in sections[-1]) == 3


def test_a_device_that_has_room(doctor: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices of several sizes: the recipe runs on those that it fits."""
    devices = [
        {"name": f"cuda:{number}", "found": True, "kind": "GPU", "free_bytes": free, "reason": ""}
        for number, free in enumerate((1 << 30, 1 << 40, None))
    ]
    monkeypatch.setattr(findings, "_cuda_devices", lambda: devices)
    assert named(doctor()["recipes"], "qwen3.8-flash")["own"]["runs_on"] == ["cuda:1", "cuda:2"]
    monkeypatch.setattr(findings, "_cuda_devices", lambda: devices[:1])
    own = named(doctor()["recipes"], "qwen3.8-flash")["own"]
    assert (own["runs_on"], own["reason"]) == ([], "cuda:0 has 1.000 GiB free")
    monkeypatch.setattr(findings, "_free_host_bytes", lambda: 1 << 20)
    embedded = named(doctor()["recipes"], "qwen3.8-flash")["embedded"]
    assert (embedded["runs_on"], embedded["reason"]) == ([], "cpu has 1.000 MiB free")


# --- what is broken ----------------------------------------------------------------------------------------------------


def test_torch_that_cannot_be_imported(site: Any) -> None:
    site.module("torch", "raise OSError('libtorch.so: cannot open shared object file')\n")
    result = site.specdec("doctor", "--json")
    found = json.loads(result.stdout)
    assert result.code == found["exit_code"] == 6, result
    assert not found["torch"]["works"] and "libtorch.so" in found["torch"]["reason"]
    assert found["problems"] == [f"torch cannot be imported: {found['torch']['reason']}"]
    for recipe in found["recipes"]:
        assert recipe["embedded"]["runs_on"] == [] and recipe["embedded"]["reason"] == "torch does not work"
        assert recipe["own"]["bytes"] > 1 << 30
    text = site.specdec("doctor")
    assert text.code == 6 and "libtorch.so" in text.stdout and "Traceback" not in text.stderr


def test_broken_plugins_are_named_with_their_reason(site: Any) -> None:
    site.module("raises_plugin", "print('noise')\nraise RuntimeError('no such library')\n")
    site.distribution("specdec-raises", version="1.1", plugins={"raises": "raises_plugin"})
    site.module("exits_plugin", "import sys\nsys.exit(3)\n")
    site.distribution("specdec-exits", version="1.2", plugins={"exits": "exits_plugin"})
    result = site.specdec("doctor", "--json")
    found = json.loads(result.stdout)
    assert result.code == found["exit_code"] == 3, result
    assert named(found["plugins"], "raises")["status"] == "failed"
    assert len(found["problems"]) == 2
    assert any("raises (specdec-raises 1.1)" in line and "no such library" in line for line in found["problems"])
    assert [one["name"] for one in found["recipes"]] == RECIPES
    # a plugin that is left out is not asked for
    chosen = site.specdec("doctor", SPECDEC_PLUGINS="qwen38")
    assert (chosen.code, chosen.stderr) == (0, ""), chosen
    assert "skipped" in chosen.stdout


def test_a_selected_plugin_that_is_not_there(site: Any) -> None:
    result = site.specdec("doctor", SPECDEC_PLUGINS="elephant")
    assert result.code == 3 and "SPECDEC_PLUGINS names 'elephant', which is not installed" in result.stderr
    assert result.stdout.rstrip().endswith("none")


#: A recipe of which everything that can be asked for fails.
HOSTILE = """
import sys
from attrs import evolve
import healthy_plugin
from specdec import hookimpl

RECIPES = [
    evolve(healthy_plugin.RECIPE, name="no-memory", memory="hostile_plugin:no_such_function"),
    evolve(healthy_plugin.RECIPE, name="exits", memory="hostile_plugin:leave", embedded_checkpoint="hostile_plugin:x"),
    evolve(healthy_plugin.RECIPE, name="nowhere", embedded_checkpoint="no_such_package:x"),
    evolve(healthy_plugin.RECIPE, name="folder", embedded_checkpoint="specdec_qwen38:no_such_folder"),
    evolve(healthy_plugin.RECIPE, name="foreign", embedded_checkpoint="specdec_qwen38:tiny"),
]


def leave(*arguments):
    sys.exit("leaving")


@hookimpl
def declare_speculation():
    return RECIPES
"""


def test_recipes_that_fail_in_every_way(site: Any) -> None:
    site.healthy("healthy_plugin", "healthy-toy")
    site.module("hostile_plugin", HOSTILE)
    site.distribution("specdec-hostile", plugins={"hostile": "hostile_plugin"})
    result = site.specdec("doctor", "--json")
    found = json.loads(result.stdout)
    assert result.code == 0 and result.stderr == "", result
    reasons = {one["name"]: one["embedded"]["reason"] for one in found["recipes"]}
    assert reasons["no-memory"] == "the plugin ships none; name a folder with --checkpoint"
    assert "no_such_package" in reasons["nowhere"] and "no_such_folder" in reasons["folder"]
    assert "model_type is 'qwen4_exp'" in reasons["foreign"]
    assert all(one["own"]["bytes"] is None for one in found["recipes"] if one["name"] in ("no-memory", "exits"))
    own = {one["name"]: one["own"] for one in found["recipes"]}
    assert "memory hostile_plugin:no_such_function failed with AttributeError" in own["no-memory"]["reason"]
    assert own["no-memory"]["runs_on"] == []
    assert site.specdec("doctor").code == 0


def test_packages_that_are_broken_old_or_missing(
    doctor: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"jinja2": "3.1.5", "llguidance": None, "argcomplete": "4.0", "prometheus-client": "unreadable"}
    real = metadata.version

    def version(name: str) -> str:
        found = versions.get(name, real(name))
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    found = doctor()
    states = {name: named(found["extras"], name) for name in ("chat", "grammar", "completion", "metrics")}
    assert {name: one["state"] for name, one in states.items()} == {
        "chat": "too old",
        "grammar": "missing",
        "completion": "broken",
        "metrics": "too old",
    }
    assert states["chat"]["packages"][0]["reason"] == "needs 3.1.6 or later"
    assert states["chat"]["cure"] == "pip install 'specdec-core[chat]'"
    assert "argcomplete" in states["completion"]["packages"][0]["reason"]
    assert found["exit_code"] == 0


def test_every_probe_may_fail(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a library raises, panics of other languages included."""

    class Panic(BaseException):
        pass

    def failing(*arguments: Any, **options: Any) -> Any:
        raise Panic("no\nreason")

    for name in ("_discovery", "_free_host_bytes", "_cuda_devices"):
        monkeypatch.setattr(findings, name, failing)
    monkeypatch.setattr(findings, "import_module", failing)
    monkeypatch.setattr(findings, "metadata", SimpleNamespace(version=failing))
    outcome = specdec(capsys, "doctor", "--json")
    found = json.loads(outcome.stdout)
    assert outcome.code == 3, outcome
    assert found["problems"] == [
        "plugins cannot be looked for: Panic: no / reason",
        "torch cannot be imported: Panic: no / reason",
    ]
    assert found["devices"][1]["reason"] == "Panic: no / reason"
    assert specdec(capsys, "doctor").code == 3


def test_an_interrupt_is_the_users(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(findings, "_cuda_devices", interrupted)
    assert main(["doctor"]) == 130
