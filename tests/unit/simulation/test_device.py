"""The simulated device: what a round emits, when it is done, and what no scheduler may do."""

from __future__ import annotations

from random import Random

import pytest
from attrs import evolve

from specdec.errors import CapacityError, UsageError
from specdec.round.completion import METADATA_FIELDS, Completion, Finish
from specdec.sampling.params import SamplingParams
from specdec.scheduling.device import LanePlan, RoundPlan
from specdec.scheduling.resident import Resident, TokenRun
from specdec.serving.request import Request
from specdec.simulation.acceptance import STOP, Category, Luck
from specdec.simulation.costs import CostModel
from specdec.simulation.device import DeviceMisuse, Nature, SimulatedDevice

COSTS = CostModel(base=1.0, draft=0.25, first=0.125, chunk=2.0, prompt_token=0.01, host=0.001)


def device(*, length: int = 1000, rates: tuple[float, ...] = (1.0,), **options: object) -> SimulatedDevice:
    def nature(request: Request) -> Nature:
        return Nature(category=Category(conditional=rates), luck=Luck(0, request.sampling.seed), length=length)

    return SimulatedDevice(COSTS, nature, **options)  # type: ignore[arg-type]


def admitted(
    made: SimulatedDevice, slot: int = 0, *, budget: int = 50, prompt: int = 10, reach: int | None = None
) -> Resident:
    """A request in a slot, its prompt consumed."""
    request = Request(prompt=(1,) * prompt, sampling=SamplingParams(seed=slot), max_new_tokens=budget)
    made.check(request)
    resident = Resident(
        number=slot + 100,
        request=request,
        slot=slot,
        epoch=made.next_epoch(),
        budget=budget,
        context_bound=False,
        run=TokenRun(request.inputs),
    )
    made.admit(resident, prompt + budget + made.horizon if reach is None else reach)
    made.prefill(resident, prompt)
    resident.consumed = prompt
    made.enter(resident)
    return resident


def plan(number: int, width: int, *lanes: LanePlan, batch: int = 1, first: bool = False) -> RoundPlan:
    return RoundPlan(number=number, batch=batch, width=width, lanes=lanes, first=first)


def played(made: SimulatedDevice, asked: RoundPlan) -> list[Completion]:
    made.submit(asked)
    return [Completion.parse(record) for record in made.collect(asked, False).records]


def started(made: SimulatedDevice, slot: int = 0, **options: int) -> int:
    """Admits and samples the first token, which it returns."""
    admitted(made, slot, **options)
    return played(made, plan(0, 1, LanePlan(slot=slot, ceiling=0), first=True))[0].tokens[0]


def test_a_round_emits_the_accepted_prefix_and_one_more() -> None:
    """Against the definition, over random acceptance, ceilings, budgets and early ends, token by token."""
    random = Random(4)
    for case in range(60):
        length, budget, rate = random.randint(1, 30), random.randint(1, 30), random.choice((0.0, 0.5, 0.9, 1.0))
        made = device(length=length, rates=(rate, rate / 2))
        luck = Luck(0, 0)
        text = [luck.token(position) for position in range(60)]
        text[length - 1] = STOP
        output = [started(made, budget=budget)]
        finish = Finish.STOP if length == 1 else Finish.LENGTH if budget == 1 else Finish.NONE
        number = 0
        while finish is Finish.NONE:
            number += 1
            width, ceiling = random.randint(1, 6), random.randint(0, 7)
            [found] = played(made, plan(number, width, LanePlan(slot=0, ceiling=ceiling)))
            offered = max(0, min(width - 1, ceiling, budget - len(output) - 1))
            accepted = 0
            while accepted < offered and luck.uniform(0, len(output) + accepted) < (
                rate if accepted == 0 else rate / 2
            ):
                accepted += 1
            expected = text[len(output) : len(output) + accepted + 1]
            if STOP in expected:
                expected = expected[: expected.index(STOP) + 1]
            assert list(found.tokens) == expected, case
            output += expected
            finish = Finish.STOP if output[-1] == STOP else Finish.LENGTH if len(output) == budget else Finish.NONE
            assert (found.offered, found.verified, found.accepted) == (offered, offered, accepted)
            assert (found.finish, found.generated, found.consumed) == (finish, len(output), 10 + len(output) - 1)
            assert (found.request, found.epoch, found.round, found.slot) == (100, 1, number, 0)
            assert (found.pending, found.verify_width, found.emitted) == (output[-1], width, len(expected))
        assert len(output) == min(length, budget)


def test_records_have_the_layout_of_a_frame() -> None:
    made = device(widths=(1, 2, 4))
    started(made)
    asked = plan(1, 2, LanePlan(slot=0, ceiling=1))
    made.submit(asked)
    [record] = made.collect(asked, False).records
    assert len(record) == METADATA_FIELDS + 4 and record[METADATA_FIELDS + 2 :] == [-1, -1]


def test_copies_are_judged_by_what_the_target_emits() -> None:
    made = device(rates=(0.0,))
    started(made)
    luck = Luck(0, 0)
    right = tuple(luck.token(position) for position in (1, 2))
    lane = LanePlan(slot=0, ceiling=5, copies=(*right, 1 + luck.token(3)))
    [found] = played(made, plan(1, 6, lane))
    # two right copies, a wrong one, and learned drafts that nobody came to
    assert (found.accepted, found.copy_sources, found.offered) == (2, 0b111, 5)
    assert found.tokens == (*right, luck.token(3))
    # learned drafts behind copies go by the curve
    made = device(rates=(0.0, 0.0, 1.0))
    started(made)
    [found] = played(made, plan(1, 5, LanePlan(slot=0, ceiling=4, copies=right)))
    assert (found.accepted, found.copy_sources) == (4, 0b11)


def test_dead_lanes_report_themselves_and_do_nothing() -> None:
    made = device()
    started(made, budget=3)
    first, second = (plan(number, 4, LanePlan(slot=0, ceiling=3)) for number in (1, 2))
    made.submit(first)
    made.submit(second)
    [ended] = [Completion.parse(record) for record in made.collect(first, False).records]
    [behind] = [Completion.parse(record) for record in made.collect(second, False).records]
    assert (ended.finish, ended.emitted) == (Finish.LENGTH, 2)
    assert (behind.emitted, behind.generated, behind.finish, behind.round) == (0, 3, Finish.LENGTH, 2)
    assert sum(counts.lanes for counts in made.work.rounds.values()) == 1


def test_time_is_that_of_an_ordered_stream() -> None:
    """Prompts and rounds queue one behind another; the clock moves where the host waits, and while it submits."""
    made = device()
    admitted(made)
    assert made.clock() == 0.0  # nobody waited for the prompt
    first = plan(0, 1, LanePlan(slot=0, ceiling=0), first=True)
    made.submit(first)
    second = plan(1, 3, LanePlan(slot=0, ceiling=2))
    made.submit(second)
    assert made.clock() == pytest.approx(0.002)
    made.collect(first, False)
    assert made.clock() == pytest.approx(2.1 + 0.125)
    # while the host slept the device finished the second round, and then had nothing to do
    made.advance(10.0)
    result = made.collect(second, False)
    assert (made.clock(), result.seconds) == (10.0, 1.5)
    third = plan(2, 1, LanePlan(slot=0, ceiling=0))
    made.submit(third)
    made.collect(third, False)
    assert made.clock() == pytest.approx(11.001)
    assert made.work.busy == pytest.approx(2.1 + 0.125 + 1.5 + 1.0)
    made.advance(1.0)
    assert made.clock() == pytest.approx(11.001)


def test_shapes_are_those_of_the_catalog() -> None:
    made = device(concurrency=5, widths=(1, 2, 4, 8), token_capacity=16)
    assert [made.batch_for(lanes) for lanes in range(1, 6)] == [1, 2, 4, 4, 8]
    assert [made.widths(batch) for batch in (1, 2, 4, 8)] == [(1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4), (1, 2)]
    assert device(plain=True).widths(4) == (1,)


def test_pages_run_out_and_come_back() -> None:
    made = device(concurrency=2, pages=6, page_tokens=16, context=64, widths=(1, 2))
    admitted(made, 0, reach=40)
    assert made.free_pages == 3
    with pytest.raises(CapacityError, match="3 of 6 are free"):
        admitted(made, 1, reach=50)
    made.reserve(0, 48)
    assert made.free_pages == 3
    made.reserve(0, 65)
    assert made.free_pages == 1
    with pytest.raises(CapacityError):
        made.reserve(0, 200)
    assert made.free_pages == 1
    made.retire(0)
    made.release(0)
    assert made.free_pages == 6
    big = Request(prompt=(1,) * 50, max_new_tokens=20)
    with pytest.raises(CapacityError, match="5 pages of 16 tokens; there are 4"):
        device(pages=4, page_tokens=16, context=64, widths=(1, 2)).check(big)


@pytest.mark.parametrize(
    ("request_", "part"),
    [
        (Request(prompt=(1,) * 64), "fill the context of 64"),
        (Request(prompt=(1,), stop=("x",), max_new_tokens=2), "stop needs a model"),
        (Request(prompt=(1,), logprobs=0, max_new_tokens=2), "logprobs needs a model"),
        (Request(prompt=(1,), prompt_logprobs=1, max_new_tokens=2), "prompt_logprobs needs a model"),
    ],
)
def test_requests_that_need_a_model_are_refused(request_: Request, part: str) -> None:
    with pytest.raises(UsageError, match=part):
        device(context=64).check(request_)


def _third_round(made: SimulatedDevice) -> None:
    for number in (1, 2, 3):
        made.submit(plan(number, 1, LanePlan(slot=0, ceiling=0)))


def _wrong_order(made: SimulatedDevice) -> None:
    plans = [plan(number, 1, LanePlan(slot=0, ceiling=0)) for number in (1, 2)]
    for asked in plans:
        made.submit(asked)
    made.collect(plans[1], False)


def _early_release(made: SimulatedDevice) -> None:
    made.submit(plan(1, 1, LanePlan(slot=0, ceiling=0)))
    made.retire(0)
    made.release(0)


def _beyond_pages(made: SimulatedDevice) -> None:
    admitted(made, 1, prompt=63, reach=64)
    played(made, plan(1, 1, LanePlan(slot=1, ceiling=0), first=True))
    made.submit(plan(2, 4, LanePlan(slot=1, ceiling=3)))


def _half_prompt(made: SimulatedDevice) -> None:
    resident = admitted(made, 1)
    made.retire(1)
    made.release(1)
    made.admit(resident, 64)
    made.enter(resident)


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        (_third_round, "overwrite a frame"),
        (_wrong_order, "not the oldest"),
        (_early_release, "while a submitted round names it"),
        (_beyond_pages, "too few for width 4"),
        (_half_prompt, "0 of 10 inputs"),
        (lambda made: made.submit(plan(1, 7, LanePlan(slot=0, ceiling=0))), "width 7 is not prepared"),
        (lambda made: made.submit(plan(1, 1, LanePlan(slot=3, ceiling=0))), "slot 3 holds no request"),
        (lambda made: made.submit(plan(1, 1, *[LanePlan(slot=0, ceiling=0)] * 2, batch=2)), "in two lanes"),
        (lambda made: made.submit(plan(1, 1, *[LanePlan(slot=0, ceiling=0)] * 2)), "2 lanes in a batch of 1"),
        (lambda made: made.submit(plan(1, 1, LanePlan(slot=0, ceiling=0), first=True)), "slot 0 with 1 tokens"),
        (lambda made: admitted(made, 0), "is taken"),
        (lambda made: made.publish(evolve_resident(made), 1), "keeps no prefix checkpoints"),
    ],
)
def test_misuse_is_found(wrong: object, part: str) -> None:
    made = device(concurrency=2)
    started(made)
    with pytest.raises(DeviceMisuse, match=part):
        wrong(made)  # type: ignore[operator]


def evolve_resident(made: SimulatedDevice) -> Resident:
    resident = admitted(made, 1)
    resident.request = evolve(resident.request, max_new_tokens=1)
    return resident
