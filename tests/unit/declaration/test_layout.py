"""State layouts: exact bytes by kind, and refusal of extents that cannot hold a round."""

from typing import Any

import pytest

from specdec.declaration import StateField, StateKind, StateLayout
from specdec.errors import DeclarationError


def field(kind: str, **changes: Any) -> StateField:
    return StateField(**{"name": kind, "kind": kind, "shape": (3,), "dtype": "float32", "source": "test", **changes})


@pytest.mark.parametrize(
    ("kind", "extent", "rows"),
    [("row", 1, 1), ("columns", 8, 8), ("window", 3, 11), ("ring", 16, 16), ("records", 9, 9)],
)
def test_rows_and_bytes_per_slot(kind: str, extent: int, rows: int) -> None:
    made = field(kind, extent=extent, layers=5)
    assert made.rows(7) == rows
    # layers · slots · rows · 3 float32 values; pages do not count
    assert made.bytes(slots=4, pages=100, horizon=7, page_tokens=64) == 5 * 4 * rows * 12


@pytest.mark.parametrize(("extent", "entries"), [(1, 64), (4, 16)])
def test_paged_bytes_follow_pages(extent: int, entries: int) -> None:
    made = field("paged", extent=extent, layers=2)
    assert made.bytes(slots=9, pages=10, horizon=7, page_tokens=64) == 2 * 10 * entries * 12
    with pytest.raises(DeclarationError, match="per page, not per slot"):
        made.rows(7)


def test_layout_totals() -> None:
    layout = StateLayout(
        owner="target",
        fields=[field("row"), field("paged", dtype="bfloat16"), field("paged", name="groups", extent=4)],
        max_draft_tokens=7,
    )
    assert layout.bytes_per_token == 6 + 12 / 4
    assert layout.bytes(slots=2, pages=3) == 2 * 12 + 3 * 64 * 6 + 3 * 16 * 12
    assert layout.field("row").kind is StateKind.ROW
    with pytest.raises(DeclarationError, match="has no field 'rwo'; fields: row, paged, groups"):
        layout.field("rwo")


@pytest.mark.parametrize(
    ("kind", "history", "enough"),
    [("columns", 0, 8), ("records", 0, 8), ("ring", 0, 8), ("ring", 3, 11), ("columns", 3, 8)],
)
def test_extent_must_hold_history_and_a_round(kind: str, history: int, enough: int) -> None:
    def build(extent: int) -> StateLayout:
        return StateLayout(
            owner="target", fields=[field(kind, extent=extent)], max_draft_tokens=7, ring_history=history
        )

    assert build(enough).fields[0].extent == enough
    with pytest.raises(DeclarationError, match=rf"extent {enough - 1}.*at least {enough}"):
        build(enough - 1)


def test_contradictions_are_refused() -> None:
    with pytest.raises(DeclarationError, match="extent must be 1, got 2"):
        field("row", extent=2)
    with pytest.raises(DeclarationError, match="names repeat: row"):
        StateLayout(owner="target", fields=[field("row"), field("row")], max_draft_tokens=7)
    with pytest.raises(DeclarationError, match="3 tokens per entry, which does not divide a page of 64"):
        StateLayout(owner="target", fields=[field("paged", extent=3)], max_draft_tokens=7)
    with pytest.raises(DeclarationError, match="owner must be one of 'target', 'drafter'; got 'draft'"):
        StateLayout(owner="draft", fields=[], max_draft_tokens=7)
    with pytest.raises(ValueError, match="is not a valid StateKind"):
        field("pages")
    with pytest.raises(DeclarationError, match="fill must be a number"):
        field("row", fill="zero")
