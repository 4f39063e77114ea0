"""A DeepSeek-V4.1 target alone, driven without rounds: slots with private pages, lanes at will, and what a slot has committed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from specdec.checkpoint.reader import Checkpoint
from specdec.declaration import StateKind
from specdec.interfaces import Capacities
from specdec.state.requests import CONSUMED, FINISH, Lanes, RequestTable
from specdec_deepseek_v41.geometry import Geometry
from specdec_deepseek_v41.target import DeepseekTarget

CPU = torch.device("cpu")


class Driver:
    """One target and the number of tokens that each of its slots consumed."""

    def __init__(
        self, directory: Path, *, dtype: str = "float64", qdq: bool = True, slots: int = 3, context: int = 120
    ) -> None:
        reach = -(-(context + 8) // 64)
        capacities = Capacities(
            slots=slots, context=context, pages=slots * reach, max_draft_tokens=7, dtype=dtype, prefill_rows=context
        )
        with Checkpoint.open(directory) as checkpoint:
            geometry = Geometry.from_config(checkpoint.config)
            self.target = DeepseekTarget(checkpoint, geometry, capacities, CPU, qdq=qdq)
        self.table = RequestTable(slots=slots, stop_ids=1, device=CPU)
        self.consumed = [0] * slots
        for slot in range(slots):
            self.target.store.set_pages(slot, range(1 + slot * reach, 1 + (slot + 1) * reach))

    def prefill(self, slot: int, tokens: torch.Tensor, chunks: Sequence[int] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        """Consumes a prompt in chunks of the given sizes, the rest as one. Returns features [T, D] and logits [T, V]."""
        features, logits = [], []
        for chunk in tokens.split([*chunks, len(tokens) - sum(chunks)]):
            if len(chunk):
                features.append(self.target.prefill(chunk, torch.tensor([slot]), self.consumed[slot]))
                logits.append(self.target.prefill_logits(len(chunk)))
                self.consumed[slot] += len(chunk)
        return torch.cat(features), torch.cat(logits)

    def lanes(self, *slots: int, dead: Sequence[int] = ()) -> Lanes:
        """Lanes of these slots at what they consumed; those in ``dead`` have finished."""
        for slot in slots:
            self.table.integers[slot, CONSUMED] = self.consumed[slot]
            self.table.integers[slot, FINISH] = int(slot in dead)
        return self.table.lanes(torch.tensor(slots))

    def commit(self, lanes: Lanes, taken: Sequence[int]) -> None:
        """Commits ``taken`` rows of each lane."""
        self.target.commit(lanes, torch.tensor(taken))
        for slot, count in zip(lanes.requested.tolist(), taken, strict=True):
            self.consumed[slot] += count

    def step(self, slot: int, tokens: Sequence[int], taken: int) -> torch.Tensor:
        """Verifies one lane's tokens and commits ``taken`` of them. Returns logits [W, V]."""
        lanes = self.lanes(slot)
        logits = self.target.verify(torch.tensor([list(tokens)]), lanes)[0]
        self.commit(lanes, [taken])
        return logits

    def state(self, slot: int) -> dict[str, torch.Tensor]:
        """Copies of all that a later call may read of a slot, by field name."""
        store, consumed, found = self.target.store, self.consumed[slot], {}
        for field in store.layout.fields:
            tensor = store[field.name]
            if field.kind is StateKind.PAGED:
                entries = tensor[:, store.page_table[slot]].flatten(1, 2)
                found[field.name] = entries[:, : consumed // field.extent].clone()
            elif field.kind is StateKind.COLUMNS:
                found[field.name] = tensor[:, slot, store.selected[slot]].clone()
            elif field.name != "pending" or consumed % 2:
                found[field.name] = tensor[:, slot, : field.extent].clone()
        return found


def furthest(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Largest difference of two states with the same fields."""
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).abs().max()) if wanted[name].numel() else 0.0 for name in wanted)
