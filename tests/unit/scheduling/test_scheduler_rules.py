"""What the scheduler promises one by one: nobody starves, nobody is told anything behind the end, late records are nobody's.

The negative controls take one rule away each and must be noticed by the checks of ``SchedulerBench``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from scheduler_bench import GONE, IMPOSSIBLE, Fault, SchedulerBench, ScriptedGrammar, grammar, submissions
from simulated_fleet import arrival
from simulated_fleet import run as run_fleet

from specdec.errors import CapacityError, UsageError
from specdec.round.completion import Finish
from specdec.scheduling import scheduler as scheduling
from specdec.scheduling.admission import Admission
from specdec.scheduling.scheduler import Scheduler
from specdec.serving.request import Emission
from specdec.simulation.acceptance import Category, Copies
from specdec.simulation.costs import CostModel

SMALL: dict[str, Any] = {"context": 48, "page_tokens": 8, "prefill_tokens": 8}
DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def play(bench: SchedulerBench, seed: int, steps: int) -> None:
    """A random script without errors of the device; ends with everything at its end."""
    draw = random.Random(seed)
    for _ in range(steps):
        if draw.random() < 0.5:
            decided = draw.choice([{}, {}, {}, {"stop": ("ab",)}, {"grammar": grammar(complete=5)}])
            with suppress(CapacityError):
                bench.submit(
                    prompt=draw.choice([1, 5, 9, 20]),
                    output=draw.choice([1, 1, 7, 20, 25]),
                    budget=draw.choice([None, None, None, 1, 9]),
                    draft_tokens=draw.choice([None, None, 0, 2]),
                    **decided,  # type: ignore[arg-type]
                )
        bench.step(
            draw.choice([None, None, 1, 2]),
            between=lambda: draw.random() < 0.02 and bench.cancel(draw.choice(sorted(bench.seen))),
        )
        live = [number for number, one in bench.seen.items() if not one.finish and not one.cancelled]
        if live and draw.random() < 0.1:
            bench.cancel(draw.choice(live))
    bench.finish()


@DEPTHS
@pytest.mark.parametrize("copying", [False, True])
@pytest.mark.parametrize("pages", [None, 10])
def test_random_scripts_lose_nothing(depth: int, copying: bool, pages: int | None) -> None:
    """Also that the scripts come to what they are for: two rounds in flight, preemption, drafts that are right and wrong."""
    bench = SchedulerBench(queue_depth=depth, copying=copying, reserved_output=1, pages=pages, **SMALL)
    play(bench, seed=depth, steps=600)
    figures = bench.metrics.snapshot()
    assert (bench.scheduler.admission.preemptions > 5) is (pages is not None)
    assert {"stop", "length", "cancelled"} <= {name for name, count in figures["requests"]["finished"].items() if count}
    output = figures["output"]
    assert output["verified"] > output["accepted"] > 100
    assert not copying or output["tokens_by_source"]["copied_8"] > 20


# --- negative controls ---------------------------------------------------------------------------------------------------


def _told_behind_the_end(patch: pytest.MonkeyPatch) -> None:
    drain = scheduling._drain

    def step(self: Scheduler) -> Any:
        yield from drain(self.admission.farewells)
        yield from original(self)

    original = Scheduler.step
    patch.setattr(Scheduler, "step", step)


def _pages_given_back_under_a_round(patch: pytest.MonkeyPatch) -> None:
    def retire(self: Admission, resident: Any) -> None:
        del self.residents[resident.slot]
        self.device.retire(resident.slot)
        self._release(resident.slot)

    patch.setattr(Admission, "retire", retire)


def _newcomers_always_first(patch: pytest.MonkeyPatch) -> None:
    submit_next = Scheduler._submit_next

    def forgetful(self: Scheduler) -> bool:
        self._owed = []
        return submit_next(self)

    patch.setattr(Scheduler, "_submit_next", forgetful)


def _preempted_waits_at_the_end(patch: pytest.MonkeyPatch) -> None:
    step_back = Admission._step_back

    def behind(self: Admission, resident: Any) -> None:
        step_back(self, resident)
        self.waiting.append(self.waiting.popleft())

    patch.setattr(Admission, "_step_back", behind)


def _output_of_the_preempted_forgotten(patch: pytest.MonkeyPatch) -> None:
    step_back = Admission._step_back

    def forgetful(self: Admission, resident: Any) -> None:
        entered, resident.entered = resident.entered, False
        step_back(self, resident)
        resident.entered = entered

    patch.setattr(Admission, "_step_back", forgetful)


def _decided_lanes_have_two_rounds(patch: pytest.MonkeyPatch) -> None:
    may_run = Scheduler._may_run

    def eager(self: Scheduler, residents: Any) -> Any:
        kept = [(one, one.host_decides) for one in residents]
        for one in residents:
            one.host_decides = False
        found = may_run(self, residents)
        for one, decides in kept:
            one.host_decides = decides
        return found

    patch.setattr(Scheduler, "_may_run", eager)


@pytest.mark.parametrize(
    "fault",
    [
        _told_behind_the_end,
        _pages_given_back_under_a_round,
        _newcomers_always_first,
        _preempted_waits_at_the_end,
        _output_of_the_preempted_forgotten,
        _decided_lanes_have_two_rounds,
    ],
)
def test_a_scheduler_without_one_rule_is_caught(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)

    def plays() -> None:
        for seed in range(6):
            play(SchedulerBench(queue_depth=2, reserved_output=1, pages=10, **SMALL), seed, steps=300)

    with pytest.raises(AssertionError):
        plays()


# --- order ---------------------------------------------------------------------------------------------------------------


@DEPTHS
@pytest.mark.parametrize("copying", [False, True])
@pytest.mark.parametrize("pages", [None, 8])
@pytest.mark.parametrize("decided", [{}, {"stop": ("zz",)}])
def test_a_flood_of_short_requests_stops_nobody(depth: int, copying: bool, pages: int | None, decided: Any) -> None:
    """Requests of one token end where they begin and make room for the next, for ever. One that runs goes on all the same: its
    forty tokens take a bounded number of steps, while the flood goes on."""
    bench = SchedulerBench(queue_depth=depth, copying=copying, reserved_output=1, pages=pages, **SMALL)
    long = bench.submit(prompt=2, output=40)
    for _ in range(400):
        if bench.seen[long].finish:
            break
        bench.submit(prompt=3, output=1, **decided)
        bench.step()
    assert bench.seen[long].finish is Finish.STOP
    assert len(bench.seen) > 20 and bench.scheduler.admission.waiting
    bench.finish()


@DEPTHS
@pytest.mark.parametrize("chunks", [1, 2])
def test_first_tokens_come_after_the_chunks_before_them(depth: int, chunks: int) -> None:
    """With one round at most between two steps' chunks, whatever else runs."""
    bench = SchedulerBench(queue_depth=depth, chunks_per_step=chunks, **{**SMALL, "context": 200, "page_tokens": 16})
    runs = bench.submit(prompt=1, output=150)
    bench.step()
    wanted = [bench.submit(prompt=prompt, output=3) for prompt in (40, 8, 9)]
    needed, log = 5 + 1 + 2, bench.device.log
    begun = len(log)
    while bench.seen[wanted[-1]].tokens == []:
        bench.step()
    found = log[begun:]
    assert sum(what == "chunk" for what, _ in found) == needed
    # a round for every step with chunks, then first tokens, those read, and depth
    assert sum(what in ("round", "first") for what, _ in found) <= -(-needed // chunks) + 1 + depth
    assert [number for what, number in found if what == "chunk"] == sorted(
        [wanted[0]] * 5 + [wanted[1]] + [wanted[2]] * 2
    )
    # and the one that runs never waited for more than a step's chunks
    gap = 0
    for what, _ in found:
        gap = 0 if what in ("round", "first") else gap + (what == "chunk")
        assert gap <= chunks
    assert not bench.seen[runs].finish
    bench.finish()


def lanes_of(copying: bool, depth: int, **changes: Any) -> tuple[float, dict[tuple[int, int], Any]]:
    """Time and rounds of four long requests that come one after another."""
    arrivals = [arrival(index, 0.7 * index, output=300) for index in range(4)]
    category = Category(conditional=(0.8,), copies=Copies(rate=0, long_share=0, long=(0,), short=(0,)))
    costs = CostModel(base=1.0, first=0.1, chunk=0.2)
    made = run_fleet(arrivals, "fixed:4", costs, category=category, copying=copying, queue_depth=depth, concurrency=4)
    return max(one.end for one in made.outcomes), made.replicas[0].device.work.rounds


def test_lanes_that_the_host_decides_about_stay_together() -> None:
    """Every lane is decided about with history drafts. Joining one by one while others are in flight, they would run as two
    groups that take turns for ever, at twice the time."""
    alone, _ = lanes_of(True, 1)
    queued, rounds = lanes_of(True, 2)
    assert queued == pytest.approx(alone, rel=0.05)
    full = [counts for (batch, _), counts in rounds.items() if batch == 4]
    # all but the rounds in which requests come and go have everybody
    assert sum(counts.lanes for counts in full) >= 3.8 * sum(counts.rounds for counts in full)


@pytest.mark.parametrize("decided", [{"stop": ("zz",)}, {"grammar": grammar(complete=60)}])
def test_decided_lanes_beside_others_stay_together(decided: Any) -> None:
    """Two kinds at once: those that flow have two rounds in flight, the others meet in one round each time."""
    steps = []
    for depth in (1, 2):
        bench = SchedulerBench(queue_depth=depth, context=400, page_tokens=16)
        for _ in range(2):
            bench.submit(output=100, draft_tokens=0)
            bench.step()
            bench.submit(output=60, **decided)
            bench.step()
        bench.finish()
        together = [numbers for what, numbers in submissions(bench) if what == "round" and {1, 3} & set(numbers)]
        both = sum({1, 3} <= set(numbers) for numbers in together)
        assert both >= len(together) - 4, (depth, both, len(together))
        steps.append(bench.device.clock())
    # at depth two the others also have rounds without them
    assert steps[1] <= 2 * steps[0]


# --- ends ----------------------------------------------------------------------------------------------------------------


def test_b54_b56_late_records_of_a_slot_that_has_another_request_are_dropped() -> None:
    """Cancelled between submission and collection, twice; lanes are compacted, the slot goes to the next request, and rounds
    that still name it deliver to nobody."""
    bench = SchedulerBench(queue_depth=2, concurrency=2, **SMALL)
    for _ in range(2):
        doomed, stays = bench.submit(output=20), bench.submit(output=20)
        residents = bench.scheduler.admission.residents
        while not any(one.number == doomed and one.started and one.flights for one in residents.values()):
            bench.step()
        follows = bench.submit(output=9)
        told = len(bench.seen[doomed].tokens)
        assert bench.cancel(doomed)
        # the round in flight still names the slot, so its pages are not free yet
        assert bench.scheduler.admission._retiring
        while not bench.seen[stays].finish or not bench.seen[follows].finish:
            bench.step()
        assert (len(bench.seen[doomed].tokens), bench.seen[doomed].finish) == (told, Finish.CANCELLED)
    bench.finish()


@DEPTHS
def test_b55_records_without_tokens_are_counted(depth: int) -> None:
    """At every moment of a request's life; a cancelled one's records in flight bring nothing, and figures never raise."""
    for moment in range(14):
        bench = SchedulerBench(queue_depth=depth, concurrency=2, **SMALL)
        first, second = bench.submit(prompt=9, output=12), bench.submit(prompt=3, output=12)
        for _ in range(moment):
            bench.step()
        bench.cancel(first)
        bench.finish()
        figures = bench.metrics.snapshot()
        by_request = {one["request"]: one["output"] for one in figures["by_request"]}
        for number in (first, second):
            output = by_request[number]
            assert output["tokens"] == len(bench.seen[number].tokens)
            assert 0 <= output["accepted"] <= output["verified"] <= output["offered"]


@DEPTHS
@pytest.mark.parametrize("limit", [0, 1, 3, None])
def test_b57_the_draft_limit_of_a_request_holds_to_the_end_of_the_context(depth: int, limit: int | None) -> None:
    """Beside one without a limit, up to the last position: never more drafts than the request allows, or than there is room
    for."""
    bench = SchedulerBench(policy="fixed:5", queue_depth=depth, concurrency=2, **SMALL)
    limited = bench.submit(prompt=4, output=500, draft_tokens=limit)
    other = bench.submit(prompt=4, output=500)
    offered: dict[int, list[int]] = {limited: [], other: []}
    for _ in range(200):
        for event in bench.scheduler.step():
            bench._take(event)
            if isinstance(event, Emission) and event.tokens:
                record = event.completion
                offered[event.request].append(record.offered)
                before = record.generated - record.emitted
                assert record.offered <= max(48 - 4 - before - 1, 0)
    bench.finish()
    assert bench.seen[limited].finish is bench.seen[other].finish is Finish.CONTEXT
    assert len(bench.seen[limited].tokens) == 48 - 4
    assert max(offered[limited]) == (4 if limit is None else limit) and max(offered[other]) == 4


@DEPTHS
def test_what_was_collected_comes_before_the_word_that_it_was_cancelled(depth: int) -> None:
    """The caller leaves a step in whose round two requests emitted, cancels the second, and takes the next step."""
    bench = SchedulerBench(queue_depth=depth, concurrency=2, **SMALL)
    bench.submit(output=20, draft_tokens=0), bench.submit(output=20, draft_tokens=0)
    while not bench.scheduler._ready:
        bench.step(events=1)
    second = bench.scheduler._ready[0].request
    count = len(bench.seen[second].tokens)
    assert bench.cancel(second)
    bench.step()
    assert len(bench.seen[second].tokens) > count and bench.seen[second].finish is Finish.CANCELLED
    bench.finish()


# --- errors --------------------------------------------------------------------------------------------------------------


@DEPTHS
@pytest.mark.parametrize("operation", ["prefill", "submit", "collect"])
def test_errors_are_raised_unless_isolated(depth: int, operation: str) -> None:
    for isolate in (False, True):
        bench = SchedulerBench(queue_depth=depth, isolate=isolate, concurrency=2, **SMALL)
        early = bench.submit(output=20)
        while len(bench.seen[early].tokens) < 3:
            bench.step()
        # its prompt takes two steps, in which rounds are of the early one alone
        late = bench.submit(prompt=12, output=5)
        bench.device.faults[operation] = Fault(operation, GONE)
        told = [bench.step() for _ in range(4)]
        bench.finish()
        assert (GONE in told) is not isolate
        ended = {number for number, one in bench.seen.items() if one.error}
        # the rounds are of the early one, the prompt is the late one's
        assert ended == ({late if operation == "prefill" else early} if isolate else set())


@DEPTHS
@pytest.mark.parametrize("isolate", [False, True])
def test_impossible_grammar_ends_its_request_alone(depth: int, isolate: bool) -> None:
    bench = SchedulerBench(queue_depth=depth, isolate=isolate, concurrency=2, **SMALL)
    fine, broken = bench.submit(output=20), bench.submit(output=20, grammar=IMPOSSIBLE)
    told = [bench.step() for _ in range(8)]
    if isolate:
        assert not any(told) and bench.seen[broken].error == "no output can satisfy it"
        bench.finish()
    else:
        assert [str(one) for one in told if isinstance(one, UsageError)] == ["no output can satisfy it"]
        assert all(one.number == fine for one in bench.scheduler.admission.residents.values())


@DEPTHS
@pytest.mark.parametrize("isolate", [False, True])
def test_cancelled_inside_a_submission_that_fails(depth: int, isolate: bool) -> None:
    """At depth two an earlier round names the slot, and is read after it: only then the slot and its pages are free."""
    bench = SchedulerBench(queue_depth=depth, isolate=isolate, concurrency=2, **SMALL)
    doomed = bench.submit(output=20)
    while len(bench.seen[doomed].tokens) < 3:
        bench.step()
    assert len(bench.scheduler.flights) == depth - 1

    def cancel() -> None:
        bench.seen[doomed].cancelled = bench.scheduler.cancel(doomed)

    bench.device.inside = cancel
    bench.device.faults["submit"] = Fault("submit", GONE)
    told = bench.step()
    assert (told is GONE) is not isolate
    assert bench.seen[doomed].cancelled
    bench.finish()


@pytest.mark.parametrize("pages", [None, 10])
def test_copies_that_a_grammar_refuses_are_counted_once(pages: int | None) -> None:
    """Those of rounds that were submitted. When pages are short a round is planned again, and nothing counts twice."""
    bench = SchedulerBench(queue_depth=2, copying=True, reserved_output=1, pages=pages, **SMALL)
    planned: dict[int, int] = {}
    refused = 0
    rows, submit = ScriptedGrammar.rows, bench.device.submit

    def counted(self: ScriptedGrammar, copies: Any = ()) -> list[bytes]:
        found = rows(self, copies)
        planned[id(self)] = len(copies) + 1 - len(found)
        return found

    def submitted(plan: Any) -> None:
        nonlocal refused
        submit(plan)
        by_slot = bench.scheduler.admission.residents
        refused += sum(planned.get(id(by_slot[lane.slot].grammar), 0) for lane in plan.lanes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptedGrammar, "rows", counted)
        patch.setattr(bench.device, "submit", submitted)
        for _ in range(20):
            bench.submit(prompt=9, output=25, grammar=grammar(complete=24))
        bench.finish()
    assert (bench.scheduler.admission.preemptions > 5) is (pages is not None)
    assert bench.metrics.snapshot()["grammar_rejections"] == refused > 50
