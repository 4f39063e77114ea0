"""Soak of the engine on the shipped checkpoints: random requests from several threads under page pressure, each as if alone.

Requests have penalties, bias, minimum lengths, log-probabilities, grammars, stop strings and draft ceilings; some are cancelled.
Widths are adaptive, two rounds are in flight, prompts share prefixes, and drafts are copied where the recipe offers it. Every
greedy request that comes to its end equals a plain run of its own, in float64, token by token; sampled ones are valid and
counted. At the end nothing is held and the figures are those of what was delivered.
"""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import define, evolve, field, frozen
from heldout import FOLDER

from specdec.errors import UsageError
from specdec.preparation import PreparationConfig
from specdec.recipes import recipe_book
from specdec.round.completion import Finish
from specdec.sampling.params import SamplingParams
from specdec.serving.engine import Engine
from specdec.serving.generate import Generator
from specdec.serving.grammar import Grammar
from specdec.serving.model import LoadedModel
from specdec.serving.request import Emission, Request, TokenLogprobs
from specdec.state.pages import PagePool

RECIPES = ["qwen3.8-flash", "glm-5.3-flash", "deepseek-v4.1-flash"]
CONTEXT, CONCURRENCY, THREADS = 192, 4, 3
#: Pages of 64 tokens: requests of up to three compete with checkpoints, then also with each other.
PAGES = (9, 4)
GRAMMARS = [
    Grammar(kind="regex", text=r"[a-z_]{1,9}( = [0-9]{1,4})?"),
    Grammar(kind="regex", text=r"(yes|no|maybe)"),
    Grammar(kind="json"),
    Grammar(kind="json_schema", text=json.dumps({"type": "array", "items": {"type": "integer"}, "maxItems": 3})),
    Grammar(kind="ebnf", text='root ::= "(" root ")" | [a-z]'),
]


@pytest.fixture(scope="module", params=RECIPES)
def models(request: Any) -> tuple[LoadedModel, LoadedModel]:
    """The model under test, and one without a drafter that runs one request at a time."""
    torch.set_num_threads(1)
    recipe = recipe_book().recipe(request.param)

    def prepare(**options: Any) -> LoadedModel:
        config = PreparationConfig.for_recipe(
            recipe, context=CONTEXT, prefill_tokens=(48,), extended_sampling=True, grammar=True, **options
        )
        return LoadedModel.prepare(recipe, config, dtype="float64")

    return (
        prepare(concurrency=CONCURRENCY, snapshot_bytes=1 << 24),
        prepare(concurrency=1, speculative=False),
    )


# --- requests --------------------------------------------------------------------------------------------------------------


class Pool:
    """Distinct random requests, many of which begin alike. Stop strings are such as plain text has."""

    def __init__(self, model: LoadedModel, seed: int, count: int) -> None:
        self.draw = random.Random(seed)
        self.model = model
        texts = [path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.txt"))[:6]]
        self.stems = [tuple(model.tokenizer.encode(text)[:140]) for text in texts]
        self.requests = [self._request(number % 7) for number in range(count)]

    def _sampling(self, greedy: bool) -> SamplingParams:
        draw = self.draw
        values: dict[str, Any] = {"greedy": greedy, "seed": draw.randrange(2**63)}
        if not greedy:
            values.update(draw.choice([{}, {"temperature": 0.6}, {"top_k": 3, "top_p": 0.9}, {"min_p": 0.1}]))
        if draw.random() < 0.35:
            values.update(
                presence_penalty=draw.choice([0.0, 0.5]),
                frequency_penalty=draw.choice([0.0, 0.3, -0.2]),
                repetition_penalty=draw.choice([1.0, 1.2]),
                logit_bias=draw.choice([{}, {1: -2.0, 30: 1.5}, {40: -100.0}]),
            )
        return SamplingParams(**values)

    def _request(self, kind: int) -> Request:
        draw = self.draw
        stem = draw.choice(self.stems)
        length = draw.choice([1, 30, 40, 45, 50, 50, 63, 64, 65, draw.randint(1, 120)])
        budget = draw.choice([1, 3, 12, 20, 32, 45, 60])
        decided: dict[str, Any] = {}
        if kind == 1:
            decided = {"stop": draw.choice([("e",), ("\n",), ("self", "(x"), ("return ", "in", "zzz")])}
        elif kind == 3:
            decided = {"grammar": draw.choice(GRAMMARS)}
        return Request(
            prompt=stem[:length],
            sampling=self._sampling(greedy=kind < 6),
            max_new_tokens=budget,
            stop_ids=draw.choice([None, None, (), (self.model.tokenizer.encode("\n")[0],)]),
            draft_tokens=draw.choice([None, None, None, 0, 2]),
            min_new_tokens=draw.choice([0, 0, 0, min(budget, 4)]),
            ignore_eos=draw.random() < 0.1,
            logprobs=draw.choice([None, None, None, 0, 2]),
            **decided,
        )


@frozen(kw_only=True)
class Whole:
    """All of a plain run."""

    tokens: tuple[int, ...]
    text: str
    finish: Finish
    logprobs: tuple[TokenLogprobs, ...]


@define
class Solo:
    """Plain runs of single requests, each different one run once."""

    model: LoadedModel
    known: dict[Request, Whole] = field(factory=dict)

    def __call__(self, wanted: Request) -> Whole:
        if wanted not in self.known:
            generator = Generator(self.model)
            events = [event for event in generator.run([wanted]) if isinstance(event, Emission)]
            self.known[wanted] = Whole(
                tokens=tuple(token for event in events for token in event.tokens),
                text="".join(event.text or "" for event in events),
                finish=events[-1].finish,
                logprobs=tuple(one for event in events for one in event.logprobs or ()),
            )
        return self.known[wanted]


# --- a wave of them --------------------------------------------------------------------------------------------------------


@define(kw_only=True)
class Served:
    """What one request brought. patience: events after which it is cancelled, None for never."""

    request: Request
    patience: int | None
    number: int = -1
    tokens: list[int] = field(factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(factory=list)
    finish: Finish = Finish.NONE
    error: str | None = None


def serve(engine: Engine, one: Served) -> None:
    """Submits and consumes one request, as a caller's thread does."""
    stream = engine.submit(one.request)
    if one.patience == 0:
        stream.cancel()
    for count, event in enumerate(stream, start=1):
        if count == one.patience:
            stream.cancel()
        if isinstance(event, Emission):
            one.number = event.request
            one.tokens.extend(event.tokens)
            one.text += stream.piece(event)
            one.logprobs.extend(event.logprobs or ())
            one.finish, one.error = event.finish, event.error


def wave(engine: Engine, work: list[Served], concurrent: int) -> None:
    """Serves all of it from threads that keep so many requests each at a time."""
    failures: list[BaseException] = []

    def caller(share: list[Served]) -> None:
        try:
            for place in range(0, len(share), concurrent):
                helpers = [
                    threading.Thread(target=serve, args=(engine, one)) for one in share[place : place + concurrent]
                ]
                for helper in helpers:
                    helper.start()
                for helper in helpers:
                    helper.join()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=caller, args=(work[first::THREADS],)) for first in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


class Totals(Counter[str]):
    """What the waves came to, so that a soak which tests nothing is noticed."""


def soak(models: tuple[LoadedModel, LoadedModel], *, seed: int, count: int, distinct: int, waves: int) -> Totals:
    """Serves ``count`` requests in waves on engines of changing settings and checks all of what came out."""
    model, plain = models
    pool, solo, draw = Pool(model, seed, distinct), Solo(plain), random.Random(seed + 1)
    totals, original = Totals(), model.pools
    copies = model.recipe.supports_history_drafts
    for number in range(waves):
        work = [
            Served(
                request=draw.choice(pool.requests),
                patience=draw.choice([0, 1, 2, 3, 5]) if draw.random() < 0.25 else None,
            )
            for _ in range(count // waves)
        ]
        model.pools = tuple(PagePool(pages=PAGES[number % 2], page_tokens=one.page_tokens) for one in original)
        try:
            engine = Engine(
                model,
                history_drafts=copies and number % 4 < 2,
                prefixes=number % 4 != 3,
                reserved_output=draw.choice([1, 4]),
            )
            wave(engine, work, concurrent=draw.choice([2, 4]))
            with pytest.raises(UsageError, match="valid"):
                engine.submit(evolve(pool.requests[0], grammar=Grammar(kind="regex", text="(")))
            engine.close()
            check_nothing_held(engine)
        finally:
            model.pools = original
        check_metrics(engine, work, totals)
        for one in work:
            check(model, one, solo, totals)
    return totals


def check(model: LoadedModel, one: Served, solo: Callable[[Request], Whole], totals: Totals) -> None:
    """One request against its plain run."""
    wanted = one.request
    totals[one.finish.name] += 1
    if one.finish is Finish.FAULT:
        # grammars may come to a dead end before the minimum; alone they do so too
        assert wanted.grammar is not None and "min_new_tokens" in str(one.error), one
    if one.finish is not Finish.CANCELLED or one.tokens:
        assert len(one.tokens) <= wanted.max_new_tokens
    if wanted.logprobs is not None:
        assert [entry.token for entry in one.logprobs] == one.tokens
        assert all(len(entry.top) == wanted.logprobs for entry in one.logprobs)
    if not wanted.stop:
        assert one.text == model.tokenizer.decode(one.tokens)
    if not wanted.sampling.greedy:
        return
    expected = solo(wanted)
    if one.finish is Finish.CANCELLED:
        assert tuple(one.tokens) == expected.tokens[: len(one.tokens)]
        return
    assert (tuple(one.tokens), one.finish) == (expected.tokens, expected.finish), wanted
    totals["compared"] += 1
    for name in ("grammar", "stop", "extended"):
        totals[name] += bool(getattr(wanted, name))
    if wanted.stop:
        assert one.text == expected.text
    for found, alone in zip(one.logprobs, expected.logprobs, strict=True):
        assert found.logprob == pytest.approx(alone.logprob, abs=1e-9)


def check_metrics(engine: Engine, work: list[Served], totals: Totals) -> None:
    """Sums are what was delivered, in total and of each request."""
    figures = engine.metrics.snapshot()
    assert engine._failure is None
    assert figures["output"]["tokens"] == sum(len(one.tokens) for one in work)
    by_request = {one["request"]: one["output"]["tokens"] for one in figures["by_request"]}
    for one in work:
        # one that was cancelled before the worker saw it has no number
        assert by_request.get(one.number, 0) == len(one.tokens) or one.number not in by_request
    assert sum(figures["output"]["tokens_by_source"].values()) == figures["output"]["tokens"]
    assert figures["output"]["inconsistent_records"] == 0
    assert sum(figures["requests"]["finished"].values()) == len(work) == figures["requests"]["submitted"]
    for reason in (Finish.STOP, Finish.LENGTH, Finish.CONTEXT, Finish.CANCELLED, Finish.FAULT):
        assert figures["requests"]["finished"][reason.name.lower()] == sum(one.finish is reason for one in work)
    assert figures["queue"]["waiting"] == figures["queue"]["running"] == 0
    assert (
        sum(shape["tokens"] for shape in figures["rounds"]) + figures["output"]["tokens_by_source"]["first"]
        == (figures["output"]["tokens"])
    )
    totals["preemptions"] += figures["requests"]["preemptions"]
    totals["reused"] += figures["prefix"]["reused_tokens"]
    totals["evicted"] += figures["prefix"]["evicted"]
    totals["accepted"] += figures["output"]["accepted"]
    totals["copied"] += sum(n for name, n in figures["output"]["tokens_by_source"].items() if name.startswith("copied"))
    totals["widths"] |= sum(
        1 << shape["width"] for shape in figures["rounds"] if not totals["widths"] >> shape["width"] & 1
    )


def check_nothing_held(engine: Engine) -> None:
    """Slots, pages, tables, policies and rings of a closed engine are as they were."""
    model, scheduler = engine.model, engine._scheduler
    queue = scheduler.admission
    engine._device.prefixes.cache.clear()
    assert sorted(queue.free_slots) == list(range(model.config.concurrency))
    assert not (queue.residents or queue.waiting or scheduler.flights or queue._retiring or scheduler.busy)
    assert [pool.free for pool in model.pools] == [pool.pages for pool in model.pools]
    assert not getattr(scheduler.policy, "_requests", ())
    assert scheduler.history is None or not scheduler.history._responses
    table = model.arena.requests
    assert torch.equal(table.integers, table.integers[table.spare].expand_as(table.integers))
    assert not engine._streams and not engine._worker.is_alive()


def assert_worth_it(totals: Totals, model: LoadedModel) -> None:
    """What a soak is for took place."""
    assert totals["compared"] > 15 and totals["accepted"] > 50
    for name in ("STOP", "LENGTH", "CANCELLED", "grammar", "stop", "extended", "reused", "evicted"):
        assert totals[name] > 0, (name, totals)
    assert totals["widths"].bit_count() > 1
    assert not totals["copied"] or model.recipe.supports_history_drafts


def test_engine_soak(models: tuple[LoadedModel, LoadedModel]) -> None:
    totals = soak(models, seed=1, count=36, distinct=9, waves=4)
    assert_worth_it(totals, models[0])


@pytest.mark.slow
def test_long_engine_soak(models: tuple[LoadedModel, LoadedModel]) -> None:
    totals = soak(models, seed=2, count=1200, distinct=160, waves=24)
    assert totals["compared"] > 600 and totals["preemptions"] > 20
    assert (totals["copied"] > 100) is models[0].recipe.supports_history_drafts
    assert_worth_it(totals, models[0])
