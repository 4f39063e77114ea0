"""Committed state of one slot, pages excluded: taken for a prefix checkpoint, or given from one; eagerly or as CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from specdec.interfaces import Drafter, Target
from specdec.round.arena import Arena
from specdec.round.graphs import GraphPool
from specdec.state.upload import upload

#: "target" and "drafter" snapshots by field name, as a round's ``boundary_state``.
Snapshots = Mapping[str, Mapping[str, Tensor]]


class SlotState:
    """Snapshots of slots. Captured, both directions go through the arena's buffers of boundary state."""

    def __init__(self, target: Target, drafter: Drafter | None, arena: Arena) -> None:
        """drafter: None for checkpoints without draft state."""
        self._owners = {"target": target} | ({} if drafter is None else {"drafter": drafter})
        self._arena = arena
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self._buffers: dict[str, dict[str, Tensor]] = {}

    @property
    def captured(self) -> bool:
        """Whether graphs are replayed."""
        return bool(self._graphs)

    def snapshot(self, slot: int) -> Snapshots:
        """State of a slot [layers, 1, …] by field name, in storage of its own. Host side, between rounds; waits for nothing."""
        if not self._graphs:
            where = upload([slot], torch.int64, self._arena.device)
            return {name: owner.snapshot(where) for name, owner in self._owners.items()}
        self._replay("snapshot", slot, 0)
        return {owner: {name: value.clone() for name, value in part.items()} for owner, part in self._buffers.items()}

    def restore(self, slot: int, state: Snapshots, consumed: int) -> None:
        """Gives a slot the state of so many consumed inputs; see ``Target.restore``. Host side, between rounds."""
        if not self._graphs:
            where, length = (upload([value], torch.int64, self._arena.device) for value in (slot, consumed))
            self._give(where, state, length)
            return
        for owner, part in self._buffers.items():
            for name, value in part.items():
                value.copy_(state[owner][name])
        self._replay("restore", slot, consumed)

    def capture(self, pool: GraphPool, spare: int) -> None:
        """Captures both directions. Preparation only; the spare slot is written. Raises CaptureError."""
        # what the programs read: slot and consumed inputs
        self._staged = upload([spare, 0], torch.int64, self._arena.device)
        slot, consumed = self._staged[:1], self._staged[1:]
        self._buffers = {
            owner: {name: self._buffer(owner, name, value) for name, value in part.items()}
            for owner, part in self.snapshot(spare).items()
        }
        graphs = {"snapshot": pool.capture(partial(self._take, slot), "a snapshot of a slot")}
        self._graphs = graphs | {
            "restore": pool.capture(partial(self._give, slot, self._buffers, consumed), "restoring a slot")
        }

    def _buffer(self, owner: str, name: str, value: Tensor) -> Tensor:
        shape = (value.shape[0], self._arena.slots, *value.shape[2:])
        return self._arena.scratch(f"boundary.{owner}.{name}", shape, value.dtype)[:, :1]

    def _take(self, slot: Tensor) -> None:
        for name, owner in self._owners.items():
            for field, value in owner.snapshot(slot).items():
                self._buffers[name][field].copy_(value)

    def _give(self, slot: Tensor, state: Snapshots, consumed: Tensor) -> None:
        for name, owner in self._owners.items():
            owner.restore(slot, state[name], consumed)

    def _replay(self, name: str, slot: int, consumed: int) -> None:
        self._staged.copy_(upload([slot, consumed], torch.int64, self._arena.device))
        self._graphs[name].replay()
