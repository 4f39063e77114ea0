"""The ordinary choice is the best rate, by an oracle; reasons say what happened; nothing is random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate, product
from operator import mul

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from specdec.control.controller import PARKED, Decision, LaneOutlook, Reason, WidthController
from specdec.control.cost import RoundCosts
from specdec.control.exploration import GAP
from specdec.errors import UsageError

WIDTHS = (1, 2, 3, 4, 6, 8)


def outlooks(*rates: Sequence[float]) -> list[LaneOutlook]:
    return [(tuple(accumulate(lane, mul))) for lane in rates]


def declared(slope: float = 0.1, batches: Sequence[int] = (1, 2, 4)) -> RoundCosts:
    return RoundCosts({(b, w): 1.0 + slope * (w - 1) + 0.01 * b for b, w in product(batches, WIDTHS)})


def quiet(**options: object) -> WidthController:
    """Costs are known and nothing is probed."""
    return WidthController(WIDTHS, **{"costs": declared(), "share": 0.0, "margin": 0.0, **options})  # type: ignore[arg-type]


# eighths: sums and products are exact, so equal rates are equal
RATES = st.lists(st.integers(0, 8).map(lambda eighths: eighths / 8), max_size=7)


@given(st.lists(RATES, min_size=1, max_size=4), st.floats(0.0, 0.5))
def test_the_best_rate_is_chosen(lanes: list[list[float]], slope: float) -> None:
    costs = declared(slope)
    decision = quiet(costs=costs).choose(4, outlooks(*lanes))
    found = {}
    for width in WIDTHS:
        tokens = 0.0
        for lane in lanes:
            running = 1.0
            tokens += 1.0
            for rate in lane[: width - 1]:
                running *= rate
                tokens += running
        found[width] = tokens / costs.estimate(4, width)
    assert found[decision.width] == pytest.approx(max(found.values()))
    assert decision.width == min(w for w in WIDTHS if found[w] >= found[decision.width])


def test_good_drafts_widen_and_bad_ones_narrow() -> None:
    assert quiet().choose(1, outlooks([0.95] * 7)).width == 8
    assert quiet().choose(1, outlooks([0.05] * 7)).width == 1
    mixed = quiet().choose(2, outlooks([0.95] * 7, [0.05] * 7))
    assert mixed.reason is Reason.BEST
    assert mixed.candidates[2] == pytest.approx((3.0, 1.12))


def test_ceilings_bound_what_is_considered() -> None:
    """Widths behind the first that holds every draft bring nothing."""
    decision = quiet().choose(2, outlooks([0.9] * 4, [0.9]))
    assert set(decision.candidates) == {1, 2, 3, 4, 6}
    assert decision.candidates[6][0] == pytest.approx(2 + sum(0.9**j for j in range(1, 5)) + 0.9)
    nothing = quiet().choose(2, outlooks([], []))
    assert (nothing.width, nothing.reason) == (1, Reason.ONLY)


def test_only_allowed_widths_are_considered() -> None:
    assert quiet().choose(1, outlooks([0.95] * 7), allowed=(1, 2, 3)).width == 3
    assert quiet().choose(1, outlooks([0.95] * 7), allowed=(1,)).reason is Reason.ONLY
    for lanes, allowed in (([], (1,)), (outlooks([0.5]), (2, 3)), (outlooks([0.5]), ())):
        with pytest.raises(UsageError, match="width 1"):
            quiet().choose(1, lanes, allowed=allowed)


@pytest.mark.parametrize("options", [{"margin": -0.1}, {"margin": 1.0}, {"share": -0.1}, {"share": 1.0}])
def test_shares_out_of_range_are_refused(options: dict) -> None:
    with pytest.raises(UsageError, match="at least 0 and below 1"):
        WidthController(WIDTHS, **options)
    with pytest.raises(UsageError, match="start with 1"):
        WidthController((2, 3))


def test_allocated_rounds_count_the_drafts_that_their_rows_hold() -> None:
    """Two lanes, width 4 with five rows: three of six drafts, those most likely to survive."""
    lanes = outlooks([0.9, 0.9, 0.9], [0.5, 0.5, 0.5])
    decision = quiet(rows={(2, 4): 5}).choose(2, lanes)
    assert decision.candidates[4][0] == pytest.approx(2 + 0.9 + 0.81 + 0.729)
    best = max(
        sum(0.9**j for j in range(1, a + 1)) + sum(0.5**j for j in range(1, b + 1))
        for a, b in product(range(4), repeat=2)
        if a + b == 3
    )
    assert decision.candidates[4][0] == pytest.approx(2 + best)
    assert decision.candidates[3][0] == pytest.approx(2 + 0.9 + 0.81 + 0.5 + 0.25)


def test_a_width_in_use_is_held_within_the_margin() -> None:
    controller = quiet(margin=0.05)
    assert controller.choose(1, outlooks([0.9] * 7)).width == 8
    close = outlooks([0.8] * 7)
    rates = {w: t / s for w, (t, s) in quiet().choose(1, close).candidates.items()}
    assert max(rates, key=rates.__getitem__) == 6
    decision = controller.choose(1, close)
    assert (decision.width, decision.reason) == (8, Reason.HELD)
    decision = controller.choose(1, outlooks([0.5] * 7))
    assert (decision.width < 6, decision.reason) == (True, Reason.BEST)
    # each batch capacity has a width of its own
    assert controller.choose(2, close).width == 6


def test_unknown_costs_are_measured_from_narrow_to_wide() -> None:
    """Two rounds of each width that may be best; one that cannot be is left alone."""
    controller = WidthController((1, 2, 3, 4))
    chosen = []
    for _ in range(12):
        decision = controller.choose(1, outlooks([0.9, 0.3, 0.1]))
        chosen.append(decision.width)
        assert decision.probe == (decision.reason is Reason.MEASURE)
        controller.observe(1, decision.width, (1.0, 1.05, 2.2, 3.0)[decision.width - 1], [1])
    assert chosen == [1, 1, 2, 2, 3, 3, 2, 2, 2, 2, 2, 2]


def test_probes_are_spaced_and_labelled() -> None:
    controller = WidthController(WIDTHS, costs=declared(0.05))
    turns = []
    for turn in range(400):
        decision = controller.choose(1, outlooks([0.01] * 7))
        if decision.probe:
            assert decision.reason is Reason.PROBE
            assert decision.width == 2
            turns.append(turn)
        controller.observe(1, decision.width, controller.costs.estimate(1, decision.width), [1])
    gaps = [later - earlier for earlier, later in zip(turns, turns[1:])]
    assert len(turns) > 20
    assert min(gaps) >= GAP
    assert sum(gaps) / len(gaps) <= 8


def test_a_probe_that_pays_is_repeated_at_once() -> None:
    controller = WidthController(WIDTHS, costs=declared(0.05))
    widths = []
    for _ in range(60):
        decision = controller.choose(1, outlooks([0.01] * 7))
        widths.append(decision.width)
        controller.observe(1, decision.width, controller.costs.estimate(1, decision.width), [decision.width])
    first = widths.index(2)
    assert widths[first : first + 8] == [2] * 8


def test_a_width_that_cannot_win_is_not_probed() -> None:
    """Saturated: two rows cost twice as much as one, so no acceptance makes width two better."""
    costs = RoundCosts({(4, width): float(width) for width in WIDTHS})
    controller = WidthController(WIDTHS, costs=costs)
    for _ in range(300):
        decision = controller.choose(4, outlooks(*[[0.5] * 7] * 4))
        assert (decision.width, decision.reason) == (1, Reason.BEST)
        controller.observe(4, 1, 1.0, [1] * 4)


def test_drafting_after_a_long_time_without_is_a_reentry() -> None:
    controller = quiet()
    for _ in range(PARKED):
        assert controller.choose(1, outlooks([0.01] * 7)).reason is Reason.BEST
        controller.observe(1, 1, 1.0, [1])
    decision = controller.choose(1, outlooks([0.9] * 7))
    assert (decision.width, decision.reason) == (8, Reason.REENTRY)
    controller.observe(1, 8, 1.7, [5])
    assert controller.choose(1, outlooks([0.9] * 7)).reason is Reason.BEST


def flips(controller: WidthController, jitter: float, rounds: int = 2000) -> int:
    """Changes of width on a constant outlook for which widths 4 and 6 are equally good, costs measured with noise."""
    chance = random.Random(5)
    lanes = outlooks([0.8] * 7)
    tokens = {4: 1 + 0.8 + 0.64 + 0.512, 6: 1 + 0.8 + 0.64 + 0.512 + 0.4096 + 0.32768}
    costs = {1: 0.9, 2: 1.0, 3: 1.1, 4: tokens[4], 6: tokens[6], 8: 9.0}
    costs = {width: cost if width in tokens else 9.0 for width, cost in costs.items()}
    last, count = None, 0
    for _ in range(rounds):
        decision = controller.choose(1, lanes)
        for width in tokens:  # both are measured, as if other lanes ran them
            controller.costs.observe(1, width, costs[width] * (1 + jitter * chance.gauss(0, 1)))
        controller.observe(1, decision.width, costs[decision.width] * (1 + jitter * chance.gauss(0, 1)), [3])
        if not decision.probe:
            count += last is not None and decision.width != last
            last = decision.width
    return count


def test_equals_do_not_alternate_on_noise() -> None:
    assert flips(WidthController(WIDTHS), 0.005) <= 2


def test_without_a_margin_equals_alternate_on_noise() -> None:
    """The control."""
    assert flips(WidthController(WIDTHS, margin=0.0), 0.005) > 100


def test_constant_input_gives_one_width() -> None:
    """No noise at all: after costs are measured the ordinary choice never changes, with or without a margin."""
    for margin in (0.0, 0.01):
        assert flips(WidthController(WIDTHS, margin=margin), 0.0) == 0


class Choosing(RuleBasedStateMachine):
    """Any outlooks and costs: a prepared width, none wider than needed, and twice the same."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = [WidthController(WIDTHS), WidthController(WIDTHS)]
        self.open: list[Decision] = []

    @rule(
        batch=st.sampled_from([1, 2, 4]),
        lanes=st.lists(RATES, min_size=1, max_size=4),
        allowed=st.sampled_from([None, (1,), (1, 2, 3), (1, 8)]),
    )
    def choose(self, batch: int, lanes: list[list[float]], allowed: tuple[int, ...] | None) -> None:
        one, other = (controller.choose(batch, outlooks(*lanes), allowed=allowed) for controller in self.pair)
        assert one == other
        assert one.width in (allowed or WIDTHS)
        needed = max(map(len, lanes)) + 1
        assert not any(needed <= width < one.width for width in allowed or WIDTHS)
        assert one.width in one.candidates
        self.open.append(one)

    @rule(seconds=st.floats(0.001, 10.0), emitted=st.lists(st.integers(0, 8), max_size=4))
    def observe(self, seconds: float, emitted: list[int]) -> None:
        if self.open:
            done = self.open.pop(0)
            for controller in self.pair:
                controller.observe(done.batch, done.width, seconds, emitted)

    @invariant()
    def balances_agree(self) -> None:
        assert self.pair[0].budget.balance == self.pair[1].budget.balance


TestChoosing = Choosing.TestCase
TestChoosing.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
