"""Host time of one decision of the width controller: survival of every lane, the choice, and taking the outcomes in.

    python tests/benchmarks/control.py [--lanes N] [--rounds N] [--out FILE]

No model and no scheduler. Prints medians in microseconds; ``--out`` keeps them with the machine's name.
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

from simulated_rounds import DRAFTS, WIDTHS, Lane, SimulatedRounds, Stretch

from specdec import __version__
from specdec.control.acceptance import AcceptanceHistory, RequestSurvival
from specdec.control.controller import WidthController

RATES = ((0.9,) * DRAFTS, (0.6,) * DRAFTS, (0.8, 0.5, 0.3, 0.2, 0.2, 0.2, 0.2), (0.05,) * DRAFTS)
STEPS = ("survival", "choose", "observe")


def measure(lanes: int, rounds: int) -> dict[str, float]:
    """Median microseconds of a round by step, and in all."""
    stretch = Stretch(
        lanes=tuple(Lane(learned=RATES[lane % len(RATES)]) for lane in range(lanes)),
        cost=lambda batch, width: 0.010 * (1 + 0.002 * batch * width),
        rounds=rounds,
    )
    controller, history = WidthController(WIDTHS), AcceptanceHistory(DRAFTS)
    requests = [RequestSurvival(history) for _ in range(lanes)]
    taken: dict[str, list[float]] = {name: [] for name in (*STEPS, "all")}
    for _, draws, _ in SimulatedRounds([stretch], seed=1).rounds:
        times = [time.perf_counter()]
        outlooks = [(request.survival(DRAFTS)) for request in requests]
        times.append(time.perf_counter())
        decision = controller.choose(stretch.batch, outlooks)
        times.append(time.perf_counter())
        width, emitted = decision.width, []
        for request, draw in zip(requests, draws):
            accepted = min(draw.accepted, width - 1)
            request.observe(width - 1, accepted)
            emitted.append(1 + accepted)
        controller.observe(stretch.batch, width, stretch.cost(stretch.batch, width), emitted)
        times.append(time.perf_counter())
        for name, start, end in zip(STEPS, times, times[1:]):
            taken[name].append(end - start)
        taken["all"].append(times[-1] - times[0])
    return {name: round(statistics.median(values) * 1e6, 1) for name, values in taken.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    found = measure(args.lanes, args.rounds)
    print(f"{args.lanes} lanes, {DRAFTS} drafts, microseconds per round (median of {args.rounds}):")
    print(", ".join(f"{name} {value}" for name, value in found.items()))
    if args.out is not None:
        result = {
            "command": "python tests/benchmarks/control.py " + " ".join(sys.argv[1:]),
            "specdec": __version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "lanes": args.lanes,
            "drafts": DRAFTS,
            "rounds": args.rounds,
            "median_microseconds": found,
        }
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
