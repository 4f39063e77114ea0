"""The DeepSeek plugin's wheel: what it holds, and that it works with the core alone, other plugins absent."""

import json
import zipfile
from pathlib import Path

import pytest
from wheels import build_wheels, install_wheels, names, run

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "plugins" / "deepseek_v41" / "specdec_deepseek_v41"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("hatchling")
    return build_wheels(tmp_path_factory.mktemp("built"), ["deepseek_v41"])


def test_the_wheel_holds_the_package_and_no_training(wheels: dict[str, Path]) -> None:
    assert sorted(wheels) == ["specdec-core", "specdec-deepseek-v41"]
    held = names(wheels["specdec-deepseek-v41"])
    info = "specdec_deepseek_v41-0.1.0.dist-info"
    assert {name.split("/")[0] for name in held} == {"specdec_deepseek_v41", info}
    expected = {
        str(path.relative_to(PACKAGE.parent))
        for path in PACKAGE.rglob("*")
        if path.is_file() and (path.suffix == ".py" or "tiny" in path.parts)
    }
    assert {name for name in held if name.endswith(".py") or "/tiny/" in name} == expected
    assert not [name for name in held if "training" in name]
    assert f"{info}/licenses/LICENSE" in held
    with zipfile.ZipFile(wheels["specdec-deepseek-v41"]) as archive:
        assert (
            "[specdec]\ndeepseek_v41 = specdec_deepseek_v41.plugin" in archive.read(f"{info}/entry_points.txt").decode()
        )
        assert "Requires-Dist: specdec-core<0.2,>=0.1" in archive.read(f"{info}/METADATA").decode()


@pytest.fixture(scope="module")
def installed(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_wheels(tmp_path_factory.mktemp("environment"), wheels.values())


def test_the_recipe_is_listed_and_no_other(installed: Path, tmp_path: Path) -> None:
    specdec = installed / "bin" / "specdec"
    recipes = json.loads(run(specdec, "recipes", "--json", cwd=tmp_path))
    assert [recipe["name"] for recipe in recipes] == ["deepseek-v4.1-flash"]
    plugins = json.loads(run(specdec, "plugins", "--json", cwd=tmp_path))
    assert [(plugin["distribution"], plugin["status"]) for plugin in plugins] == [("specdec-deepseek-v41", "loaded")]
    places = run(
        installed / "bin" / "python",
        "-c",
        "import importlib.util as u, specdec, specdec_deepseek_v41 as d; print(specdec.__file__, d.__file__)\n"
        "assert u.find_spec('specdec_glm53') is u.find_spec('specdec_qwen38') is None",
        cwd=tmp_path,
    )
    assert places.count(str(installed)) == 2, places


@pytest.mark.skipif(not (PACKAGE / "tiny" / "config.json").is_file(), reason="the small checkpoint is not there")
def test_it_generates_from_wheels(installed: Path, tmp_path: Path) -> None:
    command = ("run", "deepseek-v4.1-flash", "--prompt", "def f(", "--max-new-tokens", "4", "--json")
    generated = json.loads(run(installed / "bin" / "specdec", *command, cwd=tmp_path))
    assert generated["summary"]["tokens"] == 4
