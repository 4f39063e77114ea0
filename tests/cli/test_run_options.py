"""Penalties, biases, ends and log-probabilities from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from command import RECIPE, Outcome, RunCommand, specdec
from small_checkpoint import write_small_checkpoint

from specdec.checkpoint.tokenizer import Tokenizer
from specdec.recipes import RecipeBook
from specdec.serving.model import LoadedModel


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_checkpoint(tmp_path_factory.mktemp("options") / "checkpoint")


@pytest.fixture
def run(checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> RunCommand:
    monkeypatch.delenv("SPECDEC_TRACEBACK", raising=False)
    return RunCommand(capsys=capsys, checkpoint=checkpoint)


def data_of(outcome: Outcome) -> dict[str, Any]:
    assert (outcome.code, outcome.stderr) == (0, ""), outcome
    return json.loads(outcome.stdout)


def test_logprobs_in_json_are_those_of_the_tokens(run: RunCommand) -> None:
    """Equal with and without drafts, one for each token, the most probable first."""
    options = ("--json", "--greedy", "--dtype", "float64", "--ignore-eos")
    drafted = data_of(run(*options, "--logprobs", 4, "--mtp-draft-tokens", 3))
    plain = data_of(run(*options, "--logprobs", 4, "--no-mtp"))
    assert "logprobs" not in data_of(run(*options))
    assert drafted["tokens"] == plain["tokens"] == [one["token"] for one in drafted["logprobs"]]
    for one, other in zip(drafted["logprobs"], plain["logprobs"], strict=True):
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-5)
        assert [entry["token"] for entry in one["top"]] == [entry["token"] for entry in other["top"]]
        values = [entry["logprob"] for entry in one["top"]]
        assert len(values) == 4 and values == sorted(values, reverse=True)
        # greedy: the token is the first of its row
        assert one["top"][0] == {"token": one["token"], "logprob": one["logprob"]}
    assert [one["top"] for one in data_of(run(*options, "--logprobs", 0))["logprobs"]] == [[]] * 24


def test_biases_and_minimum_decide_the_output(run: RunCommand, checkpoint: Path) -> None:
    stop = json.loads((checkpoint / "config.json").read_text())["text_config"]["eos_token_id"]
    favoured = ("--json", "--greedy", "--logit-bias", f"{stop}:100")
    assert data_of(run(*favoured))["tokens"] == [stop]
    held = data_of(run(*favoured, "--min-new-tokens", 7))
    assert len(held["tokens"]) == 8 and held["tokens"].count(stop) == 1 and held["summary"]["finish"] == "stop"
    ignored = data_of(run(*favoured, "--ignore-eos", "--max-new-tokens", 5))
    assert (ignored["tokens"], ignored["summary"]["finish"]) == ([stop] * 5, "length")
    two = data_of(run("--json", "--greedy", "--logit-bias", "65:100", "--logit-bias", "66:-100", "--logit-bias=67:80"))
    assert two["tokens"] == [65] * 24


def test_penalties_change_the_text(run: RunCommand) -> None:
    bias = ("--json", "--greedy", "--logit-bias", "65:100", "--logit-bias", "67:98")
    counted = data_of(run(*bias, "--frequency-penalty", "-2"))["tokens"]
    assert counted == [65] * 24
    alternating = data_of(run(*bias, "--frequency-penalty", 2))["tokens"]
    assert set(alternating) == {65, 67} and abs(alternating.count(65) - alternating.count(67)) <= 8
    long = ("--json", "--greedy", "--ignore-eos", "--max-new-tokens", 60)
    plain, penalised = (data_of(run(*long, *extra)) for extra in ((), ("--repetition-penalty", 3)))
    assert len(set(penalised["tokens"])) > len(set(plain["tokens"]))


def test_tables_are_prepared_only_for_those_who_use_them(run: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[bool] = []
    prepare = LoadedModel.prepare.__func__  # type: ignore[attr-defined]

    def watching(cls: type[LoadedModel], recipe: Any, config: Any, **rest: Any) -> LoadedModel:
        prepared.append(config.extended_sampling)
        return prepare(cls, recipe, config, **rest)

    monkeypatch.setattr(LoadedModel, "prepare", classmethod(watching))
    for options in (
        (),
        ("--ignore-eos", "--top-k", 3),
        ("--presence-penalty", 0, "--min-new-tokens", 0),
        ("--min-new-tokens", 1),
        ("--logprobs", 0, "--json"),
        ("--logit-bias", "3:0.5"),
        ("--repetition-penalty", 1.1),
    ):
        assert run(*options).code == 0
    assert prepared == [False] * 3 + [True] * 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--presence-penalty", "2.5"], ["--presence-penalty", "2.5", "from -2 to 2"]),
        (["--frequency-penalty", "nan"], ["--frequency-penalty", "nan"]),
        (["--frequency-penalty", "much"], ["--frequency-penalty", "invalid float value: 'much'"]),
        (["--repetition-penalty", "0"], ["--repetition-penalty", "0.0", "from 0.01 to 100"]),
        (["--logit-bias", "5"], ["--logit-bias is '5'", "like 17:-2.5"]),
        (["--logit-bias", "5:x"], ["--logit-bias is '5:x'"]),
        (["--logit-bias", "x:5"], ["--logit-bias is 'x:5'"]),
        (["--logit-bias", "5:200"], ["--logit-bias", "200", "from -100 to 100"]),
        (["--logit-bias", "5:1", "--logit-bias", "5:2"], ["--logit-bias", "token 5 twice"]),
        (["--logit-bias", "512:1"], ["logit_bias token 512", "vocabulary of 512"]),
        (["--min-new-tokens", "-1"], ["--min-new-tokens", "-1", "between 0 and 24"]),
        (["--min-new-tokens", "25"], ["--min-new-tokens", "25", "max_new_tokens 24"]),
        (["--logprobs", "21", "--json"], ["--logprobs", "21", "between 0 and 20"]),
        (["--logprobs", "3"], ["--logprobs 3", "add --json"]),
    ],
    ids=str,
)
def test_refused_options(run: RunCommand, options: list[str], words: list[str]) -> None:
    outcome = run(*options)
    assert outcome.code == 2, outcome
    for word in words:
        assert word in outcome.refusal


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("logprobs", ["--logprobs", "1", "--json"]),
        ("min_p", ["--min-p", "0.1"]),
        ("ignore_eos", ["--ignore-eos"]),
        ("frequency_penalty", ["--frequency-penalty", "1"]),
    ],
)
def test_what_a_recipe_cannot_honour_is_refused_before_anything_is_loaded(
    run: RunCommand, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, options: list[str]
) -> None:
    find = RecipeBook.recipe
    monkeypatch.setattr(
        RecipeBook, "recipe", lambda self, recipe: evolve(find(self, recipe), unsupported_options=(name,))
    )
    monkeypatch.setattr(Tokenizer, "load", lambda *_: pytest.fail("the checkpoint was opened"))
    monkeypatch.setattr(LoadedModel, "prepare", lambda *_, **__: pytest.fail("a model was loaded"))
    outcome = run(*options)
    assert outcome.code == 2 and f"recipe '{RECIPE}' cannot honour {name}; leave it out" in outcome.refusal
    shown = specdec(capsys, "recipes", RECIPE, "--json")
    assert json.loads(shown.stdout)["unsupported_options"] == [name]
