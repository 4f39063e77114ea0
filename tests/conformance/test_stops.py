"""Stop strings through the generation loop: where outputs end, what a caller reads, what neighbours and prefixes notice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from prefix_runs import (
    GREEDY,
    SAMPLED,
    PrefixBench,
    WatchedGenerator,
    assert_equal_runs,
    assert_nothing_held,
    cache_of,
    cached,
    request,
    tokens,
)
from serving_runs import run_all, tokens_of
from stop_oracle import plain_cut

from specdec.errors import UsageError
from specdec.preparation import PreparationConfig
from specdec.recipes import recipe_book
from specdec.round.completion import Finish
from specdec.sampling.params import SamplingParams
from specdec.serving.generate import Generator
from specdec.serving.model import LoadedModel
from specdec.serving.request import Emission, Request

PROMPT = tokens(90, 60)
NEW = 24


def text_of(emissions: list[Emission]) -> str:
    """The pieces of one request's text joined."""
    return "".join(emission.text or "" for emission in emissions)


def assert_agreement(emissions: list[Emission]) -> None:
    """Every record counts what was handed out, and nothing was drafted."""
    generated = emissions[0].completion.generated - emissions[0].completion.emitted
    for emission in emissions:
        generated += len(emission.tokens)
        assert (emission.completion.generated, emission.completion.emitted) == (generated, len(emission.tokens))
        assert emission.completion.offered == 0 and len(emission.tokens) <= 1
        assert emission.logprobs is None or [one.token for one in emission.logprobs] == list(emission.tokens)
        assert emission.text is not None
    assert all(emission.finish is Finish.NONE for emission in emissions[:-1])


# --- the shipped checkpoint, real text -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shipped() -> LoadedModel:
    torch.set_num_threads(1)
    recipe = recipe_book().recipe("qwen3.8-flash")
    config = PreparationConfig.for_recipe(
        recipe, concurrency=4, context=128, extended_sampling=True, adaptive_verification=False
    )
    return LoadedModel.prepare(recipe, config, dtype="float64")


@pytest.mark.parametrize("law", ["greedy", "bytes"])
def test_b17_b18_output_is_the_plain_one_cut_at_the_stop(shipped: LoadedModel, law: str) -> None:
    """Strings of one to six characters of the plain output, from all over it: tokens, log-probabilities, text and usage end
    with the token that completes the string."""
    tokenizer, sampling = shipped.tokenizer, GREEDY
    if law == "bytes":
        # characters over several tokens, and bytes that form none
        favoured = dict.fromkeys(tokenizer.encode("é€"), 24.0)
        sampling = SamplingParams(seed=4, temperature=4.0, logit_bias=favoured)
    plain = Request(
        prompt=tokenizer.encode("class Reader:\n    def read(self, size):\n        "),
        sampling=sampling,
        max_new_tokens=40,
        stop_ids=(),
        logprobs=2,
    )
    (whole,) = run_all(Generator(shipped, width=1), [plain]).values()
    output, logprobs = tokens_of(whole), [one for emission in whole for one in emission.logprobs or ()]
    full = tokenizer.decode(output)
    assert law == "greedy" or {"é", "€", "\ufffd"} <= set(full)
    starts = range(0, len(full) - 1, 2)
    stops = [full[start : start + 1 + number % 6] for number, start in enumerate(starts)]
    found = run_all(Generator(shipped), [evolve(plain, stop=stop) for stop in stops])
    assert len(stops) >= 12 and len({len(tokens_of(found[number])) for number in found}) >= 6
    for number, stop in enumerate(stops):
        expected = plain_cut(tokenizer, output, [stop])
        assert tokens_of(found[number]) == output[: expected.kept]
        assert text_of(found[number]) == expected.text and full.startswith(expected.text)
        scores = [one.logprob for emission in found[number] for one in emission.logprobs or ()]
        assert scores == pytest.approx([one.logprob for one in logprobs[: expected.kept]], abs=1e-6)
        assert found[number][-1].finish is Finish.STOP
        assert found[number][-1].completion.generated == expected.kept
        assert_agreement(found[number])


# --- small random model --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> PrefixBench:
    return PrefixBench(tmp_path_factory.mktemp("stops") / "checkpoint")


@pytest.fixture(scope="module")
def plain(bench: PrefixBench) -> list[int]:
    """Greedy output after ``PROMPT``, one character a token."""
    output = bench.cold(request(PROMPT, new=NEW), 1).tokens
    assert len(bench.model(1).tokenizer.decode(output)) == len(output) == NEW
    return output


def stops_in(bench: PrefixBench, output: list[int], length: int) -> list[str]:
    """Every string of that many characters in the text, from the left."""
    text = bench.model(1).tokenizer.decode(output)
    return list(dict.fromkeys(text[start : start + length] for start in range(len(text) - length + 1)))


def test_neighbours_go_on_speculating_and_lanes_without_drafts_verify_nothing(bench, plain: list[int]) -> None:
    """Requests without stop strings have the records they have alone; when the others are alone, rounds are of width one."""
    model, width = bench.model(4), 5
    neighbours = [request(tokens(seed, 20 + seed), new=60) for seed in (1, 2)]
    alone = [bench.cold(neighbour, width) for neighbour in neighbours]
    assert sum(record.accepted for outcome in alone for record in outcome.records) > 10
    stop = stops_in(bench, plain, 3)[-1]
    generator = WatchedGenerator(model, width=width)
    stopping = [request(PROMPT, new=200, stop=("never", stop)), request(PROMPT, new=100, stop="never")]
    outcomes = generator.outcomes([stopping[0], *neighbours, stopping[1]])
    for found, expected in zip(outcomes[1:3], alone, strict=True):
        assert_equal_runs(found, expected)
    widths = [[record.verify_width for record in outcomes[number].records[1:]] for number in (0, 3)]
    last = max(len(outcome.records) for outcome in alone)
    assert widths[1] == [width] * (last - 1) + [1] * (100 - last)
    for number in (0, 3):
        assert_agreement(generator.events[number])
    assert outcomes[0].tokens == plain[: plain_cut(model.tokenizer, plain, [stop]).kept]
    # a request that wants no drafts needs no wide round either
    without = WatchedGenerator(model, width=width).outcomes([request(PROMPT, new=NEW, draft_tokens=0)])[0]
    assert without.tokens == plain and {record.verify_width for record in without.records} == {1}


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_rounds_are_those_of_plain_decoding_and_keep_the_draft_history(bench, sampling: SamplingParams) -> None:
    wanted = request(PROMPT, new=NEW, sampling=sampling)
    (found,) = WatchedGenerator(bench.model(1), width=5).outcomes([evolve(wanted, stop="never")])
    assert_equal_runs(found, bench.cold(wanted, 1))
    assert [record.draft_rows for record in found.records] == [record.consumed - 1 for record in found.records]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_b18_b19_prefix_after_a_stop_ends_at_the_last_consumed_token(bench, plain: list[int], length: int) -> None:
    """What shares the prefix equals a cold run, whether it goes on like the output, behind it or elsewhere."""
    model = bench.model(1)
    for stop in stops_in(bench, plain, length):
        expected = plain_cut(model.tokenizer, plain, [stop])
        generator = cached(model, width=4)
        number = generator.submit(request(PROMPT, new=NEW, stop=stop, logprobs=0))
        for event in generator.run():
            generator.keep(event)
        emissions = generator.events[number]
        assert (tokens_of(emissions), text_of(emissions)) == (plain[: expected.kept], expected.text)
        assert emissions[-1].finish is Finish.STOP
        assert_agreement(emissions)
        consumed = len(PROMPT) + expected.kept - 1
        assert max(entry.length for entry in cache_of(generator)) == consumed
        sequence = PROMPT + plain
        for follower in (sequence[:consumed], sequence[: consumed + 4], [*sequence[:consumed], 0, 1]):
            wanted = request(follower, new=20)
            (found,) = generator.outcomes([wanted])
            assert found.prefilled[0] >= consumed
            assert_equal_runs(found, bench.cold(wanted))
        assert_nothing_held(generator)


# --- ends --------------------------------------------------------------------------------------------------------------------


def ended(model: LoadedModel, **changes: Any) -> tuple[list[int], str, Finish]:
    """Tokens, text and finish of the request of these tests with changes."""
    (emissions,) = run_all(Generator(model, width=4), [request(PROMPT, **{"new": NEW, **changes})]).values()
    assert_agreement(emissions)
    return tokens_of(emissions), text_of(emissions), emissions[-1].finish


def test_what_is_held_back_comes_with_the_last_emission(bench, plain: list[int]) -> None:
    """The budget or a stop id ends the request while the beginning of a stop string is held back."""
    model = bench.model(1)
    text = model.tokenizer.decode(plain)
    assert ended(model, stop=text + "x") == (plain, text, Finish.LENGTH)
    assert ended(model, stop=text) == (plain, "", Finish.STOP)
    assert ended(model, stop=text[5:] + "x", new=9) == (plain[:9], text[:9], Finish.LENGTH)
    last = plain.index(plain[-1])
    by_id = Request(prompt=PROMPT, sampling=GREEDY, max_new_tokens=NEW, stop_ids=(plain[last],), stop=text)
    (emissions,) = run_all(Generator(model), [by_id]).values()
    assert (tokens_of(emissions), text_of(emissions)) == (plain[: last + 1], text[: last + 1])
    assert emissions[-1].finish is Finish.STOP


@pytest.mark.parametrize("minimum", [1, 5, 12, NEW])
def test_no_stop_string_before_the_minimum(bench, plain: list[int], minimum: int) -> None:
    model = bench.model(1)
    for stop in stops_in(bench, plain, 2):
        expected = plain_cut(model.tokenizer, plain, [stop], minimum)
        finish = Finish.STOP if expected.matched else Finish.LENGTH
        assert ended(model, stop=stop, min_new_tokens=minimum) == (plain[: expected.kept], expected.text, finish)


# --- resumed and cancelled ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(seed=8)])
def test_a_stop_string_across_the_point_of_resumption(bench, sampling: SamplingParams) -> None:
    """Cut after any emission: what is emitted then, text included, is what the uninterrupted run emitted."""
    model = bench.model(1)
    one = request(PROMPT, new=NEW, sampling=sampling)
    text = model.tokenizer.decode(bench.cold(one, 1).tokens)
    for stop in (text[9:13], text[:20], text[16:] + "x"):
        stopping = evolve(one, stop=stop)
        (whole,) = run_all(Generator(model), [stopping]).values()
        for cut in range(1, len(whole)):
            resumed = evolve(stopping, output=tuple(tokens_of(whole[:cut])))
            (found,) = run_all(Generator(model), [resumed]).values()
            assert [(e.tokens, e.text, e.finish) for e in found] == [(e.tokens, e.text, e.finish) for e in whole[cut:]]


def test_output_that_has_ended_is_not_resumed(bench, plain: list[int]) -> None:
    model = bench.model(1)
    generator, stop = Generator(model), model.tokenizer.decode(plain[3:6])
    ended_output = tuple(plain[: plain_cut(model.tokenizer, plain, [stop]).kept])
    with pytest.raises(UsageError, match=f"the {len(ended_output)} tokens in output already contains a stop string"):
        generator.submit(request(PROMPT, stop=("x", stop), output=ended_output))
    assert list(generator.run()) == []
    # before the minimum it ended nothing
    generator.submit(request(PROMPT, new=30, stop=stop, output=ended_output, min_new_tokens=len(ended_output) + 1))
    assert len(list(generator.run())) > 2


def test_cancelled_requests_release_what_they_held_back(bench, plain: list[int]) -> None:
    model = bench.model(1)
    text = model.tokenizer.decode(plain)
    generator = Generator(model)
    running = generator.submit(request(PROMPT, new=NEW, stop=text))
    waiting = generator.submit(request(PROMPT, new=NEW, stop=text))
    other = generator.submit(request(PROMPT, new=NEW))
    emissions: dict[int, list[Emission]] = {}
    for event in generator.run():
        if isinstance(event, Emission):
            emissions.setdefault(event.request, []).append(event)
            if event.request == running and event.completion.generated == 7 and not event.finish:
                assert all(generator.cancel(number) for number in (running, waiting, other))
    assert (tokens_of(emissions[running]), text_of(emissions[running])) == (plain[:7], text[:7])
    assert [emissions[number][-1].text for number in (running, waiting, other)] == [text[:7], "", None]
    assert {found[-1].finish for found in emissions.values()} == {Finish.CANCELLED}


def test_requests_without_stop_strings_have_no_text(bench) -> None:
    (emissions,) = run_all(Generator(bench.model(1)), [request(PROMPT, new=5)]).values()
    assert {emission.text for emission in emissions} == {None}
