"""Tensors of one state layout: allocation, addressing and the commit that all layout kinds share.

Every per-slot field is [layers, R + 1, rows, *shape]; slot R is the spare slot, the trash target of dead lanes.
Every paged field is [layers, pages + 1, entries per page, *shape]; page 0 is trash.
Methods used inside a round (``entries``, ``read_*``, ``write_*``, ``commit``) are tensor programs: they do not synchronise,
allocate nothing that outlives the round and accept repeated spare slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from specdec.declaration import StateField, StateKind, StateLayout
from specdec.errors import DeclarationError
from specdec.places import method_of
from specdec.state.upload import upload

# kinds whose commit is the same for every plugin: selection, shift, or validity by length and tags
_COMMITTED_BY_STORE = (StateKind.COLUMNS, StateKind.WINDOW, StateKind.PAGED, StateKind.RING)


#: What commits a field, by kind.
_COMMITTED_WITH = {
    StateKind.ROW: "store.write_row('{name}', lanes.slots, values)",
    StateKind.RECORDS: "store.commit_records('{name}')",
} | dict.fromkeys(_COMMITTED_BY_STORE, "store.commit(lanes.slots, taken)")


class StateStore:
    """State of up to R requests under one layout. Making one allocates all of it: at preparation, in the hook that needs it.

    layout: what it was made from. slots: R. spare: the spare slot, number R. pages: of each paged field, the trash page not
    counted. horizon: most inputs of a verification, drafts and the pending token. device: where all tensors are. fields, tensors:
    declaration and tensor of each field by name; ``store[name]`` is the tensor. page_table: [R + 1, S] int64, page of each
    ``layout.page_tokens`` positions of a slot; S pages reach over the context and a horizon behind it. selected: [R + 1] int64,
    the committed column of ``columns`` fields. faults: [R + 1] int64, broken invariants seen since the slot was reset.
    """

    def __init__(self, layout: StateLayout, *, slots: int, pages: int, context: int, device: torch.device) -> None:
        self.layout = layout
        self.slots = slots
        self.spare = slots
        self.pages = pages
        self.horizon = layout.max_draft_tokens + 1
        self.device = device
        self.fields: dict[str, StateField] = {field.name: field for field in layout.fields}
        self.tensors: dict[str, Tensor] = {field.name: self._allocate(field) for field in layout.fields}
        reach = -(-(context + self.horizon) // layout.page_tokens)
        self.page_table = torch.zeros(slots + 1, reach, dtype=torch.int64, device=device)
        # column written by the last consumed verification input of each slot; 0 after a prompt
        self.selected = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        # broken invariants seen since the slot was reset; a round ends the request when it is not zero
        self.faults = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self._windows = [f for f in layout.fields if f.kind is StateKind.WINDOW]
        self._committed_rows = {f.name: torch.arange(f.extent, device=device) for f in self._windows}
        self._trash = torch.zeros((), dtype=torch.int64, device=device)
        self._commits: Counter[str] = Counter()

    def _allocate(self, field: StateField) -> Tensor:
        dtype = getattr(torch, field.dtype)
        if field.kind is StateKind.PAGED:
            shape = (field.layers, self.pages + 1, self.layout.page_tokens // field.extent, *field.shape)
        else:
            shape = (field.layers, self.slots + 1, field.rows(self.layout.max_draft_tokens), *field.shape)
        return torch.full(shape, field.fill, dtype=dtype, device=self.device)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @property
    def nbytes(self) -> int:
        """Bytes of all field tensors, spare slot and trash page included."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    # --- host side, between rounds -------------------------------------------------------------------------------

    def reset(self, slot: int) -> None:
        """Gives a slot its initial state before a new request: fill values, no selected column, no pages."""
        for field in self.layout.fields:
            if field.kind is not StateKind.PAGED:
                self.tensors[field.name][:, slot] = field.fill
        self.selected[slot] = 0
        self.faults[slot] = 0
        self.page_table[slot] = 0

    def resize_pages(self, pages: int) -> None:
        """Allocates the paged fields anew for another number of pages; contents are lost. Preparation only: nothing may have been
        captured or admitted. The old tensors go first, so that both sizes are never held at once."""
        self.pages = pages
        for field in self.layout.fields:
            if field.kind is StateKind.PAGED:
                del self.tensors[field.name]
                self.tensors[field.name] = self._allocate(field)

    def set_pages(self, slot: int, pages: Iterable[int]) -> None:
        """Writes a slot's page table row; entries past the given pages stay trash."""
        owned = upload(list(pages), torch.int64, self.device)
        self.page_table[slot, : owned.numel()] = owned

    # --- device side, inside a round -------------------------------------------------------------------------------

    def entries(self, slots: Tensor, positions: Tensor, *, group: int = 1, valid: Tensor | None = None) -> Tensor:
        """Flat entry index of token positions in a paged field whose entries cover ``group`` tokens.

        slots: [B]; positions: [B, T] int64 ≥ 0; valid: [B, T] bool, False rows are sent to trash entry 0.
        Returns [B·T] int64 into ``paged(name, layer)``. Page table lookups past its end are clamped and must be masked.
        """
        size = self.layout.page_tokens
        page = torch.div(positions, size, rounding_mode="floor").clamp(max=self.page_table.shape[1] - 1)
        page = self.page_table.index_select(0, slots).gather(1, page)
        flat = page * (size // group) + torch.div(positions % size, group, rounding_mode="floor")
        if valid is not None:
            flat = torch.where(valid, flat, self._trash)
        return flat.reshape(-1)

    def page_rows(self, slots: Tensor, tokens: int) -> Tensor:
        """Page ids [B · pages] that cover the first ``tokens`` positions of each lane, for ``read_pages``."""
        count = -(-tokens // self.layout.page_tokens)
        return self.page_table[:, :count].index_select(0, slots).reshape(-1)

    def paged(self, name: str, layer: int) -> Tensor:
        """View [(pages + 1) · entries per page, *shape] of one layer."""
        return self.tensors[name][layer].flatten(0, 1)

    def read_pages(self, name: str, layer: int, page_rows: Tensor, lanes: int) -> Tensor:
        """Copies whole pages: [B, entries, *shape] in position order."""
        pages = self.tensors[name][layer].index_select(0, page_rows)
        return pages.reshape(lanes, -1, *pages.shape[2:])

    def column_index(self, slots: Tensor, name: str) -> Tensor:
        """Flat index [B] of each lane's committed column, for ``read_column`` of fields with this extent."""
        return slots * self.fields[name].extent + self.selected.index_select(0, slots)

    def read_column(self, name: str, layer: int, index: Tensor) -> Tensor:
        """Committed values [B, *shape] of a ``columns`` field. index: from ``column_index``."""
        return self.tensors[name][layer].flatten(0, 1).index_select(0, index)

    def write_columns(self, name: str, layer: int, slots: Tensor, values: Tensor) -> None:
        """Writes candidate columns 0 … T−1. values: [B, T, *shape]."""
        self.tensors[name][layer][:, : values.shape[1]].index_copy_(0, slots, values)

    def read_window(self, name: str, layer: int, slots: Tensor) -> Tensor:
        """Committed history [B, n, *shape] of a ``window`` field."""
        return self.tensors[name][layer][:, : self.fields[name].extent].index_select(0, slots)

    def write_candidates(self, name: str, layer: int, slots: Tensor, values: Tensor) -> None:
        """Writes a verification's new rows behind the committed ones. values: [B, T, *shape], T ≤ horizon."""
        start = self.fields[name].extent
        self.tensors[name][layer][:, start : start + values.shape[1]].index_copy_(0, slots, values)

    def write_window(self, name: str, layer: int, slots: Tensor, values: Tensor) -> None:
        """Replaces the committed rows themselves (prompt chunks). values: [B, n, *shape]."""
        self.tensors[name][layer][:, : self.fields[name].extent].index_copy_(0, slots, values)

    def flag(self, slots: Tensor, broken: Tensor) -> None:
        """Counts a broken invariant for lanes where ``broken`` [B] bool holds. A round cannot raise; it ends such requests."""
        self.faults.index_copy_(0, slots, self.faults.index_select(0, slots) + broken)

    def read_row(self, name: str, layer: int, slots: Tensor) -> Tensor:
        """Values [B, *shape] of a ``row`` field."""
        return self.tensors[name][layer][:, 0].index_select(0, slots)

    def write_row(self, name: str, slots: Tensor, values: Tensor, layer: int = 0) -> None:
        """Sets a ``row`` field of one layer; values: [B, *shape]. This is its commit; a field of several layers counts once, when
        layer 0 is written."""
        self.tensors[name][layer][:, 0].index_copy_(0, slots, values)
        self._commits[name] += layer == 0

    def write_rows(self, name: str, slots: Tensor, values: Tensor) -> None:
        """Sets a ``row`` field of all layers at once; values: [layers, B, *shape]. This is its commit."""
        self.tensors[name][:, :, 0].index_copy_(1, slots, values)
        self._commits[name] += 1

    def write_records(self, name: str, layer: int, slots: Tensor, values: Tensor) -> None:
        """Writes the records of a verification's rows. values: [B, T, *shape], T ≤ horizon."""
        self.tensors[name][layer][:, : values.shape[1]].index_copy_(0, slots, values)

    def read_records(self, name: str, slots: Tensor, rows: int) -> Tensor:
        """The first ``rows`` records of all layers, [layers, B, rows, *shape]."""
        return self.tensors[name][:, :, :rows].index_select(1, slots)

    def commit_records(self, *names: str) -> None:
        """Says that these ``records`` were consumed: what they recorded is now part of committed rows."""
        self._commits.update(names)

    def commit(self, slots: Tensor, taken: Tensor) -> None:
        """Selects the state after verification input ``taken − 1``: column for ``columns`` fields, shift for windows.

        slots, taken: [B] int64; a lane with taken = 0 keeps its state. Pages and rings need nothing: their validity follows
        the committed length and the tags. Rows and records are the plugin's to commit.
        """
        before = self.selected.index_select(0, slots)
        self.selected.index_copy_(0, slots, torch.where(taken > 0, taken - 1, before))
        for field in self._windows:
            tensor = self.tensors[field.name].flatten(1, 2)  # [layers, (R + 1) · rows, *shape]
            target, source = self._window_rows(field, slots, taken)
            tensor.index_copy_(1, target, tensor.index_select(1, source))
        self._commits.update(field.name for field in self.layout.fields if field.kind in _COMMITTED_BY_STORE)

    def _window_rows(self, field: StateField, slots: Tensor, taken: Tensor) -> tuple[Tensor, Tensor]:
        """Flat rows of the committed part, and of what it becomes after ``taken`` inputs; both [B · n]."""
        first = (slots * field.rows(self.layout.max_draft_tokens)).unsqueeze(1)
        target = first + self._committed_rows[field.name]
        return target.reshape(-1), (target + taken.unsqueeze(1)).reshape(-1)

    # --- commit accounting: python, once per traced round ------------------------------------------------------------

    def begin_round(self) -> None:
        """Starts counting commits."""
        self._commits.clear()

    def end_round(self, of: object = None) -> None:
        """Checks that every declared field was committed exactly once since ``begin_round``. of: whose state it is, for messages.

        Raises DeclarationError naming the fields that were not, what commits each and where; a plugin that forgets one cannot
        produce text.
        """
        wrong = self._miscounted()
        if not wrong:
            return
        said = []
        for field in wrong:
            count = self._commits[field.name]
            cure = _COMMITTED_WITH[field.kind].format(name=field.name)
            what = "was committed again" if count else f"was not committed in the round, call {cure}"
            said.append(f"{field.name} ({count} times) {what}")
        raise DeclarationError(
            f"state of the {self.layout.owner}: {'; '.join(said)}; every declared field is committed exactly once a round, in "
            f"{'its commit' if of is None else method_of(of, 'commit')}, or must not be declared"
        )

    def _miscounted(self) -> list[StateField]:
        return [field for field in self.layout.fields if self._commits[field.name] != 1]

    # --- snapshots ---------------------------------------------------------------------------------------------------

    def state_after(self, slots: Tensor, taken: Tensor) -> dict[str, Tensor]:
        """Committed state of lanes, pages excluded, if ``taken`` inputs of the last verification were consumed.

        slots, taken: [B]; taken = 0 is the committed state as it is. Returns copies [layers, B, …] by field name: one entry for
        rows and columns, the carried rows for windows, rings whole; records have no committed part. Rows that a plugin commits by
        replay are returned as they are. Changes nothing.
        """
        column = torch.where(taken > 0, taken - 1, self.selected.index_select(0, slots))
        found = {}
        for field in self.layout.fields:
            tensor = self.tensors[field.name]
            if field.kind is StateKind.ROW:
                found[field.name] = tensor[:, :, 0].index_select(1, slots)
            elif field.kind is StateKind.COLUMNS:
                found[field.name] = tensor.flatten(1, 2).index_select(1, slots * field.extent + column)
            elif field.kind is StateKind.WINDOW:
                _, source = self._window_rows(field, slots, taken)
                rows = tensor.flatten(1, 2).index_select(1, source)
                found[field.name] = rows.unflatten(1, (slots.shape[0], field.extent))
            elif field.kind is StateKind.RING:
                found[field.name] = tensor.index_select(1, slots)
        return found

    def restore(self, slot: Tensor, state: Mapping[str, Tensor]) -> None:
        """Writes a state of one lane (``state_after`` with B = 1) into a slot; pages and ring tags are the caller's.

        slot: [1] int64. Between rounds. Raises DeclarationError if a field is missing.
        """
        for field in self.layout.fields:
            if field.kind in (StateKind.PAGED, StateKind.RECORDS):
                continue
            tensor = self.tensors[field.name]
            if field.kind is StateKind.WINDOW:
                tensor = tensor[:, :, : field.extent]
            elif field.kind is not StateKind.RING:
                tensor = tensor[:, :, 0]
            if field.name not in state:
                raise DeclarationError(
                    f"state of the {self.layout.owner}: the snapshot to restore has no field {field.name!r}; snapshot must "
                    "return every declared field but pages and records, as store.state_after does"
                )
            tensor.index_copy_(1, slot, state[field.name])
        self.selected.index_fill_(0, slot, 0)
        self.faults.index_fill_(0, slot, 0)

    def poison(self) -> None:
        """Overwrites everything that is not committed: unselected columns, window candidates, records, spare slot, trash page.

        Floats become NaN, integers −7. Host side, for tests: nothing that a later round may read may change.
        """
        for field in self.layout.fields:
            tensor = self.tensors[field.name]
            junk = float("nan") if tensor.is_floating_point() else -7
            if field.kind is StateKind.PAGED:
                tensor[:, 0] = junk
                continue
            if field.kind is StateKind.COLUMNS:
                unselected = torch.arange(field.extent, device=self.device) != self.selected.unsqueeze(1)
                shape = (1, *unselected.shape, *[1] * len(field.shape))
                tensor.masked_fill_(unselected.view(shape), junk)
            elif field.kind is StateKind.WINDOW:
                tensor[:, :, field.extent :] = junk
            elif field.kind is StateKind.RECORDS:
                tensor.fill_(junk)
            tensor[:, self.spare] = junk
