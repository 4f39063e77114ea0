"""``specdec run --metrics FILE``: the snapshot agrees with what was printed, and a file that cannot be written is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import Outcome, RunCommand
from small_checkpoint import write_small_checkpoint

from specdec.cli.output import OutputError, check_writable, write_file
from specdec.errors import UsageError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_checkpoint(tmp_path_factory.mktemp("run") / "checkpoint")


@pytest.fixture
def run(checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> RunCommand:
    monkeypatch.delenv("SPECDEC_TRACEBACK", raising=False)
    return RunCommand(capsys=capsys, checkpoint=checkpoint)


def both(run: RunCommand, file: Path, *options: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """What ``--json`` printed and what the file holds."""
    outcome: Outcome = run("--json", "--metrics", file, *options)
    assert (outcome.code, outcome.stderr) == (0, ""), outcome
    text = file.read_text(encoding="utf-8")
    assert text.endswith("}\n")
    return json.loads(outcome.stdout), json.loads(text)


#: A high temperature makes both laws flat, so that drafts are accepted.
FLAT = ("--temperature", 30, "--top-k", 0, "--top-p", 1, "--max-new-tokens", 60, "--mtp-draft-tokens", 4)


def test_the_file_agrees_with_the_output(run: RunCommand, tmp_path: Path) -> None:
    printed, metrics = both(run, tmp_path / "metrics.json", *FLAT)
    summary, output = printed["summary"], metrics["output"]
    assert output["tokens"] == len(printed["tokens"]) == sum(output["tokens_by_source"].values())
    assert output["tokens_by_source"]["first"] == 1
    assert output["lane_rounds"] == summary["rounds"]
    assert (output["offered"], output["accepted"]) == (summary["offered"], summary["accepted"])
    assert output["accepted"] > 10
    assert [row["judged"] for row in output["drafts"]] == summary["judged_by_depth"]
    assert sum(shape["tokens"] for shape in metrics["rounds"]) == len(printed["tokens"]) - 1
    assert sum(shape["seconds"] for shape in metrics["rounds"]) <= summary["seconds"]
    assert metrics["requests"]["finished"][summary["finish"]] == metrics["requests"]["submitted"] == 1
    (one,) = metrics["by_request"]
    assert one["output"] == output
    # the command's clock starts a little later and stops a little later than the engine's
    assert one["first_token_seconds"] == pytest.approx(summary["prompt_seconds"], abs=0.05)
    assert one["prompt_tokens"] == summary["prompt_tokens"]


def test_a_stop_string_ends_tokens_logprobs_text_and_counts_together(run: RunCommand, tmp_path: Path) -> None:
    text = both(run, tmp_path / "whole.json", "--greedy", "--logprobs", 0)[0]["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    printed, metrics = both(run, tmp_path / "cut.json", "--greedy", "--logprobs", 0, "--stop", stop)
    assert printed["text"] == text[: text.index(stop)]
    assert printed["summary"]["finish"] == "stop"
    assert metrics["output"]["tokens"] == len(printed["tokens"]) == len(printed["logprobs"])
    assert metrics["requests"]["finished"]["stop"] == 1


def test_text_and_summary_are_printed_as_without(run: RunCommand, tmp_path: Path) -> None:
    plain, written = run("--seed", 0), run("--seed", 0, "--metrics", tmp_path / "metrics.json")
    assert written.stdout == plain.stdout
    assert [line.split()[0] for line in written.stderr.splitlines()] == [
        line.split()[0] for line in plain.stderr.splitlines()
    ]
    assert json.loads((tmp_path / "metrics.json").read_text())["version"] == 1


def test_a_file_that_cannot_be_written_is_refused_before_the_checkpoint_is_read(
    run: RunCommand, tmp_path: Path
) -> None:
    for file, reason in ((tmp_path, "is a directory"), (tmp_path / "no" / "where", "does not exist"), ("", "is empty")):
        outcome = run("--metrics", file, folder=tmp_path / "no checkpoint")
        assert outcome.code == 2
        assert outcome.refusal.startswith(f"specdec: error: --metrics {str(file)!r}: ")
        assert reason in outcome.refusal


def test_a_full_device_is_one_line_after_the_output(run: RunCommand) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no device here that is always full")
    outcome = run("--json", "--metrics", "/dev/full")
    assert outcome.code == 1
    assert outcome.stderr == (
        "specdec: error: --metrics '/dev/full': No space left on device; make room or name another file\n"
    )
    assert json.loads(outcome.stdout)["tokens"]


def test_checking_a_file_leaves_it_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, new = tmp_path / "kept", tmp_path / "new"
    kept.write_text("as it was")
    check_writable("--metrics", str(kept))
    check_writable("--metrics", str(new))
    assert kept.read_text() == "as it was"
    assert not new.exists()
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(UsageError, match="permission denied"):
        check_writable("--metrics", str(kept))
    with pytest.raises(OutputError, match="--metrics"):
        write_file("--metrics", str(tmp_path), "")
