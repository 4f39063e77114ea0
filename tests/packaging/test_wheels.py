"""Wheels of the core and of the plugin: what they hold, and that they work in an environment without anything else of ours."""

import json
import tomllib
import zipfile
from pathlib import Path

import pytest
from wheels import build_wheels, install_wheels, names, run

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "plugins" / "qwen38" / "specdec_qwen38"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("hatchling")
    return build_wheels(tmp_path_factory.mktemp("built"), ["qwen38"])


def test_both_are_built(wheels: dict[str, Path]) -> None:
    assert sorted(wheels) == ["specdec-core", "specdec-qwen38"]


def test_the_core_wheel_holds_the_package_and_nothing_else(wheels: dict[str, Path]) -> None:
    held = names(wheels["specdec-core"])
    expected = {
        str(path.relative_to(ROOT / "core"))
        for path in (ROOT / "core" / "specdec").rglob("*")
        if path.suffix in (".py", ".json")
    }
    info = "specdec_core-0.1.0.dist-info"
    assert {name for name in held if name.endswith((".py", ".json"))} == expected
    assert "specdec/py.typed" in held
    assert {name.split("/")[0] for name in held} == {"specdec", info}
    with zipfile.ZipFile(wheels["specdec-core"]) as archive:
        metadata = archive.read(f"{info}/METADATA").decode()
    # the conformance suite is in the wheel; what it needs is an extra
    assert "Requires-Dist: pytest>=8; extra == 'testing'" in metadata


def test_the_plugin_wheel_holds_the_small_checkpoint_and_no_training(wheels: dict[str, Path]) -> None:
    held = names(wheels["specdec-qwen38"])
    info = "specdec_qwen38-0.1.0.dist-info"
    assert {name.split("/")[0] for name in held} == {"specdec_qwen38", info}
    expected = {
        str(path.relative_to(PACKAGE.parent))
        for path in PACKAGE.rglob("*")
        if path.is_file() and (path.suffix in (".py", ".json") or "tiny" in path.parts)
    }
    assert {name for name in held if name.endswith((".py", ".json")) or "/tiny/" in name} == expected
    assert f"{PACKAGE.name}/profiles.json" in expected
    assert not [name for name in held if "training" in name]
    with zipfile.ZipFile(wheels["specdec-qwen38"]) as archive:
        assert "[specdec]\nqwen38 = specdec_qwen38.plugin" in archive.read(f"{info}/entry_points.txt").decode()
        metadata = archive.read(f"{info}/METADATA").decode()
    assert "Requires-Dist: specdec-core<0.2,>=0.1" in metadata


def test_every_wheel_has_its_licence(wheels: dict[str, Path]) -> None:
    for distribution, wheel in wheels.items():
        info = f"{distribution.replace('-', '_')}-0.1.0.dist-info"
        with zipfile.ZipFile(wheel) as archive:
            assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes(), distribution
            metadata = archive.read(f"{info}/METADATA").decode()
        assert "License-Expression: Apache-2.0\nLicense-File: LICENSE\n" in metadata, distribution


@pytest.mark.parametrize("project", sorted(ROOT.glob("plugins/*/pyproject.toml")), ids=lambda path: path.parent.name)
def test_every_plugin_ships_the_licence(project: Path) -> None:
    """Also those whose wheels are built elsewhere: a wheel has what its project lists, a source distribution what it includes."""
    data = tomllib.loads(project.read_text(encoding="utf-8"))
    assert data["project"]["license-files"] == ["LICENSE"]
    assert "/LICENSE" in data["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert project.with_name("LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.fixture(scope="module")
def installed(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_wheels(tmp_path_factory.mktemp("environment"), wheels.values())


def test_the_command_works_from_wheels(installed: Path, tmp_path: Path) -> None:
    specdec = installed / "bin" / "specdec"
    assert run(specdec, "--version", cwd=tmp_path) == "specdec 0.1.0\n"
    plugins = json.loads(run(specdec, "plugins", "--json", cwd=tmp_path))
    assert [(p["distribution"], p["status"]) for p in plugins if p["name"] == "qwen38"] == [
        ("specdec-qwen38", "loaded")
    ]
    assert "qwen3.8-flash" in run(specdec, "recipes", cwd=tmp_path)
    assert "qwen3.8-flash" in run(specdec, "recipes", "--help", cwd=tmp_path)
    # profiles of the wheels' own files, and that of the only recipe where none is named
    simulated = json.loads(run(specdec, "simulate", "--requests", "4", "--json", cwd=tmp_path))
    assert simulated["profile"] == "qwen3.8-flash"
    generated = json.loads(
        run(specdec, "run", "qwen3.8-flash", "--prompt", "def f(", "--max-new-tokens", "4", "--json", cwd=tmp_path)
    )
    assert generated["summary"]["tokens"] == 4
    places = run(
        installed / "bin" / "python",
        "-c",
        "import specdec, specdec_qwen38 as q; print(specdec.__file__, q.__file__)",
        cwd=tmp_path,
    )
    assert places.count(str(installed)) == 2, places
