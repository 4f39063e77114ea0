"""Survival is learned from outcomes, with what was not verified left open."""

from __future__ import annotations

import random

import pytest

from specdec.control.survival import PrefixSurvival
from specdec.errors import UsageError


def test_begins_at_the_prior() -> None:
    assert PrefixSurvival(3).values == pytest.approx((0.7, 0.49, 0.343))
    assert PrefixSurvival(3).expected(2) == pytest.approx(1 + 0.7 + 0.49)
    assert PrefixSurvival(3).expected(0) == 1


def test_a_rejection_decides_every_longer_prefix() -> None:
    survival = PrefixSurvival(4)
    survival.observe(verified=2, accepted=1)
    expected = [0.9 * 0.7 + 0.1, 0.9 * 0.49, 0.9 * 0.343, 0.9 * 0.2401]
    assert survival.values == pytest.approx(expected)


def test_acceptance_of_everything_verified_is_censored() -> None:
    """Longer prefixes keep their conditional survival."""
    survival = PrefixSurvival(4)
    survival.observe(verified=2, accepted=2)
    first, second = 0.9 * 0.7 + 0.1, 0.9 * 0.49 + 0.1
    assert survival.values == pytest.approx([first, second, second * 0.7, second * 0.49])


def test_nothing_verified_teaches_nothing() -> None:
    survival = PrefixSurvival(2)
    before = survival.values
    survival.observe(verified=0, accepted=0)
    assert survival.values == before


def test_finds_the_joint_survival_of_simulated_rounds() -> None:
    """Conditional acceptance 0.9, 0.6, 0.8 under ceilings that vary: the estimate goes to 0.9, 0.54, 0.432."""
    chance, survival = random.Random(1), PrefixSurvival(3, rate=0.005)
    sums = [0.0] * 3
    for turn in range(20_000):
        verified = chance.randint(1, 3)
        accepted = 0
        while accepted < verified and chance.random() < (0.9, 0.6, 0.8)[accepted]:
            accepted += 1
        survival.observe(verified, accepted)
        assert all(a >= b for a, b in zip(survival.values, survival.values[1:]))
        if turn >= 10_000:
            sums = [total + value / 10_000 for total, value in zip(sums, survival.values, strict=True)]
    assert sums == pytest.approx([0.9, 0.54, 0.432], abs=0.02)


def test_hopeless_estimates_stay_numbers() -> None:
    survival = PrefixSurvival(3, rate=1.0)
    survival.observe(verified=3, accepted=0)
    assert survival.values == (0, 0, 0)
    survival.observe(verified=1, accepted=1)
    assert survival.values == (1, 0, 0)


@pytest.mark.parametrize(("verified", "accepted"), [(2, 3), (4, 0), (1, -1)])
def test_impossible_outcomes_are_refused(verified: int, accepted: int) -> None:
    with pytest.raises(UsageError, match="accepted"):
        PrefixSurvival(3).observe(verified, accepted)
