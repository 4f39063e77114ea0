"""``specdec calibrate``: refusals of one line, and a file that the next preparation uses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import specdec
from deepseek_conformance import write_serving_checkpoint
from safetensors.torch import load_file, save_file

from specdec.cli.calibrate import PROMPT_TOKENS
from specdec.control.calibration import GRID, calibration_file, read_temperatures

RECIPE = "deepseek-v4.1-flash"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_serving_checkpoint(tmp_path_factory.mktemp("calibrate"))


def test_a_recipe_without_forecasts_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    found = specdec(capsys, "calibrate", "qwen3.8-flash", "--out", out)
    assert found.code == 2
    assert "recipe 'qwen3.8-flash' forecasts no acceptance" in found.refusal and RECIPE in found.refusal
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ([], ["--out"]),
        (["--out", "nowhere/out.json"], ["--out 'nowhere/out.json'", "a folder that exists"]),
        (["--out", "."], ["--out '.'"]),
        (["--out", "x.json", "--rounds", "29"], ["--rounds is 29", "30 or more"]),
        (["--out", "x.json", "--mtp-draft-tokens", "0"], ["--mtp-draft-tokens 0"]),
        (["--out", "x.json", "--mtp-draft-tokens", "8"], ["--mtp-draft-tokens 8", "between 0 and 7"]),
        (["--out", "x.json", "--text", "nowhere.txt"], ["--text: nowhere.txt: No such file"]),
        (["--out", "x.json", "--max-new-tokens", "0"], ["--max-new-tokens is 0"]),
    ],
)
def test_wrong_options_are_refused(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    parts: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    found = specdec(capsys, "calibrate", RECIPE, *options)
    assert found.code == 2
    assert all(part in found.refusal for part in parts), found
    assert not list(tmp_path.iterdir())


def test_texts_without_a_prompt_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, checkpoint: Path
) -> None:
    text = tmp_path / "short.txt"
    text.write_text("a few words")
    found = specdec(
        capsys, "calibrate", RECIPE, "--checkpoint", checkpoint, "--out", tmp_path / "x.json", "--text", text
    )
    assert f"no prompt of {PROMPT_TOKENS} tokens" in found.refusal


@pytest.mark.parametrize(
    ("options", "room"), [(["--max-new-tokens", "4"], 4), (["--max-new-tokens", "40", "--context", "68"], 4)]
)
def test_continuations_too_short_for_a_whole_block_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, checkpoint: Path, options: list[str], room: int
) -> None:
    """They would be generated for ever: no round could verify three drafts. One token more is enough."""
    common = ["calibrate", RECIPE, "--checkpoint", checkpoint, "--out", tmp_path / "x.json", "--mtp-draft-tokens", 3]
    found = specdec(capsys, *common, *options)
    assert found.code == 2
    assert f"a continuation has {room} tokens" in found.refusal and "all 3 drafts needs 5" in found.refusal
    assert specdec(capsys, *common, "--max-new-tokens", 5, "--rounds", 30).code == 0


def test_forecasts_too_low_for_a_whole_block_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, checkpoint: Path
) -> None:
    """A drafter that expects nothing of its drafts never has all of them verified."""
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = load_file(checkpoint / "model.safetensors")
    name = next(name for name in tensors if name.endswith("confidence_head.proj.weight"))
    tensors[name] *= 1000
    save_file(tensors, folder / "model.safetensors")
    for file in ("config.json", "tokenizer.json"):
        (folder / file).write_bytes((checkpoint / file).read_bytes())
    text = tmp_path / "text.txt"
    text.write_text("def main(arguments):\n    return arguments\n" * 40)
    found = specdec(
        capsys,
        "calibrate",
        RECIPE,
        "--checkpoint",
        folder,
        "--text",
        text,
        "--out",
        tmp_path / "x.json",
        "--max-new-tokens",
        9,
    )
    assert found.code == 2
    assert "64 continuations without a round that verified all 7 drafts" in found.refusal
    assert not (tmp_path / "x.json").exists()


def test_the_file_holds_a_temperature_for_every_depth(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, checkpoint: Path
) -> None:
    """A short block of three. The file is the one that preparation reads; another run fits raw forecasts and does not see it."""
    text = tmp_path / "text.txt"
    text.write_text("def main(arguments):\n    return arguments\n" * 40)
    options = ["--checkpoint", checkpoint, "--text", text, "--rounds", "40", "--mtp-draft-tokens", "3"]
    folder = tmp_path / "model"
    folder.mkdir()
    out = folder / calibration_file(3)
    found = specdec(capsys, "calibrate", RECIPE, *options, "--out", out, "--json")
    assert found.code == 0, found
    data = json.loads(found.stdout)
    assert (data["recipe"], data["rounds"], data["file"]) == (RECIPE, 40, str(out))
    assert len(data["temperatures"]) == len(data["error_before"]) == len(data["error_after"]) == 3
    assert all(any(abs(t - step) < 1e-9 for step in GRID) for t in data["temperatures"])
    assert read_temperatures(folder, 3) == pytest.approx(data["temperatures"], abs=1e-6)

    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_bytes((checkpoint / name).read_bytes())
    out.write_text("[10.0, 0.1, 10.0]")
    again = specdec(
        capsys, "calibrate", RECIPE, *options, "--checkpoint", folder, "--out", tmp_path / "again.json", "--json"
    )
    assert json.loads(again.stdout)["temperatures"] == data["temperatures"]


def test_the_table_is_for_people(capsys: pytest.CaptureFixture[str], tmp_path: Path, checkpoint: Path) -> None:
    out = tmp_path / "x.json"
    found = specdec(
        capsys, "calibrate", RECIPE, "--checkpoint", checkpoint, "--rounds", 30, "--mtp-draft-tokens", 2, "--out", out
    )
    assert found.code == 0, found
    lines = found.stdout.splitlines()
    assert lines[0].split() == ["depth", "temperature", "error", "before", "error", "after"]
    assert len(lines) == 3 and f"written to {out}" in found.stderr
    assert len(json.loads(out.read_text())) == 2


def test_a_spoilt_calibration_stops_preparation(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, checkpoint: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_bytes((checkpoint / name).read_bytes())
    (folder / calibration_file(7)).write_text("[1.0]")
    found = specdec(capsys, "run", RECIPE, "--checkpoint", folder, "--prompt", "a", "--max-new-tokens", 2)
    assert "draft_calibration_7.json" in found.refusal and "7 temperatures" in found.refusal
