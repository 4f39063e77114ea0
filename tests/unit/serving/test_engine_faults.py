"""Faults that others have reported of engines with a queue of rounds, on a real model: each is a case here.

The same life of a request on a simulated device, in more disorder, is in ``tests/unit/scheduling``.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from serving_runs import run_all, tokens_of

from specdec.drafting.history import HistoryRing
from specdec.round.completion import Finish
from specdec.sampling.params import SamplingParams
from specdec.scheduling.policy import FixedWidth
from specdec.scheduling.scheduler import Scheduler
from specdec.serving.device import ModelDevice
from specdec.serving.engine import Engine
from specdec.serving.generate import Generator
from specdec.serving.grammar import Grammar
from specdec.serving.metrics import Metrics
from specdec.serving.model import LoadedModel
from specdec.serving.request import Emission, Request

GREEDY = SamplingParams(greedy=True)
#: The model's six tokens are the bytes from ``!`` on. Runs that change what is allowed at each token.
RUNS = Grammar(kind="regex", text='(!{3}"{3}#{2}[$%]{2})+')


def alone(model: LoadedModel, wanted: Request) -> tuple[list[int], Finish]:
    """A plain run of one request."""
    (emissions,) = run_all(Generator(model), [wanted]).values()
    return tokens_of(emissions), emissions[-1].finish


def test_b21_grammar_goes_on_after_preemption_with_drafts_of_its_new_state(prepared: Any) -> None:
    """Copies are proposed from what others wrote, pages run out between rounds, and requests come back with other copies: their
    grammar takes every token, and drafts that it refuses are rejections and no errors."""
    plain, model = prepared(drafts=None, grammar=True), prepared(concurrency=4, pages=4, grammar=True)
    wanted = [
        Request(
            prompt=[number % 5] * 40,
            max_new_tokens=50,
            sampling=GREEDY,
            stop_ids=(),
            grammar=RUNS if number % 3 else None,
        )
        for number in range(9)
    ]
    engine = Engine(model, reserved_output=4, prefixes=False, history_drafts=True)
    outputs = engine.generate(wanted)
    engine.close()
    figures = engine.metrics.snapshot()
    assert figures["requests"]["preemptions"] > 2 and figures["requests"]["finished"]["fault"] == 0
    constrained = [one["output"] for one in figures["by_request"] if one["request"] % 3]
    assert sum(one["accepted"] for one in constrained) > 50, "copies that are never right prove little"
    assert all(
        source.startswith("copied") for one in constrained for source in {row["source"] for row in one["drafts"]}
    )
    for output, one in zip(outputs, wanted, strict=True):
        assert (list(output.tokens), output.finish) == alone(plain, one)
        assert output.error is None


@pytest.mark.parametrize("copying", [False, True])
def test_b54_b56_completions_of_a_request_that_is_gone_are_dropped(prepared: Any, copying: bool) -> None:
    """Cancelled while a round with it is in flight, twice over; the slot's next request and the neighbour, whose lane moves up,
    are as if nothing had been there."""
    plain, model = prepared(drafts=None), prepared(concurrency=2)
    metrics, draw = Metrics(), random.Random(6)
    scheduler = Scheduler(
        ModelDevice(model, queued=True),
        FixedWidth(8),
        queue_depth=2,
        history=HistoryRing() if copying else None,
        metrics=metrics,
    )
    outputs: dict[int, list[int]] = {}
    asked: dict[int, Request] = {}
    ended: dict[int, Finish] = {}

    def submit(budget: int) -> int:
        wanted = Request(
            prompt=[draw.randrange(6) for _ in range(9)], max_new_tokens=budget, sampling=GREEDY, stop_ids=()
        )
        number = scheduler.submit(wanted)
        asked[number], outputs[number] = wanted, []
        return number

    def step() -> None:
        for event in scheduler.step():
            if isinstance(event, Emission):
                assert event.request not in ended
                outputs[event.request].extend(event.tokens)
                if event.finish:
                    ended[event.request] = event.finish

    for _ in range(2):
        doomed, stays = submit(60), submit(70)
        while not any(
            doomed in [one.number for one in flight.lanes] and len(outputs[doomed]) for flight in scheduler.flights
        ):
            step()
        told = len(outputs[doomed])
        follows = submit(20)
        assert scheduler.cancel(doomed)
        while stays not in ended or follows not in ended:
            step()
        assert (ended[doomed], len(outputs[doomed])) == (Finish.CANCELLED, told)
    for number, wanted in asked.items():
        expected, finish = alone(plain, wanted)
        assert outputs[number] == expected[: len(outputs[number])]
        assert ended[number] in (finish, Finish.CANCELLED)
    assert metrics.snapshot()["output"]["tokens"] == sum(map(len, outputs.values()))
    assert not scheduler.busy
    assert [pool.free for pool in model.pools] == [pool.pages for pool in model.pools]


def test_b57_each_request_has_its_own_draft_limit_up_to_the_last_position(prepared: Any) -> None:
    """Four limits in one batch run into the end of the context; nobody is offered more than it allows or has room for."""
    plain, model = prepared(drafts=None), prepared(concurrency=4)
    limits = (0, 2, 5, None)
    wanted = [
        Request(prompt=[number] * 30, max_new_tokens=500, sampling=GREEDY, stop_ids=(), draft_tokens=limit)
        for number, limit in enumerate(limits)
    ]
    for depth in (1, 2):
        engine = Engine(model, queue_depth=depth)
        streams = [engine.submit(one) for one in wanted]
        for stream, limit in zip(streams, limits, strict=True):
            offered, tokens, finish = [], [], Finish.NONE
            for event in stream:
                if isinstance(event, Emission):
                    room = model.capacities.context - 30 - len(tokens) - 1
                    offered.append(event.completion.offered)
                    assert event.completion.offered <= max(room, 0)
                    tokens.extend(event.tokens)
                    finish = event.finish
            assert max(offered) == (7 if limit is None else limit)
            assert (tokens, finish) == alone(plain, stream.request)
            assert (len(tokens), finish) == (model.capacities.context - 30, Finish.CONTEXT)
        engine.close()
