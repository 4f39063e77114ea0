"""Acceptance is learned from outcomes, with what was not judged left open; a request goes its own way when it differs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from specdec.control import acceptance
from specdec.control.acceptance import GLOBAL_HALF_LIFE, PRIOR, PRIOR_WEIGHT, AcceptanceHistory, RequestSurvival
from specdec.errors import UsageError


def drawn(chance: random.Random, rates: Sequence[float], verified: int) -> int:
    accepted = 0
    while accepted < verified and chance.random() < rates[accepted]:
        accepted += 1
    return accepted


def prefixes(rates: Sequence[float]) -> list[float]:
    return list(accumulate(rates, mul))


# --- all requests --------------------------------------------------------------------------------------------------------


def test_begins_at_the_prior() -> None:
    assert AcceptanceHistory(3).survival(3) == pytest.approx((0.7, 0.49, 0.343))
    assert AcceptanceHistory(3, prior=0.5).survival(2) == pytest.approx((0.5, 0.25))
    assert AcceptanceHistory(3).survival(0) == ()
    assert AcceptanceHistory(3).survival(9) == pytest.approx((0.7, 0.49, 0.343))


def test_a_rejection_is_judged_at_its_depth_and_nothing_behind_it() -> None:
    """Behind it the depth before it is the best guess."""
    history = AcceptanceHistory(4)
    history.observe(verified=3, accepted=1)
    first = PRIOR_WEIGHT * (1 - PRIOR) / (1 + PRIOR_WEIGHT)
    second = (1 + PRIOR_WEIGHT * first) / (1 + PRIOR_WEIGHT)
    assert history.hazards() == pytest.approx((first, second, second, second))


def test_acceptance_of_everything_verified_is_censored() -> None:
    history = AcceptanceHistory(3)
    history.observe(verified=1, accepted=1)
    first = PRIOR_WEIGHT * (1 - PRIOR) / (1 + PRIOR_WEIGHT)
    assert history.hazards() == pytest.approx((first, first, first))


def test_nothing_verified_teaches_nothing() -> None:
    history = AcceptanceHistory(2)
    before = history.hazards()
    history.observe(verified=0, accepted=0)
    assert history.hazards() == before


def test_older_outcomes_weigh_half_after_the_half_life() -> None:
    history = AcceptanceHistory(1)
    history.observe(verified=1, accepted=0)
    for _ in range(int(GLOBAL_HALF_LIFE)):
        history.observe(verified=1, accepted=1)
    weights = [0.5 ** (age / GLOBAL_HALF_LIFE) for age in range(int(GLOBAL_HALF_LIFE) + 1)]
    expected = (weights[-1] + PRIOR_WEIGHT * (1 - PRIOR)) / (sum(weights) + PRIOR_WEIGHT)
    # outcomes that are counted together count as of the same age
    assert history.hazards()[0] == pytest.approx(expected, rel=0.1)


def test_finds_the_joint_survival_of_simulated_rounds() -> None:
    """Conditional acceptance 0.9, 0.6, 0.8 under ceilings that vary: survival goes to 0.9, 0.54, 0.432."""
    chance, history = random.Random(1), AcceptanceHistory(3)
    sums = [0.0] * 3
    for turn in range(20_000):
        verified = chance.randint(1, 3)
        history.observe(verified, drawn(chance, (0.9, 0.6, 0.8), verified))
        if turn >= 10_000:
            sums = [total + value / 10_000 for total, value in zip(sums, history.survival(3), strict=True)]
    assert sums == pytest.approx([0.9, 0.54, 0.432], abs=0.02)


def test_counting_only_whole_rounds_would_be_wrong() -> None:
    """The control: accepted over verified by depth, as if what was not reached had been judged, misses the second depth."""
    chance = random.Random(1)
    verified_at, accepted_at = [0, 0], [0, 0]
    for _ in range(10_000):
        accepted = drawn(chance, (0.5, 0.9), 2)
        for depth in range(2):
            verified_at[depth] += 1
            accepted_at[depth] += accepted > depth
    assert abs(accepted_at[1] / verified_at[1] - 0.9) > 0.3
    history = AcceptanceHistory(2)
    chance = random.Random(1)
    for _ in range(10_000):
        history.observe(2, drawn(chance, (0.5, 0.9), 2))
    assert 1 - history.hazards()[1] == pytest.approx(0.9, abs=0.05)


def test_copies_are_counted_apart_by_the_length_of_their_match() -> None:
    chance, history = random.Random(2), AcceptanceHistory(4)
    for _ in range(2000):
        history.observe(4, drawn(chance, (0.95,) * 4, 4), copied=4, match_length=8)
        history.observe(4, drawn(chance, (0.3,) * 4, 4), copied=4, match_length=4)
        history.observe(4, drawn(chance, (0.6,) * 4, 4))
    assert history.survival(4, 4, 8) == pytest.approx(prefixes((0.95,) * 4), abs=0.1)
    assert history.survival(1, 4, 4)[0] == pytest.approx(0.3, abs=0.08)
    assert history.survival(2) == pytest.approx(prefixes((0.6,) * 2), abs=0.08)


def test_learned_drafts_behind_copies_count_as_learned() -> None:
    history = AcceptanceHistory(4)
    for _ in range(100):
        history.observe(4, 2, copied=2, match_length=8)
    assert history.hazards(8)[1] < 0.05, "both copies were accepted"
    assert history.hazards()[2] > 0.95, "the first draft behind them was not"
    assert history.hazards()[0] == pytest.approx(1 - PRIOR), "nobody judged a learned draft at the first depth"
    short, mixed = history.survival(2, 2, 8), history.survival(4, 2, 8)
    assert mixed[:2] == pytest.approx(short)
    assert mixed[2] < 0.05 * mixed[1]


@pytest.mark.parametrize(("verified", "accepted"), [(2, 3), (4, 0), (1, -1), (-1, -1)])
def test_impossible_outcomes_are_refused(verified: int, accepted: int) -> None:
    for learner in (AcceptanceHistory(3), RequestSurvival(AcceptanceHistory(3))):
        with pytest.raises(UsageError, match="accepted"):
            learner.observe(verified, accepted)
        with pytest.raises(UsageError, match="accepted"):
            learner.observe(verified, accepted, copied=1, match_length=8)


@pytest.mark.parametrize(("copied", "match_length"), [(1, None), (1, 0), (-1, 8)])
def test_copies_need_a_match(copied: int, match_length: int | None) -> None:
    for learner in (AcceptanceHistory(3), RequestSurvival(AcceptanceHistory(3))):
        with pytest.raises(UsageError, match="match"):
            learner.observe(2, 1, copied, match_length)
        with pytest.raises(UsageError, match="match"):
            learner.survival(2, copied, match_length)


@pytest.mark.parametrize("options", [{"drafts": 0}, {"drafts": 3, "prior": 0.0}, {"drafts": 3, "prior": 1.5}])
def test_numbers_out_of_range_are_refused(options: dict) -> None:
    with pytest.raises(UsageError):
        AcceptanceHistory(**options)


# --- one request ---------------------------------------------------------------------------------------------------------


def test_a_request_begins_as_all_requests_are() -> None:
    history = AcceptanceHistory(3)
    for _ in range(200):
        history.observe(3, 1)
    assert RequestSurvival(history).survival(3) == history.survival(3)
    assert [1 - h for h in history.hazards()] == pytest.approx(
        [s / b for s, b in zip(history.survival(3), (1, *history.survival(2)))]
    )


def test_outcomes_of_a_request_are_everybodys() -> None:
    history = AcceptanceHistory(2)
    one = RequestSurvival(history)
    for _ in range(50):
        one.observe(2, 0)
    assert RequestSurvival(history).survival(1)[0] < 0.2


def test_requests_that_differ_are_told_apart() -> None:
    """One of .9 and one of .3 at every depth, side by side: each estimate is its own after forty rounds."""
    chance, history = random.Random(3), AcceptanceHistory(4)
    requests = [RequestSurvival(history), RequestSurvival(history)]
    sums = [0.0, 0.0]
    for turn in range(240):
        for place, rate in enumerate((0.9, 0.3)):
            requests[place].observe(4, drawn(chance, (rate,) * 4, 4))
            found = requests[place].survival(4)
            if turn >= 40:
                sums[place] += found[0] / 200
    assert sums == pytest.approx([0.9, 0.3], abs=0.06)
    assert history.shared < acceptance.MOST_SHARED


def test_requests_that_are_alike_share_what_they_know() -> None:
    chance, history = random.Random(4), AcceptanceHistory(4)
    for _ in range(30):
        request = RequestSurvival(history)
        for _ in range(50):
            request.survival(4)
            request.observe(4, drawn(chance, (0.6,) * 4, 4))
    assert history.shared == acceptance.MOST_SHARED
    request = RequestSurvival(history)
    for accepted in (2, 1, 4, 3):
        request.observe(4, accepted)
    assert request.survival(1)[0] < 0.7, "four lucky rounds are no other text"


def rounds_to_follow(before: float, after: float, seed: int) -> int:
    """Rounds after a change until the estimate of the first depth stays within .2 of the truth for the next twenty."""
    chance, request = random.Random(seed), RequestSurvival(AcceptanceHistory(4))
    for _ in range(300):
        request.survival(4)
        request.observe(4, drawn(chance, (before,) * 4, 4))
    close = 0
    for turn in range(200):
        request.survival(4)
        request.observe(4, drawn(chance, (after,) * 4, 4))
        close = close + 1 if abs(request.survival(1)[0] - after) < 0.2 else 0
        if close == 20:
            return turn - 19
    return 200


@pytest.mark.parametrize(("before", "after", "least"), [(0.9, 0.1, 58), (0.1, 0.9, 58), (0.9, 0.4, 52), (0.4, 0.9, 58)])
def test_a_change_of_text_is_followed(before: float, after: float, least: int) -> None:
    """Of sixty requests so many within 32 rounds, half of them within 15; twenty rounds near .4 are rare by themselves."""
    taken = sorted(rounds_to_follow(before, after, seed) for seed in range(60))
    assert taken[30] <= 15
    assert taken[least - 1] <= 32


def test_without_surprise_a_change_is_followed_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: long memory alone."""
    monkeypatch.setattr(acceptance, "SURPRISE", 1e9)
    assert sorted(rounds_to_follow(0.9, 0.1, seed) for seed in range(60))[30] > 24


def test_rounds_without_drafts_let_old_outcomes_fade() -> None:
    history = AcceptanceHistory(2)
    request = RequestSurvival(history)
    for _ in range(30):
        request.survival(2)
        request.observe(2, 0)
    other = RequestSurvival(history)
    for _ in range(600):
        other.observe(2, 2)
    before = request.survival(1)[0]
    for _ in range(2000):
        request.observe(0, 0)
    assert before < 0.3
    assert request.survival(1)[0] > 0.6


class Learning(RuleBasedStateMachine):
    """Any outcomes: survival is a survival, and learning is deterministic."""

    drafts = 5

    def __init__(self) -> None:
        super().__init__()
        self.pair = [AcceptanceHistory(self.drafts) for _ in range(2)]
        self.requests = [[RequestSurvival(history) for _ in range(2)] for history in self.pair]

    @rule(lane=st.integers(0, 1), data=st.data(), times=st.sampled_from([1, 7, 3000]))
    def observe(self, lane: int, data: st.DataObject, times: int) -> None:
        verified = data.draw(st.integers(0, self.drafts))
        accepted = data.draw(st.integers(0, verified))
        copied = data.draw(st.integers(0, verified))
        match = data.draw(st.sampled_from([4, 8])) if copied else None
        for requests in self.requests:
            for _ in range(times):
                requests[lane].observe(verified, accepted, copied, match)

    @rule(lane=st.integers(0, 1))
    def leave(self, lane: int) -> None:
        for history, requests in zip(self.pair, self.requests):
            requests[lane] = RequestSurvival(history)

    @invariant()
    def survival_is_one(self) -> None:
        for lane in range(2):
            for copied, match in ((0, None), (2, 4), (self.drafts, 8)):
                one, other = (requests[lane].survival(self.drafts, copied, match) for requests in self.requests)
                assert one == other
                assert len(one) == self.drafts
                assert all(-1e-12 <= value <= 1 + 1e-12 for value in one)
                assert all(later <= earlier + 1e-12 for earlier, later in zip(one, one[1:]))


TestLearning = Learning.TestCase
TestLearning.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
