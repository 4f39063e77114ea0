"""``specdec plan``: bytes for people and as data, budgets, checkpoints by sizes alone; refusals of one line; never torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import specdec

from specdec.checkpoint.accepted import embedded_checkpoint
from specdec.recipes import recipe_book
from specdec_deepseek_v41.geometry import REAL as DEEPSEEK
from specdec_glm53.geometry import REAL as GLM
from specdec_qwen38.geometry import REAL as QWEN

RECIPES = {"qwen3.8-flash": QWEN, "glm-5.3-flash": GLM, "deepseek-v4.1-flash": DEEPSEEK}


def data(capsys: pytest.CaptureFixture[str], *arguments: Any, code: int = 0) -> dict[str, Any]:
    found = specdec(capsys, "plan", *arguments, "--json")
    assert found.code == code, found
    return json.loads(found.stdout)


@pytest.mark.parametrize("name", RECIPES)
def test_text_and_data_say_the_same(capsys: pytest.CaptureFixture[str], name: str) -> None:
    made = data(capsys, name)
    assert (made["recipe"], made["device"], made["dtype"]) == (name, "cuda", "bfloat16")
    assert made["subject"] == recipe_book().recipe(name).checkpoint
    assert sum(made["totals"].values()) == sum(item["bytes"] for item in made["items"])
    assert made["total_bytes"] == sum(item["bytes"] for item in made["items"] if item["kind"] != "host")
    assert made["allocated_bytes"] + made["estimated_bytes"] == made["total_bytes"]
    assert made["budget_bytes"] is None and made["fits"] and made["shortage_bytes"] == 0

    text = specdec(capsys, "plan", name).stdout
    for item in made["items"]:
        assert f"{item['bytes']:,}  {item['name']}" in text
    for shape in made["shapes"]:
        assert " ".join(str(value) for value in shape.values()) in " ".join(text.split())
    assert text.splitlines()[-1].split()[:3] == ["in", "all", f"{made['total_bytes']:,}"]
    assert all(len(line) <= 200 for line in text.splitlines())


def test_eighteen_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    shapes = data(capsys, "qwen3.8-flash", "--concurrency", 4, "--mtp-draft-tokens", 5)["shapes"]
    assert len(shapes) == 18
    assert [shape["verify_width"] for shape in shapes] == [1, 2, 3, 4, 5, 6] * 3


@pytest.mark.parametrize("name", RECIPES)
def test_sizes_of_a_configuration_without_weights(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    """A folder that holds the published configuration alone has the plan of the recipe."""
    recipe = recipe_book().recipe(name)
    settings = {"model_type": recipe.model_types[0], "text_config": RECIPES[name].to_config()}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    own, sizes = data(capsys, name), data(capsys, name, "--checkpoint", tmp_path)
    assert sizes.pop("subject") == f"{tmp_path}, stored as {own.pop('subject')}"
    assert sizes == own


@pytest.mark.parametrize("name", RECIPES)
def test_the_embedded_checkpoint(capsys: pytest.CaptureFixture[str], name: str) -> None:
    folder = embedded_checkpoint(recipe_book().recipe(name))
    small = data(capsys, name, "--embedded", "--context", 256)
    assert small == data(capsys, name, "--checkpoint", folder, "--context", 256)
    assert small["totals"]["weights"] < 64 << 20 < data(capsys, name, "--context", 256)["totals"]["weights"]


def test_options_change_what_they_say(capsys: pytest.CaptureFixture[str]) -> None:
    def totals(*options: Any) -> dict[str, int]:
        return data(capsys, "qwen3.8-flash", "--embedded", "--context", 512, *options)["totals"]

    plain = totals()
    assert totals("--no-mtp")["weights"] < plain["weights"]
    assert totals("--concurrency", 8)["state"] > plain["state"]
    assert totals("--pages", 8)["pages"] < plain["pages"]
    assert totals("--mtp-draft-tokens", 2)["scratch"] < plain["scratch"]
    assert totals("--dtype", "float32")["weights"] > plain["weights"]
    assert totals("--grammar")["frames"] > plain["frames"]
    assert totals("--extended-sampling")["tables"] > plain["tables"]
    assert totals("--headroom-bytes", "1MiB")["headroom"] == 1 << 20
    assert "boundary" in totals("--snapshot-bytes", "64MiB") and "boundary" not in plain
    assert "graphs" in plain and "graphs" not in totals("--no-cuda-graphs")
    assert not {"graphs", "rounding", "work"} & totals("--device", "cpu").keys()


def test_a_budget_that_suffices(capsys: pytest.CaptureFixture[str]) -> None:
    made = data(capsys, "qwen3.8-flash", "--memory-bytes", "141GiB")
    assert made["budget_bytes"] == 141 << 30 and made["fits"]
    assert made["budget_bytes"] > made["total_bytes"]
    text = specdec(capsys, "plan", "qwen3.8-flash", "--memory-bytes", "141GiB").stdout
    assert "budget (memory_bytes)" in text and text.splitlines()[-1].startswith("left")


def test_a_plan_that_does_not_fit_is_printed_and_refused(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("qwen3.8-flash", "--context", 200_000, "--concurrency", 8, "--memory-bytes", "140GiB")
    made = data(capsys, *options, code=5)
    assert not made["fits"] and made["shortage_bytes"] == made["total_bytes"] - (140 << 30)
    assert set(made["remedies"]) == {"context", "concurrency", "pages"}
    found = specdec(capsys, "plan", *options)
    assert found.code == 5 and "short by" in found.stdout
    assert found.stderr.count("\n") == 1
    assert f"--memory-bytes is {140 << 30}" in found.stderr
    assert f"{made['shortage_bytes']} bytes short" in found.stderr
    assert f"context {made['remedies']['context']}" in found.stderr
    # what the message promises
    assert data(capsys, *options, "--context", made["remedies"]["context"])["fits"]
    assert data(capsys, *options, "--pages", made["remedies"]["pages"])["fits"]


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["qwen3.8-flsh"], 2, "did you mean"),
        (["qwen3.8-flash", "--contxt", "5"], 2, "did you mean --context?"),
        (["qwen3.8-flash", "--mtp-draft-tokens", "8"], 2, "--mtp-draft-tokens 8 must be between 0 and 7"),
        (["qwen3.8-flash", "--no-mtp", "--mtp-draft-tokens", "3"], 2, "contradicts --no-mtp"),
        (
            ["qwen3.8-flash", "--context", "300000"],
            2,
            "--context is 300000; the model's max_position_embeddings is 262144",
        ),
        (["qwen3.8-flash", "--dtype", "float16"], 2, "--dtype is 'float16'; allowed: float32, float64, bfloat16"),
        (["qwen3.8-flash", "--concurrency", "0"], 2, "--concurrency 0 must be at least 1"),
        (["qwen3.8-flash", "--pages", "0"], 2, "--pages 0 must be at least 1"),
        (
            ["qwen3.8-flash", "--memory-bytes", "12 parsecs"],
            2,
            "--memory-bytes is '12 parsecs'; give bytes, or a number with",
        ),
        (["qwen3.8-flash", "--memory-bytes", "1.5"], 2, "--memory-bytes is '1.5'"),
        (["qwen3.8-flash", "--snapshot-bytes", "5"], 5, "--snapshot-bytes is 5, but one prefix checkpoint takes"),
        (["qwen3.8-flash", "--embedded", "--checkpoint", "x"], 2, "--checkpoint and --embedded contradict each other"),
        (["qwen3.8-flash", "--checkpoint", "/nowhere"], 4, "/nowhere: no such checkpoint directory; name a folder"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], options: list[str], code: int, words: str) -> None:
    found = specdec(capsys, "plan", *options)
    assert found.code == code, found
    assert found.stdout == "" and found.stderr.count("\n") == 1
    assert words in found.stderr


def test_folders_that_are_no_checkpoint_of_the_recipe(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def refused(content: str | None) -> str:
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        found = specdec(capsys, "plan", "qwen3.8-flash", "--checkpoint", tmp_path)
        assert found.code == 4 and found.stderr.count("\n") == 1, found
        return found.stderr

    assert "config.json: No such file or directory; name a folder with a config.json" in refused(None)
    assert "not readable as JSON" in refused("{")
    assert "needs a JSON object" in refused("[]")
    assert "model_type is 'glm5_next', recipe 'qwen3.8-flash' accepts" in refused('{"model_type": "glm5_next"}')
    assert "config.json: missing hidden_size" in refused(
        '{"model_type": "qwen4_exp", "text_config": {"vocab_size": "many"}}'
    )


def test_bytes_may_have_a_unit(capsys: pytest.CaptureFixture[str]) -> None:
    for given, meant in (("1048576", 1 << 20), ("1MiB", 1 << 20), ("1.5 gib", 3 << 29), ("2b", 2)):
        assert data(capsys, "qwen3.8-flash", "--headroom-bytes", given)["totals"]["headroom"] == meant


def test_planning_never_loads_torch(site: Any) -> None:
    body = """
import sys
from specdec.cli.main import main
assert main(["plan", "qwen3.8-flash", "--memory-bytes", "100GiB"]) == 5
assert main(["plan", "qwen3.8-flash", "--embedded", "--json"]) == 0
assert not {"torch", "numpy", "safetensors", "tokenizers"} & set(sys.modules)
"""
    result = site.python("-c", body)
    assert result.code == 0, result
