"""Random requests, options, cancellations and shared prefixes under page pressure: outputs stay exact, nothing leaks."""

from __future__ import annotations

import random
from time import monotonic
from typing import Any

import pytest
import torch
from attrs import frozen
from prefix_runs import Outcome, WatchedGenerator, assert_nothing_held, few_pages, prepare_model
from serving_runs import FEW_TOKENS, FEW_TOKENS_SEED
from small_checkpoint import write_small_checkpoint

from specdec.round.completion import Finish
from specdec.sampling.params import SamplingParams
from specdec.serving.model import LoadedModel
from specdec.serving.prefixes import prefix_cache
from specdec.serving.request import Emission, Request

CONTEXT = 224
STOP = 5


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    torch.set_num_threads(1)
    return write_small_checkpoint(
        tmp_path_factory.mktemp("soak") / "checkpoint", seed=FEW_TOKENS_SEED, geometry=FEW_TOKENS
    )


@pytest.fixture(scope="module")
def model(directory) -> LoadedModel:
    return prepare_model(
        directory, context=CONTEXT, concurrency=4, extended_sampling=True, max_draft_tokens=7, snapshot_bytes=1 << 23
    )


@pytest.fixture(scope="module")
def plain(directory) -> LoadedModel:
    """Decodes one token a round without drafter or prefix cache."""
    return prepare_model(
        directory,
        context=CONTEXT,
        concurrency=1,
        extended_sampling=True,
        speculative=False,
        max_draft_tokens=None,
        snapshot_bytes=0,
    )


class Requests:
    """Random requests of which many begin with what earlier ones consumed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.stems = [self.tokens(count) for count in (1, 3, 40, 63, 64, 65, 100, 130)]

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(6) for _ in range(count)]

    def sampling(self) -> SamplingParams:
        draw = self.random
        values: dict[str, Any] = {"greedy": draw.random() < 0.7, "seed": draw.randrange(2**63)}
        if not values["greedy"]:
            values.update(draw.choice([{}, {"temperature": 0.6}, {"top_k": 3, "top_p": 0.9}, {"min_p": 0.1}]))
        if draw.random() < 0.3:
            values.update(
                presence_penalty=draw.choice([0.0, 0.5]),
                frequency_penalty=draw.choice([0.0, 0.3, -0.2]),
                repetition_penalty=draw.choice([1.0, 1.2]),
                logit_bias=draw.choice([{}, {1: -2.0, 3: 1.0}]),
            )
        return SamplingParams(**values)

    def next(self) -> Request:
        draw = self.random
        stem = draw.choice(self.stems)
        stem = stem[: draw.choice([len(stem), len(stem), draw.randint(1, len(stem))])]
        budget = draw.choice([1, 2, 7, 20, 40, 60, 200])
        return Request(
            prompt=stem + self.tokens(draw.choice([0, 0, 1, 5, 20])),
            sampling=self.sampling(),
            max_new_tokens=budget,
            stop_ids=draw.choice([(), (), (STOP,), (0, STOP), None]),
            draft_tokens=draw.choice([None, None, None, 0, 2, 5]),
            min_new_tokens=draw.choice([0, 0, 0, min(budget, 6)]),
            ignore_eos=draw.random() < 0.2,
            logprobs=draw.choice([None, None, None, 0, 2]),
        )


@frozen(kw_only=True)
class Ended:
    """What became of one request at one width."""

    request: Request
    width: int
    tokens: list[int]
    finish: Finish

    def assert_equals(self, expected: Outcome) -> None:
        """A cancelled request has the beginning of the expected output, any other all of it."""
        if self.finish is Finish.CANCELLED:
            assert self.tokens == expected.tokens[: len(self.tokens)]
        else:
            assert (self.tokens, self.finish) == (expected.tokens, expected.finish)


class Soak:
    """One soak over several generators that share a prefix cache; requests come and go at random."""

    def __init__(self, model: LoadedModel, seed: int) -> None:
        self.model = model
        self.requests = Requests(seed)
        self.random = random.Random(seed + 1)
        self.rounds = 0
        self.finished: list[Ended] = []

    def run(self, generator: WatchedGenerator, rounds: int, deadline: float) -> None:
        """At least that many rounds, then to the end; fewer if time runs out."""
        until, asked, ended = self.rounds + rounds, {}, set()
        while True:
            if self.rounds < until and monotonic() < deadline:
                # load comes in waves: with few requests checkpoints gather, with many they have to go
                while len(asked) - len(ended) < 1 + self.rounds // 30 % 7:
                    wanted = self.requests.next()
                    asked[generator.submit(wanted)] = wanted
            elif len(asked) == len(ended):
                break
            for event in generator.step():
                generator.keep(event)
                if isinstance(event, Emission) and event.finish:
                    ended.add(event.request)
                if self.random.random() < 0.01:
                    generator.cancel(self.random.choice(sorted(asked)))
            self.rounds += 1
            for store in self.model.stores:
                # candidates and trash are nobody's state
                store.poison()
        for number, wanted in asked.items():
            outcome = generator.outcome(number)
            self.finished.append(
                Ended(request=wanted, width=generator.width, tokens=outcome.tokens, finish=outcome.finish)
            )
            self.check_records(wanted, outcome)

    def check_records(self, wanted: Request, outcome: Outcome) -> None:
        """The accounting identities of a request's records."""
        assert sum(record.emitted for record in outcome.records) == len(outcome.tokens) == outcome.records[-1].generated
        for record in outcome.records[1:] if outcome.tokens else ():
            if record.finish is Finish.CANCELLED:
                continue
            assert record.offered >= record.verified >= record.accepted >= record.emitted - 1 >= 0
            assert record.consumed == len(wanted.prompt) + record.generated - 1
            assert record.draft_rows == record.consumed - 1
        assert all(record.faults == 0 for record in outcome.records)


def soak(model: LoadedModel, plain: LoadedModel, *, seed: int, rounds: int, seconds: float, replays: int) -> Soak:
    """Runs ``rounds`` rounds at changing widths, then replays ``replays`` of the finished requests alone: greedy ones by plain
    decoding, sampled ones at their width."""
    found = Soak(model, seed)
    deadline = monotonic() + seconds
    reused = evicted = 0
    # room for checkpoints beside four requests; then not even room for four requests
    for pages, widths in ((26, (8, 4, 1)), (11, (6, 2))):
        with few_pages(model, pages), torch.inference_mode():
            cache = prefix_cache(model)
            for width in widths:
                generator = WatchedGenerator(model, width=width, prefix_cache=cache)
                found.run(generator, rounds // 5, deadline)
                assert all(not pool.owned(slot) for pool in model.pools for slot in range(model.capacities.slots))
            assert_nothing_held(generator)
        reused += cache.statistics.full_hits + cache.statistics.partial_hits
        evicted += cache.statistics.evicted
    assert reused > 10 and evicted > 100
    found.requests.random.shuffle(found.finished)
    for ended in found.finished[:replays]:
        # sampled output is a function of seed and width: the same drafts, without a cache and without neighbours
        greedy = ended.request.sampling.greedy
        generator = WatchedGenerator(plain) if greedy else WatchedGenerator(model, width=ended.width)
        ended.assert_equals(generator.outcomes([ended.request])[0])
    return found


def test_soak(model, plain) -> None:
    found = soak(model, plain, seed=1, rounds=600, seconds=25, replays=40)
    finishes = {ended.finish for ended in found.finished}
    assert finishes == {Finish.STOP, Finish.LENGTH, Finish.CONTEXT, Finish.CANCELLED}
    assert found.rounds > 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
def test_long_soak(model, plain, seed: int) -> None:
    found = soak(model, plain, seed=seed, rounds=3000, seconds=300, replays=400)
    assert found.rounds >= 3000
