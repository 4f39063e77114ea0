"""Replicas of one device behind a dispatcher, and what became of every request.

Each replica has a scheduler and a clock of its own; the one that is furthest behind goes on first, so an arrival is dispatched by
what was known when it came.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

from attrs import define, field, frozen

from specdec.errors import UsageError
from specdec.round.completion import Finish
from specdec.sampling.params import SamplingParams
from specdec.scheduling.scheduler import Scheduler
from specdec.serving.request import Emission, Request
from specdec.simulation.acceptance import Category, Luck
from specdec.simulation.device import Nature, SimulatedDevice
from specdec.simulation.history import PROMPT_TOKEN, SimulatedHistory
from specdec.simulation.workload import Arrival

#: How requests are spread. Least loaded: fewest unfinished requests, the first of equals.
DISPATCH = ("round-robin", "least-loaded")


@define(kw_only=True, eq=False)
class Outcome:
    """One request: where it ran, when it gave its first and last token, what it emitted in how many rounds, why it ended."""

    arrival: Arrival
    replica: int
    first: float = -1.0
    end: float = -1.0
    tokens: list[int] = field(factory=list)
    rounds: int = 0
    finish: Finish = Finish.NONE

    @property
    def time_to_first_token(self) -> float:
        """Seconds from arrival."""
        return self.first - self.arrival.time

    @property
    def latency(self) -> float:
        """Seconds from arrival to the last token."""
        return self.end - self.arrival.time


class Natures:
    """What each arrival is like, found again by the seed of its request."""

    def __init__(self, arrivals: Sequence[Arrival], categories: dict[str, Category], seed: int) -> None:
        self._natures = {
            one.index: Nature(category=categories[one.category], luck=Luck(seed, one.index), length=one.output_tokens)
            for one in arrivals
        }

    def __call__(self, request: Request) -> Nature:
        return self._natures[request.sampling.seed]


def request_of(arrival: Arrival) -> Request:
    """The request of an arrival; its seed is its index. The prompt's tokens mean nothing."""
    return Request(
        prompt=(PROMPT_TOKEN,) * arrival.prompt_tokens,
        sampling=SamplingParams(seed=arrival.index),
        max_new_tokens=arrival.max_new_tokens,
        draft_tokens=arrival.draft_tokens,
    )


@frozen(kw_only=True, eq=False)
class Replica:
    """One device with its scheduler, and the decoded history that this scheduler asks, if any."""

    device: SimulatedDevice
    scheduler: Scheduler
    history: SimulatedHistory | None = None


class _Running:
    def __init__(self, index: int, replica: Replica, nature: Callable[[Request], Nature]) -> None:
        self.index = index
        self.device = replica.device
        self.scheduler = replica.scheduler
        self._history = replica.history
        self._nature = nature
        self.outcomes: dict[int, Outcome] = {}
        self.unfinished = 0
        self._ends: list[float] = []

    def load(self, moment: float) -> int:
        """Requests not finished at a moment; a step in progress may know more than that moment did."""
        while self._ends and self._ends[0] <= moment:
            heapq.heappop(self._ends)
        return self.unfinished + len(self._ends)

    def take(self, arrival: Arrival) -> Outcome:
        if not self.scheduler.busy:
            self.device.advance(arrival.time)
        outcome = Outcome(arrival=arrival, replica=self.index)
        request = request_of(arrival)
        number = self.scheduler.submit(request)
        self.outcomes[number] = outcome
        if self._history is not None:
            self._history.expect(number, self._nature(request))
        self.unfinished += 1
        return outcome

    def step(self) -> None:
        for event in self.scheduler.step():
            if not isinstance(event, Emission):
                continue
            outcome, now = self.outcomes[event.request], self.device.clock()
            if event.tokens and not outcome.tokens:
                outcome.first = now
            outcome.rounds += bool(event.tokens) and bool(outcome.tokens)
            outcome.tokens.extend(event.tokens)
            if event.finish is not Finish.NONE:
                outcome.end, outcome.finish = now, event.finish
                del self.outcomes[event.request]
                self.unfinished -= 1
                heapq.heappush(self._ends, now)


@frozen(kw_only=True, eq=False)
class Run:
    """A finished simulation: an outcome per arrival in order, and the replicas that made them."""

    outcomes: list[Outcome]
    replicas: list[Replica]


def simulate(
    arrivals: Sequence[Arrival],
    make: Callable[[], Replica],
    nature: Callable[[Request], Nature],
    *,
    replicas: int = 1,
    dispatch: str = "round-robin",
    report: Callable[[int], Any] | None = None,
) -> Run:
    """Runs all arrivals to their ends. make: a fresh replica; nature: what requests are like, the one its device was made with.
    report: called with how many were dispatched.

    Raises UsageError for a number or name out of range, or a request that a device refuses; CapacityError as a device does.
    """
    if replicas < 1:
        raise UsageError(f"replicas is {replicas}; allowed: 1 or more")
    if dispatch not in DISPATCH:
        raise UsageError(f"dispatch is {dispatch!r}; allowed: {', '.join(DISPATCH)}")
    made = [make() for _ in range(replicas)]
    fleet = [_Running(index, replica, nature) for index, replica in enumerate(made)]
    outcomes: list[Outcome] = []
    # by clock, then index; every busy replica is in it once
    behind: list[tuple[float, int]] = []
    for arrival in arrivals:
        while behind and behind[0][0] < arrival.time:
            _go_on(fleet, behind)
        if dispatch == "round-robin":
            replica = fleet[len(outcomes) % replicas]
        else:
            replica = min(fleet, key=lambda one: (one.load(arrival.time), one.index))
        idle = not replica.scheduler.busy
        outcomes.append(replica.take(arrival))
        if idle:
            heapq.heappush(behind, (replica.device.clock(), replica.index))
        if report is not None:
            report(len(outcomes))
    while behind:
        _go_on(fleet, behind)
    return Run(outcomes=outcomes, replicas=made)


def _go_on(fleet: Sequence[_Running], behind: list[tuple[float, int]]) -> None:
    """One step of the replica that is furthest behind."""
    _, index = heapq.heappop(behind)
    replica = fleet[index]
    replica.step()
    if replica.scheduler.busy:
        heapq.heappush(behind, (replica.device.clock(), index))
