"""What becomes a prefix checkpoint on the Qwen3.8 plugin, and what happens when there is no room for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from committed_state import assert_same_state
from prefix_runs import (
    GREEDY,
    SAMPLED,
    Crossings,
    PrefixBench,
    WatchedGenerator,
    assert_equal_runs,
    assert_nothing_held,
    cache_of,
    cached,
    few_pages,
    request,
    tokens,
)

from specdec.errors import CapacityError, UsageError
from specdec.round.completion import Finish
from specdec.sampling.params import SamplingParams
from specdec.serving.generate import Generator
from specdec.serving.prefixes import prefix_cache
from specdec.serving.request import Request
from specdec.snapshot_sizes import page_bytes, snapshot_bytes


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> PrefixBench:
    return PrefixBench(tmp_path_factory.mktemp("prefix") / "checkpoint")


# --- what is published ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accepted", range(8))
def test_b19_request_that_ends_inside_an_accepted_run_publishes_what_it_consumed(bench, accepted: int) -> None:
    """The stop token and accepted drafts behind it are no part of the prefix; what shares it equals a cold run."""
    prompt = tokens(90, 60)
    greedy = bench.cold(request(prompt, new=24)).tokens
    stop = next(token for token in greedy[1:] if token != greedy[0])
    stopping = greedy.index(stop)
    crossings = Crossings(bench.model(1), 1)
    scripted, own = crossings.generators(width=4)
    number = scripted.submit(Request(prompt=prompt, sampling=GREEDY, max_new_tokens=24, stop_ids=(stop,)))
    list(scripted.step())
    crossings.drafter.write({0: greedy[1 : accepted + 1]})
    while scripted._residents:
        for event in scripted.step():
            scripted.keep(event)
        crossings.drafter.write({0: greedy[len(scripted.outcome(number).tokens) + 1 :][:7]})
    assert scripted.outcome(number).tokens[-1:] == [stop]
    consumed = len(prompt) + stopping
    assert max(entry.length for entry in cache_of(own)) == consumed
    sequence = prompt + greedy
    for follower in (
        sequence[:consumed],
        sequence[: consumed + 1],
        sequence[: consumed + 6],
        [*sequence[:consumed], 0, 1],
    ):
        wanted = request(follower, new=30)
        found = own.outcomes([wanted])[0]
        assert found.prefilled[0] >= consumed
        assert_equal_runs(found, bench.cold(wanted))
    assert_nothing_held(own)


class _Interrupted:
    """A round that reaches the device and then is cut off before anybody reads its records."""

    def __init__(self, inner: Any, between: Callable[[], None]) -> None:
        self.inner, self.between = inner, between

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def submit(self, *arguments: Any, **options: Any) -> None:
        self.inner.submit(*arguments, **options)
        self.between()


# the first round of eight rejects its first draft (asserted)
IN_FLIGHT_SEED = 109


@pytest.mark.parametrize("outcome", ["cancelled", "interrupted"])
def test_b47_rounds_in_flight_publish_nothing(bench, monkeypatch: pytest.MonkeyPatch, outcome: str) -> None:
    """B starts with A's prefix while A's round, which crosses a boundary, is on the device; A is cancelled."""
    model = bench.model(1)
    prompt = tokens(IN_FLIGHT_SEED, 62)
    greedy = bench.cold(request(prompt, new=30)).tokens
    generator = cached(model, width=8)
    first = generator.submit(request(prompt, new=30))
    list(generator.step())
    list(generator.step())
    # one token behind what is published, so that whatever the next round emits crosses the boundary
    assert generator._residents[0].consumed == 63
    acknowledged = {entry.length for entry in cache_of(generator)}
    assert acknowledged == {62}

    def between() -> None:
        assert {entry.length for entry in cache_of(generator)} == acknowledged
        if outcome == "interrupted":
            raise KeyboardInterrupt
        assert generator.cancel(first)

    with monkeypatch.context() as patch:
        patch.setitem(model.rounds, (1, 8), _Interrupted(model.rounds[1, 8], between))
        if outcome == "interrupted":
            with pytest.raises(KeyboardInterrupt):
                list(generator.step())
            assert generator.cancel(first)
        else:
            list(generator.step())
    assert {entry.length for entry in cache_of(generator)} == acknowledged
    assert not generator.cancel(first)
    for event in generator.run():
        generator.keep(event)
    assert generator.outcome(first).records[-1].finish is Finish.CANCELLED
    for follower in (prompt + greedy[:1], prompt + greedy[:4], prompt):
        wanted = request(follower, new=30)
        assert_equal_runs(generator.outcomes([wanted])[0], bench.cold(wanted, 8))
    assert_nothing_held(generator)


def test_lost_records_publish_nothing(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round whose records were lost ran on the device: the host no longer knows which tokens the state stands for."""
    model = bench.model(1)
    generator = cached(model, width=4)
    prompt = tokens(101, 50)
    generator.submit(request(prompt, new=40))
    list(generator.step())
    before = {entry.length for entry in cache_of(generator)}
    read = model.arena.read_frame
    with monkeypatch.context() as patch:
        patch.setattr(model.arena, "read_frame", lambda frame, slots: read(1 - frame, slots))
        list(generator.step())
    list(generator.run())
    assert {entry.length for entry in cache_of(generator)} == before
    wanted = request(prompt, new=40)
    assert_equal_runs(generator.outcomes([wanted])[0], bench.cold(wanted))
    assert_nothing_held(generator)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_cancelled_request_resumes_from_its_checkpoint(bench, sampling: SamplingParams) -> None:
    """Whatever the number of rounds before, the continuation is the one that nothing had interrupted."""
    prompt = tokens(110, 40)
    whole = bench.cold(request(prompt, new=60, sampling=sampling))
    for rounds in (1, 2, 9, 20):
        generator = cached(bench.model(1), width=4)
        number = generator.submit(request(prompt, new=60, sampling=sampling))
        for _ in range(rounds):
            for event in generator.step():
                generator.keep(event)
        done = generator.outcome(number).tokens
        assert generator.cancel(number)
        for event in generator.run():
            generator.keep(event)
        cut = generator.outcome(number)
        assert cut.finish is Finish.CANCELLED and cut.tokens == done == whole.tokens[: len(done)]
        assert cut.records[-1].consumed == len(prompt) + len(done) - 1
        assert (cut.records[-1].emitted, cut.records[-1].generated) == (0, len(done))
        rest = generator.outcomes([request(prompt, new=60, sampling=sampling, output=done)])[0]
        assert done + rest.tokens == whole.tokens
        assert rest.prefilled == [len(prompt) + len(done) - 1]
        assert rest.records == whole.records[-len(rest.records) :]
        assert_same_state(rest.state, whole.state)
        assert_nothing_held(generator)


def test_cancellation_of_waiting_unknown_and_half_consumed_requests(bench) -> None:
    generator = cached(bench.model(1), width=4)
    prompt = tokens(120, 200)
    numbers = [generator.submit(request(prompt, new=8)), *(generator.submit(request([1], new=8)) for _ in range(2))]
    assert generator.cancel(numbers[1])
    assert not generator.cancel(numbers[1]) and not generator.cancel(99)
    steps = generator.step()
    for event in steps:
        generator.keep(event)
        if event.request == numbers[0] and event.consumed == 112:
            assert generator.cancel(numbers[0])
    for event in generator.run():
        generator.keep(event)
    finishes = [generator.outcome(number).finish for number in numbers]
    assert finishes == [Finish.CANCELLED, Finish.CANCELLED, Finish.LENGTH]
    assert generator.outcome(numbers[0]).prefilled == [48, 64, 112]
    # the boundary that was passed stays; the end of the prompt was never reached
    assert {64} <= {entry.length for entry in cache_of(generator)} <= {64, 1, 8}
    wanted = request(prompt, new=8)
    found = generator.outcomes([wanted])[0]
    assert found.prefilled[0] == 64
    assert_equal_runs(found, bench.cold(wanted))
    assert_nothing_held(generator)


def test_abandoned_prompt_goes_on_where_it_was(bench) -> None:
    generator = cached(bench.model(1), width=4)
    wanted = request(tokens(121, 150), new=8)
    number = generator.submit(wanted)
    steps = generator.step()
    assert [next(steps).consumed for _ in range(3)] == [48, 64, 112]
    steps.close()
    for event in generator.run():
        generator.keep(event)
    assert generator.outcome(number).prefilled == [128, 150]
    assert_equal_runs(generator.outcome(number), bench.cold(wanted))
    assert_nothing_held(generator)


def test_generator_that_was_left_with_running_requests_holds_nothing_up(bench) -> None:
    """Its slots are given to others together with their pages."""
    model = bench.model(1)
    left = cached(model, width=4)
    left.submit(request(tokens(150, 100), new=60))
    list(left.step())
    held = [pool.owned(0) for pool in model.pools]
    assert all(held)
    generator = WatchedGenerator(model, width=4, prefix_cache=cache_of(left))
    wanted = request(tokens(151, 30), new=20)
    assert_equal_runs(generator.outcomes([wanted])[0], bench.cold(wanted))
    assert_nothing_held(generator)


def test_failure_while_a_checkpoint_is_restored_leaves_no_pages_behind(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bench.model(1)
    generator = cached(model, width=4)
    prompt = tokens(152, 70)
    generator.outcomes([request(prompt, new=1)])
    free = [pool.free for pool in model.pools]

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model.drafter, "restore", fail)
        generator.submit(request(prompt, new=1))
        with pytest.raises(KeyboardInterrupt):
            list(generator.step())
    assert [pool.free for pool in model.pools] == free
    for event in generator.run():
        generator.keep(event)
    assert generator.outcome(1).prefilled == [70]
    assert_nothing_held(generator)


# --- room ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoints", [1, 2, 5])
def test_eviction_under_a_byte_budget(bench, checkpoints: int) -> None:
    """A budget of a few checkpoints: entries come and go under requests that continue from them."""
    model = bench.model(4)
    # the longest prompt and output end in their third page
    each = sum(snapshot_bytes(store.layout) + 3 * page_bytes(store.layout) for store in model.stores)
    generator = cached(model, width=4, budget=checkpoints * each)
    stem = tokens(130, 64)
    prompts = [stem + tokens(131 + number, 1 + 7 * (number % 9)) for number in range(10)]
    for order in (prompts, prompts[::-1]):
        for prompt, found in zip(order, generator.outcomes([request(p, new=20) for p in order]), strict=True):
            assert_equal_runs(found, bench.cold(request(prompt, new=20)))
            assert cache_of(generator).nbytes <= checkpoints * each
    assert cache_of(generator).statistics.evicted > 10
    assert_nothing_held(generator)


def test_page_pressure_makes_requests_wait_and_checkpoints_go(bench) -> None:
    """Pages for two and a half requests and a cache that would fill everything: all finish, all equal, nothing leaks."""
    model = bench.model(4)
    with few_pages(model, 8):
        generator = cached(model, width=4)
        stem = tokens(140, 66)
        prompts = [stem + tokens(141 + number, 10 * (number % 4) + 1) for number in range(9)]
        for _ in range(2):
            for prompt, found in zip(prompts, generator.outcomes([request(p, new=50) for p in prompts]), strict=True):
                assert_equal_runs(found, bench.cold(request(prompt, new=50)))
        statistics = cache_of(generator).statistics
        assert statistics.evicted > 0 and statistics.reused_tokens > 0
        assert_nothing_held(generator)


def test_request_that_no_page_pressure_relief_could_serve_is_refused(bench) -> None:
    model = bench.model(4)
    with few_pages(model, 4):
        generator = cached(model)
        with pytest.raises(CapacityError, match="the request needs 5 pages of 64 tokens; there are 4 in all"):
            generator.submit(request(tokens(1, 200), new=64))
        assert generator.submit(request(tokens(1, 180), new=64)) == 0
        assert generator.cancel(0)


def test_cache_of_another_model_is_refused(bench) -> None:
    with pytest.raises(UsageError, match="the prefix cache was made for another model"):
        Generator(bench.model(1), prefix_cache=prefix_cache(bench.model(4)))
