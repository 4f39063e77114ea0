"""Draft lengths from forecasts and measured speed, by the greedy rule with a stop: what packed rounds are compared with.

The rule prices a row: it admits as long as the next draft raises expected throughput. Rounds themselves admit by the top-P rule
under a capacity that was fixed before their drafts were drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

from specdec.round.allocation import LEAST_SURVIVAL


@frozen(kw_only=True)
class Admission:
    """What ``admit_while_improving`` chose. lengths: drafts per lane; throughput: expected tokens per second."""

    lengths: tuple[int, ...]
    throughput: float


def admit_while_improving(
    forecasts: Sequence[Sequence[float]], steps_per_second: Mapping[int, float], ceilings: Sequence[int] | None = None
) -> Admission:
    """Draft lengths of greatest expected throughput, admitted one draft at a time.

    forecasts: [B][K], probability that each draft is accepted if the earlier ones of its lane are. steps_per_second: rounds per
    second by number of target rows, for every number from B to B · (K + 1). ceilings: most drafts of each lane, None for K.

    Drafts come in order of prefix survival, ties by depth and then lane, and admission stops at the first one that does not
    improve. Going on to a later optimum would look better and be wrong: forecasts behind a draft are made from that draft, so
    what was drawn would decide whether it is verified, and the emitted law would be biased.
    """
    pairs = []
    for lane, row in enumerate(forecasts):
        survival = 1.0
        for depth, forecast in enumerate(row if ceilings is None else row[: ceilings[lane]]):
            survival *= forecast
            pairs.append((-survival, depth, lane))
    lengths = [0] * len(forecasts)
    expected, rows = float(len(forecasts)), len(forecasts)
    best = expected * steps_per_second[rows]
    for negative, _, lane in sorted(pairs):
        candidate = (expected - negative) * steps_per_second[rows + 1]
        if -negative < LEAST_SURVIVAL or candidate <= best:
            break
        best, expected, rows = candidate, expected - negative, rows + 1
        lengths[lane] += 1
    return Admission(lengths=tuple(lengths), throughput=best)
