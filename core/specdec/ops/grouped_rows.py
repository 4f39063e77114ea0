"""Rows of one call over a context whose tokens are selected in groups: addresses, carried members, choice, visibility.

Groups of ``ratio`` consecutive tokens, aligned at position 0, have one key each; a query attends to the tokens of its
``budget`` best complete groups and to the open tail, the tokens after the last complete group. A group's key needs all of its
raw rows. Those of the open group wait in a ring until the row that completes the group arrives; every ring entry is tagged
with its position, and a tag that is not the expected one is a fault.

``RowPlan`` holds what every layer of one call shares. How raw rows become a key, how groups are scored and what is attended
to is the model's. State fields it relies on: ``raw_tags`` (ring), ``anchor`` (row), a paged field per kind of entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor

from specdec.ops.select import uses_cuda
from specdec.state.store import StateStore

# Groups of a context among which a kernel finds the best by comparing all pairs; a sort is better for more.
_MOST_RANKED = 8192


@frozen(kw_only=True, eq=False)
class Chosen:
    """Chosen groups of every row. ids: [B, T, n] int64; counted: [B, T, n] bool, False where a row has fewer than n complete
    groups."""

    ids: Tensor
    counted: Tensor


@frozen(kw_only=True, eq=False)
class RowPlan:
    """Addresses of one call's rows in one store. B lanes, T rows each; positions [B, T].

    Invalid rows (masked by ``valid``) read like any other but write only to trash.
    """

    store: StateStore
    ratio: int  # tokens per group
    budget: int  # groups a row may choose
    slots: Tensor  # [B]
    batch: int
    rows: int
    positions: Tensor
    token_entries: Tensor  # [B·T]
    group_entries: Tensor  # [B·T], trash where the row completes no group
    ring_read: Tensor  # [B·(ratio − 1)] flat ring entries of the positions just before the interval
    ring_valid: Tensor  # [B, ratio − 1]
    ring_write: Tensor  # [B·kept]
    ring_rows: int
    page_rows: Tensor
    unwritten: Tensor  # [B, tokens] positions no row of this call may see
    causal: Tensor  # [B, T, tokens] positions ≤ the row's own
    select: bool
    gather: bool

    @classmethod
    def build(
        cls,
        store: StateStore,
        *,
        ratio: int,
        budget: int,
        slots: Tensor,
        positions: Tensor,
        tokens: int,
        valid: Tensor | None = None,
        **more: Any,
    ) -> Self:
        """Plans the rows and writes their ring tags; checks that the carried group members carry the expected tags.

        slots: [B]; positions: [B, T] consecutive per lane; tokens: attended positions 0 … tokens−1, a multiple of the page;
        valid: [B, T] bool or None for all; more: the fields of a subclass.
        """
        batch, rows = positions.shape
        completes = positions % ratio == ratio - 1
        if valid is not None:
            completes = completes & valid
        first = (positions - (ratio - 1)).clamp(min=0)
        extent = store.fields["raw_tags"].extent
        carried = positions[:, :1] - torch.arange(ratio - 1, 0, -1, device=positions.device)
        ring_read = (slots.unsqueeze(1) * extent + carried % extent).reshape(-1)
        tags = store["raw_tags"][0].flatten()
        held = tags.index_select(0, ring_read).view(batch, -1) == carried
        # row j needs the carried members that lie in its group: those at or after positions[j] − (ratio − 1)
        needed = completes.unsqueeze(-1) & (carried.unsqueeze(1) >= first.unsqueeze(-1))
        store.flag(slots, (needed & ~held.unsqueeze(1)).flatten(1).any(1))
        ring_rows = min(rows, extent)
        last = positions[:, rows - ring_rows :]
        write_slots = slots.unsqueeze(1)
        if valid is not None:
            write_slots = torch.where(valid[:, rows - ring_rows :], write_slots, store.spare)
        ring_write = (write_slots * extent + last % extent).reshape(-1)
        tags.index_copy_(0, ring_write, last.reshape(-1))
        select = tokens // ratio > budget
        seen = torch.arange(tokens, device=positions.device)
        return cls(
            store=store,
            ratio=ratio,
            budget=budget,
            slots=slots,
            batch=batch,
            rows=rows,
            positions=positions,
            token_entries=store.entries(slots, positions, valid=valid),
            group_entries=store.entries(slots, positions, group=ratio, valid=completes),
            ring_read=ring_read,
            ring_valid=held,
            ring_write=ring_write,
            ring_rows=ring_rows,
            page_rows=store.page_rows(slots, tokens),
            unwritten=seen > positions[:, -1:],
            causal=seen <= positions.unsqueeze(-1),
            select=select,
            # gathering single tokens pays once the selection is a small part of the context; fixed by sizes, not by T
            gather=select and tokens > 2 * ratio * (budget + 1),
            **more,
        )

    def steps(self) -> Iterator[Self]:
        """The same rows as T calls of one row each: row j is planned as if rows before it had been called already.

        For recursive drafting, where a row's input is known only after the row before it has run. Needs ring extent ≥ T + ratio −
        1, so that the tags written for all rows at once hide no carried member.
        """
        ratio = self.ratio
        extent = self.store.fields["raw_tags"].extent
        back = torch.arange(ratio - 1, 0, -1, device=self.positions.device)
        carried = self.positions.unsqueeze(-1) - back  # [B, T, ratio − 1]
        ring_read = self.slots[:, None, None] * extent + carried % extent
        # members at or after the first row are written by earlier steps, the others were checked by ``build``
        own = carried >= self.positions[:, :1].unsqueeze(-1)
        before = F.pad(self.ring_valid, (0, self.rows), value=True).unfold(1, ratio - 1, 1)
        held = own | before[:, : self.rows]
        token_entries, group_entries = self.token_entries.view(self.batch, -1), self.group_entries.view(self.batch, -1)
        ring_write = self.ring_write.view(self.batch, -1)
        seen = self.causal.logical_not()
        for j in range(self.rows):
            row = slice(j, j + 1)
            yield evolve(
                self,
                rows=1,
                positions=self.positions[:, row],
                token_entries=token_entries[:, j],
                group_entries=group_entries[:, j],
                ring_read=ring_read[:, j].reshape(-1),
                ring_valid=held[:, j],
                ring_write=ring_write[:, j],
                ring_rows=1,
                unwritten=seen[:, j],
                causal=self.causal[:, row],
            )

    # --- raw rows and group keys -------------------------------------------------------------------------------------

    def members(self, name: str, layer: int, raw: Tensor) -> Tensor:
        """Raw rows of the ``ratio`` positions that end at each row, the carried ones read from the ring ``name``.

        raw: [B, T, *shape]. Returns [B, T, *shape, ratio], oldest first; members before position 0 or without a valid tag are
        zero. Call before ``keep_raw``.
        """
        carried = self.store[name][layer].flatten(0, 1).index_select(0, self.ring_read)
        carried = carried.view(self.batch, self.ratio - 1, *raw.shape[2:])
        held = self.ring_valid.view(self.batch, self.ratio - 1, *[1] * (raw.dim() - 2))
        return torch.cat([torch.where(held, carried, 0), raw], dim=1).unfold(1, self.ratio, 1)

    def keep_raw(self, name: str, layer: int, raw: Tensor) -> None:
        """Writes the last rows into the ring ``name``. raw: [B, T, *shape]."""
        kept = raw[:, self.rows - self.ring_rows :].flatten(0, 1)
        self.store[name][layer].flatten(0, 1).index_copy_(0, self.ring_write, kept)

    def write_tokens(self, name: str, layer: int, values: Tensor) -> None:
        """Writes one entry per row into the paged field ``name``. values: [B·T, *shape]."""
        self.store.paged(name, layer).index_copy_(0, self.token_entries, values)

    def write_groups(self, name: str, layer: int, values: Tensor) -> None:
        """Writes the entry of the group that ends at each row, where one does. values: [B·T, *shape]."""
        self.store.paged(name, layer).index_copy_(0, self.group_entries, values)

    # --- choice ------------------------------------------------------------------------------------------------------

    def choose(self, scores: Tensor) -> Chosen:
        """The best complete groups of every row; ties take the lower group. scores: [B, T, tokens / ratio], of any sign."""
        complete = ((self.positions + 1) // self.ratio).unsqueeze(-1)
        groups = torch.arange(scores.shape[-1], device=scores.device)
        # keys of incomplete groups were never written and may hold anything
        known = scores.masked_fill(groups >= complete, float("-inf"))
        ids = torch.sort(known, dim=-1, descending=True, stable=True).indices[..., : self.budget]
        return Chosen(ids=ids, counted=ids < complete)

    def choose_scored(
        self, q: Tensor, weights: Tensor | None, name: str, layer: int, *, factor: float
    ) -> Chosen | None:
        """``choose`` on scores that kernels compute, or None where the caller's program has to do it.

        Score of group z: factor · Σ_h w_h · relu(q_h · key_z). q: [B, T, heads, D]; weights: [B·T, heads], or None for ones;
        ``name``: paged group field [D].
        """
        if self.causal.shape[-1] > self.ratio * _MOST_RANKED or not uses_cuda("choose_groups", q):
            return None
        from specdec.ops.cuda.group_choice import choose_groups

        return choose_groups(q, weights, self.store.paged(name, layer), self, factor=factor)

    def visible(self, chosen: Chosen) -> Tensor:
        """Which positions each row attends to, [B, T, tokens] bool: tokens of the chosen groups, and the open tail."""
        tokens = self.causal.shape[-1]
        shape = (self.batch, self.rows, tokens // self.ratio)
        groups = torch.zeros(shape, dtype=torch.bool, device=chosen.ids.device).scatter(2, chosen.ids, chosen.counted)
        tail = torch.arange(tokens, device=groups.device) >= self._tail().unsqueeze(-1)
        picked = groups.unsqueeze(-1).expand(-1, -1, -1, self.ratio).flatten(2)
        return (picked | tail) & self.causal

    def gathered(self, chosen: Chosen) -> tuple[Tensor, Tensor]:
        """Where the attended tokens of each row are: flat entries [B·T·n] of a paged token field, and which of them count,
        [B·T, n] bool; n = ratio · (budget + 1) − 1. Entries that do not count are trash."""
        members = torch.arange(self.ratio, device=chosen.ids.device)
        picked = (chosen.ids.unsqueeze(-1) * self.ratio + members).flatten(2)
        tail = self._tail().unsqueeze(-1) + members[:-1]
        tokens = torch.cat([picked, tail], dim=-1)
        open_rows = tail <= self.positions.unsqueeze(-1)
        counts = torch.cat([chosen.counted.repeat_interleave(self.ratio, dim=-1), open_rows], dim=-1)
        entries = self.store.entries(self.slots, tokens.flatten(1), valid=counts.flatten(1))
        return entries, counts.flatten(0, 1)

    def attend(
        self, q: Tensor, name: str, layer: int, chosen: Chosen | None, *, scale: float, shared: bool = False
    ) -> Tensor | None:
        """The attention of these rows by a kernel that finds the entries itself, or None where the caller's program has to do it.

        To the tokens of the chosen groups and the open tail, or up to the row's own token if nothing is chosen. q: [B, T, heads,
        D]; ``name``: paged token field [2, kv heads, D], keys and values, or [D], both for all heads, if ``shared``. Returns [B,
        T, heads, D] in the dtype of q.
        """
        if not uses_cuda("grouped_attention", q):
            return None
        from specdec.ops.cuda.gather_attention import attend_groups

        return attend_groups(q, self.store.paged(name, layer), self, chosen, scale=scale, shared=shared)

    def _tail(self) -> Tensor:
        """First position of each row's open tail, [B, T]."""
        return (self.positions + 1) // self.ratio * self.ratio


def move_anchor(store: StateStore, slots: Tensor, positions: Tensor, *, prompt: bool) -> None:
    """The interval must start right after what the previous one got accepted; then it becomes the last interval.

    slots: [B]; positions: [B, T]; prompt: the rows are committed as they go. This is the commit of the field ``anchor``.
    """
    expected = store.read_row("anchor", 0, slots) + store.selected.index_select(0, slots) + 1
    store.flag(slots, expected != positions[:, 0])
    store.write_row("anchor", slots, positions[:, -1] if prompt else positions[:, 0])


def open_group_state(state: Mapping[str, Tensor], rows: Tensor, ratio: int) -> dict[str, Tensor]:
    """Ring tags and anchor of a state in which exactly ``rows`` [1] int64 positions are history.

    Only the members of the open group stay valid: a later interval reads no other carried row. The next interval starts at
    ``rows``, as after a prompt.
    """
    tags = state["raw_tags"]
    kept = (tags >= rows - rows % ratio) & (tags < rows)
    return {
        "raw_tags": torch.where(kept, tags, -1),
        "anchor": torch.zeros_like(state["anchor"]) + (rows - 1),
    }
