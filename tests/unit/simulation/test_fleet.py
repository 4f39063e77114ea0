"""Whole simulations: every token arrives, the same luck for every policy, and waiting times as queueing theory has them."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

import pytest
from simulated_fleet import CATEGORY, WIDTHS, arrival, replica_maker, run

from specdec.errors import UsageError
from specdec.round.completion import Finish
from specdec.simulation.acceptance import Burst, Category, Copies, Luck
from specdec.simulation.costs import Band, CostModel
from specdec.simulation.fleet import Natures, Run, request_of, simulate
from specdec.simulation.summary import summarise
from specdec.simulation.workload import Arrival

POLICIES = ("plain", "fixed:1", "fixed:3", "fixed:4", "adaptive")


def stream(count: int, *, rate: float = 0.05, seed: int = 2, **more: int) -> list[Arrival]:
    random, clock, found = Random(seed), 0.0, []
    for index in range(count):
        clock += random.expovariate(rate)
        prompt, output = random.randint(1, 300), random.randint(1, 60)
        found.append(arrival(index, clock, prompt, output, **more))
    return found


def outputs(found: Run) -> list[tuple[int, ...]]:
    return [tuple(one.tokens) for one in found.outcomes]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_with_exactly_its_tokens(policy: str, depth: int) -> None:
    """Lengths from the arrivals, tokens from the luck, across policies, page pressure, prompt chunks and rounds in flight."""
    arrivals = stream(60, rate=0.5)
    pressure = {"concurrency": 5, "pages": 40, "page_tokens": 16, "context": 512, "reserved_output": 8}
    found = run(arrivals, policy, queue_depth=depth, prefill_tokens=64, **pressure)
    for one, outcome in zip(arrivals, found.outcomes, strict=True):
        luck = Luck(0, one.index)
        expected = [luck.token(position) for position in range(one.output_tokens - 1)]
        assert outcome.arrival is one and outcome.tokens == [*expected, 0]
        assert outcome.finish is Finish.STOP
        assert one.time < outcome.first <= outcome.end
    [replica] = found.replicas
    assert replica.device.free_pages == 40 and sorted(replica.scheduler.admission.free_slots) == list(range(5))
    assert replica.scheduler.admission.preemptions > 0
    counted = sum(counts.tokens for counts in replica.device.work.rounds.values())
    # first tokens come without a round
    assert counted == sum(one.output_tokens - 1 for one in arrivals)


def test_a_budget_ends_an_output_before_it_ends_itself() -> None:
    found = run([arrival(0, output=50, max_new_tokens=7), arrival(1, output=7, max_new_tokens=50)])
    assert [(len(one.tokens), one.finish) for one in found.outcomes] == [(7, Finish.LENGTH), (7, Finish.STOP)]


def test_a_request_may_forbid_its_drafts() -> None:
    found = run([arrival(0, draft_tokens=0, output=30)], "fixed:4")
    assert {width for _, width in found.replicas[0].device.work.rounds} == {1}


@pytest.mark.parametrize("policy", POLICIES)
def test_runs_repeat_exactly(policy: str) -> None:
    arrivals = stream(40)
    first, second = (run(arrivals, policy, queue_depth=2, replicas=2, dispatch="least-loaded") for _ in range(2))
    for one, other in zip(first.outcomes, second.outcomes, strict=True):
        assert (one.first, one.end, one.tokens, one.replica) == (other.first, other.end, other.tokens, other.replica)
    assert summarise("x", first) == summarise("x", second)


def test_luck_is_common_to_policies_rates_and_replicas() -> None:
    """How a request's tokens fall into rounds of one width depends on nothing but the request."""

    def pieces(found: Run) -> list[int]:
        return [one.rounds for one in found.outcomes]

    arrivals = stream(40)
    late = [arrival(one.index, 9 * one.time, one.prompt_tokens, one.output_tokens) for one in arrivals]
    base = pieces(run(arrivals, "fixed:3"))
    assert (
        base
        == pieces(run(late, "fixed:3", replicas=3))
        == pieces(run(arrivals, "fixed:3", concurrency=2, queue_depth=2))
    )
    assert base != pieces(run(arrivals, "fixed:3", seed=1))

    def correlation(left: list[int], right: list[int]) -> float:
        """Of tokens per round, so that the lengths that all runs share do not count."""
        a, b = ([one.output_tokens / n for one, n in zip(arrivals, rounds)] for rounds in (left, right))
        ma, mb = sum(a) / len(a), sum(b) / len(b)
        covariance = sum((x - ma) * (y - mb) for x, y in zip(a, b))
        return covariance / math.sqrt(sum((x - ma) ** 2 for x in a) * sum((y - mb) ** 2 for y in b))

    arrivals = [arrival(index, output=100) for index in range(60)]
    wide, narrow = (pieces(run(arrivals, policy)) for policy in ("fixed:4", "fixed:3"))
    assert correlation(wide, narrow) > 0.6
    # with luck of its own, the other policy's figures say nothing about the same request
    assert abs(correlation(wide, pieces(run(arrivals, "fixed:3", seed=1)))) < 0.5


def lindley(arrivals: list[Arrival], service: float) -> list[float]:
    """Waiting times of a queue with one server, one after another (Lindley 1952)."""
    waits, free = [], 0.0
    for one in arrivals:
        begin = max(one.time, free)
        waits.append(begin - one.time)
        free = begin + service
    return waits


def single_server(count: int, load: float, seed: int = 0) -> tuple[list[Arrival], Run]:
    """One slot, prompts of one chunk and outputs of one token: service always takes 1.0 s."""
    random, clock, arrivals = Random(seed), 0.0, []
    for index in range(count):
        clock += random.expovariate(load)
        arrivals.append(arrival(index, clock, prompt=1, output=1))
    return arrivals, run(arrivals, "fixed:1", CostModel(chunk=0.75, first=0.25), concurrency=1)


def test_one_server_waits_as_a_queue_does() -> None:
    arrivals, found = single_server(2000, 0.8)
    for wait, outcome in zip(lindley(arrivals, 1.0), found.outcomes, strict=True):
        assert outcome.time_to_first_token == pytest.approx(wait + 1.0, abs=1e-6)


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_mean_wait_is_that_of_deterministic_service(load: float) -> None:
    """M/D/1: mean wait ρ / (2 (1 − ρ)) services, none with probability 1 − ρ."""
    _, found = single_server(20_000, load)
    waits = [outcome.time_to_first_token - 1.0 for outcome in found.outcomes]
    mean, formula = sum(waits) / len(waits), load / (2 * (1 - load))
    assert mean == pytest.approx(formula, rel=0.06)
    # exponential service would wait twice as long
    assert abs(mean - 2 * formula) > 0.4 * formula
    assert sum(wait < 1e-9 for wait in waits) / len(waits) == pytest.approx(1 - load, abs=0.015)


def test_a_saturated_batch_has_the_throughput_of_its_curve() -> None:
    """Four lanes that never run dry: expected tokens of a lane's round by its survival, over the round's cost."""
    costs = CostModel(base=1.0, bands=(Band(rows=8, row=0.125), Band(fixed=0.5, row=0.0625)), draft=0.25)
    arrivals = [arrival(index, output=4000, prompt=1) for index in range(4)]
    for width, rows_cost in ((1, 4 * 0.125), (2, 8 * 0.125), (4, 0.5 + 16 * 0.0625)):
        found = run(arrivals, f"fixed:{width}", costs, category=Category(conditional=(0.8, 0.6)), context=4200)
        expected = 1 + sum([0.8, 0.8 * 0.6, 0.8 * 0.6 * 0.6][: width - 1])
        summary = summarise("x", found)
        assert summary.tokens_per_round == pytest.approx(expected, rel=0.02)
        # lanes end at slightly different rounds, so the very last rounds are not full
        seconds = 1.0 + rows_cost + 0.25 * (width - 1)
        assert summary.tokens_per_second == pytest.approx(4 * expected / seconds, rel=0.04)


def test_adaptive_lies_near_the_best_fixed_width() -> None:
    """With a cost step that makes wide rounds bad in a full batch and good in an empty one."""
    costs = CostModel(base=1.0, bands=(Band(rows=8, row=0.02), Band(fixed=3.0, row=0.02)), draft=0.05)
    for count, best in ((1, "fixed:4"), (4, "fixed:2")):
        arrivals = [arrival(index, output=1500, prompt=1) for index in range(count)]
        fixed = {f"fixed:{width}": summarise("x", run(arrivals, f"fixed:{width}", costs)).seconds for width in WIDTHS}
        assert min(fixed, key=fixed.__getitem__) == best
        # what it pays for learning is bounded by the controller's own tests
        assert summarise("x", run(arrivals, "adaptive", costs)).seconds < 1.05 * fixed[best]


def test_round_robin_and_least_loaded() -> None:
    """One long request and then short ones: taking turns sends some behind it, looking at the load does not."""
    arrivals = [arrival(0, 0.0, output=400), *(arrival(index, 10.0 * index, output=2) for index in range(1, 9))]
    turns = run(arrivals, "fixed:1", replicas=2, concurrency=1)
    assert [one.replica for one in turns.outcomes] == [0, 1] * 4 + [0]
    loads = run(arrivals, "fixed:1", replicas=2, concurrency=1, dispatch="least-loaded")
    assert [one.replica for one in loads.outcomes] == [0] + [1] * 8
    assert summarise("x", loads).time_to_first_token[95] < 0.1 * summarise("x", turns).time_to_first_token[95]


def test_load_counts_what_was_unfinished_when_a_request_came() -> None:
    """A step that ends after an arrival may already have finished a request; the dispatcher must not know that."""
    arrivals = [arrival(0, 0.0, output=1, prompt=1), arrival(1, 0.5, output=1, prompt=1)]
    found = run(arrivals, "fixed:1", CostModel(chunk=1.0), replicas=2, dispatch="least-loaded", concurrency=1)
    assert [one.replica for one in found.outcomes] == [0, 1]
    assert [one.end for one in found.outcomes] == pytest.approx([1.0, 1.5])


def test_replicas_share_the_work() -> None:
    arrivals = stream(80, rate=2.0)
    one, four = (summarise("x", run(arrivals, "fixed:3", replicas=n)) for n in (1, 4))
    assert one.tokens == four.tokens and four.seconds < 0.4 * one.seconds
    used = Counter(outcome.replica for outcome in run(arrivals, "fixed:3", replicas=4).outcomes)
    assert used == {0: 20, 1: 20, 2: 20, 3: 20}


def test_bursts_change_what_a_round_brings() -> None:
    arrivals = [arrival(index, output=400) for index in range(20)]
    calm = run(arrivals, "fixed:4", category=Category(conditional=(0.9,)))
    burst = Burst(tokens=20, share=0.5, conditional=(0.1,))
    rough = run(arrivals, "fixed:4", category=Category(conditional=(0.9,), burst=burst))
    assert outputs(calm) == outputs(rough)
    assert summarise("x", rough).tokens_per_round < 0.8 * summarise("x", calm).tokens_per_round


def test_copies_are_used_as_declared() -> None:
    """Copies of certain quality in place of drafts that are never right, and of no quality in place of good ones."""
    arrivals = [arrival(index, output=300) for index in range(10)]

    def tokens_per_round(rate: float, learned: float, copied: float) -> float:
        copies = Copies(rate=rate, long_share=0.5, long=(copied,), short=(copied,), most=3)
        category = Category(conditional=(learned,), copies=copies)
        found = run(arrivals, "fixed:4", category=category, copying=True, queue_depth=2, concurrency=3)
        assert all(len(one.tokens) == 300 for one in found.outcomes)
        return summarise("x", found).tokens_per_round

    # outputs end anywhere in a round, so the last one is short
    assert tokens_per_round(1.0, 0.0, 1.0) == pytest.approx(4.0, rel=0.02)
    assert tokens_per_round(1.0, 1.0, 0.0) == pytest.approx(1.0)
    assert tokens_per_round(0.0, 1.0, 0.0) == pytest.approx(4.0, rel=0.02)
    # one round in four finds a right copy: 1 + 3/4 tokens
    assert tokens_per_round(0.25, 0.0, 1.0) == pytest.approx(1.75, rel=0.05)


def test_copies_survive_preemption() -> None:
    arrivals = stream(40, rate=0.5)
    copies = Copies(rate=0.5, long_share=0.5, long=(1.0,), short=(1.0,))
    pressure = {"concurrency": 5, "pages": 40, "page_tokens": 16, "context": 512, "reserved_output": 8}
    category = Category(conditional=(0.0,), copies=copies)
    found = run(arrivals, "adaptive", category=category, copying=True, **pressure)
    [replica] = found.replicas
    assert replica.scheduler.admission.preemptions > 0
    assert [len(one.tokens) for one in found.outcomes] == [one.output_tokens for one in arrivals]
    # learned drafts are never right, so what was accepted was copied
    assert summarise("x", found).acceptance > 0.1


def test_two_rounds_in_flight_hide_the_host() -> None:
    arrivals = [arrival(0, output=300, prompt=1)]
    costs = CostModel(base=1.0, host=0.5)
    single, double = (summarise("x", run(arrivals, "fixed:1", costs, queue_depth=depth)) for depth in (1, 2))
    # one after another 1.5 s a round, with a round queued the device never waits
    assert single.seconds == pytest.approx(300 * 1.5, rel=0.01)
    assert double.seconds == pytest.approx(300 * 1.0, rel=0.01)


def test_numbers_out_of_range_are_refused() -> None:
    arrivals = [arrival(0)]
    natures = Natures(arrivals, {"only": CATEGORY}, 0)
    make = replica_maker(natures, "plain", CostModel(base=1.0))
    with pytest.raises(UsageError, match="replicas is 0"):
        simulate(arrivals, make, natures, replicas=0)
    with pytest.raises(UsageError, match="dispatch is 'random'"):
        simulate(arrivals, make, natures, dispatch="random")
    with pytest.raises(UsageError, match="fill the context"):
        run([arrival(0, prompt=64)], context=64)
    assert request_of(arrivals[0]).sampling.seed == 0
