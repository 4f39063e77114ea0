"""Host time of one round: scheduler and width policy over a simulated device, whose own time is left out.

    python tests/benchmarks/host_time.py [--lanes N] [--tokens N] [--out FILE]

All lanes run to their ends in full batches. Prints medians in microseconds per round; exit code 1 if the adaptive policy's
misses the bound. ``--out`` keeps them with the processor's name.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from run import processor
from simulated_fleet import CATEGORY, COSTS, arrival

from specdec import __version__
from specdec.scheduling.device import RoundPlan, RoundResult
from specdec.scheduling.scheduler import Scheduler
from specdec.simulation.device import SimulatedDevice
from specdec.simulation.fleet import Natures, request_of
from specdec.simulation.policies import named_policy

#: Microseconds at 64 lanes.
BOUND = 200.0
WIDTHS = (1, 2, 3, 4, 5, 6)


class TimedDevice(SimulatedDevice):
    """A device whose own time is kept apart."""

    seconds = 0.0

    def submit(self, plan: RoundPlan) -> None:
        begun = time.perf_counter()
        super().submit(plan)
        self.seconds += time.perf_counter() - begun

    def collect(self, plan: RoundPlan, logprobs: bool) -> RoundResult:
        begun = time.perf_counter()
        result = super().collect(plan, logprobs)
        self.seconds += time.perf_counter() - begun
        return result


def measure(policy: str, lanes: int, tokens: int) -> tuple[float, int]:
    """Median microseconds of a step with a full batch, and how many there were."""
    arrivals = [arrival(index, prompt=1, output=tokens) for index in range(lanes)]
    natures = Natures(arrivals, {"only": CATEGORY}, 0)
    named = named_policy(policy, WIDTHS)
    device = TimedDevice(COSTS, natures, widths=WIDTHS, concurrency=lanes, token_capacity=1024, context=2 * tokens)
    scheduler = Scheduler(device, named.make())
    for one in arrivals:
        scheduler.submit(request_of(one))
    taken: list[float] = []
    while scheduler.busy:
        full = sum(one.started for one in scheduler.admission.residents.values()) == lanes
        device.seconds, begun = 0.0, time.perf_counter()
        for _ in scheduler.step():
            pass
        if full:
            taken.append(time.perf_counter() - begun - device.seconds)
    return statistics.median(taken) * 1e6, len(taken)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2000, help="output of each request")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    found = {}
    for policy in ("fixed:4", "adaptive"):
        median, rounds = measure(policy, args.lanes, args.tokens)
        found[policy] = {"median_microseconds": round(median, 1), "rounds": rounds}
        print(f"{policy:<10} {median:7.1f} microseconds per round of {args.lanes} lanes (median of {rounds})")
    holds = found["adaptive"]["median_microseconds"] <= BOUND
    print(f"bound {BOUND:.0f}: {'holds' if holds else 'MISSED'}")
    if args.out is not None:
        result = {
            "command": "python tests/benchmarks/host_time.py " + " ".join(sys.argv[1:]),
            "processor": processor(),
            "versions": {"specdec": __version__, "python": platform.python_version()},
            "lanes": args.lanes,
            "policies": found,
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
