"""Prefix checkpoints of every plugin: what continues from one equals a cold run, token for token and state for state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from prefix_runs import (
    CONTEXT,
    GREEDY,
    SAMPLED,
    WRITERS,
    Crossings,
    PrefixBench,
    WatchedGenerator,
    assert_equal_runs,
    assert_nothing_held,
    cache_of,
    cached,
    prepare_model,
    request,
    tokens,
)

from specdec.sampling.params import SamplingParams
from specdec.state.prefix_records import Lost

LENGTHS = (1, 3, 4, 63, 64, 65, 127, 128, 130)


@pytest.fixture(scope="module", params=WRITERS)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PrefixBench:
    return PrefixBench(tmp_path_factory.mktemp("prefix") / "checkpoint", request.param)


# --- restores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("length", LENGTHS)
def test_restored_run_equals_a_cold_run(bench, length: int, sampling: SamplingParams) -> None:
    """Full hits and hits with a tail to consume, at every alignment of groups of four and pages of 64."""
    stem, tail = tokens(1, 140)[:length], tokens(2, 9)
    generator = cached(bench.model(1), width=4, poison=True)
    # another seed leaves the checkpoint: nothing of its randomness is in it
    generator.outcomes([request(stem, new=1, sampling=SamplingParams(seed=5))])
    expected_lengths = sorted({*range(64, length + 1, 64), length})
    assert sorted(entry.length for entry in cache_of(generator)) == expected_lengths
    for prompt in (stem, stem + tail[:1], stem + tail[1:]):
        wanted = request(prompt, sampling=sampling)
        before = cache_of(generator).statistics.reused_tokens
        found = generator.outcomes([wanted])[0]
        reused = cache_of(generator).statistics.reused_tokens - before
        # what a run before this one generated may agree with a token or two of the tail
        assert reused == found.prefilled[0] >= length
        assert reused == length or len(prompt) > length
        assert_equal_runs(found, bench.cold(wanted))
    assert_nothing_held(generator)


def test_accepted_drafts_occur_in_these_tests(bench) -> None:
    """Otherwise equal rounds would say little."""
    accepted = {record.accepted for record in bench.cold(request(tokens(1, 140)[:64])).records}
    assert {0, 1, 2} <= accepted


# --- rounds that cross a boundary --------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", range(1, 9))
def test_boundary_crossed_at_every_offset(bench, before: int) -> None:
    """The round starts ``before`` tokens ahead of the boundary and consumes 1 … 8, so that it ends up to seven behind it."""
    base = tokens(3, 120)
    greedy = bench.cold(request(base, new=24)).tokens
    boundary = base + greedy[:8]
    crossings = Crossings(bench.model(1), 1)
    for taken in range(1, 9):
        scripted, own = crossings.generators(width=4, poison=True)
        start = 128 - before
        crossings.cross(scripted, [(boundary[:start], greedy[8 - before :], taken)])
        end = start + taken
        lengths = {64, start} | ({128} if end >= 128 else set())
        assert {length for length, _ in crossings.published} == lengths
        lengths.add(end)
        assert {entry.length for entry in cache_of(own)} == lengths
        if taken < before:
            assert_nothing_held(own)
            continue
        # the tail leaves the published continuation at the boundary itself
        wanted = request([*boundary, (greedy[8] + 1) % 6])
        found = own.outcomes([wanted])[0]
        assert found.prefilled == [128, 129]
        assert_equal_runs(found, bench.cold(wanted))
        # and the exact end, which is a full hit
        if taken == 8:
            wanted = request((boundary + greedy[8:])[:end])
            found = own.outcomes([wanted])[0]
            assert found.prefilled == [end]
            assert_equal_runs(found, bench.cold(wanted))
        assert_nothing_held(own)


def test_lanes_that_cross_in_one_round_leave_their_own_state(bench) -> None:
    plan = [(1, 1), (3, 8), (8, 8), (5, 6)]
    stems = [tokens(20 + lane, 64 - before) for lane, (before, _) in enumerate(plan)]
    outputs = [bench.cold(request(stem, new=24)).tokens for stem in stems]
    crossings = Crossings(bench.model(4), 4)
    scripted, own = crossings.generators(width=4)
    crossings.cross(
        scripted, [(stem, output, taken) for stem, output, (_, taken) in zip(stems, outputs, plan, strict=True)]
    )
    for stem, output, (before, _) in zip(stems, outputs, plan, strict=True):
        wanted = request([*stem, *output[:before], (output[before] + 1) % 6])
        found = own.outcomes([wanted])[0]
        assert found.prefilled == [64, 65]
        assert_equal_runs(found, bench.cold(wanted))
    assert_nothing_held(own)


def test_lane_that_stands_at_a_boundary_does_not_cross_it(bench) -> None:
    """A neighbour's crossing makes the round keep boundary states; a lane that stayed short of its next boundary has none."""
    starts = [[0, *tokens(160, 63)], [1, *tokens(161, 61)]]
    outputs = [bench.cold(request(stem, new=24)).tokens for stem in starts]
    crossings = Crossings(bench.model(4), 4)
    scripted, own = crossings.generators(width=4)
    crossings.cross(scripted, [(starts[0], outputs[0], 3), (starts[1], outputs[1], 4)], forget=True)
    assert crossings.published == {(64, 1)}
    for entry in cache_of(own):
        for part in entry.state.values():
            for name, value in part.items():
                assert value.untyped_storage().nbytes() == value.nbytes, f"{name} keeps other lanes alive"
    assert_nothing_held(own)


# --- cold, hit, partial hit, branch --------------------------------------------------------------------------------------


def test_cold_hit_partial_hit_and_branches_are_equal(bench) -> None:
    stem = tokens(30, 70)
    branches = [stem + tokens(31 + branch, count) for branch, count in enumerate((0, 1, 12, 60))]
    generator = cached(bench.model(4), width=4)
    for turn in range(2):
        found = generator.outcomes([request(prompt, new=40) for prompt in branches])
        for prompt, outcome in zip(branches, found, strict=True):
            assert_equal_runs(outcome, bench.cold(request(prompt, new=40)))
            if turn:
                assert outcome.prefilled[0] == len(prompt)
    statistics = cache_of(generator).statistics
    # first turn: nothing for the stem, which the branches behind it in the same admission already continue from
    assert (statistics.misses, statistics.partial_hits, statistics.full_hits) == (1, 3, 4)
    assert statistics.reused_tokens == 3 * 70 + sum(map(len, branches))
    assert_nothing_held(generator)


def test_b44_prompts_that_share_prefixes_around_a_block(bench) -> None:
    """State and draft history restored at different lengths: twelve prompts, 0 … 70 shared tokens, in one batch of four."""
    stem = tokens(40, 80)
    shared = (70, 0, 1, 2, 3, 60, 62, 63, 64, 65, 66, 69)
    prompts = [stem[:count] + tokens(41 + number, 90 - count) for number, count in enumerate(shared)]
    generator = cached(bench.model(4), width=4, poison=True)
    for _ in range(2):
        for prompt, outcome in zip(
            prompts, generator.outcomes([request(prompt, new=24) for prompt in prompts]), strict=True
        ):
            assert_equal_runs(outcome, bench.cold(request(prompt, new=24)))
    # second turn: every prompt wholly; first turn: the stem's block where it is shared
    statistics = cache_of(generator).statistics
    assert (statistics.full_hits, statistics.partial_hits, statistics.misses) == (12, 4, 8)
    assert statistics.reused_tokens == 12 * 90 + 4 * 64
    lost = sum(count - 64 * (count >= 64) for count in shared[1:])
    assert statistics.lost_tokens.keys() == {Lost.NO_CHECKPOINT}
    assert statistics.lost_tokens[Lost.NO_CHECKPOINT] >= lost
    assert_nothing_held(generator)


def test_b46_identical_prompt_twice_is_reused_wholly(bench) -> None:
    """Target pages, draft pages one row behind and recurrent state have three alignments; none of them costs the hit."""
    for length in (5, 64, 100, 129):
        generator = cached(bench.model(1), width=4)
        for _ in range(2):
            generator.outcomes([request(tokens(50, length), new=4)])
        statistics = cache_of(generator).statistics
        assert (statistics.lookups, statistics.full_hits, statistics.reused_tokens) == (2, 1, length)
        assert not statistics.lost_tokens
        assert_nothing_held(generator)


def test_b48_equal_prompts_get_equal_proposals_with_the_cache_on_and_off(bench) -> None:
    same, other = tokens(60, 67), tokens(61, 67)
    seen: dict[str, list[list[list[int]]]] = {}
    laws: dict[str, list[torch.Tensor]] = {}
    for name in ("off", "on", "again"):
        model = bench.model(4)
        if name != "again":
            generator = cached(model, width=8) if name == "on" else WatchedGenerator(model, width=8)
        for prompt in (same, other, same):
            generator.submit(request(prompt, new=24, sampling=SAMPLED))
        captured = model.rounds[4, 8]
        seen[name], laws[name] = [], []
        for _ in generator.step():
            pass
        while len(generator._residents) == 3:
            list(generator.step())
            seen[name].append(captured.draft_tokens.tolist()[:3])
            laws[name].append(captured.draft_probs[:3].clone())
        list(generator.run())
    assert len(seen["off"]) > 3
    for name in ("off", "on", "again"):
        assert all(lanes[0] == lanes[2] for lanes in seen[name])
        assert any(lanes[0] != lanes[1] for lanes in seen[name])
        assert seen[name] == seen["off"]
        for law, expected in zip(laws[name], laws["off"], strict=True):
            torch.testing.assert_close(law, expected, rtol=1e-6, atol=1e-7)
    assert cache_of(generator).statistics.reused_tokens == 67 + 3 * 67
    assert_nothing_held(generator)


OPTIONS = (
    {"sampling": SamplingParams(temperature=0.8, top_k=4, top_p=0.9, seed=9)},
    {"sampling": SamplingParams(temperature=1.0, min_p=0.05, seed=9, repetition_penalty=1.3, frequency_penalty=0.4)},
    {"sampling": SamplingParams(greedy=True, presence_penalty=0.7, logit_bias={2: 1.5, 4: -100.0})},
    {"sampling": SamplingParams(seed=3), "logprobs": 3, "min_new_tokens": 10, "draft_tokens": 2},
)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("length", [64, 70])
def test_options_of_the_new_request_hold_after_a_hit(bench, options: dict[str, Any], length: int) -> None:
    """Penalties count the whole prompt, however much of it was consumed by somebody else."""
    stem = tokens(70, length)
    generator = cached(bench.model(1), width=4)
    generator.outcomes([request(stem, new=20, sampling=SamplingParams(seed=1))])
    for prompt in (stem, stem + tokens(71, 5)):
        wanted = request(prompt, new=40, **options)
        found = generator.outcomes([wanted])[0]
        assert found.prefilled[0] == length
        assert_equal_runs(found, bench.cold(wanted))
    assert_nothing_held(generator)


def test_plain_decoding_without_a_drafter_uses_checkpoints_too(bench) -> None:
    model = prepare_model(
        bench.directory,
        context=CONTEXT,
        recipe_name=bench.recipe_name,
        concurrency=2,
        speculative=False,
        max_draft_tokens=None,
    )
    prompts = [tokens(80, 64), tokens(80, 64) + tokens(81, 30), tokens(80, 130)]
    plain = [WatchedGenerator(model).outcomes([request(prompt, new=70)])[0] for prompt in prompts]
    generator = cached(model)
    for _ in range(2):
        for found, expected in zip(
            generator.outcomes([request(prompt, new=70) for prompt in prompts]), plain, strict=True
        ):
            assert_equal_runs(found, expected)
    assert cache_of(generator).statistics.full_hits == 3
    assert_nothing_held(generator)
