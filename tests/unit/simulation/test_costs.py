"""Costs by hand: bands by target rows, drafts, plain devices."""

from __future__ import annotations

import pytest

from specdec.errors import UsageError
from specdec.simulation.costs import Band, CostModel

MODEL = CostModel(
    base=10.0,
    bands=(Band(rows=8, row=0.5), Band(rows=16, fixed=3.0, row=0.25), Band(fixed=9.0, row=0.125)),
    lane=0.0625,
    absorb=1.0,
    draft=2.0,
    draft_lane=0.03125,
    chunk=4.0,
    prompt_token=0.5,
)


@pytest.mark.parametrize(
    ("batch", "width", "seconds"),
    [
        (1, 1, 10 + 0.5 + 0.0625 + 1),
        # eight rows are the last of the first band
        (1, 8, 10 + 4 + 0.0625 + 1 + 7 * (2 + 0.03125)),
        (2, 4, 10 + 4 + 0.125 + 1 + 3 * (2 + 0.0625)),
        (1, 9, 10 + 3 + 9 / 4 + 0.0625 + 1 + 8 * (2 + 0.03125)),
        (4, 4, 10 + 3 + 4 + 0.25 + 1 + 3 * (2 + 0.125)),
        (4, 5, 10 + 9 + 2.5 + 0.25 + 1 + 4 * (2 + 0.125)),
    ],
)
def test_rounds(batch: int, width: int, seconds: float) -> None:
    assert MODEL.round(batch, width) == pytest.approx(seconds, rel=1e-12)


def test_a_plain_round_neither_drafts_nor_absorbs() -> None:
    assert MODEL.round(4, 1, plain=True) == pytest.approx(10 + 2 + 0.25)


def test_a_block_is_drafted_once_whatever_the_width() -> None:
    model = CostModel(base=1.0, block=3.0, draft_lane=0.5)
    assert [model.round(2, width) for width in (1, 2, 8)] == [1.0, 5.0, 5.0]


def test_prompts() -> None:
    assert MODEL.prefill(100) == 54.0


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: CostModel(base=-1.0), "base is -1.0"),
        (lambda: CostModel(draft=float("inf")), "draft is inf"),
        (lambda: CostModel(block=-2.0), "block is -2.0"),
        (lambda: CostModel(bands=()), "bands end at"),
        (lambda: CostModel(bands=(Band(rows=8),)), "must have no end"),
        (lambda: CostModel(bands=(Band(), Band())), "must have no end"),
        (lambda: CostModel(bands=(Band(rows=8), Band(rows=8), Band())), "must increase"),
        (lambda: Band(rows=0), "rows is 0"),
        (lambda: Band(row=float("nan")), "row is nan"),
    ],
)
def test_numbers_out_of_range_are_refused(make: object, part: str) -> None:
    with pytest.raises(UsageError, match=part):
        make()  # type: ignore[operator]
