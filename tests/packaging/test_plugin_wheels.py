"""The wheel of a plugin: what it holds, and that it works with the core alone, other plugins absent."""

import json
import zipfile
from pathlib import Path

import pytest
from wheels import build_wheels, install_wheels, names, run

ROOT = Path(__file__).parents[2]
#: Recipe by folder of the plugin. The first plugin's wheel is tested beside the core's.
RECIPES = {"glm53": "glm-5.3-flash", "deepseek_v41": "deepseek-v4.1-flash"}


@pytest.fixture(scope="module", params=RECIPES)
def plugin(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def wheels(plugin: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("hatchling")
    return build_wheels(tmp_path_factory.mktemp("built"), [plugin])


def distribution(plugin: str) -> str:
    return f"specdec-{plugin.replace('_', '-')}"


def package(plugin: str) -> Path:
    return ROOT / "plugins" / plugin / f"specdec_{plugin}"


def test_the_wheel_holds_the_package_and_no_training(plugin: str, wheels: dict[str, Path]) -> None:
    own = distribution(plugin)
    assert sorted(wheels) == sorted(["specdec-core", own])
    held, info = names(wheels[own]), f"specdec_{plugin}-0.1.0.dist-info"
    assert {name.split("/")[0] for name in held} == {package(plugin).name, info}
    expected = {
        str(path.relative_to(package(plugin).parent))
        for path in package(plugin).rglob("*")
        if path.is_file() and (path.suffix in (".py", ".json") or "tiny" in path.parts)
    }
    assert {name for name in held if name.endswith((".py", ".json")) or "/tiny/" in name} == expected
    assert f"{package(plugin).name}/profiles.json" in expected
    assert not [name for name in held if "training" in name]
    assert f"{info}/licenses/LICENSE" in held
    with zipfile.ZipFile(wheels[own]) as archive:
        entry = f"[specdec]\n{plugin} = specdec_{plugin}.plugin"
        assert entry in archive.read(f"{info}/entry_points.txt").decode()
        assert "Requires-Dist: specdec-core<0.2,>=0.1" in archive.read(f"{info}/METADATA").decode()


@pytest.fixture(scope="module")
def installed(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_wheels(tmp_path_factory.mktemp("environment"), wheels.values())


def test_the_recipe_is_listed_and_no_other(plugin: str, installed: Path, tmp_path: Path) -> None:
    specdec = installed / "bin" / "specdec"
    recipes = json.loads(run(specdec, "recipes", "--json", cwd=tmp_path))
    assert [recipe["name"] for recipe in recipes] == [RECIPES[plugin]]
    plugins = json.loads(run(specdec, "plugins", "--json", cwd=tmp_path))
    assert [(one["distribution"], one["status"]) for one in plugins] == [(distribution(plugin), "loaded")]
    profiles = json.loads(run(specdec, "simulate", "--list", "--json", cwd=tmp_path))
    assert {one["recipe"] for one in profiles} == {RECIPES[plugin], None}
    others = sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml") if path.parent.name != plugin)
    assert "qwen38" in others
    places = run(
        installed / "bin" / "python",
        "-c",
        f"import importlib.util as u, specdec, specdec_{plugin} as p; print(specdec.__file__, p.__file__)\n"
        f"assert not [name for name in {others} if u.find_spec('specdec_' + name)]",
        cwd=tmp_path,
    )
    assert places.count(str(installed)) == 2, places


def test_it_generates_from_wheels(plugin: str, installed: Path, tmp_path: Path) -> None:
    if not (package(plugin) / "tiny" / "config.json").is_file():
        pytest.skip("the plugin ships no small checkpoint yet")
    command = ("run", RECIPES[plugin], "--prompt", "def f(", "--max-new-tokens", "4", "--json")
    generated = json.loads(run(installed / "bin" / "specdec", *command, cwd=tmp_path))
    assert generated["summary"]["tokens"] == 4
