"""Completion records: what one round says about one slot. Torch-free.

A record is int64: sixteen metadata fields, then the emitted tokens padded with −1. Two transfer frames alternate by round; a
frame holds one record per slot and one for the spare slot, which nobody reads.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

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


# plain integers and a table: looking an enumeration up costs more than the rest of a record
_EMITTED, _FINISH = int(Field.EMITTED), int(Field.FINISH)
_FINISHES = tuple(sorted(Finish))
_new = tuple.__new__


class Completion(NamedTuple):
    """One record, parsed; a named tuple in the order of ``Field``, because a batch makes one for each lane of every round.

    Counters are totals after the round, except emitted, offered, verified and accepted, which are its own. offered: drafts that
    could still be used under the lane's ceiling and budget; verified: those the target judged; accepted: the accepted prefix
    before clipping; copy_sources: bit k set if offered draft k was copied; draft_rows: rows of draft history.
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

    @staticmethod
    def parse(record: list[int]) -> Completion:
        """record: sixteen fields and padded tokens, as read from a frame."""
        fields: list[Any] = record[:METADATA_FIELDS]
        fields[_FINISH] = _FINISHES[fields[_FINISH]]
        fields.append(tuple(record[METADATA_FIELDS : METADATA_FIELDS + fields[_EMITTED]]))
        return _new(Completion, fields)
