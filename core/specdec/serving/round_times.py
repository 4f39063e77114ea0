"""Observations of rounds and what follows from them: floors, the engine's time per round, overhead, phases. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

from attrs import define, field, frozen

__all__ = ["WARM_UP", "AdaptiveTimes", "EngineRound", "ShapeTimes", "output_tokens"]

#: Rounds of every run that are not measured.
WARM_UP = 4


def output_tokens(rounds: int, width: int, lanes: int) -> int:
    """Output budget of a request that no run of ``rounds`` measured rounds brings to its end.

    Before the first full batch a lane may run while others are still admitted.
    """
    return (rounds + WARM_UP + 2 * lanes + 8) * width


@frozen
class EngineRound:
    """A measured round of the engine. seconds: since the round before it was collected. device_seconds: what the device says."""

    width: int
    seconds: float
    device_seconds: float


@define(kw_only=True)
class ShapeTimes:
    """Every observation of one shape.

    lanes: requests in it, fewer than ``batch`` where the concurrency is no power of two. floors: seconds of a replay, by pass.
    engine: rounds, by pass. phases: seconds by name, of one round each.
    """

    batch: int
    width: int
    target_rows: int
    lanes: int
    floors: list[float] = field(factory=list)
    engine: list[list[EngineRound]] = field(factory=list)
    phases: list[dict[str, float]] = field(factory=list)

    @property
    def floor(self) -> float:
        """Seconds of a replay: the median pass."""
        return median(self.floors)

    def as_data(self) -> dict[str, Any]:
        """Plain types for JSON: figures, then every observation under ``raw``. Seconds everywhere."""
        taken = [mean(one.seconds for one in rounds) for rounds in self.engine]
        names = self.phases[0] if self.phases else ()
        return {
            "batch": self.batch,
            "width": self.width,
            "target_rows": self.target_rows,
            "lanes": self.lanes,
            "floor": self.floor,
            "engine": median(taken),
            "engine_device": median(one.device_seconds for rounds in self.engine for one in rounds),
            "ratio": median(taken) / self.floor,
            "ratio_by_pass": [engine / floor for engine, floor in zip(taken, self.floors, strict=True)],
            "phases": {name: median(one[name] for one in self.phases) for name in names},
            "raw": {"floors": list(self.floors), "engine": _raw(self.engine), "phases": list(self.phases)},
        }


@define(kw_only=True)
class AdaptiveTimes:
    """Every observation of the adaptive policy at one batch capacity, by pass."""

    batch: int
    lanes: int
    engine: list[list[EngineRound]] = field(factory=list)

    def as_data(self, floors: Mapping[int, float]) -> dict[str, Any]:
        """Plain types for JSON, means by round. floors: seconds of a replay by width.

        ``floor`` is that of the rounds that were run, each by its own width; so ``ratio`` is what the engine adds to them.
        """
        taken = [sum(one.seconds for one in rounds) for rounds in self.engine]
        least = [sum(floors[one.width] for one in rounds) for rounds in self.engine]
        ratios = [engine / floor for engine, floor in zip(taken, least, strict=True)]
        widths = Counter(one.width for rounds in self.engine for one in rounds)
        return {
            "batch": self.batch,
            "lanes": self.lanes,
            "floor": sum(least) / widths.total(),
            "engine": sum(taken) / widths.total(),
            "engine_device": sum(one.device_seconds for rounds in self.engine for one in rounds) / widths.total(),
            "ratio": median(ratios),
            "ratio_by_pass": ratios,
            "rounds_by_width": {str(width): widths[width] for width in sorted(widths)},
            "raw": {"engine": _raw(self.engine)},
        }


def _raw(passes: Sequence[Sequence[EngineRound]]) -> list[dict[str, list[Any]]]:
    return [
        {
            "widths": [one.width for one in rounds],
            "seconds": [one.seconds for one in rounds],
            "device_seconds": [one.device_seconds for one in rounds],
        }
        for rounds in passes
    ]
