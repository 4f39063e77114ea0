"""What a simulation says: throughput, tails of time to first token and latency, widths, tokens per round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import frozen

from specdec.simulation.device import RoundCounts
from specdec.simulation.fleet import Run

#: Percentiles that are reported.
TAILS = (50, 95, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """Of a sample, linear between neighbours (type 7 of Hyndman and Fan 1996). The values need not be sorted."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@frozen(kw_only=True)
class Summary:
    """One policy. seconds: from the first arrival to the last token. widths: share of rounds by verification width.
    tokens_per_round: emitted by a lane in a round, first tokens not counted. acceptance: of offered drafts. busy: share of time
    that devices worked."""

    policy: str
    requests: int
    tokens: int
    seconds: float
    time_to_first_token: dict[int, float]
    latency: dict[int, float]
    widths: dict[int, float]
    tokens_per_round: float
    acceptance: float
    busy: float
    preemptions: int

    @property
    def tokens_per_second(self) -> float:
        """Of all replicas."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def requests_per_second(self) -> float:
        """Of all replicas."""
        return self.requests / self.seconds if self.seconds else 0.0

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "policy": self.policy,
            "requests": self.requests,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "requests_per_second": self.requests_per_second,
            "time_to_first_token": {f"p{percent}": value for percent, value in self.time_to_first_token.items()},
            "latency": {f"p{percent}": value for percent, value in self.latency.items()},
            "widths": {str(width): share for width, share in self.widths.items()},
            "tokens_per_round": self.tokens_per_round,
            "acceptance": self.acceptance,
            "busy": self.busy,
            "preemptions": self.preemptions,
        }


def summarise(policy: str, run: Run) -> Summary:
    """Figures of a run under the name of its policy."""
    begin = min(one.arrival.time for one in run.outcomes)
    seconds = max(one.end for one in run.outcomes) - begin
    first = [one.time_to_first_token for one in run.outcomes]
    latency = [one.latency for one in run.outcomes]
    by_width: dict[int, RoundCounts] = {}
    for replica in run.replicas:
        for (_, width), counts in replica.device.work.rounds.items():
            by_width.setdefault(width, RoundCounts()).add(counts)
    total = RoundCounts()
    for counts in by_width.values():
        total.add(counts)
    return Summary(
        policy=policy,
        requests=len(run.outcomes),
        tokens=sum(len(one.tokens) for one in run.outcomes),
        seconds=seconds,
        time_to_first_token={percent: percentile(first, percent) for percent in TAILS},
        latency={percent: percentile(latency, percent) for percent in TAILS},
        widths={width: by_width[width].rounds / total.rounds for width in sorted(by_width)},
        tokens_per_round=total.tokens / total.lanes if total.lanes else 0.0,
        acceptance=total.accepted / total.offered if total.offered else 0.0,
        busy=sum(one.device.work.busy for one in run.replicas) / (seconds * len(run.replicas)) if seconds else 0.0,
        preemptions=sum(one.scheduler.admission.preemptions for one in run.replicas),
    )
