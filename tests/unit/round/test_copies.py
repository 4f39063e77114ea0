"""Copies in the staging buffer, and the source bits they give."""

from __future__ import annotations

import pytest
import torch

from specdec.errors import UsageError
from specdec.round.arena import Arena
from specdec.round.copies import Copies
from specdec.round.staging import Staging


@pytest.fixture
def staging() -> Staging:
    arena = Arena(slots=4, max_draft_tokens=7, stop_ids=2, device=torch.device("cpu"))
    return Staging(arena, 3, 2)


def test_copies_travel_with_the_other_decisions(staging: Staging) -> None:
    assert staging.copies is not None
    staging.write([1, 3], [2, 1], 7, [(5, 6), (9,)])
    assert staging.slots.tolist() == [1, 3, 4] and staging.ceilings.tolist() == [2, 1, 0]
    assert (int(staging.frame), int(staging.round)) == (1, 7)
    assert staging.copies.counts.tolist() == [2, 1, 0]
    assert staging.copies.tokens.tolist() == [[5, 6], [9, 0], [0, 0]]
    found = [[part.tolist() for part in staging.copies.at(depth)] for depth in range(2)]
    assert found == [[[True, True, False], [5, 9, 0]], [[True, False, False], [6, 0, 0]]]
    # the next rounds bring none, in either frame
    for number in (8, 9):
        staging.write([1, 3], [2, 1], number)
        assert staging.copies.counts.tolist() == [0, 0, 0]


def test_copies_must_fit(staging: Staging) -> None:
    with pytest.raises(UsageError, match="a lane brings 3 copied drafts; this round has 2; shorten the copy"):
        staging.write([1, 3], [2, 1], 0, [(1, 2, 3), ()])
    with pytest.raises(UsageError, match="copies name 1 lanes and the round 2"):
        staging.write([1, 3], [2, 1], 0, [(1, 2)])


def test_source_bits_end_with_the_copies_and_with_what_was_offered() -> None:
    counts = torch.tensor([0, 1, 7, 7, 3])
    copies = Copies(tokens=torch.zeros(5, 7, dtype=torch.int64), counts=counts)
    assert copies.sources(torch.tensor([7, 7, 7, 2, 0])).tolist() == [0, 1, 127, 3, 0]
