"""What later rounds can read of a slot, by name, and comparisons of it. Works on everything with a target and a drafter."""

from __future__ import annotations

from typing import Any

import torch

from specdec.declaration import StateKind


def committed_state(model: Any, slot: int, consumed: int) -> dict[str, torch.Tensor]:
    """Copies of all committed state of a slot that consumed that many tokens: pages, recurrent state, windows, open groups.

    The anchor describes rounds, not tokens: it is checked against the number of rows instead of being returned.
    """
    state = {}
    owners = [("target", model.target.store, consumed)]
    if model.drafter is not None:
        owners.append(("drafter", model.drafter.store, max(consumed - 1, 0)))
    for owner, store, rows in owners:
        selected = store.selected[slot]
        for field in store.layout.fields:
            tensor = store[field.name]
            name = f"{owner}.{field.name}"
            if field.kind is StateKind.PAGED:
                entries = tensor[:, store.page_table[slot]].flatten(1, 2)
                state[name] = entries[:, : rows // field.extent].clone()
            elif field.kind is StateKind.COLUMNS:
                state[name] = tensor[:, slot, selected].clone()
            elif field.kind is StateKind.WINDOW:
                state[name] = tensor[:, slot, : field.extent].clone()
            elif field.kind is StateKind.ROW and field.name != "anchor":
                state[name] = tensor[:, slot, 0].clone()
            elif field.kind is StateKind.RING and field.name == "raw_keys":
                open_members = torch.arange(rows - rows % 4, rows)
                state[name] = tensor[:, slot, open_members % field.extent]
                assert torch.equal(store["raw_tags"][0, slot, open_members % field.extent], open_members)
        assert int(store["anchor"][0, slot, 0] + selected + 1) == rows, owner
        assert int(store.faults[slot]) == 0, owner
    return state


def assert_same_state(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Equal up to the rounding of another chunking or width, in float64."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
