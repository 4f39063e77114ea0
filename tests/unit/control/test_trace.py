"""A trace says of every round what was known, chosen and got, and its costs give the same decisions again."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from simulated_rounds import DRAFTS, WIDTHS, Lane, Round, SimulatedRounds, Source, Stretch

from specdec.control.controller import WidthController
from specdec.control.trace import TraceWriter, read_trace, replay
from specdec.errors import UsageError
from specdec.round.completion import Completion, Finish
from specdec.scheduling.device import LanePlan, RoundPlan

COPIES = Source(rates=(0.9,) * DRAFTS, share=0.4, match_length=8)


def completion(request: int, width: int, accepted: int) -> Completion:
    numbers = dict.fromkeys(
        ("epoch", "slot", "consumed", "generated", "pending", "draft_rows", "faults", "copy_sources"), 0
    )
    return Completion(
        request=request,
        round=0,
        finish=Finish.NONE,
        emitted=accepted + 1,
        offered=width - 1,
        verified=width - 1,
        accepted=accepted,
        verify_width=width,
        tokens=(0,) * (accepted + 1),
        **cast(Any, numbers),
    )


def write_round(writer: TraceWriter, one: Round) -> None:
    lanes = tuple(
        LanePlan(slot=slot, ceiling=DRAFTS, copies=(0,) * draw.copied, match_length=draw.match_length)
        for slot, draw in enumerate(one.draws)
    )
    plan = RoundPlan(number=one.number, batch=one.stretch.batch, width=one.width, lanes=lanes)
    outcomes = [
        (lane, cast(Any, SimpleNamespace(number=100 + lane.slot)), completion(100 + lane.slot, one.width, accepted))
        for lane, accepted in zip(lanes, one.accepted)
    ]
    writer.write(plan, one.decision, one.seconds, float(one.number), outcomes)


def traced(path: Path, queue_depth: int) -> list[int]:
    """Widths of four hundred simulated rounds, written to a trace."""
    lanes = (
        Lane(learned=(0.8,) * DRAFTS, copies=(COPIES,)),
        Lane(learned=(0.2,) * DRAFTS),
        Lane(learned=(0.9,) * DRAFTS),
    )
    stretch = Stretch(lanes=lanes, cost=lambda batch, width: 0.01 * (1 + 0.03 * batch * width), rounds=400)
    writer = TraceWriter(path)
    outcome = SimulatedRounds([stretch], seed=6).run(
        WidthController(WIDTHS), queue_depth=queue_depth, on_round=lambda one: write_round(writer, one)
    )
    writer.close()
    return list(outcome.widths)


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_costs_of_a_trace_give_the_same_decisions(tmp_path: Path, queue_depth: int) -> None:
    path = tmp_path / "trace.jsonl"
    widths = traced(path, queue_depth)
    assert len(set(widths)) > 3
    decisions = list(replay(read_trace(path), WidthController(WIDTHS)))
    assert [cast(Any, decision).width for decision in decisions] == widths
    assert [cast(Any, decision).reason for decision in decisions] == [one["reason"] for one in read_trace(path)]


def test_other_costs_give_other_decisions(tmp_path: Path) -> None:
    """The control."""
    path = tmp_path / "trace.jsonl"
    widths = traced(path, 1)
    rounds = [{**one, "seconds": one["seconds"] * one["width"]} for one in read_trace(path)]
    assert [cast(Any, decision).width for decision in replay(rounds, WidthController(WIDTHS))] != widths


def test_a_line_holds_what_was_known_chosen_and_got(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    widths = traced(path, 1)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["width"] for line in lines] == widths
    for line in lines:
        assert line["candidates"][str(line["width"])][1] > 0
        assert line["emitted"] == sum(lane["emitted"] for lane in line["lanes"])
        assert [lane["request"] for lane in line["lanes"]] == [100, 101, 102]
        tokens = 3 + sum(sum(lane["survival"][: line["width"] - 1]) for lane in line["lanes"])
        assert line["candidates"][str(line["width"])][0] == pytest.approx(tokens)
    assert {lane["match_length"] for line in lines for lane in line["lanes"]} == {None, 8}


def test_rounds_without_a_choice_and_lanes_that_left(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    writer = TraceWriter(path)
    plan = RoundPlan(number=0, batch=2, width=1, lanes=(LanePlan(slot=0, ceiling=0), LanePlan(slot=1, ceiling=0)))
    gone = (plan.lanes[1], cast(Any, SimpleNamespace(number=9)), completion(9, 1, 0))
    writer.write(plan, None, 0.5, 1.0, [gone])
    (line,) = read_trace(path)
    assert line["reason"] is None
    assert [lane["request"] for lane in line["lanes"]] == [None, 9]
    assert line["emitted"] == 1
    controller = WidthController(WIDTHS)
    assert list(replay([line], controller)) == [None]
    writer.close()
    writer.close()


def test_files_that_are_no_trace_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        TraceWriter(tmp_path / "missing" / "trace.jsonl")
    with pytest.raises(UsageError, match="cannot be read"):
        list(read_trace(tmp_path / "missing.jsonl"))
    path = tmp_path / "trace.jsonl"
    path.write_text('{"width": 1}\n', encoding="utf-8")
    with pytest.raises(UsageError, match="line 1 is no round"):
        list(read_trace(path))
    path.write_text("text\n", encoding="utf-8")
    with pytest.raises(UsageError, match="cannot be read"):
        list(read_trace(path))
