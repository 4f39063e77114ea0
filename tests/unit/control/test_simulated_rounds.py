"""The controller against the best fixed width in hindsight, on the same random numbers: stationary, mixed, and after a change.

Costs jitter by 2 %, one round in a hundred takes five times as long, requests change every 150 rounds, and nothing is known at
first: neither costs nor acceptance.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import pytest
from simulated_rounds import WIDTHS, Lane, Outcome, SimulatedRounds, Source, Stretch, survival, true_rates

from specdec.control import controller as control
from specdec.control.controller import Reason, WidthController
from specdec.control.cost import ENOUGH

ROUNDS = 2000
SEEDS = (1, 2, 3)

Cost = Callable[[int, int], float]


def linear(per_row: float, per_draft: float = 0.03) -> Cost:
    """10 ms for one row, a share more for each further row, and for each draft step."""
    return lambda batch, width: 0.010 * (1 + per_row * (batch * width - 1) + per_draft * (width - 1))


def cliff(batch: int, width: int) -> float:
    """Beyond eight rows another kernel that costs 80 % more."""
    return 0.010 * (1 + 0.01 * batch * width + 0.02 * (width - 1) + (0.8 if batch * width > 8 else 0.0))


def saturated(batch: int, width: int) -> float:
    """Free up to sixteen rows, in proportion beyond."""
    return 0.010 * max(1.0, batch * width / 16) * (1 + 0.02 * width)


def flat(rate: float) -> tuple[float, ...]:
    return (rate,) * 7


def steep(first: float, ratio: float) -> tuple[float, ...]:
    return tuple(first * ratio**depth for depth in range(7))


def plain(rates: Sequence[float], count: int = 1) -> tuple[Lane, ...]:
    return (Lane(learned=tuple(rates)),) * count


COPIES = Source(rates=flat(0.93), share=0.6, match_length=8)
LONG = Source(rates=flat(0.97), share=0.25, match_length=8)
SHORT = Source(rates=flat(0.3), share=0.25, match_length=4)

CATEGORIES: dict[str, tuple[tuple[Lane, ...], Cost]] = {
    "flat .9, one lane": (plain(flat(0.9)), linear(0.04)),
    "flat .6, one lane": (plain(flat(0.6)), linear(0.04)),
    "flat .75, sixteen lanes": (plain(flat(0.75), 16), linear(0.01)),
    "steep, one lane": (plain(steep(0.85, 0.6)), linear(0.04)),
    "steep, four lanes": (plain(steep(0.85, 0.6), 4), linear(0.02)),
    "rising with depth": (plain((0.555, 0.58, 0.62, 0.62, 0.6, 0.6, 0.6), 4), linear(0.02)),
    "bad first draft, good ones behind": (plain((0.4, *flat(0.97)[1:])), linear(0.04)),
    "hopeless, one lane": (plain(flat(0.05)), linear(0.08, 0.05)),
    "hopeless, eight lanes": (plain(flat(0.05), 8), linear(0.01, 0.05)),
    "barely worth one draft": (plain(flat(0.3)), linear(0.15, 0.1)),
    "cliff at eight rows, one lane": (plain(flat(0.8)), cliff),
    "cliff at eight rows, two lanes": (plain(flat(0.8), 2), cliff),
    "cliff at eight rows, four lanes": (plain(flat(0.6), 4), cliff),
    "cliff worth crossing, four lanes": (plain(flat(0.97), 4), cliff),
    "saturated, width one wins": (plain(flat(0.6), 32), saturated),
    "copy-heavy": ((Lane(learned=flat(0.5), copies=(COPIES,)),) * 2, linear(0.04)),
    "bimodal copies, match length tells": ((Lane(learned=flat(0.4), copies=(LONG, SHORT)),) * 2, linear(0.05)),
    "two good lanes among six bad": (plain(flat(0.95), 2) + plain(flat(0.2), 6), linear(0.03)),
    "four lanes, four shapes": (
        plain(steep(0.95, 0.5)) + plain(flat(0.9)) + plain(flat(0.1)) + plain((0.3, *flat(0.95)[1:])),
        linear(0.03),
    ),
}


def explored(outcome: Outcome) -> float:
    """Share of time that probes and first measurements cost, by the truth."""
    return sum(outcome.lost) / sum(outcome.seconds)


@pytest.mark.parametrize("name", CATEGORIES)
def test_close_to_the_best_fixed_width_in_hindsight(name: str, record_property: Callable[[str, object], None]) -> None:
    lanes, cost = CATEGORIES[name]
    ratios, shares = [], []
    for seed in SEEDS:
        rounds = SimulatedRounds([Stretch(lanes=lanes, cost=cost, rounds=ROUNDS)], seed=seed)
        outcome = rounds.run(WidthController(WIDTHS))
        width, best = rounds.best_fixed()
        ratios.append(outcome.rate() / best)
        shares.append(explored(outcome))
        print(f"{name}: {ratios[-1]:.3f} of width {width}, explored {shares[-1]:.2%}, {outcome.switches} switches")
    record_property("ratio", min(ratios))
    assert min(ratios) >= 0.97
    assert max(shares) <= 0.02


def test_copies_whose_match_length_tells_beat_every_fixed_width() -> None:
    lanes, cost = CATEGORIES["bimodal copies, match length tells"]
    rounds = SimulatedRounds([Stretch(lanes=lanes, cost=cost, rounds=ROUNDS)], seed=1)
    assert rounds.run(WidthController(WIDTHS)).rate() >= 1.1 * rounds.best_fixed()[1]


COPYING = (Lane(learned=flat(0.5), copies=(COPIES,)),) * 2
STREAMS: dict[str, tuple[tuple[tuple[Lane, ...], ...], Cost]] = {
    "light and full load": (
        (plain(flat(0.9)), plain(flat(0.6), 16), COPYING, plain(flat(0.15)), plain(steep(0.85, 0.6), 4)),
        linear(0.03, 0.02),
    ),
    "across the cliff": (
        (plain(flat(0.9)), plain(flat(0.7), 4), COPYING, plain(flat(0.15)), plain(flat(0.7), 8)),
        cliff,
    ),
    "into saturation": (
        (plain(flat(0.9)), plain(flat(0.7), 4), COPYING, plain(flat(0.7), 32), plain(flat(0.7), 8)),
        saturated,
    ),
}
STRETCH, REPEATS = 300, 4


def time_for_work(outcome: Outcome, parts: Sequence[tuple[Lane, ...]]) -> float:
    """Seconds for as many tokens of every lane in every stretch: a faster policy must not be given more of some work."""
    total = 0.0
    for place, lanes in enumerate([*parts] * REPEATS):
        total += len(lanes) / outcome.rate(place * STRETCH, (place + 1) * STRETCH)
    return total


@pytest.mark.parametrize("queue_depth", [1, 2])
@pytest.mark.parametrize("name", STREAMS)
def test_a_mixed_stream_beats_every_fixed_width(name: str, queue_depth: int) -> None:
    parts, cost = STREAMS[name]
    for seed in SEEDS:
        stretches = [Stretch(lanes=lanes, cost=cost, rounds=STRETCH) for lanes in [*parts] * REPEATS]
        rounds = SimulatedRounds(stretches, seed=seed)
        outcome = rounds.run(WidthController(WIDTHS), queue_depth=queue_depth)
        fixed = {width: time_for_work(rounds.fixed(width), parts) for width in WIDTHS}
        best = min(fixed, key=fixed.__getitem__)
        ratio = fixed[best] / time_for_work(outcome, parts)
        print(f"{name}, {queue_depth} in flight: {ratio:.3f} of width {best}, explored {explored(outcome):.2%}")
        assert ratio >= 1.05
        assert explored(outcome) <= 0.02


# --- change --------------------------------------------------------------------------------------------------------------

BEFORE, WITHIN = 400, 32
GOOD, BAD, MIDDLING, STEEP = flat(0.9), flat(0.05), flat(0.5), steep(0.85, 0.6)
CHANGES: dict[str, tuple[tuple[Lane, ...], tuple[Lane, ...], Cost]] = {
    "good to bad": (plain(GOOD), plain(BAD), linear(0.04)),
    "parked to good": (plain(BAD), plain(GOOD), linear(0.04)),
    "parked to steep": (plain(BAD), plain(STEEP), linear(0.04)),
    "good to middling": (plain(GOOD), plain(MIDDLING), linear(0.04)),
    "middling to good": (plain(MIDDLING), plain(GOOD), linear(0.04)),
    "steep to good": (plain(STEEP), plain(GOOD), linear(0.04)),
    "four lanes, parked to good": (plain(BAD, 4), plain(GOOD, 4), linear(0.04)),
    "eight lanes, good to bad": (plain(GOOD, 8), plain(BAD, 8), linear(0.03, 0.02)),
    "32 lanes, parked to good": (plain(BAD, 32), plain(GOOD, 32), linear(0.02)),
}


def after_change(name: str, seed: int, **options: float) -> tuple[float, int]:
    """(true rate of the choices in the 32 rounds after the first 32, as a share of the best; rounds until a width of at least
    90 % of the best was chosen). Probes are left out."""
    before, after, cost = CHANGES[name]
    stretches = [Stretch(lanes=before, cost=cost, rounds=BEFORE), Stretch(lanes=after, cost=cost, rounds=2 * WITHIN)]
    outcome = SimulatedRounds(stretches, seed=seed, lifetime=None).run(WidthController(WIDTHS, **options))
    rates = true_rates(stretches[1])
    best = max(rates.values())
    chosen = [
        (turn, rates[width] / best)
        for turn, (width, reason) in enumerate(zip(outcome.widths[BEFORE:], outcome.reasons[BEFORE:]))
        if reason is not Reason.PROBE
    ]
    late = [share for turn, share in chosen if turn >= WITHIN]
    first = next((turn for turn, share in chosen if share >= 0.9), 2 * WITHIN)
    return statistics.mean(late), first


@pytest.mark.parametrize("name", CHANGES)
def test_an_abrupt_change_is_recovered_from_within_32_rounds(name: str) -> None:
    found = [after_change(name, seed) for seed in range(40)]
    shares, rounds = [share for share, _ in found], sorted(first for _, first in found)
    print(
        f"{name}: {statistics.mean(shares):.3f} of the best after 32 rounds, least {min(shares):.3f}; first after {rounds}"
    )
    assert statistics.mean(shares) >= 0.97
    assert min(shares) >= 0.9
    assert rounds[-1] <= WITHIN


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_recovery_on_many_seeds(name: str) -> None:
    """Seeds that nothing was tuned on."""
    rounds = sorted(after_change(name, seed)[1] for seed in range(1000, 1200))
    print(f"{name}: half by round {rounds[100]}, last {rounds[-5:]}")
    assert rounds[-1] <= WITHIN


def reentry(seed: int, **options: float) -> Outcome:
    """A thousand rounds without use for drafts, then good ones."""
    cost = linear(0.08, 0.05)
    stretches = [
        Stretch(lanes=plain(flat(0.02)), cost=cost, rounds=1000),
        Stretch(lanes=plain(GOOD), cost=cost, rounds=WITHIN),
    ]
    return SimulatedRounds(stretches, seed=seed, lifetime=None).run(WidthController(WIDTHS, **options))


def test_reentry_after_a_long_time_parked() -> None:
    """Drafting again within 32 rounds, by ordinary choice, and said so."""
    reasons = set()
    for seed in range(10):
        outcome = reentry(seed)
        drafting = [
            reason
            for width, reason in zip(outcome.widths[1000:], outcome.reasons[1000:])
            if width > 1 and reason is not Reason.PROBE
        ]
        assert drafting, f"seed {seed}"
        reasons.update(drafting)
    assert Reason.REENTRY in reasons


def test_without_exploration_parked_drafts_are_seldom_found_again() -> None:
    """The control: but by luck, when enough was forgotten just then."""
    assert sum(set(reentry(seed, share=0.0).widths[1000:]) == {1} for seed in range(10)) >= 8


def test_a_dearer_cost_is_noticed_where_the_width_is_used() -> None:
    """The width in use becomes three times as dear: another takes its place within 32 rounds."""
    before, after = linear(0.04), lambda batch, width: linear(0.04)(batch, width) * (3.0 if width > 4 else 1.0)
    stretches = [
        Stretch(lanes=plain(GOOD), cost=before, rounds=BEFORE),
        Stretch(lanes=plain(GOOD), cost=after, rounds=2 * WITHIN),
    ]
    outcome = SimulatedRounds(stretches, seed=1).run(WidthController(WIDTHS))
    assert outcome.widths[BEFORE - 1] == 8
    assert all(width <= 4 for width in outcome.widths[BEFORE + WITHIN :])


# --- constant ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", WIDTHS)
def test_a_width_whose_first_rounds_were_slow_is_used_nevertheless(slow: int) -> None:
    """Both that make a cost known: believed, it would never be measured again."""
    cost, controller, widths = linear(0.04), WidthController(WIDTHS), list[int]()
    for _ in range(100):
        width = controller.choose(1, [survival(GOOD)]).width
        factor = 5.0 if width == slow and widths.count(width) < ENOUGH else 1.0
        widths.append(width)
        controller.observe(1, width, factor * cost(1, width), [width])
    assert widths[-20:] == [8] * 20


@pytest.mark.parametrize("name", ["flat .9, one lane", "hopeless, one lane", "cliff at eight rows, two lanes"])
def test_clear_cases_settle_on_one_width(name: str) -> None:
    lanes, cost = CATEGORIES[name]
    outcome = SimulatedRounds([Stretch(lanes=lanes, cost=cost, rounds=1000)], seed=4, jitter=0.0).run(
        WidthController(WIDTHS)
    )
    ordinary = [w for w, r in zip(outcome.widths[200:], outcome.reasons[200:]) if r is not Reason.PROBE]
    changes = sum(one != other for one, other in zip(ordinary, ordinary[1:]))
    assert changes <= 0.02 * len(ordinary)


def test_the_margin_saves_switches() -> None:
    """The control: without it the same rounds switch more often, and gain nothing."""
    lanes, cost = CATEGORIES["flat .6, one lane"]
    rounds = SimulatedRounds([Stretch(lanes=lanes, cost=cost, rounds=ROUNDS)], seed=1)
    held, free = rounds.run(WidthController(WIDTHS)), rounds.run(WidthController(WIDTHS, margin=0.0))
    assert held.switches < 0.75 * free.switches
    assert held.rate() > 0.99 * free.rate()
    assert control.MARGIN > 0
