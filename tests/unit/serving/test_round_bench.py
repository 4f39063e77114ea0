"""Measuring rounds: marks stand between the phases, and a run whose requests end early is no measurement."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec.errors import SpecdecError
from specdec.round.phases import PHASES, PhaseMarks
from specdec.serving import round_bench as module
from specdec.serving.generate import Generator
from specdec.serving.request import Request
from specdec.serving.round_bench import RoundBench
from specdec.serving.round_times import AdaptiveTimes, EngineRound, ShapeTimes, output_tokens

PROMPTS = [[1, 2, 3], [4, 5]]


def quiet(_: str) -> None:
    pass


class Diary(PhaseMarks):
    """Marks and calls in the order in which they come."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.entries: list[str] = []

    def mark(self, name: str) -> None:
        self.entries.append(name)

    def watch(self, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        called = getattr(owner, name)

        def noted(*arguments: Any, **options: Any) -> Any:
            self.entries.append(f"({name})")
            return called(*arguments, **options)

        monkeypatch.setattr(owner, name, noted)


def test_marks_stand_between_the_phases(prepared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared(drafts=1)
    diary = Diary()
    for owner, name in ((model.drafter, "propose"), (model.target, "verify"), (model.target, "commit")):
        diary.watch(owner, name, monkeypatch)
    diary.watch(model.rounds[1, 2]._settlement, "clip", monkeypatch)
    monkeypatch.setattr(model.arena, "phases", diary)
    for _ in Generator(model).run([Request(prompt=(1, 2, 3), max_new_tokens=2, stop_ids=())]):
        pass
    assert diary.entries == [
        *("begin", "(propose)", "draft", "(verify)", "verify", "(clip)", "accept", "(commit)", "commit"),
    ]


def test_seconds_are_distances_of_marks() -> None:
    marks = PhaseMarks(torch.device("cpu"))
    with pytest.raises(KeyError):
        marks.seconds()
    for name in ("begin", *PHASES):
        marks.mark(name)
    first = marks.seconds()
    assert list(first) == list(PHASES) and all(seconds >= 0 for seconds in first.values())
    for name in ("begin", *PHASES):
        marks.mark(name)
    assert marks.seconds() != first


def test_a_bench_leaves_the_model_as_it_was(prepared: Any) -> None:
    model = prepared(concurrency=2, drafts=1)
    bench = RoundBench(model, PROMPTS, rounds=2)
    said: list[str] = []
    bench.run(2, said.append)
    assert said == ["pass 1 of 2", "pass 2 of 2", "phases"]
    assert [(one.batch, one.width) for one in bench.shapes] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert model.arena.phases is None
    assert all(pool.free == pool.pages for pool in model.pools)
    alone = prepared(drafts=1)
    request = Request(prompt=(1, 2, 3), max_new_tokens=12, stop_ids=())

    def tokens(one: Any) -> list[int]:
        return [token for event in Generator(one).run([request]) for token in getattr(event, "tokens", ())]

    assert tokens(model) == tokens(alone)


def test_arms_turn_round_from_pass_to_pass(prepared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(RoundBench, "_floor", lambda self, one: order.append(f"floor {one.width}"))
    monkeypatch.setattr(RoundBench, "_fixed", lambda self, one: order.append(f"engine {one.width}"))
    monkeypatch.setattr(RoundBench, "_chosen", lambda self, one, *rest: order.append(f"adaptive {one.batch}"))
    monkeypatch.setattr(RoundBench, "_phases", lambda self, one: None)
    RoundBench(prepared(drafts=1), PROMPTS, rounds=1).run(2, quiet)
    once = ["floor 1", "engine 1", "floor 2", "engine 2", "adaptive 1"]
    assert order == [*once, *reversed(once)]


@pytest.mark.parametrize(("arm", "words"), [("_floor", "ended within 8 rounds"), ("_fixed", "of 8 rounds had 1 lanes")])
def test_requests_that_end_early_are_no_measurement(
    prepared: Any, monkeypatch: pytest.MonkeyPatch, arm: str, words: str
) -> None:
    monkeypatch.setattr(module, "output_tokens", lambda rounds, width, lanes: 6)
    bench = RoundBench(prepared(drafts=1), PROMPTS, rounds=8)
    with pytest.raises(SpecdecError, match=words):
        getattr(bench, arm)(bench.shapes[0])
    # nothing is left running
    assert all(pool.free == pool.pages for pool in bench.model.pools)


def test_no_request_ends_within_its_rounds() -> None:
    """Every round at full width, and the rounds of lanes that are there before the others."""
    assert output_tokens(rounds=10, width=3, lanes=2) >= 3 * (10 + 4 + 2 * 2)


def test_a_shape_with_an_outlier() -> None:
    rounds = [[EngineRound(2, 0.010, 0.009), EngineRound(2, 0.014, 0.009)], [EngineRound(2, 0.030, 0.009)] * 2]
    shape = ShapeTimes(batch=1, width=2, target_rows=2, lanes=1, floors=[0.010, 0.020], engine=rounds)
    data = shape.as_data()
    assert data["floor"] == pytest.approx(0.015) and data["engine"] == pytest.approx(0.021)
    assert data["ratio"] == pytest.approx(1.4) and data["ratio_by_pass"] == pytest.approx([1.2, 1.5])
    assert data["engine_device"] == pytest.approx(0.009) and data["phases"] == {}


def test_adaptive_rounds_have_the_floors_of_their_widths() -> None:
    one = AdaptiveTimes(batch=1, lanes=1, engine=[[EngineRound(1, 0.011, 0.01), EngineRound(4, 0.022, 0.02)]])
    data = one.as_data({1: 0.010, 4: 0.020})
    assert data["floor"] == pytest.approx(0.015) and data["ratio"] == pytest.approx(1.1)
    assert data["engine_device"] == pytest.approx(0.015)
    assert data["rounds_by_width"] == {"1": 1, "4": 1}
