"""Choice and addressing of grouped rows against plain Python: signed scores, ties, incomplete groups, rings."""

from __future__ import annotations

import pytest
import torch

from specdec.declaration import StateField, StateKind, StateLayout
from specdec.ops.grouped_rows import RowPlan, move_anchor, open_group_state
from specdec.state.store import StateStore

RATIO, BUDGET, TOKENS, RING = 4, 3, 64, 10


def make_store(slots: int = 2) -> StateStore:
    def field(name: str, kind: StateKind, dtype: str = "float64", **changes) -> StateField:
        return StateField(name=name, kind=kind, shape=changes.pop("shape", ()), dtype=dtype, source="test", **changes)

    layout = StateLayout(
        owner="target",
        fields=(
            field("values", StateKind.PAGED),
            field("keys", StateKind.PAGED, extent=RATIO),
            field("raw", StateKind.RING, shape=(2,), extent=RING),
            field("raw_tags", StateKind.RING, "int64", extent=RING, fill=-1),
            field("anchor", StateKind.ROW, "int64", fill=-1),
        ),
        max_draft_tokens=7,
        ring_history=2,
    )
    store = StateStore(layout, slots=slots, pages=2 * slots, context=TOKENS - 8, device=torch.device("cpu"))
    for slot in range(slots):
        store.set_pages(slot, [2 * slots - slot])
    return store


def plan_of(store: StateStore, slots: list[int], starts: list[int], rows: int) -> RowPlan:
    return RowPlan.build(
        store,
        ratio=RATIO,
        budget=BUDGET,
        slots=torch.tensor(slots),
        positions=torch.tensor(starts).unsqueeze(1) + torch.arange(rows),
        tokens=TOKENS,
    )


def attended(scores: list[float], position: int) -> set[int]:
    """Positions that a row attends to, by the definition."""
    complete = (position + 1) // RATIO
    best = sorted(range(complete), key=lambda group: (-scores[group], group))[:BUDGET]
    return {group * RATIO + member for group in best for member in range(RATIO)} | set(
        range(complete * RATIO, position + 1)
    )


@pytest.mark.parametrize("signs", ["negative", "mixed", "ties", "zeros"])
def test_the_best_complete_groups_whatever_their_sign(signs):
    generator = torch.Generator().manual_seed(1)
    store, starts, rows = make_store(), [0, 21], 30
    plan = plan_of(store, [1, 0], starts, rows)
    scores = torch.randn(2, rows, TOKENS // RATIO, generator=generator, dtype=torch.float64)
    scores = {
        "negative": -scores.abs() - 2,
        "mixed": scores,
        "ties": scores.sign() * 3,
        "zeros": torch.zeros_like(scores),
    }[signs]
    known = scores.clone()
    complete = (plan.positions + 1) // RATIO
    # keys of incomplete groups may be anything
    for junk in (torch.nan, torch.inf, 100.0):
        unknown = torch.arange(TOKENS // RATIO) >= complete.unsqueeze(-1)
        chosen = plan.choose(scores.masked_fill(unknown, junk))
        visible = plan.visible(chosen)
        entries, counts = plan.gathered(chosen)
        entries = entries.view(2, rows, -1)
        counts = counts.view(2, rows, -1)
        for lane, row in ((lane, row) for lane in range(2) for row in range(rows)):
            position = int(plan.positions[lane, row])
            wanted = attended(known[lane, row].tolist(), position)
            assert set(visible[lane, row].nonzero().flatten().tolist()) == wanted
            base = int(store.page_table[[1, 0][lane], 0]) * store.layout.page_tokens
            assert sorted((entries[lane, row][counts[lane, row]] - base).tolist()) == sorted(wanted)
            assert (entries[lane, row][~counts[lane, row]] == 0).all()


def test_members_cross_calls_and_survive_rejected_rows():
    """Windows of eight rows of which one to eight stand, in a ring of the smallest extent: every group that closes sees its own
    four rows, the carried ones included."""
    generator = torch.Generator().manual_seed(2)
    store = make_store(1)
    slot, start, kept, closed = torch.tensor([0]), 0, {}, 0
    while start + 8 <= TOKENS - 8:
        plan = plan_of(store, [0], [start], 8)
        move_anchor(store, slot, plan.positions, prompt=False)
        raw = torch.randn(1, 8, 2, generator=generator, dtype=torch.float64)
        members = plan.members("raw", 0, raw)
        plan.keep_raw("raw", 0, raw)
        for row in range(8):
            rows = {**kept, **{start + j: raw[0, j] for j in range(row + 1)}}
            position = start + row
            if position % RATIO == RATIO - 1:
                wanted = torch.stack([rows[position - RATIO + 1 + j] for j in range(RATIO)], dim=-1)
                assert torch.equal(members[0, row], wanted)
                closed += 1
        taken = int(torch.randint(1, 9, (), generator=generator))
        kept |= {start + j: raw[0, j] for j in range(taken)}
        store.commit(slot, torch.tensor([taken]))
        start += taken
    assert closed > 15
    assert store.faults.eq(0).all()


def test_an_interval_that_does_not_follow_is_a_fault():
    store, slot = make_store(1), torch.tensor([0])
    move_anchor(store, slot, torch.arange(5).unsqueeze(0), prompt=True)
    move_anchor(store, slot, torch.arange(5, 8).unsqueeze(0), prompt=False)
    store.commit(slot, torch.tensor([2]))
    assert store.faults[0] == 0
    move_anchor(store, slot, torch.tensor([[8]]), prompt=False)
    assert store.faults[0] == 1


@pytest.mark.parametrize("rows", range(8, 13))
def test_a_restored_state_keeps_the_open_group_alone(rows):
    tags = torch.tensor([10, 11, 12, 3, 4, 5, 6, 7, 8, 9]).view(1, 1, RING)
    state = open_group_state({"raw_tags": tags, "anchor": torch.tensor([[5]])}, torch.tensor([rows]), RATIO)
    held = sorted(tag for tag in state["raw_tags"].flatten().tolist() if tag >= 0)
    assert held == list(range(rows - rows % RATIO, rows))
    assert state["anchor"].item() == rows - 1
