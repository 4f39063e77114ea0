"""h[i] = tanh(h[i−1] · turn + embedding[x[i]]); logits are head · h[i]."""

from __future__ import annotations

import torch

from specdec.round.row_target import RowTarget

from .state import VOCAB, target_layout


class RecurrentTarget(RowTarget):
    feedback_field = sampling_field = "memory"
    vocab_size = VOCAB

    def __init__(self, checkpoint, capacities, device):
        super().__init__(target_layout(capacities.dtype), capacities, device)
        dtype = getattr(torch, capacities.dtype)
        self.embedding, self.turn, self.head = (
            checkpoint.load(name).to(device, dtype) for name in ("embedding", "turn", "head")
        )

    def run_rows(self, tokens, slots, positions, *, prompt):
        hidden = self.feedback(slots)
        rows = []
        for step in range(tokens.shape[1]):
            hidden = torch.tanh(hidden @ self.turn + self.embedding[tokens[:, step]])
            rows.append(hidden)
        found = torch.stack(rows, dim=1).flatten(0, 1)
        if prompt:
            self.store.write_row("steps", slots, positions[:, -1] + 1)
        return found, found

    def commit(self, lanes, taken):
        self.store.write_row("steps", lanes.slots, lanes.consumed + taken)
        self.store.commit(lanes.slots, taken)

    def snapshot(self, slots, taken=None):
        state = super().snapshot(slots, taken)
        return state if taken is None else {**state, "steps": state["steps"] + taken}
