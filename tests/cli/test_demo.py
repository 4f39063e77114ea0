"""``specdec demo`` on a small random checkpoint: the table, the data behind it, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command import Outcome, specdec
from small_checkpoint import altered_checkpoint, write_small_checkpoint

from specdec.cli.demo import SOURCES

Demo = Callable[..., Outcome]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_checkpoint(tmp_path_factory.mktemp("demo") / "checkpoint")


@pytest.fixture
def demo(checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Demo:
    monkeypatch.delenv("SPECDEC_TRACEBACK", raising=False)

    def call(*options: object, folder: Path = checkpoint) -> Outcome:
        budget = [] if "--max-new-tokens" in options else ["--max-new-tokens", 10]
        return specdec(capsys, "demo", "--checkpoint", folder, *budget, *options)

    return call


def test_table_lists_plain_and_every_draft_count(demo: Demo) -> None:
    outcome = demo("--draft-counts", "3,1,0,1")
    assert outcome.code == 0, outcome
    *_, head, plain, zero, one, three = outcome.stdout.splitlines()
    assert head.split("  ")[-1].strip() == "speed"
    assert [line.split("  ")[0] for line in (plain, zero, one, three)] == ["plain", "0 drafts", "1 draft", "3 drafts"]
    assert plain.rstrip().endswith("1.00x")
    title = outcome.stdout.splitlines()[0]
    assert title == f"--- {SOURCES[0]}, continued by qwen3.8-flash with 3 drafts after its first 160 tokens"
    assert "Page pool" in outcome.stdout and "⏵" in outcome.stdout
    assert outcome.stderr == "specdec: 4 requests, 10 new tokens each, 4 ways\n"


def test_data(demo: Demo) -> None:
    outcome = demo("--json", "--draft-counts", "2,4", "--greedy", "--dtype", "float64")
    assert outcome.code == 0, outcome
    data = json.loads(outcome.stdout)
    assert (data["recipe"], data["requests"]) == ("qwen3.8-flash", len(SOURCES))
    assert data["prompt"].startswith('"""Page pool')
    plain, *drafting = data["arms"]
    assert (plain["name"], plain["draft_tokens"], plain["speed_ratio"]) == ("plain", None, 1.0)
    assert [(arm["name"], arm["draft_tokens"]) for arm in drafting] == [("2 drafts", 2), ("4 drafts", 4)]
    for arm in data["arms"]:
        in_rounds = arm["tokens"] - len(SOURCES)
        # greedy: the same requests give the same number of tokens however they are decoded
        assert arm["tokens"] == plain["tokens"]
        assert arm["tokens_per_round"] == in_rounds / arm["rounds"]
        assert arm["tokens_per_second"] == pytest.approx(in_rounds / arm["seconds"])
        assert arm["speed_ratio"] == pytest.approx(arm["tokens_per_second"] / plain["tokens_per_second"])
        assert arm["tokens_per_second_by_pass"] == [pytest.approx(arm["tokens_per_second"])]
        assert len(arm["acceptance_by_depth"]) == len(arm["survival_by_depth"]) == (arm["draft_tokens"] or 0)
        assert all(0 <= rate <= 1 for rate in arm["acceptance_by_depth"])
    assert plain["rounds"] == plain["tokens"] - len(SOURCES)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--draft-counts", "1,x"], "--draft-counts is '1,x'; give whole numbers"),
        (["--draft-counts", ""], "--draft-counts is ''; give whole numbers"),
        (["--draft-counts", "1,,2"], "give whole numbers"),
        (
            ["--draft-counts", "-1,2"],
            "--draft-counts has no value; give one, as --draft-counts=VALUE",
        ),  # to the parser this is an option
        (["--draft-counts=-1,2"], "--draft-counts is '-1,2'; allowed: numbers from 0 to 7"),
        (["--draft-counts", "1,8"], "the most that recipe 'qwen3.8-flash' drafts (source: gated delta net"),
        (["--max-new-tokens", "0"], "--max-new-tokens is 0"),
        (["--temperature", "0"], "--greedy"),
        (["--context", "100"], "the prompt has 160 tokens; --context 100 leaves room for at most 99"),
        (["--no-mtp"], "unknown argument '--no-mtp'"),
        (["qwen3.8-flush"], "did you mean qwen3.8-flash?"),
    ],
)
def test_refused(demo: Demo, options: list[str], words: str) -> None:
    outcome = demo(*options)
    assert outcome.code == 2 and words in outcome.refusal, outcome


def test_missing_checkpoint(demo: Demo, tmp_path: Path) -> None:
    outcome = demo(folder=tmp_path / "nowhere")
    assert outcome.code == 4 and "no such checkpoint directory" in outcome.refusal


def test_output_budget_beyond_the_context_is_cut(demo: Demo, checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())["text_config"]
    folder = altered_checkpoint(
        checkpoint, tmp_path / "short", config={"text_config": {**config, "max_position_embeddings": 164}}
    )
    outcome = demo("--json", "--draft-counts", "2", folder=folder)
    assert outcome.code == 0, outcome
    assert [arm["tokens"] for arm in json.loads(outcome.stdout)["arms"]] == [4 * len(SOURCES)] * 2


def test_seed_at_the_end_of_its_range(demo: Demo) -> None:
    assert demo("--draft-counts", "1", "--max-new-tokens", 2, "--seed", 2**63 - 1).code == 0


def test_logits_that_are_no_distribution(demo: Demo, checkpoint: Path, tmp_path: Path) -> None:
    def broken(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = torch.full_like(tensors["lm_head.weight"], torch.nan)

    outcome = demo("--draft-counts", "1", folder=altered_checkpoint(checkpoint, tmp_path / "nan", tensors=broken))
    assert outcome.code == 1, outcome
    assert outcome.stderr.splitlines()[-1].startswith(
        "specdec: error: plain: the model's logits were not a distribution"
    )
