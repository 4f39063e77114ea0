"""Round costs follow what is measured, not its outliers, and never invent cheap rows."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.control.cost import ENOUGH, WINDOW, RoundCosts
from specdec.errors import UsageError


def test_a_shape_is_known_after_two_rounds_and_its_first_does_not_count_for_more() -> None:
    costs = RoundCosts()
    costs.observe(2, 3, 9.0)
    assert not costs.known(2, 3)
    costs.observe(2, 3, 1.0)
    assert costs.known(2, 3)
    assert costs.estimate(2, 3) == 1.0


def test_outliers_are_ignored_and_a_lasting_change_is_followed() -> None:
    costs = RoundCosts()
    for seconds in (1.0, 1.0, 50.0, 1.0, 50.0, 1.0, 1.0, 50.0):
        costs.observe(1, 1, seconds)
    assert costs.estimate(1, 1) == 1.0
    for _ in range(WINDOW // 2 + 1):
        costs.observe(1, 1, 2.0)
    assert costs.estimate(1, 1) == 2.0


def test_declared_costs_hold_until_measured() -> None:
    costs = RoundCosts({(1, 1): 3.0})
    assert costs.known(1, 1)
    assert costs.estimate(1, 1) == 3.0
    for _ in range(ENOUGH):
        costs.observe(1, 1, 4.0)
    assert costs.estimate(1, 1) == 4.0


def test_nothing_known_makes_every_shape_alike() -> None:
    assert RoundCosts().estimate(4, 8) == RoundCosts().estimate(1, 1)


SHAPES = st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 8))


@given(st.sets(SHAPES, min_size=1), SHAPES)
def test_unknown_shapes_lie_between_their_neighbours(known: set[tuple[int, int]], asked: tuple[int, int]) -> None:
    """Costs that grow with rows: no estimate is below a smaller known shape or above a larger one."""
    costs = RoundCosts({(batch, width): 1.0 + batch * width for batch, width in known})
    found = costs.estimate(*asked)
    for batch, width in known:
        if batch <= asked[0] and width <= asked[1]:
            assert found >= 1.0 + batch * width
        if batch >= asked[0] and width >= asked[1]:
            assert found <= 1.0 + batch * width


@given(st.sets(SHAPES, min_size=1), SHAPES, SHAPES)
def test_estimates_grow_with_rows(known: set[tuple[int, int]], one: tuple[int, int], other: tuple[int, int]) -> None:
    costs = RoundCosts({(batch, width): 1.0 + batch * width for batch, width in known})
    smaller = min(one[0], other[0]), min(one[1], other[1])
    floors = any(b <= smaller[0] and w <= smaller[1] for b, w in known)
    if floors:
        assert costs.estimate(*smaller) <= costs.estimate(*one)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_impossible_times_are_refused(seconds: float) -> None:
    with pytest.raises(UsageError, match="batch 1 and width 2"):
        RoundCosts().observe(1, 2, seconds)
    with pytest.raises(UsageError, match="batch 1 and width 2"):
        RoundCosts({(1, 2): seconds})
