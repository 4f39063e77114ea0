"""Committed state of a slot by what later rounds can read of it, how two of them compare, and poison for everything
else."""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import gcd

import torch
from torch import Tensor

from specdec.declaration import StateField, StateKind, StateLayout
from specdec.state.store import StateStore
from specdec.testing.conformance.bench import Bench
from specdec.testing.conformance.precision import Precision


def open_positions(layout: StateLayout, rows: int) -> range:
    """Positions that rings must still hold when ``rows`` positions are committed.

    With grouped pages these are the members of the open group; without, the declared ring history.
    """
    groups = [field.extent for field in layout.fields if field.kind is StateKind.PAGED and field.extent > 1]
    if not groups:
        return range(max(rows - layout.ring_history, 0), rows)
    largest = 1
    for extent in groups:
        largest = largest * extent // gcd(largest, extent)
    return range(rows - rows % largest, rows)


def tag_field(layout: StateLayout, ring: StateField) -> StateField | None:
    """The position tags of a ring: an int64 scalar ring of the same extent, the one with the most similar name."""
    tags = [
        field
        for field in layout.fields
        if field.kind is StateKind.RING and field.dtype == "int64" and not field.shape and field.extent == ring.extent
    ]
    if not tags or ring in tags:
        return None

    def shared(field: StateField) -> int:
        return next(
            (i for i, (a, b) in enumerate(zip(field.name, ring.name)) if a != b), min(len(field.name), len(ring.name))
        )

    return max(tags, key=shared)


def page_entries(store: StateStore, field: StateField, slot: int, rows: int) -> Tensor:
    """Complete entries [layers, rows // extent, *shape] of a paged field, in position order."""
    pages = store.tensors[field.name][:, store.page_table[slot]]
    return pages.flatten(1, 2)[:, : rows // field.extent]


def committed(store: StateStore, slot: int, rows: int, ignore: Collection[str] = ()) -> dict[str, Tensor]:
    """What a later round can read of a slot whose store has ``rows`` committed positions, by field name.

    Records hold nothing between rounds; rings are reduced to the positions that must be there, and a wrong tag is an
    error. ignore: fields that describe rounds rather than tokens. Raises AssertionError for a missing ring position.
    """
    where = torch.tensor([slot], device=store.device)
    after = store.state_after(where, torch.zeros_like(where))
    found: dict[str, Tensor] = {}
    for field in store.layout.fields:
        if field.name in ignore or field.kind is StateKind.RECORDS:
            continue
        if field.kind is StateKind.PAGED:
            found[field.name] = page_entries(store, field, slot, rows)
        elif field.kind is StateKind.RING:
            tags = tag_field(store.layout, field)
            positions = torch.tensor(list(open_positions(store.layout, rows)), dtype=torch.int64, device=store.device)
            entries = positions % field.extent
            if tags is None:
                held = after[field.name][:, 0, entries]
                assert bool((held == positions).all()), (
                    f"{store.layout.owner} {field.name}: tags {held}, want {positions}"
                )
            else:
                found[field.name] = after[field.name][:, 0, entries]
        else:
            found[field.name] = after[field.name]
    return found


def assert_same_state(
    found: dict[str, Tensor],
    expected: dict[str, Tensor],
    *,
    owner: str,
    precision: Precision,
    explain: Callable[[str], str] = lambda name: "",
) -> None:
    """Compares two results of ``committed``. Raises AssertionError naming the field and the greatest difference.

    explain: what may be the matter with a field that differs, to follow the message.
    """
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        got = found[name]
        assert got.shape == wanted.shape, f"{owner} {name}: {tuple(got.shape)} against {tuple(wanted.shape)}"
        if not wanted.numel():
            continue
        if wanted.is_floating_point():
            wrong = precision.differences(got, wanted)
            assert wrong is None, f"{owner} {name}: {wrong}{explain(name)}"
        else:
            assert torch.equal(got, wanted), (
                f"{owner} {name}: {got.flatten().tolist()} against {wanted.flatten().tolist()}{explain(name)}"
            )


def _junk(tensor: Tensor) -> float:
    return float("nan") if tensor.is_floating_point() else -1


def poison(bench: Bench, rows: dict[int, int]) -> None:
    """Overwrites everything that is not committed state of the slots in ``rows`` (slot → N consumed tokens).

    Candidates, records, the spare slot and the trash page by the store's own ``poison``; then all page entries behind
    the committed ones, free and foreign pages included, ring entries that nobody may rely on, and the arena's
    scratch. Slots that are not in ``rows`` lose their pages' contents too.
    """
    for store, lag in zip(bench.stores, (0, bench.drafter.lag), strict=True):
        store.poison()
        for field in store.layout.fields:
            tensor = store.tensors[field.name]
            if field.kind is StateKind.PAGED:
                _poison_pages(store, field, {slot: max(count - lag, 0) for slot, count in rows.items()})
            elif field.kind is StateKind.RING:
                for slot, count in rows.items():
                    kept = [p % field.extent for p in open_positions(store.layout, max(count - lag, 0))]
                    stale = [entry for entry in range(field.extent) if entry not in kept]
                    tensor[:, slot, stale] = _junk(tensor)
    bench.arena.poison()


def _poison_pages(store: StateStore, field: StateField, rows: dict[int, int]) -> None:
    tensor = store.tensors[field.name]
    per_page = store.layout.page_tokens // field.extent
    kept = torch.zeros(store.pages + 1, per_page, dtype=torch.bool, device=store.device)
    for slot, count in rows.items():
        table = store.page_table[slot]
        entries = torch.arange(count // field.extent, device=store.device)
        kept[table[entries // per_page], entries % per_page] = True
    mask = ~kept.view(1, store.pages + 1, per_page, *[1] * len(field.shape))
    tensor.masked_fill_(mask, _junk(tensor))


def poison_slot(bench: Bench, slot: int) -> None:
    """Overwrites a slot altogether, as an earlier owner might have left it; admission must make it good again."""
    for store in bench.stores:
        for field in store.layout.fields:
            tensor = store.tensors[field.name]
            if field.kind is StateKind.PAGED:
                owned = store.page_table[slot]
                tensor[:, owned[owned > 0]] = _junk(tensor)
            else:
                tensor[:, slot] = _junk(tensor)
