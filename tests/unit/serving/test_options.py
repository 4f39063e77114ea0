"""Sampling options through the generation loop: what is refused, which variant runs, what comes back, how requests resume."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch
from attrs import evolve
from options_oracle import LogitsOf, plain_greedy, ranked_logprobs
from serving_runs import run_all, tokens_of

from specdec.errors import UsageError
from specdec.round.completion import Finish
from specdec.round.transaction import ChainRound, FirstToken
from specdec.sampling.params import SamplingParams
from specdec.serving.generate import Generator
from specdec.serving.model import LoadedModel
from specdec.serving.request import Emission, Request
from specdec.serving.statistics import DraftStatistics

VOCAB, EOS = 6, 5
PROMPTS = [(1, 4, 2), (0, 3, 3, 5, 1), (2,), (4, 4, 1, 0, 2, 3, 5, 5, 0, 1, 2, 2, 3, 1, 4, 0, 2, 1, 1)]
OPTIONS: list[dict[str, Any]] = [
    {"frequency_penalty": 0.5, "repetition_penalty": 1.5},
    {},
    {"presence_penalty": 1.0, "logit_bias": {3: 1.5, EOS: 2.0}},
    {"logit_bias": {EOS: 100.0}},
]
MINIMUMS = [0, 0, 5, 8]
BUDGET = 12


@pytest.fixture(scope="module")
def logits_of(prepared: Any) -> LogitsOf:
    """Raw logits after a sequence, from a prompt pass of a model that never drafts."""
    model = prepared(drafts=None)
    target, rows = model.target, model.capacities.prefill_rows

    @cache
    def found(sequence: tuple[int, ...]) -> tuple[float, ...]:
        with torch.inference_mode():
            target.store.reset(0)
            target.store.set_pages(0, range(1, 1 + target.store.page_table.shape[1]))
            where = torch.tensor([0])
            for start in range(0, len(sequence), rows):
                target.prefill(torch.tensor(sequence[start : start + rows]), where, start)
            return tuple(target.first_logits(where)[0].tolist())

    return found


def request(number: int, *, greedy: bool = True, **changes: Any) -> Request:
    values: dict[str, Any] = {
        "prompt": PROMPTS[number],
        "sampling": SamplingParams(greedy=greedy, seed=number, **OPTIONS[number]),
        "max_new_tokens": BUDGET,
        "min_new_tokens": MINIMUMS[number],
        "stop_ids": (EOS,),
    }
    return Request(**{**values, **changes})


@pytest.fixture(scope="module")
def expected(logits_of: LogitsOf) -> list[list[int]]:
    outputs = [
        plain_greedy(logits_of, PROMPTS[n], BUDGET, stops=(EOS,), min_new_tokens=MINIMUMS[n], **OPTIONS[n])
        for n in range(4)
    ]
    assert len(outputs[3]) == 9 and outputs[3][-1] == EOS
    return outputs


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("concurrency", [1, 3, 4])
def test_a_batch_of_mixed_options(prepared: Any, expected: list[list[int]], concurrency: int, width: int) -> None:
    """More requests than slots: whoever had a slot before leaves no count, bias or minimum behind."""
    model = prepared(concurrency=concurrency, extended=True)
    order = [3, 0, 2, 1, 0, 3, 1, 2]
    found = run_all(Generator(model, width=width), [request(number) for number in order])
    assert [tokens_of(found[key]) for key in range(len(order))] == [expected[number] for number in order]
    finishes = {3: Finish.STOP}
    for key, number in enumerate(order):
        wanted = finishes.get(number, Finish.STOP if expected[number][-1] == EOS else Finish.LENGTH)
        assert found[key][-1].finish is wanted
    options = model.arena.requests.options
    assert not options.counts.any() and not options.prompt.any() and not options.bias.any()


def test_only_rounds_that_need_it_are_extended(prepared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, bool]] = []
    for kind in (ChainRound, FirstToken):
        run = kind.run

        def recording(self: Any, *, _run: Any = run, _kind: Any = kind, **variant: Any) -> None:
            seen.append((_kind.__name__, variant["extended"]))
            _run(self, **variant)

        monkeypatch.setattr(kind, "run", recording)
    model = prepared(concurrency=2, extended=True)
    run_all(Generator(model, width=3), [request(1)])
    assert seen and not any(extended for _, extended in seen)
    seen.clear()
    run_all(Generator(model, width=3), [request(1, stop_ids=()), request(0, max_new_tokens=3)])
    kinds = [extended for name, extended in seen if name == "ChainRound"]
    # while the short request runs, and not after it
    assert kinds[0] is True and kinds[-1] is False
    assert kinds == sorted(kinds, reverse=True)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"min_new_tokens": 2}, "^min_new_tokens: this model was prepared without"),
        ({"logprobs": 0}, "^logprobs: this model"),
        (
            {"sampling": SamplingParams(presence_penalty=1, logit_bias={1: 1})},
            "^presence_penalty, logit_bias: this model was prepared without such options; prepare it with extended_sampling=True",
        ),
    ],
)
def test_options_that_were_not_prepared(prepared: Any, changes: dict[str, Any], words: str) -> None:
    generator = Generator(prepared())
    with pytest.raises(UsageError, match=words) as raised:
        generator.submit(Request(prompt=(1,), **changes))
    assert "\n" not in str(raised.value)
    assert list(generator.run()) == []
    generator.submit(Request(prompt=(1,), max_new_tokens=1, ignore_eos=True, sampling=SamplingParams(min_p=0.1)))
    assert len(list(generator.run())) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sampling": SamplingParams(logit_bias={6: 1.0})}, "logit_bias token 6 is outside the vocabulary of 6"),
        ({"output": (1, 6)}, "output token 6 is outside the vocabulary"),
        (
            {"prompt": (1,) * 60, "output": (2,) * 40},
            "prompt and output have 60 [+] 40 tokens, which fill the context of 100",
        ),
    ],
)
def test_requests_that_do_not_fit(prepared: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Generator(prepared(extended=True)).submit(request(1, max_new_tokens=99, **changes))


USES: dict[str, dict[str, Any]] = {
    "temperature": {"sampling": SamplingParams(temperature=0.5)},
    "top_k": {"sampling": SamplingParams(top_k=3)},
    "top_p": {"sampling": SamplingParams(top_p=0.5)},
    "min_p": {"sampling": SamplingParams(min_p=0.5)},
    "greedy": {"sampling": SamplingParams(greedy=True)},
    "seed": {"sampling": SamplingParams(seed=4)},
    "presence_penalty": {"sampling": SamplingParams(presence_penalty=0.5)},
    "frequency_penalty": {"sampling": SamplingParams(frequency_penalty=0.5)},
    "repetition_penalty": {"sampling": SamplingParams(repetition_penalty=1.5)},
    "logit_bias": {"sampling": SamplingParams(logit_bias={2: 1.0})},
    "min_new_tokens": {"min_new_tokens": 1},
    "ignore_eos": {"ignore_eos": True},
    "logprobs": {"logprobs": 0},
    "prompt_logprobs": {"prompt_logprobs": 0},
    "stop": {"stop": "end"},
}


@pytest.mark.parametrize("name", USES)
def test_what_the_recipe_cannot_honour_is_refused_before_the_first_round(
    prepared: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model: LoadedModel = prepared(extended=True)
    monkeypatch.setattr(model, "recipe", evolve(model.recipe, unsupported_options=(name,)))
    generator = Generator(model)
    with pytest.raises(UsageError, match=f"recipe 'qwen3.8-flash' cannot honour {name}; leave it out"):
        generator.submit(Request(prompt=(1,), **USES[name]))
    assert list(generator.run()) == []
    for other, use in USES.items():
        if other != name:
            generator._device.check(Request(prompt=(1,), **use))


# --- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 4])
def test_ignored_end_of_text_does_not_end(prepared: Any, width: int) -> None:
    """The checkpoint's stop ids are let through, others of the request still end it."""
    model = prepared(extended=True)
    assert model.defaults.stop_ids == (EOS,)
    biased = SamplingParams(greedy=True, logit_bias={EOS: 100.0})
    common: dict[str, Any] = {"prompt": (1, 2), "max_new_tokens": 7, "sampling": biased}

    def outcome(**changes: Any) -> tuple[list[int], Finish]:
        (emissions,) = run_all(Generator(model, width=width), [Request(**{**common, **changes})]).values()
        return tokens_of(emissions), emissions[-1].finish

    assert outcome() == ([EOS], Finish.STOP)
    assert outcome(ignore_eos=True) == ([EOS] * 7, Finish.LENGTH)
    assert outcome(ignore_eos=True, stop_ids=(EOS,)) == ([EOS] * 7, Finish.LENGTH)
    # nothing is forbidden that would not have ended the request
    assert outcome(ignore_eos=True, min_new_tokens=4) == ([EOS] * 7, Finish.LENGTH)
    toggled = SamplingParams(greedy=True, logit_bias={EOS: 100.0, 3: 99.0}, frequency_penalty=2.0)
    assert outcome(ignore_eos=True, stop_ids=(EOS, 3), sampling=toggled)[1] is Finish.STOP
    assert len(outcome(min_new_tokens=4)[0]) == 5


# --- log-probabilities -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 5, 8])
@pytest.mark.parametrize("greedy", [True, False])
def test_logprobs_come_with_the_tokens_they_are_of(
    prepared: Any, logits_of: LogitsOf, width: int, greedy: bool
) -> None:
    model = prepared(concurrency=4, extended=True)
    counts: list[int | None] = [3, None, 0, 20]
    requests = [request(number, greedy=greedy, logprobs=count) for number, count in enumerate(counts)]
    found = run_all(Generator(model, width=width), requests)
    for number, count in enumerate(counts):
        if count is None:
            assert all(emission.logprobs is None for emission in found[number])
            continue
        place = 0
        for emission in found[number]:
            assert emission.logprobs is not None and len(emission.logprobs) == len(emission.tokens)
            for token, one in zip(emission.tokens, emission.logprobs, strict=True):
                raw = logits_of((*PROMPTS[number], *tokens_of(found[number])[:place]))
                chosen, top = ranked_logprobs(raw, token, count)
                assert one.token == token and one.logprob == pytest.approx(chosen, abs=2e-6)
                assert [t for t, _ in one.top] == [t for t, _ in top]
                assert [v for _, v in one.top] == pytest.approx([v for _, v in top], abs=2e-6)
                place += 1
        assert len(found[number][0].logprobs[0].top) == min(count, VOCAB)
    # other requests do not change them
    (alone,) = run_all(Generator(model, width=width), requests[:1]).values()
    assert [emission.logprobs for emission in alone] == [emission.logprobs for emission in found[0]]


def test_frames_are_read_only_for_those_who_ask(prepared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared(extended=True)
    monkeypatch.setattr(model.arena, "read_logprobs", lambda *_: pytest.fail("nobody asked"))
    run_all(Generator(model, width=4), [request(0)])


# --- resumed ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("greedy", [True, False])
def test_a_resumed_request_goes_on_where_it_was(prepared: Any, width: int, greedy: bool) -> None:
    """Cut after any emission: the rest of the output, its ends and its statistics are those of the uninterrupted run."""
    model = prepared(concurrency=2, extended=True)
    for number in (0, 2, 3):
        one = request(number, greedy=greedy, stop_ids=None)
        (whole,) = run_all(Generator(model, width=width), [one]).values()
        for cut in range(1, len(whole)):
            read = tokens_of(whole[:cut])
            resumed = evolve(one, output=tuple(read))
            found = run_all(Generator(model, width=width), [request(1), resumed])[1]
            assert [e.tokens for e in found] == [e.tokens for e in whole[cut:]]
            assert [e.completion.generated for e in found] == [e.completion.generated for e in whole[cut:]]
            assert [e.completion.consumed for e in found] == [e.completion.consumed for e in whole[cut:]]
            assert found[-1].finish is whole[-1].finish
            rest = DraftStatistics.of((emission.completion, True) for emission in found)
            assert rest.accepted == sum(e.completion.accepted for e in whole[cut:])


def test_stopping_and_resuming_after_every_emission(prepared: Any) -> None:
    """The caller goes away after each emission and comes back with what it has: sampled text, one request after another."""
    model = prepared(extended=True)
    one = request(0, greedy=False, stop_ids=(), max_new_tokens=30)
    (whole,) = run_all(Generator(model, width=4), [one]).values()
    output: list[int] = []
    for _ in itertools.count():
        generator = Generator(model, width=4)
        number = generator.submit(evolve(one, output=tuple(output)))
        emission = next(event for event in generator.run() if isinstance(event, Emission))
        output += emission.tokens
        if emission.finish:
            break
        generator.cancel(number)
    assert output == tokens_of(whole)
