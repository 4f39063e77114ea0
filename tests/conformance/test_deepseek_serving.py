"""Serving DeepSeek-V4.1-Flash: rounds with fewer rows than drafts, published forecasts, prefix checkpoints with one page pool.

The model draws forecasts of its own, so allocation is real; outputs are compared with plain decoding in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from deepseek_conformance import write_serving_checkpoint
from serving_runs import run_all, tokens_of

from specdec.control.acceptance import AcceptanceHistory
from specdec.preparation import PreparationConfig
from specdec.recipes import recipe_book
from specdec.round.allocated import AllocatedRound
from specdec.sampling.params import SamplingParams
from specdec.serving.generate import Generator
from specdec.serving.model import LoadedModel
from specdec.serving.prefixes import prefix_cache
from specdec.serving.request import Request

NEW_TOKENS = 40

Prepare = Callable[..., LoadedModel]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepare:
    torch.set_num_threads(1)
    directory = write_serving_checkpoint(tmp_path_factory.mktemp("serving"))
    recipe = recipe_book().recipe("deepseek-v4.1-flash")

    @cache
    def prepare(*, drafts: int | None = 7, capacity: int = 128, snapshots: int = 0) -> LoadedModel:
        config = PreparationConfig.for_recipe(
            recipe,
            concurrency=4,
            speculative=drafts is not None,
            max_draft_tokens=drafts,
            speculative_token_capacity=capacity,
            context=192,
            prefill_tokens=(48,),
            adaptive_verification=False,
            snapshot_bytes=snapshots,
        )
        return LoadedModel.prepare(recipe, config, directory=directory, dtype="float64")

    return prepare


def prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(4)
    return [tuple(torch.randint(0, 500, (length,), generator=generator).tolist()) for length in (7, 61, 1, 70, 20)]


def requests(**options: object) -> list[Request]:
    sampling = SamplingParams(greedy=True)
    return [
        Request(prompt=prompt, sampling=sampling, max_new_tokens=NEW_TOKENS, stop_ids=(), **options)  # type: ignore[arg-type]
        for prompt in prompts()
    ]


def outputs(model: LoadedModel, **options: object) -> list[list[int]]:
    emissions = run_all(Generator(model, **options), requests())  # type: ignore[arg-type]
    return [tokens_of(emissions[number]) for number in sorted(emissions)]


@pytest.mark.parametrize(("drafts", "capacity"), [(7, 128), (7, 8), (7, 13), (5, 128), (1, 4), (0, 128)])
def test_output_is_that_of_plain_decoding(prepared: Prepare, drafts: int, capacity: int) -> None:
    """Blocks of seven, five and one, rows for all drafts and for few of them, and draft windows without drafts."""
    assert outputs(prepared(drafts=drafts, capacity=capacity)) == outputs(prepared(drafts=None))


def test_a_shorter_preparation_has_a_shorter_block(prepared: Prepare) -> None:
    """A maximum of five prepares (5, 6) and (0, 1), not the block of seven with fewer drafts offered."""
    shapes = {captured.shape for captured in prepared(drafts=5).rounds.values()}  # type: ignore[attr-defined]
    assert {(shape.draft_tokens, shape.verify_width) for shape in shapes} == {(5, 6), (0, 1)}


def test_capacity_bounds_rows_not_batches(prepared: Prepare) -> None:
    model = prepared(capacity=13)
    found = {
        (batch, width): captured.shape.target_rows  # type: ignore[attr-defined]
        for (batch, width), captured in model.rounds.items()
    }
    assert found == {(1, 1): 1, (2, 1): 2, (4, 1): 4, (1, 8): 8, (2, 8): 13, (4, 8): 13}
    assert isinstance(model.rounds[4, 8], AllocatedRound)
    assert not isinstance(model.rounds[4, 1], AllocatedRound)


def test_forecasts_ride_with_emissions(prepared: Prepare) -> None:
    model = prepared(capacity=13)
    emissions = run_all(Generator(model), requests())
    verified = 0
    for events in emissions.values():
        for event in events:
            drafts = event.completion.verify_width - 1
            assert event.forecasts is not None and len(event.forecasts) == drafts
            assert all(0 < forecast < 1 for forecast in event.forecasts)
            verified = max(verified, event.completion.verified)
    assert verified > 3
    for model in (prepared(drafts=None),):
        plain = run_all(Generator(model), requests()[:1])
        assert all(event.forecasts is None for event in plain[0])


def test_historical_survival_learns_from_outcomes_and_not_from_forecasts(prepared: Prepare) -> None:
    """Two calibrations forecast differently; with rows for every draft they verify alike, and history is the same."""
    model = prepared()
    learned, forecasts = [], []
    scaled = [captured for captured in model.rounds.values() if isinstance(captured, AllocatedRound)]
    kept = [captured.temperatures for captured in scaled]
    try:
        for temperature in (1.0, 3.0):
            for captured in scaled:
                captured.temperatures = torch.full((7,), temperature)
            generator = Generator(model)
            emissions = run_all(generator, requests())
            assert generator.acceptance is not None
            learned.append(generator.acceptance.survival(7))
            forecasts.append([event.forecasts for events in emissions.values() for event in events])
    finally:
        for captured, temperatures in zip(scaled, kept, strict=True):
            captured.temperatures = temperatures
    assert forecasts[0] != forecasts[1]
    assert learned[0] == learned[1] != AcceptanceHistory(7).survival(7)


def test_rounds_with_few_rows_verify_less_than_was_offered(prepared: Prepare) -> None:
    emissions = run_all(Generator(prepared(capacity=8)), requests())
    done = [event.completion for events in emissions.values() for event in events]
    assert any(record.verified < record.offered for record in done)
    assert sum(record.accepted for record in done) > 10, "random drafts that are never right prove little"
    assert all(record.accepted <= record.verified <= record.offered for record in done)


def test_prefix_checkpoints_have_one_page_pool(prepared: Prepare) -> None:
    """Draft windows and token history travel with the snapshot; the drafter needs no pages. A second run of the same prompts
    continues from checkpoints and emits the same."""
    model = prepared(snapshots=1 << 22)
    assert len(model.pools) == 1 and model.page_lags == (0,)
    assert model.drafter is not None and not model.drafter.store.layout.paged
    cache = prefix_cache(model)
    first = outputs(model, prefix_cache=cache)
    assert first == outputs(prepared(drafts=None))
    assert cache.statistics.reused_tokens == 0
    assert outputs(model, prefix_cache=cache) == first
    assert cache.statistics.full_hits == len(prompts())


def test_checkpoints_inside_rounds_continue_other_requests(prepared: Prepare) -> None:
    """A round that crosses a page boundary leaves a checkpoint there; a request that goes on from it is not told apart."""
    model = prepared(snapshots=1 << 22)
    cache = prefix_cache(model)
    plain = outputs(prepared(drafts=None))
    assert outputs(model, prefix_cache=cache) == plain
    longer = [
        Request(
            prompt=(*prompt, *output[: 66 - len(prompt)]),
            sampling=SamplingParams(greedy=True),
            max_new_tokens=20,
            stop_ids=(),
        )
        for prompt, output in zip(prompts(), plain, strict=True)
        if 64 - NEW_TOKENS < len(prompt) < 64
    ]
    assert len(longer) == 1, "the prompt of 61 tokens crosses position 64 inside a round"
    cache.statistics.reused_tokens = 0
    found = run_all(Generator(model, prefix_cache=cache), longer)
    assert cache.statistics.reused_tokens >= 64
    expected = run_all(Generator(prepared(drafts=None)), longer)
    assert [tokens_of(found[number]) for number in found] == [tokens_of(expected[number]) for number in expected]
