"""Penalties, biases, ends and log-probabilities from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from command import PROMPT, RECIPE, Outcome, RunCommand, specdec
from small_checkpoint import write_small_checkpoint
from stop_oracle import plain_cut

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


def test_prompt_logprobs_in_json_are_those_of_the_prompt(run: RunCommand, checkpoint: Path) -> None:
    """One for each prompt token but the first: what ``--logprobs`` says of the last one when it is emitted instead."""
    prompt = Tokenizer.load(checkpoint).encode(PROMPT)
    options = ("--json", "--greedy", "--dtype", "float64", "--ignore-eos", "--max-new-tokens", 1)
    data = data_of(run(*options, "--prompt-logprobs", 3))
    assert "logprobs" not in data and "prompt_logprobs" not in data_of(run(*options))
    assert [one["token"] for one in data["prompt_logprobs"]] == list(prompt[1:])
    assert data["prompt_logprobs"] == data_of(run(*options, "--prompt-logprobs", 3, "--no-mtp"))["prompt_logprobs"]
    # the longest beginning of the text that is a beginning of its tokens too
    cut = max(
        n for n in range(len(PROMPT)) if Tokenizer.load(checkpoint).encode(PROMPT[:n]) == prompt[: len(prompt) - 1]
    )
    bias = f"{prompt[-1]}:100"
    emitted = data_of(run(*options, "--logprobs", 3, "--prompt", PROMPT[:cut], "--logit-bias", bias))
    assert emitted["tokens"] == [prompt[-1]]
    (one,), other = emitted["logprobs"], data["prompt_logprobs"][-1]
    assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-6)
    assert [entry["token"] for entry in one["top"]] == [entry["token"] for entry in other["top"]]
    assert [one["top"] for one in data_of(run(*options, "--prompt-logprobs", 0))["prompt_logprobs"]] == [[]] * (
        len(prompt) - 1
    )


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
        ("--prompt-logprobs", 2, "--json"),
        ("--min-new-tokens", 1),
        ("--logprobs", 0, "--json"),
        ("--logit-bias", "3:0.5"),
        ("--repetition-penalty", 1.1),
    ):
        assert run(*options).code == 0
    assert prepared == [False] * 4 + [True] * 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--presence-penalty", "2.5"], ["--presence-penalty", "2.5", "from -2 to 2"]),
        (["--frequency-penalty", "nan"], ["--frequency-penalty", "nan"]),
        (["--frequency-penalty", "much"], ["--frequency-penalty is 'much'; give a number"]),
        (["--repetition-penalty", "0"], ["--repetition-penalty", "0.0", "from 0.01 to 100"]),
        (["--logit-bias", "5"], ["--logit-bias is '5'", "like 17:-2.5"]),
        (["--logit-bias", "5:x"], ["--logit-bias is '5:x'"]),
        (["--logit-bias", "x:5"], ["--logit-bias is 'x:5'"]),
        (["--logit-bias", "5:200"], ["--logit-bias", "200", "from -100 to 100"]),
        (["--logit-bias", "5:1", "--logit-bias", "5:2"], ["--logit-bias", "token 5 twice"]),
        (["--logit-bias", "512:1"], ["--logit-bias token 512", "vocabulary of 512"]),
        (["--min-new-tokens", "-1"], ["--min-new-tokens", "-1", "between 0 and 24"]),
        (["--min-new-tokens", "25"], ["--min-new-tokens", "25", "--max-new-tokens 24"]),
        (["--logprobs", "21", "--json"], ["--logprobs", "21", "between 0 and 20"]),
        (["--logprobs", "3"], ["--logprobs 3", "add --json"]),
        (["--prompt-logprobs", "-1", "--json"], ["--prompt-logprobs", "-1", "between 0 and 20"]),
        (["--prompt-logprobs", "0"], ["--prompt-logprobs 0", "add --json"]),
        (["--stop", ""], ["--stop", "empty string", "at least one character"]),
        (["--stop", "a", "--stop="], ["--stop", "empty string"]),
        (["--stop=a"] * 17, ["--stop", "17 strings", "at most 16"]),
        (["--stop", "a\udcff"], ["--stop", "no text that UTF-8 can write"]),
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
        ("prompt_logprobs", ["--prompt-logprobs", "0", "--json"]),
        ("min_p", ["--min-p", "0.1"]),
        ("ignore_eos", ["--ignore-eos"]),
        ("stop", ["--stop", "end"]),
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
    option = "--" + name.replace("_", "-")
    assert outcome.code == 2 and f"recipe '{RECIPE}' cannot honour {option}; leave it out" in outcome.refusal
    shown = specdec(capsys, "recipes", RECIPE, "--json")
    assert json.loads(shown.stdout)["unsupported_options"] == [name]


def test_stop_strings_end_text_tokens_and_logprobs_together(run: RunCommand, checkpoint: Path) -> None:
    """The output without drafts and without the option, cut; what is streamed never shows a part of the string."""
    tokenizer = Tokenizer.load(checkpoint)
    options = ("--seed", 3, "--temperature", 1, "--ignore-eos", "--dtype", "float64", "--logit-bias", "255:-100")
    plain = data_of(run(*options, "--json", "--logprobs", 1, "--mtp-draft-tokens", 0))
    assert plain["text"] == tokenizer.decode(plain["tokens"]) and plain["summary"]["finish"] == "length"
    for start in (0, 1, 5, 9):
        stop = plain["text"][start : start + 3]
        expected = plain_cut(tokenizer, plain["tokens"], [stop])
        found = data_of(run(*options, "--json", "--logprobs", 1, "--stop", "not in there", "--stop", stop))
        assert (found["text"], found["tokens"]) == (expected.text, plain["tokens"][: expected.kept])
        assert found["logprobs"] == plain["logprobs"][: expected.kept]
        summary = found["summary"]
        assert (summary["tokens"], summary["finish"], summary["draft_tokens"]) == (expected.kept, "stop", 0)
        streamed = run(*options, "--stop", stop)
        assert streamed.stdout == expected.text + "\n"
        assert "finished by          stop" in streamed.stderr and "without drafts" in streamed.stderr
    # held back until the budget ends it
    streamed = run(*options, "--stop", plain["text"] + "x")
    assert streamed.stdout == plain["text"] + "\n" and "finished by          length" in streamed.stderr
