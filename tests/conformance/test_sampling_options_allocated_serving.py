"""Every option of a request through the generation loop of DeepSeek-V4.1-Flash, whose rounds allocate what they verify.

One request at a time (Gumbel draws), and four with thirteen target rows. Expected values: the plain model at width one, and
prompt passes in float64 with the options applied in Python numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from deepseek_conformance import write_serving_checkpoint
from options_bench import logits_after
from options_oracle import LogitsOf, plain_greedy, plain_law, ranked_logprobs, shaped
from small_checkpoint import END_OF_TEXT
from stop_oracle import plain_cut

from specdec.preparation import PreparationConfig
from specdec.recipes import recipe_book
from specdec.round.completion import Finish
from specdec.sampling.params import SamplingParams
from specdec.serving.generate import Generator
from specdec.serving.model import LoadedModel
from specdec.serving.request import Emission, Progress, Request, TokenLogprobs
from specdec.testing.conformance.bench import Bench

RECIPE = "deepseek-v4.1-flash"
NEW = 24
#: Values that float32 holds exactly.
PENALTIES: dict[str, Any] = {
    "presence_penalty": 0.75,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": ((2, -1.5), (40, 6.0), (65, 5.0)),
}
#: Tokens that the drafter often draws stay likely.
MILD: dict[str, Any] = {
    "presence_penalty": -0.5,
    "frequency_penalty": 0.25,
    "repetition_penalty": 1.25,
    "logit_bias": ((2, -1.5), (3, 2.0)),
}
FILTERS: dict[str, Any] = {"temperature": 1.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1}
#: Requests at once and target rows of the widest batch.
SHAPES = {"one lane": (1, 8), "four lanes": (4, 13)}


@frozen(kw_only=True, eq=False)
class Models:
    """prepare: a model for so many requests, with so many target rows; None for plain decoding. logits_of: the oracle's."""

    prepare: Callable[[int, int | None], LoadedModel]
    logits_of: LogitsOf


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    torch.set_num_threads(1)
    directory = write_serving_checkpoint(tmp_path_factory.mktemp("options"))
    recipe = recipe_book().recipe(RECIPE)

    @cache
    def prepare(concurrency: int, rows: int | None) -> LoadedModel:
        config = PreparationConfig.for_recipe(
            recipe,
            concurrency=concurrency,
            speculative=rows is not None,
            max_draft_tokens=None if rows is None else 7,
            speculative_token_capacity=rows or 128,
            context=96,
            prefill_tokens=(48,),
            adaptive_verification=False,
            extended_sampling=True,
        )
        return LoadedModel.prepare(recipe, config, directory=directory, dtype="float64")

    reference = Bench.prepare(RECIPE, directory, slots=1, context=96)
    return Models(prepare=prepare, logits_of=logits_after(reference))


class Outcome:
    """What one request got."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.finish = Finish.NONE
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.emissions: list[Emission] = []

    def add(self, event: Progress | Emission) -> None:
        if isinstance(event, Progress):
            self.prompt_logprobs += event.logprobs or ()
            return
        self.emissions.append(event)
        self.tokens += event.tokens
        self.text += event.text or ""
        self.finish = event.finish
        self.logprobs += event.logprobs or ()

    @property
    def short(self) -> int:
        """Rounds that verified some of what was offered."""
        return sum(0 < event.completion.verified < event.completion.offered for event in self.emissions)


def run(model: LoadedModel, requests: Iterable[Request]) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    for event in Generator(model).run(requests):
        outcomes.setdefault(event.request, Outcome()).add(event)
    return [outcomes[number] for number in sorted(outcomes)]


def prompts(seed: int, lengths: Sequence[int] = (7, 21, 1, 12)) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(0, END_OF_TEXT, (length,), generator=generator).tolist()) for length in lengths]


def greedy_requests() -> list[Request]:
    """One for each option that the loop knows of, and combinations."""
    one, two, three, four = prompts(4)
    penalised = SamplingParams(greedy=True, **PENALTIES)
    # end of text is the favourite wherever it is not forbidden
    ending = SamplingParams(greedy=True, frequency_penalty=0.5, logit_bias={END_OF_TEXT: 12.0})
    return [
        Request(prompt=one, sampling=penalised, max_new_tokens=NEW, logprobs=3, prompt_logprobs=2),
        Request(prompt=two, sampling=ending, max_new_tokens=NEW, ignore_eos=True, logprobs=0),
        Request(prompt=three, sampling=ending, max_new_tokens=NEW, min_new_tokens=9),
        Request(prompt=four, sampling=penalised, max_new_tokens=NEW, prompt_logprobs=0),
        Request(prompt=one, sampling=SamplingParams(greedy=True), max_new_tokens=1),
        Request(prompt=two, sampling=penalised, max_new_tokens=NEW, min_new_tokens=3, stop_ids=(0, 1, 2, 3)),
    ]


def wanted_tokens(logits_of: LogitsOf, request: Request) -> list[int]:
    """The oracle's greedy output."""
    defaults = () if request.ignore_eos else (END_OF_TEXT,)
    sampling = request.sampling
    return plain_greedy(
        logits_of,
        request.prompt,
        request.max_new_tokens,
        stops=defaults if request.stop_ids is None else request.stop_ids,
        min_new_tokens=request.min_new_tokens,
        **{name: getattr(sampling, name) for name in PENALTIES},
    )


def check_scores(
    logits_of: LogitsOf, found: Sequence[TokenLogprobs], before: Sequence[int], tokens: Sequence[int], top: int
) -> None:
    """One score for each of ``tokens``, which follow ``before``: the target's own. Raises AssertionError."""
    assert [one.token for one in found] == list(tokens)
    for place, one in enumerate(found):
        wanted, ranking = ranked_logprobs(logits_of((*before, *tokens[:place])), tokens[place], top)
        assert one.logprob == pytest.approx(wanted, abs=2e-6)
        assert [token for token, _ in one.top] == [token for token, _ in ranking]
        assert [value for _, value in one.top] == pytest.approx([value for _, value in ranking], abs=2e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_requests_get_what_plain_decoding_gives(models: Models, shape: str) -> None:
    requests = greedy_requests()
    outcomes = run(models.prepare(*SHAPES[shape]), requests)
    plain = run(models.prepare(4, None), requests)
    for request, found, expected in zip(requests, outcomes, plain, strict=True):
        assert found.tokens == expected.tokens == wanted_tokens(models.logits_of, request)
        assert found.finish is expected.finish
        if request.logprobs is not None:
            check_scores(models.logits_of, found.logprobs, request.prompt, found.tokens, request.logprobs)
        if request.prompt_logprobs is not None:
            first, *rest = request.prompt
            check_scores(models.logits_of, found.prompt_logprobs, (first,), rest, request.prompt_logprobs)
    assert [found.finish for found in outcomes[1:3]] == [Finish.LENGTH, Finish.STOP]
    assert END_OF_TEXT in outcomes[1].tokens[:-1], "ignored, not forbidden"
    assert len(outcomes[2].tokens) == 10 and outcomes[2].tokens.index(END_OF_TEXT) == 9
    assert [len(found.tokens) for found in (outcomes[0], outcomes[4])] == [NEW, 1]
    assert sum(event.completion.accepted for found in outcomes for event in found.emissions) > 0
    if shape == "four lanes":
        assert sum(found.short for found in outcomes) > 5, "rows must be scarce"


@pytest.mark.parametrize("shape", SHAPES)
def test_stop_strings_cut_the_plain_output(models: Models, shape: str) -> None:
    """Beside requests that go on drafting; penalties count what was emitted, whatever the width of the round."""
    model, drafting = models.prepare(*SHAPES[shape]), greedy_requests()[:1] * 2
    sampling = SamplingParams(greedy=True, **PENALTIES)
    whole = Request(prompt=prompts(4)[3], sampling=sampling, max_new_tokens=NEW, stop_ids=())
    (plain,) = run(models.prepare(4, None), [whole])
    text = model.tokenizer.decode(plain.tokens)
    stops = [text[place : place + 2] for place in (3, len(text) // 2, len(text) - 3)]
    outcomes = run(model, [*drafting, *(evolve(whole, stop=(stop, "never there")) for stop in stops)])
    for stop, found in zip(stops, outcomes[2:], strict=True):
        expected = plain_cut(model.tokenizer, plain.tokens, [stop])
        assert expected.matched
        assert (found.tokens, found.text) == (plain.tokens[: expected.kept], expected.text)
        assert found.finish is Finish.STOP
        assert all(event.completion.offered == 0 for event in found.emissions)
    alone = run(models.prepare(4, None), drafting)
    assert [found.tokens for found in outcomes[:2]] == [found.tokens for found in alone]
    assert any(event.completion.offered for found in outcomes[:2] for event in found.emissions)


def sampled_requests(seed: int, **options: Any) -> list[Request]:
    """Four sampled requests with all filters and penalties."""
    return [
        Request(
            prompt=prompt,
            sampling=SamplingParams(seed=seed + number, **{**FILTERS, **MILD, **options}),
            max_new_tokens=30,
            stop_ids=(),
            logprobs=1,
        )
        for number, prompt in enumerate(prompts(9))
    ]


def outside(models: Models, requests: Sequence[Request], outcomes: Sequence[Outcome]) -> int:
    """Emitted tokens that filters and penalties leave no mass."""
    impossible = 0
    for request, found in zip(requests, outcomes, strict=True):
        for place, token in enumerate(found.tokens):
            output = found.tokens[:place]
            logits = shaped(models.logits_of((*request.prompt, *output)), request.prompt, output, **MILD)
            impossible += plain_law(logits, **FILTERS)[token] == 0
    return impossible


@pytest.mark.parametrize("shape", SHAPES)
def test_sampled_tokens_pass_the_filters_and_repeat_with_the_seed(models: Models, shape: str) -> None:
    model, requests = models.prepare(*SHAPES[shape]), sampled_requests(50)
    outcomes = run(model, requests)
    assert outside(models, requests, outcomes) == 0
    for request, found in zip(requests, outcomes, strict=True):
        check_scores(models.logits_of, found.logprobs, request.prompt, found.tokens, 1)
    texts = [found.tokens for found in outcomes]
    assert sum(event.completion.accepted for found in outcomes for event in found.emissions) > 0
    assert [found.tokens for found in run(model, requests)] == texts
    others = [found.tokens for found in run(model, sampled_requests(150))]
    assert all(one != other for one, other in zip(texts, others, strict=True))


@pytest.mark.parametrize("names", [FILTERS, MILD], ids=["filters", "penalties"])
def test_without_filters_or_penalties_other_tokens_are_emitted(models: Models, names: dict[str, Any]) -> None:
    """The control of the test above."""
    neutral = SamplingParams()
    changed = sampled_requests(50, **{name: getattr(neutral, name) for name in names})[:2]
    assert outside(models, changed, run(models.prepare(*SHAPES["four lanes"]), changed)) > 1


def test_neighbours_change_nothing_where_rows_suffice(models: Models) -> None:
    """With a row for every draft the text of a seed depends on the request alone, whatever is beside it in a batch of four."""
    model, requests = models.prepare(4, 32), sampled_requests(70)
    together = [found.tokens for found in run(model, requests)]
    beside = [evolve(request, prompt=prompt) for request, prompt in zip(sampled_requests(90), prompts(2), strict=True)]
    again = [found.tokens for found in run(model, [*beside[:2], requests[2], beside[3]])]
    assert again[2] == together[2] and again[0] != together[0]
