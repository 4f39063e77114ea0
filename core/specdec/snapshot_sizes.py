"""What prefix checkpoints take: bytes of a snapshot and of a page, and the pages that a budget provides.

Declaration layer: the standard library and other declaration modules only.
"""

from collections.abc import Sequence

from specdec.errors import CapacityError
from specdec.layout import StateKind, StateLayout

__all__ = ["checkpoint_pages", "page_bytes", "snapshot_bytes"]


def page_bytes(layout: StateLayout) -> int:
    """Bytes of one page over all paged fields and layers."""
    return layout.bytes(0, 1)


def snapshot_bytes(layout: StateLayout) -> int:
    """Bytes of one request's snapshot, pages excluded: rings and carried window rows whole, one entry of rows and columns."""
    entries = {StateKind.ROW: 1, StateKind.COLUMNS: 1}
    return sum(
        f.layers * f.entry_bytes * entries.get(f.kind, f.extent)
        for f in layout.fields
        if f.kind not in (StateKind.PAGED, StateKind.RECORDS)
    )


def checkpoint_pages(layouts: Sequence[StateLayout], budget: int) -> int:
    """Pages that each pool needs beside those of requests, so that prefix checkpoints can use a budget of ``budget`` bytes.

    One checkpoint per page boundary holds its state and at most two pages of each pool: the full one and the copy of a
    partly filled one. The pages so provided and the states of that many checkpoints are within the budget together.

    Raises CapacityError if not even a checkpoint of less than a page fits.
    """
    pages, states = sum(map(page_bytes, layouts)), sum(map(snapshot_bytes, layouts))
    if budget < pages + states:
        raise CapacityError(
            f"snapshot_bytes is {budget}, but one prefix checkpoint takes {pages + states} bytes (state {states}, a page of "
            f"each pool {pages}); raise it, or set it to 0 to do without prefix checkpoints"
        )
    return 2 * max(budget // (2 * pages + states), 1)
