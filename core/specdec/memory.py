"""A memory plan: what a preparation will hold, item by item, against a budget. Plain data; ``specdec.memory_plan`` makes it.

Declaration layer: the standard library, attrs and other declaration modules only.
"""

from __future__ import annotations

from typing import Any

from attrs import asdict, evolve, field, frozen

from specdec.errors import CapacityError
from specdec.validators import as_tuple, integer, one_of, text, tuple_of

__all__ = ["KINDS", "MemoryItem", "MemoryPlan", "ShapeMemory", "sized"]

#: Kinds of items in the order of a report, and what each is.
KINDS: dict[str, str] = {
    "weights": "tensors as they are held after loading, tables and constants with them",
    "state": "fields of request slots, the spare slot included",
    "pages": "paged fields, the trash page included",
    "tables": "page tables and accounts of state stores, the request table",
    "frames": "what rounds publish: completion, log-probability and forecast frames, grammar masks",
    "rounds": "staging buffers and constants of rounds",
    "scratch": "storage that rounds share and that outlives an operator",
    "boundary": "snapshots that a round takes at a page boundary",
    "rounding": "what the device's allocator adds to each tensor",
    "graphs": "memory pool of captured graphs",
    "work": "what a prompt chunk or an eager round has in use while it runs, and workspaces of libraries",
    "snapshots": "states of prefix checkpoints; their pages are among the pages",
    "headroom": "what stays free",
    "host": "the host's side of buffers, pinned for a GPU; not part of the budget",
}
#: Kinds that preparation allocates and that stay for as long as the model is loaded; a pool of graphs beside them.
ALLOCATED = ("weights", "state", "pages", "tables", "frames", "rounds", "scratch", "boundary", "rounding")
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def sized(count: int) -> str:
    """Bytes as people read them: ``1.500 GiB``, or ``12 B``."""
    for unit, name in _UNITS:
        if abs(count) >= unit:
            return f"{count / unit:.3f} {name}"
    return f"{count} B"


@frozen(kw_only=True)
class MemoryItem:
    """``bytes`` of one thing. ``kind`` is a key of ``KINDS``; ``detail`` says how it came about; ``estimated`` marks what is not
    exact before something was prepared and measured."""

    name: str = field(validator=text())
    bytes: int = field(validator=integer(minimum=0))
    kind: str = field(validator=one_of(tuple(KINDS)))
    detail: str = field(default="", validator=text(empty=True))
    estimated: bool = False


@frozen(kw_only=True)
class ShapeMemory:
    """What one round shape needs, in bytes.

    ``staging`` and ``constants`` are its own; ``scratch`` and ``boundary`` are views of storage that all shapes share, as much as
    the greatest needs; ``work`` estimates what it has in use while it runs, which captured graphs take from one pool.
    """

    batch: int
    draft_tokens: int
    verify_width: int
    target_rows: int
    staging: int
    constants: int
    scratch: int
    boundary: int
    work: int


@frozen(kw_only=True)
class MemoryPlan:
    """Everything that a preparation holds.

    ``subject`` is the checkpoint; ``budget`` what may be used, ``None`` for no limit, and ``budget_source`` what it is;
    ``remedies`` are options with a value with which the plan would fit, each by itself, where it does not fit as it is.
    """

    recipe: str
    subject: str
    device: str
    dtype: str
    items: tuple[MemoryItem, ...] = field(converter=as_tuple, validator=tuple_of(MemoryItem))
    shapes: tuple[ShapeMemory, ...] = field(converter=as_tuple, validator=tuple_of(ShapeMemory, empty=True))
    budget: int | None = None
    budget_source: str = ""
    remedies: tuple[tuple[str, int], ...] = ()

    def of(self, *kinds: str) -> int:
        """Bytes of all items of these kinds."""
        return sum(item.bytes for item in self.items if item.kind in kinds)

    @property
    def allocated(self) -> int:
        """Bytes that preparation allocates on the device and keeps, the pool of graphs not counted."""
        return self.of(*ALLOCATED)

    @property
    def total(self) -> int:
        """Bytes of the device that the budget must cover: everything but the host's."""
        return self.of(*(kind for kind in KINDS if kind != "host"))

    @property
    def shortage(self) -> int:
        """Bytes by which the budget is exceeded; 0 if the plan fits."""
        return 0 if self.budget is None else max(self.total - self.budget, 0)

    def totals(self) -> dict[str, int]:
        """Bytes by kind, kinds without bytes left out."""
        sums = {kind: self.of(kind) for kind in KINDS}
        return {kind: count for kind, count in sums.items() if count}

    def measured(self, **pools: int) -> MemoryPlan:
        """The plan with measured bytes in place of estimates, by kind: ``measured(graphs=…)``."""
        kept = [item for item in self.items if not (item.estimated and item.kind in pools)]
        found = [
            MemoryItem(name=KINDS[kind], bytes=count, kind=kind, detail="measured") for kind, count in pools.items()
        ]
        return evolve(self, items=(*kept, *found))

    def check(self) -> None:
        """Raises CapacityError if the plan exceeds its budget; the line names the shortage and the options that would cure it."""
        if self.budget is None or not self.shortage:
            return
        cures = [f"{name} {value}" for name, value in self.remedies]
        if cures:
            advice = f"it fits with one of: {', '.join(cures)}; or with a budget of {self.total} bytes (memory_bytes)"
        else:
            advice = f"no single option makes it fit, weights alone take {self.of('weights')}; raise memory_bytes to {self.total}"
        raise CapacityError(
            f"recipe {self.recipe!r} ({self.subject}) needs {self.total} bytes ({sized(self.total)}) and {self.budget_source} is "
            f"{self.budget} ({sized(self.budget)}), {self.shortage} bytes short; {advice}"
        )

    def as_data(self) -> dict[str, Any]:
        """Plain types, for JSON."""
        return {
            "recipe": self.recipe,
            "subject": self.subject,
            "device": self.device,
            "dtype": self.dtype,
            "shapes": [asdict(shape) for shape in self.shapes],
            "items": [asdict(item) for item in self.items],
            "totals": self.totals(),
            "allocated_bytes": self.allocated,
            "total_bytes": self.total,
            "estimated_bytes": sum(item.bytes for item in self.items if item.estimated),
            "budget_bytes": self.budget,
            "budget_source": self.budget_source or None,
            "shortage_bytes": self.shortage,
            "fits": not self.shortage,
            "remedies": dict(self.remedies),
        }
