"""Copied drafts of one round: tokens that the host found, in place of a drafter's first proposals."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from specdec.errors import UsageError


@frozen(kw_only=True, eq=False)
class Copies:
    """What the staging buffer says about copies. tokens: [B, K] int64, the first ``counts`` of a lane mean something; counts: [B]
    int64 in 0 … K, 0 for lanes without copies."""

    tokens: Tensor
    counts: Tensor

    def at(self, depth: int) -> tuple[Tensor, Tensor]:
        """Which lanes have a copy of this depth, [B] bool, and the copied tokens, [B] int64."""
        return self.counts > depth, self.tokens[:, depth]

    def sources(self, offered: Tensor) -> Tensor:
        """Source bits [B] int64 of the first ``offered`` [B] drafts: bit k is set if draft k was copied."""
        copied = torch.minimum(self.counts, offered)
        return torch.bitwise_left_shift(torch.ones_like(copied), copied) - 1


def staged_copies(copies: Sequence[Sequence[int]] | None, lanes: int, batch: int, drafts: int) -> list[int]:
    """What the staging buffer holds: B counts, then B·K tokens; nothing for K = 0. ``copies`` None is no copy anywhere.

    Raises UsageError if there are not as many entries as lanes, or a lane brings more copies than the round has drafts.
    """
    given = [()] * lanes if copies is None else copies
    if len(given) != lanes:
        raise UsageError(f"copies name {len(given)} lanes and the round {lanes}; give every lane its copies, or ()")
    longest = max(map(len, given), default=0)
    if longest > drafts:
        raise UsageError(f"a lane brings {longest} copied drafts; this round has {drafts}; shorten the copy")
    if not drafts:
        return []
    rows = [*given, *[()] * (batch - lanes)]
    counts = [len(row) for row in rows]
    return counts + [token for row in rows for token in (*row, *[0] * (drafts - len(row)))]
