"""Prompt lookup: a draft is what followed the same tokens before.

    text      x[0 … e], e the position of the last known token: consumed tokens, the pending one, drafts so far
    m(i)      how many tokens up to x[i] equal those up to x[e], at most ``longest``, for every i < e
    draft     x[i + 1] for the greatest m(i), the latest of equals

Without any match the latest place is e − 1, and the draft repeats x[e]. Letters: B lanes, S positions of a page table.
"""

import torch

from specdec.state.store import StateStore


class NgramDrafter:
    """Lookup in the text of each request. Methods are those of ``specdec.interfaces.Drafter``."""

    #: Row i of the draft state is token i: nothing is missing at N consumed tokens.
    lag = 0

    def __init__(self, layout, target, capacities, longest):
        device = target.store.device
        self.longest = longest
        self.store = StateStore(
            layout, slots=capacities.slots, pages=capacities.pages, context=capacities.context, device=device
        )

    @classmethod
    def build(cls, *, recipe, target, capacities, longest=4):
        """Allocates the draft state. longest: tokens compared at most; ``recipe`` gives the layout, ``target`` the device."""
        return cls(recipe.drafter_layout, target, capacities, longest)

    def _keep(self, slots, start, tokens, valid=None):
        """Writes tokens [B, T] at positions from start [B]; those that are not ``valid`` [B, T] go to the trash page."""
        positions = start.unsqueeze(1) + torch.arange(tokens.shape[1], device=tokens.device)
        entries = self.store.entries(slots, positions, valid=valid)
        self.store.paged("tokens", 0).index_copy_(0, entries, tokens.reshape(-1))

    def _check(self, slots, consumed):
        """A state of another length than the target's ends the request with an error."""
        self.store.flag(slots, self.store.read_row("rows", 0, slots) != consumed)

    def prefill(self, feedback, tokens, slot, start):
        """Prompt tokens [T] of one slot [1]."""
        first = torch.zeros_like(slot) + start
        self._check(slot, first)
        self._keep(slot, first, tokens.unsqueeze(0))
        self.store.write_row("rows", slot, first + tokens.shape[0])

    def propose(self, lanes, draft_tokens, proposer):
        """Places drafts one after the other; each goes on from what the proposer answered, which may be a copied token."""
        self._check(lanes.slots, lanes.consumed)
        reach = self.store.page_table.shape[1] * self.store.layout.page_tokens
        text = self.store.read_pages("tokens", 0, self.store.page_rows(lanes.slots, reach), lanes.count)
        positions = torch.arange(reach, device=text.device)
        token = lanes.pending
        for depth in range(draft_tokens):
            end = (lanes.consumed + depth).unsqueeze(1)
            text = torch.where(positions == end, token.unsqueeze(1), text)
            token = proposer.place(depth, self._following(text, positions, end))

    def _following(self, text, positions, end):
        """The token [B] behind the best place in text [B, S], whose last known position is end [B, 1]."""
        match = positions < end
        rank = torch.where(match, positions, -1)
        for back in range(self.longest):
            last = text.gather(1, (end - back).clamp(min=0))
            match = match & (positions >= back) & (text.roll(back, 1) == last)
            rank = rank + match * positions.shape[0]
        return text.gather(1, rank.argmax(1, keepdim=True) + 1).squeeze(1)

    def absorb(self, lanes, tokens, emitted):
        """Consumed inputs: the pending token and all emitted ones but the last. tokens: [B, W], emitted: [B]."""
        inputs = torch.cat([lanes.pending.unsqueeze(1), tokens[:, :-1]], dim=1)
        valid = torch.arange(inputs.shape[1], device=inputs.device) < emitted.unsqueeze(1)
        self._keep(lanes.slots, lanes.consumed, inputs, valid)

    def commit(self, lanes, emitted):
        """See ``Drafter.commit``."""
        self.store.write_row("rows", lanes.slots, lanes.consumed + emitted)
        self.store.commit(lanes.slots, emitted)

    def snapshot(self, slots, taken=None):
        """See ``Drafter.snapshot``. Tokens are in pages, which are no part of it."""
        return self.store.state_after(slots, torch.zeros_like(slots))

    def restore(self, slot, state, consumed):
        """See ``Drafter.restore``."""
        self.store.restore(slot, {**state, "rows": torch.zeros_like(state["rows"]) + consumed})

    def faults(self, slots):
        """See ``Drafter.faults``."""
        return self.store.faults.index_select(0, slots)
