"""Time that may be spent on rounds other than the best known. Torch-free.

A width that is not used teaches nothing: drafts behind it are not judged and its cost is not measured. Probes do that, within a
budget. A share of every round's time is put aside. A probe is made when that pays for what it is expected to lose; it is charged
what it did lose against the ordinary choice in the same round. So a probe that brought more than it cost is free and is repeated
at once, and drafts that became good are found out within a few rounds.
"""

from __future__ import annotations

#: Of all time, what probes may lose. Below the 2 % that are allowed, because first measurements lose some too; less would leave
#: 32 lanes at width one more than 32 rounds without a probe.
SHARE = 0.014
#: Rounds whose share is kept. More could be spent in one burst, long after it was put aside.
RESERVE_ROUNDS = 48
#: Rounds from one probe to the next while probes do not pay: six of them within the 32 rounds that finding out may take.
GAP = 5


class ExplorationBudget:
    """Seconds put aside, and the round from which the next probe may be made."""

    def __init__(self, share: float = SHARE) -> None:
        self.share = share
        self.balance = 0.0
        self.most = 0.0
        self._next = 0

    def earn(self, seconds: float) -> None:
        """A round took so long."""
        income = self.share * seconds
        self.most = RESERVE_ROUNDS * income
        self.balance = min(self.balance + income, self.most)

    def open(self, turn: int) -> bool:
        """Whether a probe may be made in this round, if there is enough for it."""
        return turn >= self._next and self.balance > 0

    def start(self, turn: int) -> None:
        """A probe is made in this round."""
        self._next = turn + GAP

    def settle(self, turn: int, loss: float) -> None:
        """A probe lost so many seconds; below 0 it gained, and another may be made at once."""
        self.balance = min(self.balance - loss, self.most)
        if loss <= 0:
            self._next = turn
