"""An error of a plugin's own code in a prompt or a round: the request's caller is told where it was made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.errors import PluginError, SpecdecError
from specdec.failures import error_line
from specdec.round.completion import Finish
from specdec.sampling.params import SamplingParams
from specdec.serving.engine import Engine, Output
from specdec.serving.request import Request


class Faulty:
    """Methods that a drafter may have, each with a mistake of its own."""

    def propose(self, lanes: Any, draft_tokens: int, proposer: Any) -> Any:
        return proposer.put(0, lanes.pending)

    def prefill(self, feedback: Any, tokens: Any, slot: Any, start: Any) -> None:
        torch.ones(2) @ torch.ones(3)

    def commit(self, lanes: Any, emitted: Any) -> None:
        undefined_name  # type: ignore[name-defined]  # noqa: B018, F821

    def absorb(self, lanes: Any, tokens: Any, emitted: Any) -> None:
        raise PluginError("toy: no rows are left")


MISTAKES = [
    ("propose", "AttributeError: ", "proposer.put("),
    ("prefill", "RuntimeError: ", "torch.ones(2) @"),
    ("commit", "NameError: name 'undefined_name' is not defined", "        undefined_name"),
]


def place(code: str) -> str:
    lines = enumerate(Path(__file__).read_text(encoding="utf-8").splitlines(), 1)
    (number,) = (number for number, line in lines if code in line and '"' not in line)
    return f"{__file__}:{number}"


def outputs_with(model: Any, method: str, patch: pytest.MonkeyPatch, count: int = 2) -> list[Output]:
    """What requests get while one method of the drafter is faulty."""
    patch.setattr(model.drafter, method, getattr(Faulty(), method))
    with Engine(model) as engine:
        wanted = Request(prompt=[1, 2, 3], max_new_tokens=30, sampling=SamplingParams(greedy=True), stop_ids=())
        return engine.generate([wanted] * count)


@pytest.mark.parametrize(("method", "said", "code"), MISTAKES)
def test_the_place_is_the_plugins(
    prepared: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    method: str,
    said: str,
    code: str,
) -> None:
    monkeypatch.delenv("SPECDEC_TRACEBACK", raising=False)
    for output in outputs_with(prepared(concurrency=2), method, monkeypatch):
        assert output.finish is Finish.FAULT and output.error is not None
        assert output.error.startswith(said) and output.error.endswith(f" ({place(code)} in {method})")
        assert "\n" not in output.error
    assert capsys.readouterr().err == ""


def test_a_deliberate_error_says_what_it_says(prepared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (output,) = outputs_with(prepared(concurrency=2), "absorb", monkeypatch, 1)
    assert output.error == "toy: no rows are left"


@pytest.mark.parametrize(("method", "said", "code"), MISTAKES)
def test_the_traceback_is_shown_once_if_asked_for(
    prepared: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    method: str,
    said: str,
    code: str,
) -> None:
    monkeypatch.setenv("SPECDEC_TRACEBACK", "1")
    outputs_with(prepared(concurrency=2), method, monkeypatch, 1)
    shown = capsys.readouterr().err
    assert shown.count("Traceback (most recent call last)") == 1
    assert said in shown and f", in {method}\n" in shown and code.strip() in shown


def test_a_line_for_every_error() -> None:
    assert error_line(ValueError("first\n  second\n")) == "ValueError: first / second"
    assert error_line(KeyError()) == "KeyError"
    assert error_line(SpecdecError("as it is; change it")) == "as it is; change it"
