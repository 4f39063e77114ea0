"""Temperatures that make a drafter's acceptance forecasts mean what they say: how they are fitted, and their file. Torch-free.

A forecast c[k] = sigmoid(s[k] / T[k]) should be the probability that draft k is accepted when the earlier ones are. What rounds
use is the product over a prefix, so temperatures are fitted one depth after the other (sequential temperature scaling): T[k] is
the one of a logarithmic grid for which c[1] · … · c[k] has the least expected calibration error against the event that the first
k drafts were accepted. The block is noncausal, so its length changes every forecast: one file for each block length.

Source: sequential temperature scaling as SGLang fits it for block drafters, with its grid and bins.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from attrs import frozen

from specdec.errors import CheckpointError, UsageError

#: 41 temperatures from 0.1 to 10, 1 among them.
GRID = tuple(10.0 ** ((step - 20) / 20) for step in range(41))
BINS = 15


@frozen(kw_only=True)
class Outcome:
    """One round that verified its whole block. scores: [K] logits of the forecasts at temperature 1; accepted: 0 … K drafts."""

    scores: tuple[float, ...]
    accepted: int


def calibration_error(forecasts: Sequence[float], events: Sequence[bool], bins: int = BINS) -> float:
    """Expected calibration error: over equal bins of [0, 1], mean distance of forecast and frequency, weighted by members.

    Raises UsageError if there are no forecasts or the two differ in number.
    """
    if not forecasts or len(forecasts) != len(events):
        raise UsageError(f"{len(forecasts)} forecasts and {len(events)} outcomes; as many of each, and at least one")
    gap = [0.0] * bins
    for forecast, event in zip(forecasts, events, strict=True):
        gap[min(int(forecast * bins), bins - 1)] += forecast - event
    return sum(abs(value) for value in gap) / len(forecasts)


def calibration_noise(forecasts: Sequence[float], bins: int = BINS) -> float:
    """Calibration error that as many perfectly calibrated forecasts are expected to show by chance alone: in each bin the mean
    distance of a sum of such events from its expectation, sqrt(2 Σ f (1 − f) / π) for many of them.

    Raises UsageError if there are no forecasts.
    """
    if not forecasts:
        raise UsageError("0 forecasts; at least one")
    variance = [0.0] * bins
    for forecast in forecasts:
        variance[min(int(forecast * bins), bins - 1)] += forecast * (1 - forecast)
    return sum(math.sqrt(2 * value / math.pi) for value in variance) / len(forecasts)


def survival_errors(outcomes: Sequence[Outcome], temperatures: Sequence[float]) -> tuple[float, ...]:
    """Calibration error of the prefix survival at every depth, [K]. Raises UsageError if there are no outcomes."""
    running, errors = [1.0] * len(outcomes), []
    for depth, temperature in enumerate(temperatures):
        running = _extended(running, outcomes, depth, temperature)
        errors.append(calibration_error(running, [outcome.accepted > depth for outcome in outcomes]))
    return tuple(errors)


def fit_temperatures(
    outcomes: Sequence[Outcome],
    grid: Sequence[float] = GRID,
    chance: Callable[[Sequence[float]], float] = calibration_noise,
) -> tuple[float, ...]:
    """Temperatures [K] fitted to rounds: the one nearest 1 whose error is the least, or no more than chance would show. A search
    for the least error alone would follow the noise of few rounds and make forecasts worse.

    chance: the error that calibrated forecasts would show by chance.

    Raises UsageError if there are no outcomes or they differ in K.
    """
    lengths = {len(outcome.scores) for outcome in outcomes}
    if len(lengths) != 1:
        raise UsageError(
            f"temperatures are fitted to rounds of one block length, got {len(outcomes)} of {sorted(lengths)}; "
            "give rounds of one"
        )
    running, found = [1.0] * len(outcomes), []
    nearest_first = sorted(grid, key=lambda temperature: abs(math.log(temperature)))
    for depth in range(lengths.pop()):
        events = [outcome.accepted > depth for outcome in outcomes]
        candidates = [_extended(running, outcomes, depth, temperature) for temperature in nearest_first]
        errors = [calibration_error(candidate, events) for candidate in candidates]
        least = min(errors)
        best = next(
            place
            for place, (candidate, error) in enumerate(zip(candidates, errors, strict=True))
            if error <= max(least, chance(candidate))
        )
        running = candidates[best]
        found.append(nearest_first[best])
    return tuple(found)


def _extended(running: Sequence[float], outcomes: Sequence[Outcome], depth: int, temperature: float) -> list[float]:
    """Prefix survival one draft further."""
    return [
        before * _sigmoid(outcome.scores[depth] / temperature)
        for before, outcome in zip(running, outcomes, strict=True)
    ]


def _sigmoid(score: float) -> float:
    return 1 / (1 + math.exp(-score)) if score >= 0 else math.exp(score) / (1 + math.exp(score))


# --- file ----------------------------------------------------------------------------------------------------------------


def calibration_file(block_length: int) -> str:
    """Name of the file in a checkpoint folder that holds the temperatures of this block length."""
    return f"draft_calibration_{block_length}.json"


def write_temperatures(path: Path, temperatures: Sequence[float]) -> None:
    """Writes a JSON list with one temperature per depth."""
    path.write_text(json.dumps([round(temperature, 6) for temperature in temperatures]) + "\n", encoding="utf-8")


def read_temperatures(folder: Path, block_length: int) -> tuple[float, ...]:
    """Temperatures of a block length: from the checkpoint folder's file if it has one, else all 1.

    Raises CheckpointError if the file is not a JSON list of ``block_length`` numbers above 0.
    """
    path = folder / calibration_file(block_length)
    if not path.is_file():
        return (1.0,) * block_length
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}") from error
    numbers = isinstance(found, list) and all(
        isinstance(item, (int, float)) and not isinstance(item, bool) and 0 < item < math.inf for item in found
    )
    if not numbers or len(found) != block_length:
        raise CheckpointError(
            f"{path}: needs a JSON list of {block_length} temperatures above 0, one per depth; write it with 'specdec calibrate' "
            "or remove it"
        )
    return tuple(float(item) for item in found)
