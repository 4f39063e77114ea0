"""Drafts are admitted by survival, and packed rows are those of their lanes."""

from __future__ import annotations

import random

import pytest
import torch
from admission import admit_while_improving

from specdec.round.allocation import PackedRows, admit_top, calibrated, prefix_survival
from specdec.state.requests import CONSUMED, INTEGER_COLUMNS, Lanes
from specdec.testing import CapturableGuard

#: Three requests with five forecasts each, as published with the rules.
FORECASTS = [[0.9, 0.8, 0.7, 0.6, 0.5], [0.6, 0.5, 0.4, 0.3, 0.2], [0.95, 0.9, 0.9, 0.85, 0.8]]
SPARE = 9


def admitted(forecasts: list[list[float]], ceilings: list[int], rows: int, live: list[bool] | None = None) -> list[int]:
    alive = torch.tensor([True] * len(forecasts) if live is None else live)
    survival = prefix_survival(torch.tensor(forecasts))
    return admit_top(survival, torch.tensor(ceilings), alive, rows).tolist()


def plain_top(forecasts: list[list[float]], ceilings: list[int], rows: int, live: list[bool]) -> list[int]:
    """The rule in plain Python: one draft after the other."""
    lengths = [0] * len(forecasts)
    survival = [1.0] * len(forecasts)
    for _ in range(rows - sum(live)):
        best = None
        for lane, row in enumerate(forecasts):
            if not live[lane] or lengths[lane] >= min(ceilings[lane], len(row)):
                continue
            next_ = float(torch.tensor(survival[lane]) * torch.tensor(row[lengths[lane]]))
            if next_ >= 1e-6 and (best is None or (-next_, lengths[lane], lane) < best):
                best = (-next_, lengths[lane], lane)
        if best is None:
            break
        lane = best[2]
        survival[lane] = -best[0]
        lengths[lane] += 1
    return lengths


@pytest.mark.parametrize(("rows", "ceilings", "expected"), [(8, [5, 5, 5], [2, 0, 3]), (12, [5, 2, 3], [4, 2, 3])])
def test_published_values_of_the_top_rule(rows: int, ceilings: list[int], expected: list[int]) -> None:
    assert admitted(FORECASTS, ceilings, rows) == expected


@pytest.mark.parametrize(
    ("slope", "lengths", "throughput"),
    [(0.02, (4, 2, 5), 787.362109), (0.15, (2, 1, 5), 338.559811), (1.0, (1, 0, 2), 81.5)],
)
def test_published_values_of_admission_by_throughput(slope: float, lengths: tuple[int, ...], throughput: float) -> None:
    found = admit_while_improving(FORECASTS, {rows: 100 / (1 + slope * rows) for rows in range(3, 19)})
    assert found.lengths == lengths
    assert found.throughput == pytest.approx(throughput, rel=1e-8)


def test_admission_stops_at_the_first_draft_that_does_not_improve() -> None:
    """A later optimum (1.8 + 0.72 tokens at 0.45 rounds) is not looked for."""
    found = admit_while_improving([[0.8, 0.9]], {1: 1.0, 2: 0.5, 3: 0.45})
    assert (found.lengths, found.throughput) == ((0,), 1.0)
    assert admit_while_improving(FORECASTS, dict.fromkeys(range(3, 19), 1.0), ceilings=[1, 0, 5]).lengths == (1, 0, 5)


def test_random_batches_follow_the_rule() -> None:
    """Few different values, so that ties are frequent; dead lanes, ceilings and capacities of every size."""
    chance = random.Random(3)
    for _ in range(400):
        lanes, drafts = chance.randint(1, 6), chance.randint(1, 7)
        forecasts = [[chance.choice([1.0, 1.0, 0.5, 0.25, 0.03, 0.0]) for _ in range(drafts)] for _ in range(lanes)]
        ceilings = [chance.randint(0, drafts) for _ in range(lanes)]
        live = [chance.random() < 0.8 for _ in range(lanes)]
        rows = chance.randint(lanes, lanes * (drafts + 1))
        found = admitted(forecasts, ceilings, rows, live)
        assert found == plain_top(forecasts, ceilings, rows, live)
        assert sum(found) + sum(live) <= rows
        assert all(length <= ceiling for length, ceiling in zip(found, ceilings, strict=True))


def test_survival_never_grows_and_bad_forecasts_count_nothing() -> None:
    survival = prefix_survival(torch.tensor([[0.5, 1.5, float("nan"), 0.9], [float("inf"), 0.5, -1.0, 1.0]]))
    assert survival.tolist() == [[0.5, 0.5, 0.0, 0.0], [1.0, 0.5, 0.0, 0.0]]
    assert admitted([[0.5, 1.0, float("nan"), 1.0]], [4], 5) == [2]
    assert admitted([[1e-3, 1e-3, 0.9]], [3], 4) == [2], "a survival of 1e-6 is the least that is verified"
    assert admitted([[1e-3, 0.9e-3, 0.9]], [3], 4) == [1]


def test_temperatures_divide_logits() -> None:
    forecasts = torch.tensor([[0.8, 0.5, 0.01]], dtype=torch.float64)
    found = calibrated(forecasts, torch.tensor([2.0, 3.0, 0.5], dtype=torch.float64))
    logits = (forecasts / (1 - forecasts)).log() / torch.tensor([2.0, 3.0, 0.5])
    torch.testing.assert_close(found, 1 / (1 + (-logits).exp()))
    ends = calibrated(torch.tensor([[0.0, 1.0]]), torch.tensor([2.0, 2.0]))
    assert ends.tolist() == [[0.0, 1.0]]


def lanes_of(consumed: list[int], live: list[bool]) -> Lanes:
    integers = torch.zeros(len(consumed), INTEGER_COLUMNS, dtype=torch.int64)
    integers[:, CONSUMED] = torch.tensor(consumed)
    alive = torch.tensor(live)
    slots = torch.where(alive, torch.arange(len(consumed)) + 3, SPARE)
    return Lanes(
        requested=slots,
        resident=integers,
        slots=slots,
        live=alive,
        integers=integers,
        floats=torch.ones(len(consumed), 3),
    )


def test_packed_rows_name_lane_place_and_position() -> None:
    lanes = lanes_of([10, 1, 30, 40], [True, False, True, True])
    packed = PackedRows.pack(lanes, torch.tensor([2, 3, 0, 1]), width=4, rows=8, spare=SPARE)
    live = packed.live.tolist()
    assert live == [True] * 6 + [False] * 2
    assert packed.lane.tolist()[:6] == [0, 0, 0, 2, 3, 3]
    assert packed.index.tolist()[:6] == [0, 1, 2, 0, 0, 1]
    assert packed.position.tolist()[:6] == [10, 11, 12, 30, 40, 41]
    assert packed.slots.tolist() == [3, 3, 3, 5, 6, 6, SPARE, SPARE]
    assert packed.lengths.tolist() == [3, 0, 1, 2]
    assert all(0 <= index < 4 for index in packed.index.tolist())
    block = torch.arange(16).view(4, 4)
    assert packed.gather(block).tolist()[:6] == [0, 1, 2, 8, 12, 13]
    scattered = packed.scatter(packed.gather(block))
    assert scattered[0].tolist()[:3] == [0, 1, 2]
    assert scattered[2, 0] == 8
    assert scattered[3].tolist()[:2] == [12, 13]


def test_everything_packed_is_the_rectangle() -> None:
    lanes = lanes_of([10, 20, 30], [True, True, True])
    packed = PackedRows.pack(lanes, torch.tensor([3, 3, 3]), width=4, rows=12, spare=SPARE)
    full = PackedRows.full(lanes, width=4)
    for name in ("lane", "index", "position", "live", "slots", "starts", "lengths"):
        assert torch.equal(getattr(packed, name), getattr(full, name)), name
    block = torch.randn(3, 4, 5)
    assert torch.equal(packed.scatter(packed.gather(block)), block)


def test_rows_of_dead_lanes_belong_to_nobody() -> None:
    lanes = lanes_of([1, 1], [False, False])
    packed = PackedRows.pack(lanes, torch.tensor([2, 2]), width=3, rows=4, spare=SPARE)
    assert not packed.live.any() and packed.slots.tolist() == [SPARE] * 4
    assert packed.scatter(torch.ones(4, 2)).isfinite().all()
    assert not PackedRows.full(lanes, width=3).live.any()


def test_allocation_passes_the_guard() -> None:
    lanes = lanes_of([10, 1, 30], [True, False, True])
    forecasts, temperatures = torch.rand(3, 5), torch.ones(5)
    ceilings, block = torch.tensor([5, 5, 2]), torch.arange(18).view(3, 6)
    with CapturableGuard() as guard:
        survival = prefix_survival(calibrated(forecasts, temperatures))
        packed = PackedRows.pack(lanes, admit_top(survival, ceilings, lanes.live, 9), width=6, rows=9, spare=SPARE)
        packed.scatter(packed.gather(block))
        del survival, packed
    assert guard.operations < 120
