"""Luck keyed by request and position, and curves that are met as declared."""

from __future__ import annotations

import math

import pytest

from specdec.errors import UsageError
from specdec.simulation.acceptance import Burst, Category, Change, Copies, Luck, _mixed, survival

REQUESTS, POSITIONS = 40, 250


def share(category: Category, depth: int, *, at: range = range(POSITIONS), seed: int = 3) -> tuple[float, int]:
    """Share of accepted drafts at a depth, and how many were judged."""
    judged = [category.accepts(Luck(seed, request), position, depth) for request in range(REQUESTS) for position in at]
    return sum(judged) / len(judged), len(judged)


def far(found: tuple[float, int], rate: float) -> float:
    """Standard errors between a share and a rate."""
    return abs(found[0] - rate) / math.sqrt(rate * (1 - rate) / found[1])


def test_mixing_is_that_of_splitmix64() -> None:
    """First numbers of the reference generator seeded with 1234567."""
    reference = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    words = [_mixed((1234567 + (place + 1) * 0x9E3779B97F4A7C15) % 2**64) for place in range(5)]
    assert words == reference


def test_luck_depends_on_its_key_alone() -> None:
    forwards = [Luck(1, 2).uniform(0, position) for position in range(100)]
    luck = Luck(1, 2)
    backwards = [luck.uniform(0, position) for position in reversed(range(100))]
    assert forwards == backwards[::-1]
    others = [Luck(1, 3), Luck(2, 2)]
    assert all(other.uniform(0, position) != forwards[position] for other in others for position in range(100))


def test_luck_is_uniform_and_uncorrelated() -> None:
    values = [Luck(0, request).uniform(0, position) for request in range(200) for position in range(100)]
    counts = [0] * 20
    for value in values:
        counts[int(value * 20)] += 1
    expected = len(values) / 20
    # 99.9 % point of chi-square with 19 degrees of freedom
    assert sum((count - expected) ** 2 / expected for count in counts) < 43.8
    mean = sum(values) / len(values)
    for lag in (1, 100):
        product = sum((a - mean) * (b - mean) for a, b in zip(values, values[lag:])) / len(values)
        assert abs(product / (1 / 12)) < 4 / math.sqrt(len(values)), lag


def test_each_depth_is_accepted_as_often_as_declared() -> None:
    category = Category(conditional=(0.9, 0.6, 0.3))
    for depth, rate in ((0, 0.9), (1, 0.6), (2, 0.3), (5, 0.3)):
        assert far(share(category, depth), rate) < 4, depth
    # the same test must see a curve that is off by three hundredths
    assert far(share(category, 0), 0.87) > 6


def test_a_change_holds_from_its_position_on() -> None:
    category = Category(
        conditional=(0.9,), changes=(Change(at=50, conditional=(0.2,)), Change(at=200, conditional=(0.6,)))
    )
    for at, rate in ((range(50), 0.9), (range(50, 200), 0.2), (range(200, 250), 0.6)):
        assert far(share(category, 0, at=at), rate) < 4, at


def test_bursts_are_blocks() -> None:
    category = Category(conditional=(1.0,), burst=Burst(tokens=10, share=0.25, conditional=(0.0,)))
    seen = [[category.accepts(Luck(5, r), position, 0) for position in range(200)] for r in range(100)]
    blocks = [row[start : start + 10] for row in seen for start in range(0, 200, 10)]
    assert all(len(set(block)) == 1 for block in blocks)
    wrong = sum(not block[0] for block in blocks) / len(blocks)
    assert far((wrong, len(blocks)), 0.25) < 4


def test_copies_come_and_are_right_as_often_as_declared() -> None:
    copies = Copies(rate=0.3, long_share=0.6, long=(0.9,), short=(0.5, 0.8), most=4)
    category = Category(conditional=(0.5,), copies=copies)
    found: dict[int, list[int]] = {8: [], 4: []}
    for request in range(REQUESTS):
        luck = Luck(9, request)
        for position in range(POSITIONS):
            copy = category.copy(luck, position)
            if copy is None:
                continue
            tokens, match = copy
            assert len(tokens) == 4
            right = [token == luck.token(position + depth) for depth, token in enumerate(tokens)]
            prefix = right.index(False) if False in right else 4
            # a wrong token is never repaired by a later one
            assert not any(right[prefix:])
            found[match].append(prefix)
    total = sum(map(len, found.values()))
    assert far((total / (REQUESTS * POSITIONS), REQUESTS * POSITIONS), 0.3) < 4
    assert far((len(found[8]) / total, total), 0.6) < 4
    for match, rates in ((8, (0.9, 0.9, 0.9, 0.9)), (4, (0.5, 0.8, 0.8, 0.8))):
        running = 1.0
        for depth, rate in enumerate(rates):
            running *= rate
            survived = sum(prefix > depth for prefix in found[match]) / len(found[match])
            assert far((survived, len(found[match])), running) < 4, (match, depth)
    assert Category(conditional=(0.5,)).copy(Luck(9, 0), 0) is None


def test_survival_is_the_running_product() -> None:
    assert survival((0.5, 0.25), 4) == (0.5, 0.125, 0.03125, 0.0078125)


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: Category(conditional=()), "conditional is empty"),
        (lambda: Category(conditional=(1.5,)), "1.5"),
        (lambda: Category(conditional=(True,)), "True"),
        (lambda: Category(conditional=(float("nan"),)), "nan"),
        (lambda: Burst(tokens=0, share=0.5, conditional=(0.5,)), "tokens is 0"),
        (lambda: Burst(tokens=4, share=-0.5, conditional=(0.5,)), "share is -0.5"),
        (lambda: Change(at=-1, conditional=(0.5,)), "at is -1"),
        (lambda: Copies(rate=2.0, long_share=0.5, long=(0.5,), short=(0.5,)), "rate is 2.0"),
        (lambda: Copies(rate=0.5, long_share=0.5, long=(0.5,), short=(0.5,), most=0), "most is 0"),
    ],
)
def test_numbers_out_of_range_are_refused(make: object, part: str) -> None:
    with pytest.raises(UsageError, match=part):
        make()  # type: ignore[operator]
