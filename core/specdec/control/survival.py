"""Historical joint prefix survival: how often the first j drafts of a round were all accepted. Torch-free.

Learned from outcomes alone. Forecasts of a drafter decide inside a round which drafts are verified; mixing them in here would let
a drafter that overrates itself keep its own reputation.

Letters: S[j] estimates P(a ≥ j), a accepted drafts, j = 1 … K.
"""

from __future__ import annotations

from specdec.catalog import require_integer
from specdec.errors import UsageError

#: Weight of the newest outcome.
RATE = 0.1
#: Before anything was seen each further draft is taken to be accepted this often.
PRIOR = 0.7


class PrefixSurvival:
    """Running estimate for one class of rounds (a request, a depth, a way of sampling)."""

    def __init__(self, drafts: int, *, rate: float = RATE, prior: float = PRIOR) -> None:
        """drafts: K. rate: weight of the newest outcome, in (0, 1]. prior: S[j] begins at prior^j.

        Raises UsageError for a number out of range.
        """
        require_integer("drafts", drafts, 1, None, "survival of no drafts is nothing to learn")
        if not 0 < rate <= 1:
            raise UsageError(f"rate is {rate}; it must be above 0 and at most 1")
        if not 0 < prior <= 1:
            raise UsageError(f"prior is {prior}; it must be above 0 and at most 1")
        self.rate = rate
        self._survival = [prior**depth for depth in range(1, drafts + 1)]

    @property
    def values(self) -> tuple[float, ...]:
        """S[1] … S[K], never increasing."""
        return tuple(self._survival)

    def expected(self, drafts: int) -> float:
        """Tokens that a round with ``drafts`` verified drafts is expected to emit: 1 + S[1] + … + S[drafts]."""
        return 1.0 + sum(self._survival[:drafts])

    def observe(self, verified: int, accepted: int) -> None:
        """Takes in one round's outcome.

        A prefix longer than what was accepted did not survive, also where it was longer than what was verified. With everything
        verified accepted, longer prefixes are censored: their conditional survival stays as it was.

        Raises UsageError unless 0 ≤ accepted ≤ verified ≤ K.
        """
        if not 0 <= accepted <= verified <= len(self._survival):
            raise UsageError(
                f"accepted {accepted} of {verified} verified drafts; 0 <= accepted <= verified <= {len(self._survival)}"
            )
        known = len(self._survival) if accepted < verified else verified
        before = list(self._survival)
        for depth in range(known):
            survived = 1.0 if accepted > depth else 0.0
            self._survival[depth] += self.rate * (survived - self._survival[depth])
        if 0 < known < len(before) and before[known - 1] > 0:
            ratio = self._survival[known - 1] / before[known - 1]
            for depth in range(known, len(before)):
                self._survival[depth] = before[depth] * ratio
        self._clamp()

    def _clamp(self) -> None:
        """Rounding must not let a longer prefix survive more often than a shorter one."""
        bound = 1.0
        for depth, value in enumerate(self._survival):
            bound = self._survival[depth] = min(max(value, 0.0), bound)
