"""The ring of decoded history against slow oracles: exact grams, latest first, links of a response, bounded memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_responses import Response, read_responses, walk

from specdec.drafting.history import Copy, HistoryRing
from specdec.errors import UsageError

RECORDED = Path(__file__).parent / "recorded.npz"


# --- any interleaving --------------------------------------------------------------------------------------------------


@define
class Oracle:
    """Everything ever stored, searched from the newest token back."""

    capacity: int
    grams: tuple[int, ...]
    most: int
    stored: list[tuple[int, int]] = field(factory=list)

    def lookup(self, tail: list[int]) -> Copy | None:
        for gram in self.grams:
            for position in range(len(self.stored) - 1, max(len(self.stored) - self.capacity, 0) - 1, -1):
                owner = self.stored[position][0]
                before = [token for other, token in self.stored[:position] if other == owner]
                if len(tail) >= gram and len(before) >= gram and before[-gram:] == tail[-gram:]:
                    after = [token for other, token in self.stored[position:] if other == owner]
                    return Copy(tuple(after[: self.most]), gram)
        return None


ACTIONS = st.lists(
    st.tuples(
        st.integers(0, 3),  # which of four requests
        st.sampled_from(["append", "append", "append", "restart"]),
        st.lists(st.integers(0, 2), min_size=0, max_size=8),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(
    actions=ACTIONS,
    capacity=st.integers(1, 24),
    grams=st.sampled_from([(8, 4), (4, 2), (3, 1), (2,), (4, 3, 2)]),
    most=st.integers(1, 7),
)
def test_equals_a_search_through_everything(actions, capacity, grams, most) -> None:
    ring, oracle = HistoryRing(capacity, grams, most), Oracle(capacity, grams, most)
    texts: dict[int, list[int]] = {number: [] for number in range(4)}
    owner = {number: number for number in range(4)}
    for number in range(4):
        ring.response(number)
    for turn, (number, action, tokens) in enumerate(actions):
        if action == "restart":
            # the next response of the same request: the tokens are its prompt, which may be asked for and is never stored
            ring.end(number)
            ring.response(number)
            owner[number] = 4 + turn
            texts[number] = list(tokens)
        else:
            ring.append(number, tokens)
            oracle.stored += [(owner[number], token) for token in tokens]
            texts[number] += tokens
        for text in texts.values():
            assert ring.lookup(text[-grams[0] :]) == oracle.lookup(text)
        assert len(ring) == min(len(oracle.stored), capacity)
        assert ring.entries <= len(ring) * len(grams)


# --- one rule at a time --------------------------------------------------------------------------------------------------


def ring_of(*responses: list[int], **options) -> HistoryRing:
    ring = HistoryRing(**options)
    for number, tokens in enumerate(responses):
        ring.response(number)
        ring.append(number, tokens)
    return ring


def test_eight_before_four_and_the_latest_of_each() -> None:
    eight = [1, 2, 3, 4, 5, 6, 7, 8]
    ring = ring_of([*eight, 20, 21], [*eight, 30, 31], [5, 6, 7, 8, 40])
    assert ring.lookup(eight) == Copy((30, 31), 8)
    assert ring.lookup([9, *eight[1:]]) == Copy((40,), 4)
    assert ring.lookup(eight[4:]) == Copy((40,), 4)
    assert ring.lookup(eight[5:]) is None


def test_a_copy_has_at_most_seven_tokens_and_ends_with_its_response() -> None:
    ring = ring_of([1, 2, 3, 4, *range(10, 30)])
    assert ring.lookup([1, 2, 3, 4]) == Copy(tuple(range(10, 17)), 4)
    assert ring.lookup([23, 24, 25, 26]) == Copy((27, 28, 29), 4)
    assert ring.lookup([26, 27, 28, 29]) is None


def test_an_entry_exists_once_its_following_token_is_stored() -> None:
    ring = ring_of([1, 2, 3, 4])
    assert ring.lookup([1, 2, 3, 4]) is None
    ring.append(0, [5])
    assert ring.lookup([1, 2, 3, 4]) == Copy((5,), 4)
    # the last occurrence has no following token yet; the one before has
    ring.append(0, [1, 2, 3, 4])
    assert ring.lookup([1, 2, 3, 4]) == Copy((5, 1, 2, 3, 4), 4)


def test_no_gram_and_no_copy_crosses_responses() -> None:
    """Two requests one after the other in one slot, and two that interleave token by token."""
    after = ring_of([1, 2], [3, 4, 5])
    assert after.lookup([1, 2, 3, 4]) is None
    ring = HistoryRing()
    ring.response(0)
    ring.response(1)
    for left, right in zip(range(10, 20), range(50, 60)):
        ring.append(0, [left])
        ring.append(1, [right])
    assert ring.lookup([10, 11, 12, 13]) == Copy((14, 15, 16, 17, 18, 19), 4)
    assert ring.lookup([50, 51, 52, 53]) == Copy((54, 55, 56, 57, 58, 59), 4)
    assert ring.lookup([10, 50, 11, 51]) is None


def test_a_preempted_response_goes_on_where_it_was() -> None:
    ring = ring_of([1, 2, 3, 4], list(range(100, 140)))
    ring.append(0, [5, 6])
    assert ring.lookup([1, 2, 3, 4]) == Copy((5, 6), 4)


def test_the_window_counts_stored_tokens_of_all_responses() -> None:
    """The entry lasts as long as the token that it leads to, at the size of the product."""
    ring = ring_of([1, 2, 3, 4, 5])
    ring.response(9)
    ring.append(9, [7] * (65_536 - 1))
    assert ring.lookup([1, 2, 3, 4]) == Copy((5,), 4)
    ring.append(9, [7])
    assert ring.lookup([1, 2, 3, 4]) is None
    assert len(ring) == 65_536


def test_an_eight_that_left_the_window_falls_through_to_a_younger_four() -> None:
    ring = ring_of([1, 2, 3, 4, 5, 6, 7, 8, 9], [5, 6, 7, 8, 20], capacity=5)
    assert ring.lookup([1, 2, 3, 4, 5, 6, 7, 8]) == Copy((20,), 4)


def test_a_slow_response_links_only_what_is_still_there() -> None:
    """Its last token left the ring before its next one came; the cell belongs to another response by then."""
    ring = HistoryRing(capacity=6, grams=(2,))
    ring.response(0)
    ring.response(1)
    ring.append(0, [1, 2, 3])
    ring.append(1, [7, 8, 9, 7, 8, 9])
    ring.append(0, [4])
    assert ring.lookup([2, 3]) == Copy((4,), 2)
    assert ring.lookup([8, 9]) == Copy((7, 8, 9), 2)


def test_memory_is_bounded() -> None:
    ring = HistoryRing(capacity=64)
    for number in range(200):
        ring.response(number)
        ring.append(number, [(number * 31 + place * place) % 997 for place in range(50)])
        ring.end(number)
        assert len(ring) <= 64 and ring.entries <= 128


def test_what_was_asked_for_is_not_stored() -> None:
    ring = HistoryRing()
    for _ in range(3):
        assert ring.lookup([1, 2, 3, 4, 1, 2, 3, 4]) is None
    assert len(ring) == ring.entries == 0


def test_only_open_responses_and_token_ids_are_stored() -> None:
    ring = ring_of([1])
    with pytest.raises(UsageError, match="response 3 is not open"):
        ring.append(3, [1])
    with pytest.raises(UsageError, match="response 0 is open"):
        ring.response(0)
    for wrong in (-1, 1 << 32):
        with pytest.raises(UsageError, match="ids are between 0 and 4294967295"):
            ring.append(0, [5, wrong])
    assert len(ring) == 1
    ring.end(0)
    ring.end(0)
    with pytest.raises(UsageError, match="not open"):
        ring.append(0, [1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 0}, "capacity 0 must be at least 1"),
        ({"most": 0}, "most 0 must be at least 1"),
        ({"grams": (4, 8)}, "longest first"),
        ({"grams": ()}, "at least one length"),
        ({"grams": (4, 0)}, "grams 0 must be at least 1"),
    ],
)
def test_options_are_checked(options, message) -> None:
    with pytest.raises(UsageError, match=message):
        HistoryRing(**options)


def test_importing_it_loads_no_torch() -> None:
    code = "import sys, specdec.drafting.history; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- recorded text ---------------------------------------------------------------------------------------------------------


class TextOracle:
    """Responses one after the other as one string of characters, searched from the right."""

    END = "\uffff"

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.text = ""

    def response(self, number: int) -> None:
        self.text += self.END

    def append(self, number: int, tokens: tuple[int, ...]) -> None:
        self.text += "".join(map(chr, tokens))

    def end(self, number: int) -> None:
        pass

    def lookup(self, tail: list[int]) -> Copy | None:
        for gram in (8, 4):
            if len(tail) >= gram:
                wanted, right = "".join(map(chr, tail[-gram:])), len(self.text)
                # the last character is left out: an occurrence needs a token behind it
                while (place := self.text.rfind(wanted, 0, right)) >= 0:
                    after = place + gram
                    right = after - 1
                    if after == len(self.text) or self.text[after] == self.END:
                        continue
                    if len(self.text[after:].replace(self.END, "")) > self.capacity:
                        break
                    copy = self.text[after : after + 7].partition(self.END)[0]
                    return Copy(tuple(map(ord, copy)), gram)
        return None


@pytest.fixture(scope="module")
def recorded() -> list[Response]:
    return read_responses(RECORDED)


@pytest.mark.parametrize("capacity", [65_536, 5_000])
def test_recorded_text_copies_what_a_search_copies(recorded, capacity) -> None:
    assert walk(recorded, HistoryRing(capacity)) == walk(recorded, TextOracle(capacity))


def test_recorded_text_offers_as_many_copies_as_measured(recorded) -> None:
    """Copy opportunity of the first sessions, close to that of all of them (1.98, 26.1 %, 55.1 %, 3.79). The search above gives
    the same numbers."""
    found = walk(recorded, HistoryRing())
    assert (len(recorded), found.tokens) == (244, 49_909)
    assert (found.rounds, found.proposals, found.offered, found.accepted) == (25_558, 6_310, 43_519, 24_477)
    assert walk(recorded, HistoryRing(grams=(8,))).rounds > found.rounds
