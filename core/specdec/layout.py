"""What per-request state a target or drafter keeps: fields by kind, with exact sizes.

The core allocates, snapshots, restores, shares, poisons and accounts for state from these records; a plugin never writes
that code. Declaration layer: the standard library, attrs and other declaration modules only. Import these names from
:mod:`specdec.declaration`.
"""

from enum import StrEnum
from math import prod

from attrs import field, frozen

from specdec.errors import DeclarationError
from specdec.tensors import DTYPE_BYTES
from specdec.validators import as_tuple, integer, one_of, text, tuple_of

__all__ = ["StateField", "StateKind", "StateLayout"]


class StateKind(StrEnum):
    """How a field is addressed and committed.

    ``PAGED``
        entries per token, or per group of tokens, in pages of the pool; full published pages are immutable and shared.
    ``ROW``
        one committed value per slot.
    ``COLUMNS``
        one candidate per verification input; the preceding accepted count selects the committed one.
    ``WINDOW``
        the last n committed rows followed by candidates; shifted at commit.
    ``RING``
        entries addressed by position modulo capacity, with position tags; valid by tag only.
    ``RECORDS``
        per-row verification records that commit consumes.
    """

    PAGED = "paged"
    ROW = "row"
    COLUMNS = "columns"
    WINDOW = "window"
    RING = "ring"
    RECORDS = "records"


@frozen(kw_only=True)
class StateField:
    """One field of per-request state.

    ``shape`` and ``dtype`` describe one entry (a dtype is a key of ``DTYPE_BYTES``); ``layers`` is how many layers keep
    their own copy. ``extent`` means, by kind: paged, tokens per entry; row, always 1; columns, candidate columns; window,
    committed rows kept (candidates come on top); ring, capacity in entries; records, rows. ``fill`` is the value every element
    holds when a request begins (−1 for a position tag, the EOS id for a token history). ``source`` says where the numbers are
    known from.

    Raises:
        DeclarationError: if a value has the wrong type or range, or a row's extent is not 1.
    """

    name: str = field(validator=text())
    kind: StateKind = field(converter=StateKind)
    shape: tuple[int, ...] = field(converter=as_tuple, validator=tuple_of(int, minimum=1, empty=True))
    dtype: str = field(validator=one_of(tuple(DTYPE_BYTES)))
    layers: int = field(default=1, validator=integer(minimum=1))
    extent: int = field(default=1, validator=integer(minimum=1))
    fill: float = field(default=0)
    source: str = field(validator=text())

    @fill.validator
    def _fill_number(self, attribute: object, value: float) -> None:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise DeclarationError(f"StateField {self.name!r}: fill must be a number, got {value!r}")

    @extent.validator
    def _row_extent(self, attribute: object, value: int) -> None:
        if self.kind is StateKind.ROW and value != 1:
            raise DeclarationError(
                f"StateField {self.name!r}: a row keeps one value per slot, so extent must be 1, got {value}"
            )

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry of one layer."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    def rows(self, horizon: int) -> int:
        """Entries per slot and layer for a horizon of ``horizon`` draft tokens.

        A window holds its committed rows, the pending input and ``horizon`` drafts; the other kinds hold ``extent`` entries.

        Raises:
            DeclarationError: if the field is paged; its entries belong to pages, not to slots.
        """
        if self.kind is StateKind.PAGED:
            raise DeclarationError(f"StateField {self.name!r} is paged: it has entries per page, not per slot")
        return self.extent + horizon + 1 if self.kind is StateKind.WINDOW else self.extent

    def bytes(self, slots: int, pages: int, horizon: int, page_tokens: int) -> int:
        """Exact allocation for ``slots`` request slots and ``pages`` pages of ``page_tokens`` tokens."""
        if self.kind is StateKind.PAGED:
            return self.layers * pages * (page_tokens // self.extent) * self.entry_bytes
        return self.layers * slots * self.rows(horizon) * self.entry_bytes


@frozen(kw_only=True)
class StateLayout:
    """All per-request state of one owner.

    ``max_draft_tokens`` is the horizon K_max that every width shares: a round of K_max drafts may be followed by width one.
    ``ring_history`` is how many committed entries a ring must still hold beside a round's candidates.

    Raises:
        DeclarationError: if names repeat, a paged field's tokens per entry do not divide a page, or an extent is smaller than
            history + max_draft_tokens + 1; the message gives both numbers.
    """

    owner: str = field(validator=one_of(("target", "drafter")))
    fields: tuple[StateField, ...] = field(converter=as_tuple, validator=tuple_of(StateField, empty=True))
    max_draft_tokens: int = field(validator=integer(minimum=0))
    page_tokens: int = field(default=64, validator=integer(minimum=1))
    ring_history: int = field(default=0, validator=integer(minimum=0))

    @fields.validator
    def _unique_names(self, attribute: object, value: tuple[StateField, ...]) -> None:
        names = [item.name for item in value]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise DeclarationError(f"StateLayout of the {self.owner}: field names repeat: {', '.join(repeated)}")

    @page_tokens.validator
    def _whole_entries(self, attribute: object, value: int) -> None:
        for item in self.fields:
            if item.kind is StateKind.PAGED and value % item.extent:
                raise DeclarationError(
                    f"StateLayout of the {self.owner}: paged field {item.name!r} has {item.extent} tokens per entry, "
                    f"which does not divide a page of {value} tokens"
                )

    @ring_history.validator
    def _extents_hold_a_round(self, attribute: object, value: int) -> None:
        # Sits on the last field, so that everything it compares is already set.
        candidates = self.max_draft_tokens + 1
        histories = {StateKind.COLUMNS: 0, StateKind.RECORDS: 0, StateKind.RING: value}
        for item in self.fields:
            history = histories.get(item.kind)
            if history is not None and item.extent < history + candidates:
                raise DeclarationError(
                    f"StateLayout of the {self.owner}: {item.kind.value} field {item.name!r} has extent {item.extent}, "
                    f"but history {history} + max_draft_tokens {self.max_draft_tokens} + 1 needs at least {history + candidates}"
                )

    def field(self, name: str) -> StateField:
        """The field called ``name``.

        Raises:
            DeclarationError: if there is none.
        """
        for item in self.fields:
            if item.name == name:
                return item
        known = ", ".join(item.name for item in self.fields)
        raise DeclarationError(f"StateLayout of the {self.owner} has no field {name!r}; fields: {known}")

    @property
    def paged(self) -> bool:
        """Whether any field has pages; a layout without needs no page pool."""
        return any(item.kind is StateKind.PAGED for item in self.fields)

    @property
    def bytes_per_token(self) -> float:
        """Paged bytes of one cached token over all layers (a group entry counts by its share)."""
        return sum(f.layers * f.entry_bytes / f.extent for f in self.fields if f.kind is StateKind.PAGED)

    def bytes(self, slots: int, pages: int) -> int:
        """Exact allocation of all fields for ``slots`` request slots and ``pages`` pages."""
        return sum(f.bytes(slots, pages, self.max_draft_tokens, self.page_tokens) for f in self.fields)
