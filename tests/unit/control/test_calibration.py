"""Fitted temperatures make forecasts honest, and their file is checked."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from specdec.control.calibration import (
    GRID,
    Outcome,
    calibration_error,
    calibration_file,
    calibration_noise,
    fit_temperatures,
    read_temperatures,
    survival_errors,
    write_temperatures,
)
from specdec.errors import CheckpointError, UsageError


def rounds(count: int, temperatures: tuple[float, ...], seed: int = 5) -> list[Outcome]:
    """Outcomes of a drafter whose scores are right after division by ``temperatures``."""
    chance, found = random.Random(seed), []
    for _ in range(count):
        true = [chance.gauss(1.2, 1.0) for _ in temperatures]
        accepted = 0
        while accepted < len(true) and chance.random() < 1 / (1 + math.exp(-true[accepted])):
            accepted += 1
        scores = tuple(score * temperature for score, temperature in zip(true, temperatures, strict=True))
        found.append(Outcome(scores=scores, accepted=accepted))
    return found


def test_the_error_of_a_known_table() -> None:
    """Bins of fifteenths: 0.9 and 0.95 share one, 0.1 has its own."""
    error = calibration_error([0.95, 0.94, 0.1, 0.1], [True, False, False, False])
    assert error == pytest.approx((abs(0.95 + 0.94 - 1) + 0.2) / 4)
    assert calibration_error([1.0, 0.0], [True, False]) == 0
    with pytest.raises(UsageError):
        calibration_error([], [])


def test_the_grid_has_41_temperatures_with_one_in_the_middle() -> None:
    assert len(GRID) == 41 and GRID[20] == 1.0
    assert (GRID[0], GRID[-1]) == (pytest.approx(0.1), pytest.approx(10.0))


def test_overconfident_scores_are_found_depth_by_depth() -> None:
    true = (2.5, 0.5, 4.0)
    found = fit_temperatures(rounds(6000, true))
    for ours, theirs in zip(found, true, strict=True):
        assert abs(math.log(ours / theirs)) < math.log(1.45), (found, true)
    fresh = rounds(6000, true, seed=6)
    before, after = survival_errors(fresh, (1.0,) * 3), survival_errors(fresh, found)
    assert max(after) < 0.02 < max(before)


def test_honest_scores_are_left_alone() -> None:
    fresh = rounds(6000, (1.0, 1.0), seed=8)
    found = fit_temperatures(rounds(6000, (1.0, 1.0)))
    assert max(survival_errors(fresh, found)) < 0.025


def test_noise_is_what_calibrated_forecasts_show() -> None:
    """The mean error of many samples whose forecasts are right."""
    chance = random.Random(11)
    forecasts = [chance.random() for _ in range(600)]
    errors = [calibration_error(forecasts, [chance.random() < f for f in forecasts]) for _ in range(300)]
    assert sum(errors) / len(errors) == pytest.approx(calibration_noise(forecasts), rel=0.05)
    with pytest.raises(UsageError):
        calibration_noise([])


def test_few_honest_rounds_change_little() -> None:
    """Their least error is at some other temperature by chance alone, which a search for it would take."""

    def distance(**options: object) -> float:
        fits = [fit_temperatures(rounds(150, (1.0,) * 3, seed), **options) for seed in range(8)]  # type: ignore[arg-type]
        return sum(abs(math.log(temperature)) for fit in fits for temperature in fit)

    assert 2 * distance() < distance(chance=lambda forecasts: 0.0)


def test_rounds_of_different_lengths_are_refused() -> None:
    mixed = [Outcome(scores=(0.0,), accepted=0), Outcome(scores=(0.0, 0.0), accepted=0)]
    with pytest.raises(UsageError, match="one block length"):
        fit_temperatures(mixed)


def test_the_file_holds_one_list(tmp_path: Path) -> None:
    path = tmp_path / calibration_file(3)
    write_temperatures(path, (0.5, 1.0, 2.123456789))
    assert path.read_text() == "[0.5, 1.0, 2.123457]\n"
    assert read_temperatures(tmp_path, 3) == (0.5, 1.0, 2.123457)
    assert read_temperatures(tmp_path, 5) == (1.0,) * 5, "another block length has a file of its own"


@pytest.mark.parametrize("content", ["[1.0, 2.0]", "[1, 2, 0]", "[1, 2, NaN]", "[1, 2, true]", "{}", "[1, 2,"])
def test_other_files_are_refused_with_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / calibration_file(3)).write_text(content)
    with pytest.raises(CheckpointError) as refusal:
        read_temperatures(tmp_path, 3)
    assert "draft_calibration_3.json" in str(refusal.value) and "\n" not in str(refusal.value)
