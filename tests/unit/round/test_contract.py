"""Shapes that rounds check of what plugins give them, and how a proposer counts what was proposed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from markov import ForecastingDrafter, MarkovDrafter, MarkovModel, MarkovTarget, random_table
from round_driver import Driver
from torch import Tensor

from specdec.errors import PluginError
from specdec.places import method_of, place
from specdec.round.allocated import AllocatedRound
from specdec.round.contract import expect, expect_every_depth
from specdec.testing.drafters import RecordingDrafter

V = 6


def wanted(value: object, **options: Any) -> None:
    expect(value, (2, V), "B, V", of=MarkovDrafter(random_table(V, 1), slots=2), method="propose", **options)


@pytest.mark.parametrize(
    ("value", "options"),
    [
        (torch.zeros(2, V), {}),
        (torch.zeros(2, V, dtype=torch.bfloat16), {}),
        (torch.zeros(2, V + 3), {"padded": True}),
        (torch.zeros(2, V, dtype=torch.int64), {"integer": True}),
    ],
)
def test_what_fits(value: Tensor, options: dict[str, bool]) -> None:
    wanted(value, **options)


@pytest.mark.parametrize(
    ("value", "options", "described"),
    [
        (torch.zeros(2, V + 3), {}, "[2, 9] float32"),
        (torch.zeros(2, V - 1), {"padded": True}, "[2, 5] float32"),
        (torch.zeros(3, V), {"padded": True}, "[3, 6] float32"),
        (torch.zeros(V), {}, "[6] float32"),
        (torch.zeros(2, 1, V), {}, "[2, 1, 6] float32"),
        (torch.zeros(2, V, dtype=torch.int64), {}, "[2, 6] int64"),
        (torch.zeros(2, V, dtype=torch.int32), {"integer": True}, "[2, 6] int32"),
        (None, {}, "NoneType"),
        ([1, 2], {}, "list"),
    ],
)
def test_what_does_not_fit_is_named_with_method_and_place(
    value: object, options: dict[str, bool], described: str
) -> None:
    with pytest.raises(PluginError) as caught:
        wanted(value, **options)
    message = str(caught.value)
    assert message.startswith(f"MarkovDrafter.propose ({place(MarkovDrafter.propose)}) returns {described}; expected ")
    assert "[B, V] = [2, 6]" in message


def test_wrapped_drafters_are_looked_through() -> None:
    drafter = MarkovDrafter(random_table(V, 1), slots=2)
    assert method_of(RecordingDrafter(RecordingDrafter(drafter)), "absorb") == method_of(drafter, "absorb")  # type: ignore[arg-type]


@pytest.mark.parametrize("drawn", [[], [0], [0, 1, 2], [0, 0], [1, 2]])
def test_every_depth_is_proposed_once(drawn: list[int]) -> None:
    expect_every_depth([1, 0], 2, of=None)
    with pytest.raises(PluginError, match=r"where draft_tokens is 2; call proposer\.draw"):
        expect_every_depth(drawn, 2, of=None)


def run(target: type[MarkovTarget], drafter: type[MarkovDrafter], kind: type | None = None) -> None:
    confidence = torch.full((V,), 0.5) if kind is not None else None
    model = MarkovModel.build(random_table(V, 1), random_table(V, 2), slots=2, confidence=confidence)
    model.target.__class__ = target
    model.drafter.__class__ = drafter
    for slot in range(2):
        model.admit(slot, [1, 2], greedy=True)
    driver = Driver(model) if kind is None else Driver(model, kind=kind, draft_rows=2)
    driver.start([0, 1])
    driver.round([0, 1], 2)


class Sound(MarkovDrafter):
    pass


class FlatFaults(MarkovTarget):
    def faults(self, slots: Tensor) -> Tensor:
        return super().faults(slots).sum()


class FlatLogits(MarkovTarget):
    def first_logits(self, slots: Tensor) -> Tensor:
        return super().first_logits(slots)[0]


class FloatFaults(MarkovDrafter):
    def faults(self, slots: Tensor) -> Tensor:
        return super().faults(slots).to(torch.float32)


class NoForecasts(ForecastingDrafter):
    def propose(self, lanes: Any, draft_tokens: int, proposer: Any) -> Any:
        super().propose(lanes, draft_tokens, proposer)


class HalfForecasts(ForecastingDrafter):
    def propose(self, lanes: Any, draft_tokens: int, proposer: Any) -> Tensor:
        return super().propose(lanes, draft_tokens, proposer)[:, :1]


class FlatRows(MarkovTarget):
    def verify_rows(self, tokens: Tensor, rows: Any) -> Tensor:
        return super().verify_rows(tokens, rows).unsqueeze(0)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("target", "drafter", "kind", "words"),
    [
        (FlatFaults, MarkovDrafter, None, "FlatFaults.faults"),
        (MarkovTarget, FloatFaults, None, "FloatFaults.faults"),
        (FlatLogits, MarkovDrafter, None, "FlatLogits.first_logits"),
        (MarkovTarget, NoForecasts, AllocatedRound, "NoForecasts.propose"),
        (MarkovTarget, HalfForecasts, AllocatedRound, "HalfForecasts.propose"),
        (FlatRows, ForecastingDrafter, AllocatedRound, "FlatRows.verify_rows"),
    ],
)
def test_rounds_refuse_other_shapes(
    target: type[MarkovTarget], drafter: type[MarkovDrafter], kind: type | None, words: str
) -> None:
    with pytest.raises(PluginError) as caught:
        run(target, drafter, kind)
    assert str(caught.value).startswith(words) and __file__ in str(caught.value)


@torch.inference_mode()
def test_rounds_take_what_fits() -> None:
    run(MarkovTarget, Sound)
    run(MarkovTarget, ForecastingDrafter, AllocatedRound)
