"""Wheels of the core and of the plugin: what they hold, and that they work in an environment without anything else of ours."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "plugins" / "qwen38" / "specdec_qwen38"

#: Relative folders that a build needs; copied, so that building leaves nothing in the repository.
SOURCES = ["core", "plugins/qwen38"]


def run(*command: object, **options: object) -> str:
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("SPECDEC_", "PYTHON", "PIP_"))
    }
    done = subprocess.run(
        [str(part) for part in command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **options,
    )  # type: ignore[call-overload]
    assert done.returncode == 0, f"$ {' '.join(str(part) for part in command)}\n{done.stdout}\n{done.stderr}"
    return str(done.stdout)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Wheel files by distribution, built from a copy of the sources with the build backend of this environment."""
    pytest.importorskip("hatchling")
    source = tmp_path_factory.mktemp("source") / "specdec"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", ".venv")
    for folder in SOURCES:
        shutil.copytree(ROOT / folder, source / folder, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    output = tmp_path_factory.mktemp("wheels")
    for folder in (source, source / "plugins" / "qwen38"):
        run(
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
            "-w",
            output,
            folder,
        )
    return {path.name.split("-")[0].replace("_", "-"): path for path in output.glob("*.whl")}


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_both_are_built(wheels: dict[str, Path]) -> None:
    assert sorted(wheels) == ["specdec-core", "specdec-qwen38"]


def test_the_core_wheel_holds_the_package_and_nothing_else(wheels: dict[str, Path]) -> None:
    held = names(wheels["specdec-core"])
    expected = {str(path.relative_to(ROOT / "core")) for path in (ROOT / "core" / "specdec").rglob("*.py")}
    info = "specdec_core-0.1.0.dist-info"
    assert {name for name in held if name.endswith(".py")} == expected
    assert "specdec/py.typed" in held
    assert f"{info}/licenses/LICENSE" in held
    assert {name.split("/")[0] for name in held} == {"specdec", info}


def test_the_plugin_wheel_holds_the_small_checkpoint_and_no_training(wheels: dict[str, Path]) -> None:
    held = names(wheels["specdec-qwen38"])
    info = "specdec_qwen38-0.1.0.dist-info"
    assert {name.split("/")[0] for name in held} == {"specdec_qwen38", info}
    expected = {
        str(path.relative_to(PACKAGE.parent))
        for path in PACKAGE.rglob("*")
        if path.is_file() and (path.suffix == ".py" or "tiny" in path.parts)
    }
    assert {name for name in held if name.endswith(".py") or "/tiny/" in name} == expected
    assert not [name for name in held if "training" in name]
    with zipfile.ZipFile(wheels["specdec-qwen38"]) as archive:
        assert "[specdec]\nqwen38 = specdec_qwen38.plugin" in archive.read(f"{info}/entry_points.txt").decode()
        metadata = archive.read(f"{info}/METADATA").decode()
    assert "Requires-Dist: specdec-core<0.2,>=0.1" in metadata


@pytest.fixture(scope="module")
def installed(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with both wheels; third-party packages come from this environment through a path file."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip())
    pip = [sys.executable, "-m", "pip", "--python", python]
    run(*pip, "install", "--no-deps", "--no-index", wheels["specdec-core"], wheels["specdec-qwen38"])
    # Appended to the path after the new environment's own packages, so the wheels are what is imported.
    (site / "third_party.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder


def test_the_command_works_from_wheels(installed: Path, tmp_path: Path) -> None:
    specdec = installed / "bin" / "specdec"
    assert run(specdec, "--version", cwd=tmp_path) == "specdec 0.1.0\n"
    plugins = json.loads(run(specdec, "plugins", "--json", cwd=tmp_path))
    assert [(p["distribution"], p["status"]) for p in plugins if p["name"] == "qwen38"] == [
        ("specdec-qwen38", "loaded")
    ]
    assert "qwen3.8-flash" in run(specdec, "recipes", cwd=tmp_path)
    assert "qwen3.8-flash" in run(specdec, "recipes", "--help", cwd=tmp_path)
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
