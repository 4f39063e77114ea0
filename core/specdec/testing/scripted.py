"""Drafters whose proposals a test decides, on top of a real drafter that keeps its state as always."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attrs import frozen
from torch import Tensor

from specdec.interfaces import Drafter, Proposer
from specdec.state.requests import Lanes
from specdec.testing.drafters import WrappedDrafter


@frozen(kw_only=True, eq=False)
class _ScriptedProposer:
    """Answers every draw, and every placed token, with the script's token and a point-mass law."""

    inner: Proposer
    script: Tensor
    slots: Tensor

    def draw(self, depth: int, logits: Tensor) -> Tensor:
        return self.inner.place(depth, self.script[:, depth].index_select(0, self.slots))

    def place(self, depth: int, tokens: Tensor) -> Tensor:
        return self.draw(depth, tokens)


class ScriptedDrafter(WrappedDrafter):
    """Proposes tokens from a script, one row per slot, instead of drawing from its own logits or placing its own tokens.

    The wrapped drafter does all its work (feedback pair, recursion over the scripted tokens, absorption), so its state is that
    of a real round in which exactly these drafts were proposed. A script may hold ids outside the vocabulary.
    """

    def __init__(self, inner: Drafter, *, slots: int, max_draft_tokens: int) -> None:
        super().__init__(inner)
        self.script = torch.zeros(slots + 1, max_draft_tokens, dtype=torch.int64, device=inner.store.device)

    def write(self, proposals: Mapping[int, Sequence[int]]) -> None:
        """Sets the next round's proposals by slot; missing depths are token 0. Host side, between rounds."""
        self.script.zero_()
        for slot, tokens in proposals.items():
            self.script[slot, : len(tokens)] = torch.tensor(list(tokens), dtype=torch.int64)

    def proposer(self, lanes: Lanes, inner: Proposer) -> Proposer:
        """Answers from the script."""
        return _ScriptedProposer(inner=inner, script=self.script, slots=lanes.slots)
