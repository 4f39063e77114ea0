"""Completion records made by hand: the fields that counts are made of, and any tokens."""

from __future__ import annotations

from specdec.round.completion import METADATA_FIELDS, Completion, Field


def completion(
    *,
    emitted: int,
    offered: int,
    accepted: int,
    verified: int | None = None,
    request: int = 0,
    copies: int = 0,
    width: int = 8,
) -> Completion:
    """verified: None is all that were offered. copies: bit k set if draft k was copied."""
    row = [0] * METADATA_FIELDS + [7] * emitted + [-1] * (8 - emitted)
    row[Field.REQUEST], row[Field.VERIFY_WIDTH], row[Field.COPY_SOURCES] = request, width, copies
    row[Field.EMITTED], row[Field.OFFERED] = emitted, offered
    row[Field.VERIFIED], row[Field.ACCEPTED] = offered if verified is None else verified, accepted
    return Completion.parse(row)
