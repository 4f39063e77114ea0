"""Why every round had its width: one JSON object per round, in the order in which rounds were collected. Torch-free.

    round         number of the round                     time     the device's clock when it was collected, seconds
    batch, width  its shape                               reason   see controller.Reason; null if nothing was to choose
    allowed       widths it could have had                turn     rounds that the controller had observed when it chose
    candidates    {width: [expected tokens, seconds]}     seconds  what the round took
    emitted       tokens of all lanes that were still their request's
    lanes         of each: slot, ceiling, copied drafts, match_length of the copy, survival as expected; and from its record
                  request, verified, accepted, emitted, null if the lane was no longer its request's

Numbers are written in full, so that a replay decides by the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.control.controller import Decision, WidthController
from specdec.errors import UsageError

if TYPE_CHECKING:
    from specdec.scheduling.device import RoundPlan
    from specdec.scheduling.policy import Outcome


class TraceWriter:
    """Writes a trace. A line is in the file when ``write`` returns, so that a trace of a process that died is whole."""

    def __init__(self, path: str | Path) -> None:
        """path: file to write; what it held is lost. Raises UsageError if it cannot be written."""
        try:
            self._file = open(path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115 - closed by close
        except OSError as error:
            raise UsageError(
                f"trace {path} cannot be written: {error.strerror}; name a file in a folder that is there"
            ) from error

    def write(
        self, plan: RoundPlan, decision: Decision | None, seconds: float, now: float, outcomes: Sequence[Outcome]
    ) -> None:
        """Adds a collected round. decision: None if there was nothing to choose. outcomes: of lanes still their request's."""
        records = {lane.slot: completion for lane, _, completion in outcomes}
        outlooks = decision.lanes if decision is not None else ()
        lanes = []
        for place, lane in enumerate(plan.lanes):
            record = records.get(lane.slot)
            lanes.append(
                {
                    "slot": lane.slot,
                    "ceiling": lane.ceiling,
                    "copied": len(lane.copies),
                    "match_length": lane.match_length,
                    "survival": outlooks[place] if place < len(outlooks) else (),
                    "request": None if record is None else record.request,
                    "verified": None if record is None else record.verified,
                    "accepted": None if record is None else record.accepted,
                    "emitted": None if record is None else record.emitted,
                }
            )
        line = {
            "round": plan.number,
            "time": now,
            "batch": plan.batch,
            "width": plan.width,
            "reason": None if decision is None else decision.reason.value,
            "allowed": [] if decision is None else list(decision.allowed),
            "turn": None if decision is None else decision.turn,
            "candidates": {} if decision is None else decision.candidates,
            "seconds": seconds,
            "emitted": sum(record.emitted for record in records.values()),
            "lanes": lanes,
        }
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def close(self) -> None:
        """Closes the file; may be called again."""
        self._file.close()


def read_trace(path: str | Path) -> Iterator[dict[str, Any]]:
    """Rounds of a trace. Raises UsageError, with the line's number, for a file that is none."""
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                found = json.loads(line)
                if not isinstance(found, dict) or not {"batch", "width", "seconds", "lanes"} <= found.keys():
                    raise UsageError(f"{path} line {number} is no round of a trace; give a file that --trace wrote")
                yield found
    except (OSError, ValueError) as error:
        raise UsageError(f"trace {path} cannot be read: {error}; name a file that --trace wrote") from error


def replay(rounds: Iterable[Mapping[str, Any]], controller: WidthController) -> Iterator[Decision | None]:
    """What a controller chooses with the outlooks of a trace, each round costing what it did there; None where nothing was to
    choose. A controller made as the traced one was, and as new, chooses as it did.
    """
    unseen: list[Mapping[str, Any]] = []
    seen = 0
    for one in rounds:
        decision = None
        if one["reason"] is not None:
            # rounds in flight when this one was chosen are observed after it
            while unseen and seen < one["turn"]:
                past = unseen.pop(0)
                emitted = [lane["emitted"] for lane in past["lanes"] if lane["emitted"] is not None]
                controller.observe(past["batch"], past["width"], past["seconds"], emitted)
                seen += 1
            lanes = [tuple(lane["survival"]) for lane in one["lanes"]]
            decision = controller.choose(one["batch"], lanes, allowed=one["allowed"] or None)
        yield decision
        unseen.append(one)
