"""Comparison of several ways to run the same requests: what is counted, in which order, against what."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.sampling.params import SamplingParams
from specdec.serving import compare as module
from specdec.serving.compare import Arm, adaptive_arm, arms_for, compare
from specdec.serving.request import Request


def requests() -> list[Request]:
    greedy = SamplingParams(greedy=True)
    return [
        Request(prompt=prompt, sampling=greedy, max_new_tokens=budget, stop_ids=())
        for prompt, budget in (([1, 2, 3], 9), ([4] * 20, 1), ([0], 5))
    ]


@pytest.fixture
def arms(prepared: Any) -> list[Arm]:
    return arms_for(prepared(), prepared(drafts=None), [None, 0, 1, 7])


def test_arms_have_their_own_widths(arms: list[Arm]) -> None:
    assert [arm.name for arm in arms] == ["plain", "0 drafts", "1 draft", "7 drafts"]
    assert [arm.generator.width for arm in arms] == [1, 1, 2, 8]
    assert arms[0].generator.model.drafter is None
    assert all(arm.generator.model.drafter is not None for arm in arms[1:])


def test_every_pass_counts_and_the_warm_up_does_not(arms: list[Arm]) -> None:
    compare(arms, requests(), passes=2, warm_up=2)
    for arm in arms:
        assert arm.statistics.tokens == 2 * (9 + 1 + 5)
        assert arm.statistics.tokens_in_rounds == 2 * (8 + 0 + 4)
        assert len(arm.passes) == 2 and all(rate > 0 for rate in arm.passes)
        assert [len(arm.outputs[number]) for number in range(3)] == [9, 1, 5]
        assert arm.outputs == arms[0].outputs  # greedy in float64
        assert arm.fault is None
    assert arms[0].statistics.rounds == 24
    assert arms[3].statistics.rounds <= 24


def test_the_order_of_arms_alternates(arms: list[Arm], monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, bool]] = []
    monkeypatch.setattr(module, "run_arm", lambda arm, _, counted=True, batch=1: order.append((arm.name, counted)))
    compare(arms[:2], requests(), passes=3)
    assert order == [
        *[("plain", False), ("0 drafts", False)],
        *[("plain", True), ("0 drafts", True)],
        *[("0 drafts", True), ("plain", True)],
        *[("plain", True), ("0 drafts", True)],
    ]


def test_ratio_is_relative_to_the_given_baseline(arms: list[Arm]) -> None:
    arm = arms[2]
    assert arm.as_data(10.0)["speed_ratio"] == 0  # nothing was run
    compare([arm], requests(), warm_up=0)
    data = arm.as_data(arm.tokens_per_second / 3)
    assert data["speed_ratio"] == pytest.approx(3)
    assert data["tokens_per_second"] == arm.statistics.tokens_in_rounds / arm.seconds
    assert arm.as_data(0.0)["speed_ratio"] == 0


def test_an_adaptive_arm_counts_like_the_others(prepared: Any) -> None:
    arm = adaptive_arm(prepared())
    compare([arm], requests(), passes=2)
    assert arm.statistics.tokens == 2 * (9 + 1 + 5) and arm.statistics.tokens_in_rounds == 2 * (8 + 0 + 4)
    (plain,) = arms_for(prepared(), prepared(drafts=None), [None])
    compare([plain], requests())
    assert arm.outputs == plain.outputs


def test_several_at_once_give_what_they_give_alone(prepared: Any) -> None:
    """The second request ends with its first token, and the third takes its place while the first runs on."""
    arms = arms_for(prepared(concurrency=2), prepared(drafts=None), [7])
    alone = arms_for(prepared(), prepared(drafts=None), [7])
    compare(arms, requests(), passes=2, batch=2)
    compare(alone, requests(), passes=2)
    assert arms[0].outputs == alone[0].outputs
    assert arms[0].statistics.tokens_in_rounds == alone[0].statistics.tokens_in_rounds == 2 * (8 + 0 + 4)
    assert arms[0].statistics.first_tokens == 6
    assert len(arms[0].passes) == 2 and all(rate > 0 for rate in arms[0].passes)
