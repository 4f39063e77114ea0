"""The generation loop: lanes come and go, ceilings, ends, late records, callers that stop half way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from serving_runs import run_all, tokens_of

from specdec.errors import UsageError
from specdec.round.completion import METADATA_FIELDS, Field, Finish
from specdec.sampling.params import SamplingParams
from specdec.serving.generate import Generator
from specdec.serving.model import LoadedModel
from specdec.serving.request import Emission, Progress, Request
from specdec.serving.statistics import DraftStatistics

CONTEXT = 100
GREEDY = SamplingParams(greedy=True)
LENGTHS = (1, 5, 17, 40, 3, 64, 33)  # the prefill capacity is 16
BUDGETS = (14, 1, 9, 20, 2, 12, 17)


def request(number: int, **changes: Any) -> Request:
    """Request ``number`` of a fixed set: prompts, budgets and stop ids of many kinds, greedy."""
    generator = torch.Generator().manual_seed(number)
    values: dict[str, Any] = {
        "prompt": torch.randint(0, 6, (LENGTHS[number],), generator=generator).tolist(),
        "max_new_tokens": BUDGETS[number],
        "stop_ids": None if number % 3 == 2 else (),
        "sampling": GREEDY,
    }
    return Request(**{**values, **changes})


@pytest.fixture(scope="module")
def alone(prepared: Any) -> list[tuple[list[int], Finish]]:
    """Output and finish of each request run alone by plain decoding without a drafter."""
    results = []
    for number in range(len(LENGTHS)):
        (emissions,) = run_all(Generator(prepared(drafts=None)), [request(number)]).values()
        results.append((tokens_of(emissions), emissions[-1].finish))
    assert {finish for _, finish in results} == {Finish.STOP, Finish.LENGTH}
    return results


def assert_nothing_leaked(generator: Generator) -> None:
    """Every slot and page is free and the request table is as it was before the first request."""
    model = generator.model
    assert sorted(generator._free_slots) == list(range(model.config.concurrency))
    assert [pool.free for pool in model.pools] == [model.capacities.pages] * len(model.pools)
    table = model.arena.requests
    assert torch.equal(table.integers, table.integers[table.spare].expand_as(table.integers))


@pytest.mark.parametrize(
    ("concurrency", "width"), [(1, 8), (2, 1), (2, 3), (3, 8), (3, 2), (4, 1), (4, 2), (4, 5), (4, 8)]
)
def test_more_requests_than_slots(prepared: Any, alone: Any, concurrency: int, width: int) -> None:
    generator = Generator(prepared(concurrency=concurrency), width=width)
    running: set[int] = set()
    most, emissions = 0, {}
    for event in generator.run([request(number) for number in range(len(LENGTHS))]):
        running.add(event.request)
        most = max(most, len(running))
        if isinstance(event, Emission):
            emissions.setdefault(event.request, []).append(event)
            if event.finish:
                running.remove(event.request)
    assert most == concurrency
    for number, (expected, finish) in enumerate(alone):
        assert tokens_of(emissions[number]) == expected
        assert emissions[number][-1].finish is finish
        assert all(emission.finish is Finish.NONE for emission in emissions[number][:-1])
    assert_nothing_leaked(generator)


def test_drafts_are_accepted_in_these_tests(prepared: Any) -> None:
    """Otherwise equality with plain decoding would say little."""
    found = run_all(Generator(prepared(concurrency=4), width=5), [request(number) for number in range(len(LENGTHS))])
    accepted = [emission.completion.accepted for emissions in found.values() for emission in emissions]
    assert {0, 1, 2} <= set(accepted)


def test_second_run_and_second_generator_on_the_same_model(prepared: Any, alone: Any) -> None:
    model = prepared(concurrency=2)
    for width in (4, 1):
        generator = Generator(model, width=width)
        for _ in range(2):
            found = run_all(generator, [request(number) for number in (3, 1, 2)])
            outputs = [tokens_of(found[key]) for key in sorted(found)]
            assert outputs == [alone[number][0] for number in (3, 1, 2)]
            assert_nothing_leaked(generator)
    assert list(Generator(model).run()) == list(Generator(model).run([])) == []


def test_requests_submitted_while_others_run(prepared: Any, alone: Any) -> None:
    generator = Generator(prepared(concurrency=2), width=4)
    assert generator.submit(request(0)) == 0
    later, found = [1, 2, 3], {}
    for event in generator.run():
        if isinstance(event, Emission):
            found.setdefault(event.request, []).append(event)
            if later:
                generator.submit(request(later.pop(0)))
    assert [tokens_of(found[number]) for number in range(4)] == [alone[number][0] for number in range(4)]


@pytest.mark.parametrize("sampling", [{"seed": 5}, {"seed": 6, "top_k": 4, "top_p": 0.9}])
def test_sampled_output_does_not_depend_on_neighbours(prepared: Any, sampling: dict[str, Any]) -> None:
    """Same seed and width: the same tokens alone and among other requests."""
    requests = [request(n, sampling=SamplingParams(**{**sampling, "seed": n}), stop_ids=()) for n in range(5)]
    together = run_all(Generator(prepared(concurrency=4), width=4), requests)
    for number, one in enumerate(requests):
        (single,) = run_all(Generator(prepared(), width=4), [one]).values()
        assert tokens_of(single) == tokens_of(together[number])


def test_slots_are_padded_but_concurrency_is_what_was_asked_for(prepared: Any) -> None:
    model = prepared(concurrency=3)
    assert model.capacities.slots == 4
    generator = Generator(model, width=1)
    for number in range(4):
        generator.submit(request(number))
    first = [event for event in generator.step() if isinstance(event, Emission)]
    assert {event.request for event in first} == {0, 1, 2}


# --- draft ceilings and budgets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ceiling", [0, 1, 3, 7, 50])
def test_request_ceiling_below_and_above_the_width(prepared: Any, alone: Any, ceiling: int) -> None:
    width = 6
    generator = Generator(prepared(concurrency=2), width=width)
    found = run_all(generator, [request(3, draft_tokens=ceiling), request(6)])
    assert [tokens_of(found[0]), tokens_of(found[1])] == [alone[3][0], alone[6][0]]
    assert max(emission.completion.offered for emission in found[0]) == min(ceiling, width - 1)
    assert max(emission.completion.offered for emission in found[1]) == width - 1


def test_offered_counts_only_drafts_that_the_budget_can_still_emit(prepared: Any) -> None:
    for number in range(len(LENGTHS)):
        emissions = run_all(Generator(prepared(), width=8), [request(number)])[0]
        generated = emissions[0].completion.emitted
        for emission in emissions[1:]:
            completion = emission.completion
            assert completion.offered == min(7, BUDGETS[number] - generated - 1)
            assert completion.offered >= completion.verified >= completion.accepted >= completion.emitted - 1
            generated += completion.emitted
            assert completion.generated == generated


# --- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 4, 8])
def test_context_ends_a_request(prepared: Any, width: int) -> None:
    plenty = {"max_new_tokens": 1000, "stop_ids": ()}
    model = prepared(concurrency=2)
    for room in (1, 2, 7):
        prompt = [3, 1, 4] * 40
        found = run_all(Generator(model, width=width), [request(3, prompt=prompt[: CONTEXT - room], **plenty)])[0]
        assert found[-1].finish is Finish.CONTEXT
        assert len(tokens_of(found)) == room
        # exactly as many tokens as the context has room for is what was asked for, not a cut
        found = run_all(
            Generator(model, width=width),
            [request(3, prompt=prompt[: CONTEXT - room], max_new_tokens=room, stop_ids=())],
        )[0]
        assert found[-1].finish is Finish.LENGTH
        assert len(tokens_of(found)) == room


def test_one_token_needs_no_round(prepared: Any, alone: Any) -> None:
    emissions = run_all(Generator(prepared(), width=8), [request(3, max_new_tokens=1)])[0]
    assert [emission.tokens for emission in emissions] == [(alone[3][0][0],)]
    assert emissions[0].finish is Finish.LENGTH


def test_stop_id_as_first_token(prepared: Any, alone: Any) -> None:
    first = alone[3][0][0]
    generator = Generator(prepared(), width=8)
    emissions = run_all(generator, [request(3, stop_ids=((first + 1) % 6, first))])[0]
    assert [emission.tokens for emission in emissions] == [(first,)]
    assert emissions[0].finish is Finish.STOP
    assert_nothing_leaked(generator)


def test_checkpoint_stop_ids_hold_unless_the_request_has_its_own(prepared: Any, alone: Any) -> None:
    output = alone[3][0]
    assert 5 in output  # the checkpoint's end-of-text id
    emissions = run_all(Generator(prepared(), width=4), [request(3, stop_ids=None)])[0]
    assert tokens_of(emissions) == output[: output.index(5) + 1]


# --- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": [1] * CONTEXT}, "the prompt has 100 tokens; the context of 100 leaves room for at most 99"),
        ({"prompt": [1, 6]}, "prompt token 6 is outside the vocabulary of 6"),
        ({"prompt": [-1]}, "prompt token -1 is outside the vocabulary of 6"),
        ({"stop_ids": range(9)}, "9 stop ids; at most 8 are supported"),
    ],
)
def test_requests_that_do_not_fit_the_model(prepared: Any, changes: dict[str, Any], words: str) -> None:
    generator = Generator(prepared())
    with pytest.raises(UsageError, match=words):
        generator.submit(request(0, **changes))
    with pytest.raises(UsageError, match=words):
        list(generator.run([request(0), request(0, **changes)]))
    # the good request beside the refused one was not queued
    assert list(generator.run()) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": "text"}, "prompt holds 't'; it takes token ids"),
        ({"prompt": [1, 2.0]}, "prompt holds 2.0"),
        ({"stop_ids": (None,)}, "stop_ids holds None"),
        ({"max_new_tokens": 0}, "max_new_tokens 0 must be at least 1"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be an integer at least 1, got 2.5"),
        ({"draft_tokens": -1}, "draft_tokens -1 must be at least 0"),
    ],
)
def test_requests_that_are_no_requests(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as raised:
        request(0, **changes)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("width", [0, -1, 3, 9])
def test_width_that_was_not_prepared(prepared: Any, width: int) -> None:
    with pytest.raises(UsageError, match=f"width {width} was not prepared; prepared: 1, 2"):
        Generator(prepared(drafts=1), width=width)


# --- callers and records that arrive late --------------------------------------------------------------------------------


def test_caller_is_not_left_in_inference_mode(prepared: Any) -> None:
    one, two = Generator(prepared(), width=2), Generator(prepared(concurrency=2), width=2)
    for _ in zip(one.run([request(3)]), two.run([request(3)]), strict=True):
        assert not torch.is_inference_mode_enabled()
    assert not torch.is_inference_mode_enabled()


def test_caller_that_stops_at_any_event_loses_no_slot_page_or_request(prepared: Any, alone: Any) -> None:
    """``step`` is abandoned at its first, second, third … event; the loop goes on from there."""
    generator = Generator(prepared(concurrency=2), width=4)
    for number in (5, 0, 3):
        generator.submit(request(number))
    finished: set[int] = set()
    for patience in range(1, 400):
        events = generator.step()
        for _ in range(patience % 9 + 1):
            event = next(events, None)
            if isinstance(event, Emission) and event.finish:
                finished.add(event.request)
        events.close()
        if not generator._waiting and not generator._residents:
            break
    assert_nothing_leaked(generator)
    found = run_all(generator, [request(3)])
    assert [tokens_of(emissions) for emissions in found.values()] == [alone[3][0]]


def test_abandoned_prompt_goes_on(prepared: Any, alone: Any) -> None:
    generator = Generator(prepared(concurrency=2), width=4)
    generator.submit(request(0))
    generator.submit(request(5))
    for event in generator.step():
        if isinstance(event, Progress) and event.request == 1 and event.consumed == 32:
            break
    found = run_all(generator, [])
    assert [tokens_of(found[0]), tokens_of(found[1])] == [alone[0][0], alone[5][0]]


class _Skipped:
    """A round whose first ``skips`` submissions never reach the device, so that the frame still holds older records."""

    def __init__(self, inner: Any, skips: int) -> None:
        self.inner, self.skips = inner, skips

    def submit(self, *arguments: Any, **variant: Any) -> None:
        if self.skips:
            self.skips -= 1
        else:
            self.inner.submit(*arguments, **variant)


@pytest.mark.parametrize("runs_before", [0, 1, 2])
def test_late_records_are_dropped(prepared: Any, alone: Any, monkeypatch: pytest.MonkeyPatch, runs_before: int) -> None:
    """Whatever a frame held before (nothing, an earlier generator's request of the same number, an earlier round of the same
    request), no token of it is emitted."""
    model: LoadedModel = prepared(concurrency=2)
    for _ in range(runs_before):
        run_all(Generator(model, width=4), [request(3), request(0)])
    if not runs_before:
        with torch.inference_mode():
            model.arena.frames.fill_(-1)
    for key, inner in model.first_tokens.items():
        monkeypatch.setitem(model.first_tokens, key, _Skipped(inner, 3))
    for key, inner in model.rounds.items():
        monkeypatch.setitem(model.rounds, key, _Skipped(inner, 2))
    found = run_all(Generator(model, width=4), [request(3), request(0)])
    assert [tokens_of(found[0]), tokens_of(found[1])] == [alone[3][0], alone[0][0]]


# --- the numbers -----------------------------------------------------------------------------------------------------------


def test_statistics_equal_a_recount_from_the_raw_records(prepared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model: LoadedModel = prepared(concurrency=3)
    rows: list[list[int]] = []
    read = model.arena.read_frame

    def recording(frame: int, slots: Sequence[int]) -> list[list[int]]:
        records = read(frame, list(slots))
        rows.extend(records)
        return records

    monkeypatch.setattr(model.arena, "read_frame", recording)
    requests = [request(number, draft_tokens=(None, 2, 0)[number % 3]) for number in range(len(LENGTHS))]
    emissions = run_all(Generator(model, width=5), requests)
    statistics = DraftStatistics.of(
        (emission.completion, place > 0) for one in emissions.values() for place, emission in enumerate(one)
    )

    seen: set[int] = set()
    tokens = rounds = in_rounds = 0
    offered, judged, accepted = [0] * 4, [0] * 4, [0] * 4
    for row in rows:
        written = [token for token in row[METADATA_FIELDS:] if token != -1]
        assert len(written) == row[Field.EMITTED]
        tokens += len(written)
        if row[Field.REQUEST] not in seen:
            seen.add(row[Field.REQUEST])
            continue
        rounds, in_rounds = rounds + 1, in_rounds + len(written)
        for depth in range(4):
            offered[depth] += row[Field.OFFERED] > depth
            judged[depth] += row[Field.OFFERED] > depth and row[Field.ACCEPTED] >= depth
            accepted[depth] += row[Field.ACCEPTED] > depth
    assert tokens == sum(len(tokens_of(one)) for one in emissions.values())
    assert (statistics.tokens, statistics.rounds, statistics.tokens_in_rounds) == (tokens, rounds, in_rounds)
    assert statistics.verified_by_depth == offered
    assert statistics.judged_by_depth == judged
    assert statistics.accepted_by_depth == accepted
    assert (statistics.offered, statistics.accepted) == (sum(offered), sum(accepted))
    assert accepted[0] > 0
