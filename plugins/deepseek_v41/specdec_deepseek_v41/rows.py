"""Addresses of one call's rows: where each row's own state goes and where it reads what came before it.

A call has P rows. In a verification a row belongs to a lane and writes *candidates* behind the committed rows of its slot; in a
prompt all rows belong to one slot, follow one another and become committed. Windowed fields (attention rows, unpooled
compressor inputs, token ids) then look alike: a buffer in which the n entries that end at a row's own are its history.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attrs import frozen
from torch import Tensor

from specdec.state.store import StateStore

from .rotary import RotaryTable, Rotation


@frozen(kw_only=True, eq=False)
class Lay:
    """Which lane, slot and position every row has.

    lanes: slots [B] of the lanes; slots, index, positions: [P] slot of each row, its place among the rows of its lane, and its
    position; width: most rows of a lane. grid: [P] place of a row in a [B, width] arrangement, B · width for rows that are
    nobody's; None if row b · width + i is row i of lane b. prompt: rows are committed at once (B = 1).
    """

    lanes: Tensor
    slots: Tensor
    index: Tensor
    positions: Tensor
    width: int
    grid: Tensor | None
    prompt: bool

    @classmethod
    def rectangle(cls, slots: Tensor, positions: Tensor, *, prompt: bool) -> Lay:
        """All rows of every lane. slots: [B]; positions: [B, T]."""
        batch, width = positions.shape
        index = torch.arange(width, device=slots.device).expand(batch, width)
        return cls(
            lanes=slots,
            slots=slots.unsqueeze(1).expand(batch, width).reshape(-1),
            index=index.reshape(-1),
            positions=positions.reshape(-1),
            width=width,
            grid=None,
            prompt=prompt,
        )

    def by_lane(self, x: Tensor) -> Tensor:
        """Rows arranged by lane, [B, width, ·], zeros where a lane has fewer. x: [P, ·]."""
        cells = self.lanes.shape[0] * self.width
        if self.grid is not None:
            x = x.new_zeros(cells + 1, x.shape[-1]).index_copy_(0, self.grid, x)[:cells]
        return x.view(self.lanes.shape[0], self.width, -1)

    def by_row(self, x: Tensor) -> Tensor:
        """The inverse of ``by_lane``: [B, width, ·] → [P, ·]; anything for rows that are nobody's."""
        flat = x.flatten(0, 1)
        if self.grid is None:
            return flat
        return flat.index_select(0, self.grid.clamp(max=flat.shape[0] - 1))


@frozen(kw_only=True, eq=False)
class Rows:
    """What all layers of one call share. n is the extent of the window field.

    own: [P] entry of each row in the buffer of a windowed field, by field name; window: [P · n] entries of a row's attention
    window; bias: [P, 1, n], 0 where the window's entry is a position and −∞ before the first. entries, complete: by ratio, the
    paged entry [P] of the group that ends at a row (trash where none does) and the number of groups that a row sees.
    """

    store: StateStore
    lay: Lay
    own: Mapping[str, Tensor]
    window: Tensor
    bias: Tensor
    entries: Mapping[int, Tensor]
    complete: Mapping[int, Tensor]
    plain: Rotation
    compressed: Rotation
    groups: Mapping[int, Tensor]
    page_rows: Tensor

    @classmethod
    def build(
        cls,
        store: StateStore,
        lay: Lay,
        *,
        ratios: tuple[int, ...],
        tokens: int,
        plain: RotaryTable,
        compressed: RotaryTable,
        like: Tensor,
    ) -> Rows:
        """ratios: those of the compressed fields; tokens: positions a call may attend to, whole pages; like: has the dtype of the
        bias, the accumulate dtype."""
        positions = lay.positions
        own: dict[str, Tensor] = {}
        for name in ("window", "pending", "engram_ids"):
            if name in store.fields:
                field = store.fields[name]
                rows = 0 if lay.prompt else field.rows(store.layout.max_draft_tokens)
                own[name] = lay.slots * rows + (lay.index + field.extent)
        extent = store.fields["window"].extent
        back = torch.arange(1 - extent, 1, device=positions.device)
        before = positions.unsqueeze(1) + back < 0
        rotation = compressed.at(positions)
        groups, entries = {}, {}
        for ratio in ratios:
            first = positions - positions % ratio
            groups[ratio] = compressed.at(first).forward if ratio > 1 else rotation.forward
            ends = (positions % ratio == ratio - 1).unsqueeze(1) if ratio > 1 else None
            entries[ratio] = store.entries(lay.slots, positions.unsqueeze(1), group=ratio, valid=ends)
        return cls(
            store=store,
            lay=lay,
            own=own,
            window=(own["window"].unsqueeze(1) + back).reshape(-1),
            bias=like.new_zeros(before.shape).masked_fill_(before, float("-inf")).unsqueeze(1),
            entries=entries,
            complete={ratio: (positions + 1) // ratio for ratio in ratios},
            plain=plain.at(positions),
            compressed=rotation,
            groups=groups,
            page_rows=store.page_rows(lay.lanes, tokens),
        )

    @property
    def count(self) -> int:
        """P."""
        return self.lay.positions.shape[0]

    def record(self, name: str, layer: int, values: Tensor) -> Tensor:
        """Writes what each row leaves in a windowed field and returns the field's buffer [·, *shape]; the entries that end at
        ``own[name]`` are a row's history. values: [P, *shape]."""
        store = self.store
        if not self.lay.prompt:
            buffer = store[name][layer].flatten(0, 1)
            return buffer.index_copy_(0, self.own[name], values)
        buffer = torch.cat([store.read_window(name, layer, self.lay.lanes)[0], values])
        store.write_window(name, layer, self.lay.lanes, buffer[-store.fields[name].extent :].unsqueeze(0))
        return buffer

    def windows(self, layer: int, values: Tensor) -> Tensor:
        """Attention rows that each row of the call sees, its own included: [P, n, d]. values: [P, d], written too."""
        buffer = self.record("window", layer, values)
        return buffer.index_select(0, self.window).view(self.count, -1, buffer.shape[-1])

    def write_groups(self, name: str, ratio: int, layer: int, values: Tensor) -> None:
        """Writes the entry of the group that ends at each row, where one does. values: [P, ·]."""
        self.store.paged(f"{name}_r{ratio}", layer).index_copy_(0, self.entries[ratio], values)
