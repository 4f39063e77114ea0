"""Row i is tanh(h[i] · draft + embedding[x[i+1]]); a draft is drawn from the last row and the mean of all rows before it."""

from __future__ import annotations

import torch

from specdec.state.store import StateStore

from .state import drafter_layout


class RecurrentDrafter:
    lag = 1

    def __init__(self, checkpoint, target, capacities):
        self.target = target
        device = target.store.device
        self.draft = checkpoint.load("draft").to(target.head)
        self.store = StateStore(
            drafter_layout(capacities.dtype),
            slots=capacities.slots,
            pages=capacities.pages,
            context=capacities.context,
            device=device,
        )
        self.tokens = self.store.page_table.shape[1] * self.store.layout.page_tokens
        self.steps = torch.arange(self.tokens, device=device)

    def row(self, feedback, tokens):
        return torch.tanh(feedback @ self.draft + self.target.embedding[tokens])

    def write(self, slots, positions, rows, valid=None):
        entries = self.store.entries(slots, positions, valid=valid)
        self.store.paged("history", 0).index_copy_(0, entries, rows.flatten(0, -2))

    def prefill(self, feedback, tokens, slot, start):
        count = tokens.shape[0]
        self.write(slot, (self.steps[:count] + start).unsqueeze(0), self.row(feedback, tokens))
        self.store.write_row("rows", slot, torch.zeros_like(slot) + start + count)

    def propose(self, lanes, draft_tokens, proposer):
        slots, first = lanes.slots, lanes.consumed - 1
        row = self.row(self.target.feedback(slots), lanes.pending)
        self.write(slots, first.unsqueeze(1), row)
        if draft_tokens == 0:
            return None
        seen = self.steps.unsqueeze(0) <= first.unsqueeze(1)
        pages = self.store.page_rows(slots, self.tokens)
        history = self.store.read_pages("history", 0, pages, lanes.count)
        mean = torch.where(seen.unsqueeze(2), history, 0.0).sum(1) / lanes.consumed.unsqueeze(1)
        for depth in range(draft_tokens):
            token = proposer.draw(depth, (row + mean) @ self.target.head.T)
            row = self.row(row, token)
        return None

    def absorb(self, lanes, tokens, emitted):
        count = tokens.shape[1] - 1
        if count:
            steps = self.steps[:count]
            feedback = self.target.feedback_rows(lanes.slots, count)
            rows = self.row(feedback, tokens[:, :count].clamp(min=0))
            valid = steps < (emitted - 1).unsqueeze(1)
            self.write(lanes.slots, lanes.consumed.unsqueeze(1) + steps, rows, valid)

    def commit(self, lanes, emitted):
        self.store.write_row("rows", lanes.slots, lanes.consumed + emitted - 1)
        self.store.commit(lanes.slots, emitted)

    def snapshot(self, slots, taken=None):
        return self.store.state_after(slots, torch.zeros_like(slots))

    def restore(self, slot, state, consumed):
        rows = torch.zeros_like(state["rows"]) + (consumed - 1).clamp(min=0)
        self.store.restore(slot, {**state, "rows": rows})

    def faults(self, slots):
        return self.store.faults.index_select(0, slots)
