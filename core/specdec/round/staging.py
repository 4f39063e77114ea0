"""The staging buffer: what the host froze before a round, in one copy to the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.round.arena import Arena


class Staging:
    """The host's frozen decisions of one round: [lane slots B | draft ceilings B | frame | round number] int64."""

    def __init__(self, arena: Arena, batch: int) -> None:
        self.batch = batch
        self.spare = arena.slots
        # one per frame: the copy of a queued round may still be reading the other
        pinned = arena.device.type == "cuda"
        self._hosts = [torch.zeros(2 * batch + 2, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._device = torch.zeros(2 * batch + 2, dtype=torch.int64, device=arena.device)
        self._device[:batch] = self.spare
        self.slots = self._device[:batch]
        self.ceilings = self._device[batch : 2 * batch]
        self.frame = self._device[2 * batch]
        self.round = self._device[2 * batch + 1]

    def write(self, slots: Sequence[int], ceilings: Sequence[int], number: int) -> None:
        """Fills unused lanes with the spare slot and copies everything at once. Frames alternate with the round number."""
        idle = self.batch - len(slots)
        row = [*slots, *[self.spare] * idle, *ceilings, *[0] * idle, number % 2, number]
        host = self._hosts[number % 2]
        host.copy_(torch.tensor(row, dtype=torch.int64))
        self._device.copy_(host, non_blocking=True)
