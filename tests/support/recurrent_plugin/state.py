"""State of the two. No torch here."""

from __future__ import annotations

from specdec.declaration import StateField, StateKind, StateLayout

VOCAB, WIDTH, DRAFTS = 24, 12, 3


def target_layout(dtype="float32"):
    memory = StateField(
        name="memory",
        kind=StateKind.COLUMNS,
        shape=(WIDTH,),
        dtype=dtype,
        extent=DRAFTS + 1,
        source="hidden state after each verified input",
    )
    steps = StateField(name="steps", kind=StateKind.ROW, shape=(), dtype="int64", source="inputs consumed so far")
    return StateLayout(owner="target", fields=(memory, steps), max_draft_tokens=DRAFTS)


def drafter_layout(dtype="float32"):
    history = StateField(
        name="history", kind=StateKind.PAGED, shape=(WIDTH,), dtype=dtype, source="row i from h[i] and token i + 1"
    )
    rows = StateField(name="rows", kind=StateKind.ROW, shape=(), dtype="int64", source="absorbed rows")
    return StateLayout(owner="drafter", fields=(history, rows), max_draft_tokens=DRAFTS)
