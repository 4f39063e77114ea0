"""Probes lose no more than what was put aside for them."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from specdec.control.exploration import GAP, RESERVE_ROUNDS, SHARE, ExplorationBudget


class Spending(RuleBasedStateMachine):
    """Rounds of one second; each probe that is affordable is made and loses at most what was expected."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = ExplorationBudget()
        self.turn, self.time, self.lost = 0, 0.0, 0.0
        self.last: int | None = None

    @rule(rounds=st.integers(1, 100))
    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self.turn += 1
            self.time += 1.0
            self.budget.earn(1.0)

    @rule(expected=st.floats(0.01, 1.0), share=st.floats(0.0, 1.0))
    def probe(self, expected: float, share: float) -> None:
        if self.budget.open(self.turn) and expected <= self.budget.balance:
            assert self.last is None or self.turn - self.last >= GAP
            self.budget.start(self.turn)
            self.turn += 1
            loss = expected * share + 1e-9
            self.budget.settle(self.turn, loss)
            self.lost += loss
            self.last = self.turn - 1

    @rule()
    def gaining_probe(self) -> None:
        if self.budget.open(self.turn):
            self.budget.start(self.turn)
            self.budget.settle(self.turn, -0.5)
            assert self.budget.open(self.turn), "what gained may be repeated at once"
            self.lost -= 0.5
            self.last = None

    @invariant()
    def losses_are_funded(self) -> None:
        assert self.lost <= SHARE * self.time + 1e-6
        assert self.budget.balance <= RESERVE_ROUNDS * SHARE + 1e-9


TestSpending = Spending.TestCase


def test_nothing_is_spent_before_something_was_put_aside() -> None:
    assert not ExplorationBudget().open(100)


def test_a_share_of_zero_never_probes() -> None:
    budget = ExplorationBudget(0.0)
    for _ in range(1000):
        budget.earn(1.0)
    assert not budget.open(1000)
