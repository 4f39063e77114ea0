"""How long the phases of a round take: events that a graph records anew with every replay, times of the processor on a CPU.

A benchmark's tool. Rounds that are served have no marks.
"""

from __future__ import annotations

import time

import torch

__all__ = ["PHASES", "PhaseMarks"]

#: Phases in the order of a round. ``accept`` is the law, the acceptance and the clip; ``commit`` has the completion records.
PHASES = ("draft", "verify", "accept", "commit")
#: The mark at the beginning of a round, before the first phase.
BEGIN = "begin"


class PhaseMarks:
    """Marks of one round. While ``Arena.phases`` holds them, every round leaves one at its beginning and one behind each phase.

    A round that is captured meanwhile keeps them as nodes of its graph, so its replays leave marks whatever the arena holds then.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._times: dict[str, float] = {}
        self._events: dict[str, torch.cuda.Event] = {}
        if device.type == "cuda":
            # external: recorded by the graph itself, where any other event would only order its nodes
            self._events = {name: torch.cuda.Event(enable_timing=True, external=True) for name in (BEGIN, *PHASES)}

    def mark(self, name: str) -> None:
        """Leaves the mark ``name``: ``begin`` or a phase that is over. Part of the round's program."""
        if self._events:
            self._events[name].record(torch.cuda.current_stream(self._device))
        else:
            self._times[name] = time.perf_counter()

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase in the last round; waits for the device. Raises KeyError if no round left marks."""
        names = (BEGIN, *PHASES)
        if self._events:
            torch.cuda.synchronize(self._device)
            pairs = zip(names, PHASES)
            return {after: self._events[before].elapsed_time(self._events[after]) / 1000 for before, after in pairs}
        return {after: self._times[after] - self._times[before] for before, after in zip(names, PHASES)}
