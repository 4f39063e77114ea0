"""A proposer for tests that drive a drafter themselves."""

from __future__ import annotations

from torch import Tensor


class Recorder:
    """A proposer that keeps the logits it is shown and draws what it was told. forced: [B, K] int64."""

    def __init__(self, forced: Tensor) -> None:
        self.forced = forced
        self.logits: list[Tensor] = []

    def draw(self, depth: int, logits: Tensor) -> Tensor:
        """See ``Proposer.draw``."""
        assert depth == len(self.logits)
        self.logits.append(logits.clone())
        return self.forced[:, depth]
