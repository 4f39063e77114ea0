"""Completion records: what one round says about one slot. Torch-free.

A record is int64: sixteen metadata fields, then the emitted tokens padded with −1. Two transfer frames alternate by round; a
frame holds one record per slot and one for the spare slot, which nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from attrs import frozen

METADATA_FIELDS = 16


class Finish(IntEnum):
    """Why a request ended; NONE while it runs. CONTEXT is the host's word for LENGTH where the context set the budget."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    CONTEXT = 3
    FAULT = 4
    CANCELLED = 5


class Field(IntEnum):
    """Metadata fields in record order."""

    REQUEST = 0
    EPOCH = 1
    ROUND = 2
    SLOT = 3
    FINISH = 4
    CONSUMED = 5
    GENERATED = 6
    PENDING = 7
    EMITTED = 8
    OFFERED = 9
    VERIFIED = 10
    ACCEPTED = 11
    COPY_SOURCES = 12
    DRAFT_ROWS = 13
    VERIFY_WIDTH = 14
    FAULTS = 15


@frozen(kw_only=True)
class Completion:
    """One record, parsed. Counters are totals after the round, except emitted, offered, verified and accepted, which are its own.

    offered: drafts that could still be used under the lane's ceiling and budget; verified: those the target judged; accepted:
    the accepted prefix before clipping; copy_sources: bit k set if draft k was copied; draft_rows: rows of draft history.
    """

    request: int
    epoch: int
    round: int
    slot: int
    finish: Finish
    consumed: int
    generated: int
    pending: int
    emitted: int
    offered: int
    verified: int
    accepted: int
    copy_sources: int
    draft_rows: int
    verify_width: int
    faults: int
    tokens: tuple[int, ...]

    @classmethod
    def parse(cls, record: Sequence[int]) -> Completion:
        """record: sixteen fields and padded tokens, as read from a frame."""
        counters = {field.name.lower(): record[field] for field in Field if field is not Field.FINISH}
        tokens = tuple(record[METADATA_FIELDS : METADATA_FIELDS + record[Field.EMITTED]])
        return cls(finish=Finish(record[Field.FINISH]), tokens=tokens, **counters)
