"""Outcomes for calibrating a drafter's forecasts, collected from real rounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from specdec.control.calibration import Outcome
from specdec.errors import UsageError
from specdec.round.allocated import AllocatedRound
from specdec.serving.generate import Generator
from specdec.serving.model import LoadedModel
from specdec.serving.request import Emission, Request

# A float32 forecast nearer to 0 or 1 than this has lost its logit.
_EDGE = 1e-7


def forget_temperatures(model: LoadedModel) -> None:
    """Rounds publish forecasts at temperature 1 from now on. For rounds that run eagerly: a captured one keeps what it has.

    Raises UsageError if no round of the model forecasts.
    """
    forecasting = [captured for captured in model.rounds.values() if isinstance(captured, AllocatedRound)]
    if not forecasting:
        raise UsageError(
            f"recipe {model.recipe.name!r} was prepared without rounds that forecast acceptance; prepare it with drafts, if it "
            "has forecasts at all"
        )
    for captured in forecasting:
        captured.temperatures = None


def outcomes(model: LoadedModel, requests: Iterable[Request]) -> Iterator[Outcome]:
    """Scores and accepted counts of every round that verified its whole block, request after request.

    The model must publish forecasts at temperature 1, see ``forget_temperatures``.
    """
    generator = Generator(model)
    for request in requests:
        for event in generator.run([request]):
            if isinstance(event, Emission) and event.forecasts:
                done = event.completion
                if done.verified == len(event.forecasts):
                    yield Outcome(scores=tuple(map(_logit, event.forecasts)), accepted=done.accepted)


def _logit(forecast: float) -> float:
    inside = min(max(forecast, _EDGE), 1 - _EDGE)
    return math.log(inside / (1 - inside))
