"""The staging buffer: what the host froze before a round, in one copy to the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.round.arena import Arena
from specdec.round.copies import Copies, staged_copies


class Staging:
    """The host's frozen decisions of one round, int64: [lane slots B | draft ceilings B | frame | round number], and where rounds
    take copied drafts [copy counts B | copied tokens B·K] behind them."""

    def __init__(self, arena: Arena, batch: int, copied_drafts: int = 0) -> None:
        """copied_drafts: K of a round that takes copies, 0 for one that takes none."""
        self.batch = batch
        self.copied_drafts = copied_drafts
        self.spare = arena.slots
        self._transfers = arena.transfers
        # one per frame: the copy of a queued round may still be reading the other
        pinned = arena.device.type == "cuda"
        size = 2 * batch + 2
        extent = size + (batch + batch * copied_drafts if copied_drafts else 0)
        self._hosts = [torch.zeros(extent, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._device = torch.zeros(extent, dtype=torch.int64, device=arena.device)
        self._device[:batch] = self.spare
        self.slots = self._device[:batch]
        self.ceilings = self._device[batch : 2 * batch]
        self.frame = self._device[2 * batch]
        self.round = self._device[2 * batch + 1]
        self.copies: Copies | None = None
        if copied_drafts:
            tokens = self._device[size + batch :].view(batch, copied_drafts)
            self.copies = Copies(tokens=tokens, counts=self._device[size : size + batch])

    def write(
        self,
        slots: Sequence[int],
        ceilings: Sequence[int],
        number: int,
        copies: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Fills unused lanes with the spare slot and copies everything at once. Frames alternate with the round number.

        copies: see ``Round.submit``; raises UsageError for other lanes, or more copied drafts, than the round has.
        """
        idle = self.batch - len(slots)
        row = [*slots, *[self.spare] * idle, *ceilings, *[0] * idle, number % 2, number]
        row += staged_copies(copies, len(slots), self.batch, self.copied_drafts)
        self._transfers.begin(number)
        host = self._hosts[number % 2]
        host.copy_(torch.tensor(row, dtype=torch.int64))
        self._device.copy_(host, non_blocking=True)
