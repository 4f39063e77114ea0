"""Forecast frames keep one row per slot and alternate by round."""

from __future__ import annotations

import math

import pytest
import torch

from specdec.round.arena import Arena
from specdec.round.forecasts import ForecastFrames


def test_frames_alternate_and_shorter_rounds_leave_no_numbers() -> None:
    frames = ForecastFrames(slots=2, width=3, device=torch.device("cpu"))
    frames.write(torch.tensor([0, 1]), torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]))
    frames.write(torch.tensor([3, 4]), torch.tensor([[0.7], [0.8]]))
    assert frames.read(0, [1, 0]) == [pytest.approx([0.4, 0.5, 0.6]), pytest.approx([0.1, 0.2, 0.3])]
    first, *rest = frames.read(1, [1])[0]
    assert first == pytest.approx(0.8) and all(math.isnan(value) for value in rest)


def test_an_arena_without_forecasts_says_so() -> None:
    arena = Arena(slots=1, max_draft_tokens=3, stop_ids=1, device=torch.device("cpu"))
    assert arena.forecasts is None
    with pytest.raises(ValueError, match="confidence_width"):
        arena.read_forecasts(0, [0])
