"""Rounds of a device that is only numbers: acceptance by depth and cost by shape are known, so the best choice is too.

Every round draws for every lane how many of K drafts would be accepted if all were verified. The draws do not depend on what is
chosen, so any two policies, and every fixed width in hindsight, meet the same ones.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

from attrs import field, frozen

from specdec.control.acceptance import AcceptanceHistory, RequestSurvival
from specdec.control.controller import Decision, Reason, WidthController

DRAFTS = 7
WIDTHS = tuple(range(1, DRAFTS + 2))


@frozen(kw_only=True)
class Source:
    """Drafts of one kind. share: of the rounds that have it; rates: conditional acceptance by depth."""

    rates: tuple[float, ...]
    share: float = 0.0
    match_length: int | None = None


@frozen(kw_only=True)
class Lane:
    """One stream of text. learned: acceptance of learned drafts; copies: kinds of copies that come instead in some rounds."""

    learned: tuple[float, ...]
    copies: tuple[Source, ...] = ()


@frozen(kw_only=True)
class Stretch:
    """Rounds in which nothing changes. cost: seconds by (batch, width); batch: the capacity, at least the number of lanes."""

    lanes: tuple[Lane, ...]
    cost: Callable[[int, int], float]
    rounds: int
    batch: int = field()
    name: str = ""

    @batch.default
    def _power(self) -> int:
        return 1 << (len(self.lanes) - 1).bit_length()


@frozen(kw_only=True)
class Draw:
    """One lane in one round: what it offered, and how many of K drafts the target would accept."""

    accepted: int
    copied: int = 0
    match_length: int | None = None


@frozen(kw_only=True)
class Round:
    """One round as it was run. factor: of its usual cost."""

    number: int
    stretch: Stretch
    draws: tuple[Draw, ...]
    decision: Decision
    factor: float

    @property
    def width(self) -> int:
        return self.decision.width

    @property
    def accepted(self) -> list[int]:
        return [min(draw.accepted, self.width - 1) for draw in self.draws]

    @property
    def emitted(self) -> int:
        return sum(1 + accepted for accepted in self.accepted)

    @property
    def seconds(self) -> float:
        return self.stretch.cost(self.stretch.batch, self.width) * self.factor

    @property
    def lost(self) -> float:
        """Seconds that a probe's width costs beyond what its expected tokens cost at the truly best width of this very round."""
        if not self.decision.probe:
            return 0.0
        rates = true_rates(self.stretch, self.draws)
        cost = self.stretch.cost(self.stretch.batch, self.width)
        return cost * (1 - rates[self.width] / max(rates.values()))


@frozen(kw_only=True)
class Outcome:
    """What one policy got. emitted, seconds, widths: by round. reasons: () for fixed widths. lost: seconds that probes cost
    beyond what their expected tokens would have at the width that is truly best, by round."""

    emitted: tuple[int, ...]
    seconds: tuple[float, ...]
    widths: tuple[int, ...]
    reasons: tuple[Reason, ...] = ()
    lost: tuple[float, ...] = ()

    def rate(self, start: int = 0, end: int | None = None) -> float:
        """Tokens per second of rounds ``start`` … ``end`` − 1."""
        return sum(self.emitted[start:end]) / sum(self.seconds[start:end])

    @property
    def switches(self) -> int:
        """Changes of width between ordinary choices; probes left out."""
        ordinary = [w for w, r in zip(self.widths, self.reasons) if r not in (Reason.PROBE, Reason.MEASURE)]
        return sum(before != after for before, after in zip(ordinary, ordinary[1:]))


def survival(rates: Sequence[float]) -> tuple[float, ...]:
    """True prefix survival."""
    values, running = [], 1.0
    for rate in rates:
        running *= rate
        values.append(running)
    return tuple(values)


def true_rates(stretch: Stretch, draws: Sequence[Draw] | None = None) -> dict[int, float]:
    """Expected tokens per second of every width: for the copies that ``draws`` offered, or without copies."""
    chains = []
    for place, lane in enumerate(stretch.lanes):
        match = draws[place].match_length if draws is not None else None
        kinds = [source.rates for source in lane.copies if source.match_length == match]
        chains.append(survival(kinds[0] if kinds else lane.learned))
    return {
        width: sum(1 + sum(chain[: width - 1]) for chain in chains) / stretch.cost(stretch.batch, width)
        for width in WIDTHS
    }


class SimulatedRounds:
    """Stretches one after the other, and the same random numbers for every policy."""

    def __init__(
        self, stretches: Sequence[Stretch], *, seed: int, jitter: float = 0.02, lifetime: int | None = 150
    ) -> None:
        """jitter: standard deviation of a round's cost, as a share of it; one round in 100 takes five times as long.
        lifetime: rounds of a request; then another with the same rates takes the lane. None: one request forever."""
        chance = random.Random(seed)
        self.lifetime = lifetime
        self.rounds: list[tuple[Stretch, list[Draw], float]] = []
        for stretch in stretches:
            for _ in range(stretch.rounds):
                draws = [self._draw(lane, chance) for lane in stretch.lanes]
                slow = 5.0 if jitter and chance.random() < 0.01 else 1.0
                self.rounds.append((stretch, draws, slow * max(0.5, 1 + jitter * chance.gauss(0, 1))))

    @staticmethod
    def _draw(lane: Lane, chance: random.Random) -> Draw:
        numbers, pick = [chance.random() for _ in range(DRAFTS)], chance.random()
        rates, copied, match = lane.learned, 0, None
        for source in lane.copies:
            if pick < source.share:
                rates, copied, match = source.rates, DRAFTS, source.match_length
                break
            pick -= source.share
        accepted = 0
        while accepted < DRAFTS and numbers[accepted] < rates[accepted]:
            accepted += 1
        return Draw(accepted=accepted, copied=copied, match_length=match)

    def fixed(self, width: int) -> Outcome:
        """Every round at one width."""
        emitted = [sum(1 + min(draw.accepted, width - 1) for draw in draws) for _, draws, _ in self.rounds]
        seconds = [stretch.cost(stretch.batch, width) * factor for stretch, _, factor in self.rounds]
        return Outcome(emitted=tuple(emitted), seconds=tuple(seconds), widths=(width,) * len(emitted))

    def best_fixed(self, start: int = 0, end: int | None = None) -> tuple[int, float]:
        """The best single width in hindsight over some rounds, and its tokens per second."""
        rates = {width: self.fixed(width).rate(start, end) for width in WIDTHS}
        best = max(rates, key=rates.__getitem__)
        return best, rates[best]

    def run(
        self,
        controller: WidthController,
        *,
        queue_depth: int = 1,
        on_round: Callable[[Round], None] | None = None,
    ) -> Outcome:
        """The controller's choices, with survival learned from what they showed. queue_depth: rounds that are chosen before the
        first of them is observed. on_round: told of each round when it is observed."""
        history = AcceptanceHistory(DRAFTS)
        requests: list[RequestSurvival] = []
        done: list[Round] = []
        queued: deque[tuple[Round, list[RequestSurvival]]] = deque()

        def observe() -> None:
            one, of = queued.popleft()
            for request, draw, accepted in zip(of, one.draws, one.accepted, strict=True):
                request.observe(one.width - 1, accepted, min(draw.copied, one.width - 1), draw.match_length)
            controller.observe(one.stretch.batch, one.width, one.seconds, [1 + accepted for accepted in one.accepted])
            if on_round is not None:
                on_round(one)

        for number, (stretch, draws, factor) in enumerate(self.rounds):
            del requests[len(draws) :]
            while len(requests) < len(draws):
                requests.append(RequestSurvival(history))
            for lane in range(len(draws)):
                # lanes change hands one after the other
                if self.lifetime is not None and number and (number + lane * 37) % self.lifetime == 0:
                    requests[lane] = RequestSurvival(history)
            while len(queued) >= queue_depth:
                observe()
            outlooks = [
                (request.survival(DRAFTS, draw.copied, draw.match_length))
                for request, draw in zip(requests, draws, strict=True)
            ]
            decision = controller.choose(stretch.batch, outlooks)
            one = Round(number=number, stretch=stretch, draws=tuple(draws), decision=decision, factor=factor)
            done.append(one)
            queued.append((one, list(requests)))
        while queued:
            observe()
        return Outcome(
            emitted=tuple(one.emitted for one in done),
            seconds=tuple(one.seconds for one in done),
            widths=tuple(one.width for one in done),
            reasons=tuple(one.decision.reason for one in done),
            lost=tuple(one.lost for one in done),
        )
