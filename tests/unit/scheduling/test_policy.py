"""Policies that choose widths: the fixed one."""

from __future__ import annotations

from specdec.control.controller import Reason
from specdec.scheduling.policy import FixedWidth


def test_a_fixed_width_is_that_wherever_it_is_prepared() -> None:
    policy = FixedWidth(4)
    assert policy.drafts == 3
    for widths, expected in (((1, 2, 3, 4, 5), 4), ((1, 4), 4), ((1, 2, 3), 1), ((1,), 1)):
        decision = policy.choose(2, widths, [])
        assert (decision.batch, decision.width, decision.reason) == (2, expected, Reason.FIXED)
