"""Recorded conversations walked through a history ring: how often it would have copied what came next.

This is copy opportunity on text that another model wrote, not a model's acceptance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import define, frozen

from specdec.drafting.history import HistoryRing

#: Tokens before a response that a lookup can read.
TAIL = 8


@frozen
class Response:
    """One recorded assistant turn. tail: the last tokens of everything before it; tokens: what was said."""

    tail: tuple[int, ...]
    tokens: tuple[int, ...]


@define
class Opportunity:
    """What a walk counted. offered: copied tokens, those past the end of a response included."""

    tokens: int = 0
    rounds: int = 0
    proposals: int = 0
    offered: int = 0
    accepted: int = 0

    def as_data(self) -> dict[str, Any]:
        """Counts and the four quotients of the table."""
        return {
            "tokens": self.tokens,
            "rounds": self.rounds,
            "proposals": self.proposals,
            "offered": self.offered,
            "accepted": self.accepted,
            "tokens_per_round": self.tokens / self.rounds,
            "rounds_with_proposal": self.proposals / self.rounds,
            "offered_accepted": self.accepted / self.offered,
            "accepted_per_proposal": self.accepted / self.proposals,
        }


def walk(responses: Iterable[Response], ring: HistoryRing) -> Opportunity:
    """Every response in order, teacher-forced: a round looks up, takes the copy as far as the record agrees, and one token more.

    ring: the product's, or anything with its methods.
    """
    found = Opportunity()
    for number, response in enumerate(responses):
        ring.response(number)
        tokens, place = response.tokens, 0
        text = [*response.tail, *tokens]
        start = len(response.tail)
        while place < len(tokens):
            copy = ring.lookup(text[max(start + place - TAIL, 0) : start + place])
            accepted = 0
            if copy is not None:
                found.proposals += 1
                found.offered += len(copy.tokens)
                for ours, theirs in zip(copy.tokens, tokens[place:]):
                    if ours != theirs:
                        break
                    accepted += 1
            emitted = min(accepted + 1, len(tokens) - place)
            ring.append(number, tokens[place : place + emitted])
            place += emitted
            found.rounds += 1
            found.tokens += emitted
            found.accepted += accepted
        ring.end(number)
    return found


def read_responses(path: Path) -> list[Response]:
    """Responses written by ``write_responses``."""
    with np.load(path) as stored:
        tokens, lengths, tails = (stored[name].tolist() for name in ("tokens", "lengths", "tails"))
    responses, place = [], 0
    for length, tail in zip(lengths, tails, strict=True):
        responses.append(Response(tuple(token for token in tail if token >= 0), tuple(tokens[place : place + length])))
        place += length
    return responses


def write_responses(path: Path, responses: Sequence[Response]) -> None:
    """Compressed: token ids one after the other, lengths, and tails padded with −1 in front."""
    tails = [[-1] * (TAIL - len(response.tail)) + list(response.tail) for response in responses]
    np.savez_compressed(
        path,
        tokens=np.array([token for response in responses for token in response.tokens], dtype=np.uint16),
        lengths=np.array([len(response.tokens) for response in responses], dtype=np.int32),
        tails=np.array(tails, dtype=np.int32).reshape(-1, TAIL),
    )
