"""Stop strings in text that arrives in runs of one to eight tokens, against a search of the whole text after each token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pieces import Pieces
from stop_oracle import REPLACEMENT, Cut, certain_text, plain_cut

from specdec.checkpoint.tokenizer import Tokenizer
from specdec.serving.stops import StopMatcher


def matched(tokenizer: Tokenizer, runs: Iterable[Sequence[int]], stops: Sequence[str], minimum: int = 0) -> Cut:
    """Pushes the runs until a stop string ends the output."""
    matcher = StopMatcher(tokenizer.stream(), stops, minimum)
    text, kept = "", 0
    for run in runs:
        outcome = matcher.push(run)
        text, kept = text + outcome.text, kept + outcome.kept
        assert outcome.matched is matcher.matched
        if outcome.matched:
            break
        assert outcome.kept == len(run)
    return Cut(text + matcher.finish(), kept, matcher.matched)


def runs_of(tokens: Sequence[int], lengths: Iterable[int]) -> list[list[int]]:
    """Consecutive runs of the given lengths, the last one as long as there are tokens."""
    rest = iter(tokens)
    runs = (list(islice(rest, length)) for length in lengths)
    return [run for run in runs if run]


# --- every place of a stop string ----------------------------------------------------------------------------------------

#: Every character once, so that each of its substrings begins at one place only; one to four bytes each.
TEXT = "abcé€d😀eßf世界ghij→k🙃lmñop"
SPLITS = {
    "bytes": [1] * len(TEXT.encode()),
    "pairs": [2] * len(TEXT.encode()),
    "mixed": [3, 1, 2, 5, 1, 1, 4, 2, 7, 1] * 6,
    "long": [9, 4, 11, 6] * 4,
}


def split(data: bytes, lengths: Iterable[int]) -> list[bytes]:
    rest = iter(data)
    return [piece for length in lengths if (piece := bytes(islice(rest, length)))]


@pytest.mark.parametrize("name", SPLITS)
def test_b17_stop_at_every_offset_of_runs_of_every_length(name: str) -> None:
    """Strings of one to six characters, anywhere in an accepted run and across two: the cut of one-token decoding."""
    pieces = split(TEXT.encode(), SPLITS[name])
    vocabulary = Pieces(pieces)
    tokens = vocabulary.tokens(pieces)
    assert vocabulary.tokenizer.decode(tokens) == TEXT
    ends = [sum(map(len, pieces[: count + 1])) for count in range(len(pieces))]
    for start in range(len(TEXT)):
        for stop in {TEXT[start : start + length] for length in range(1, 7)}:
            last = len(TEXT[:start].encode()) + len(stop.encode())
            expected = Cut(TEXT[:start], next(count for count, end in enumerate(ends, 1) if end >= last), True)
            for length in range(1, 9):
                every = [length] * len(tokens)
                assert matched(vocabulary.tokenizer, runs_of(tokens, every), [stop]) == expected
                # a first run of this length, then full ones: the string lies across two rounds at every offset
                assert matched(vocabulary.tokenizer, runs_of(tokens, [length, *[8] * 10]), [stop]) == expected


def test_b17_control_a_tail_for_one_token_misses_stops_of_longer_runs() -> None:
    """The fault these tests are for: of a run of eight, only as much is searched as one token could have added."""
    tokenizer = Pieces([b"a", b"b", b"c"]).tokenizer
    run = [0, 1, 2, 0, 0, 0, 0, 0]
    tail = tokenizer.decode(run)[-len("bc") :]
    assert "bc" not in tail
    assert matched(tokenizer, [run], ["bc"]) == Cut("a", 3, True)


# --- any text, any strings ------------------------------------------------------------------------------------------------

#: Bytes whose neighbours are likely to form whole, broken and impossible characters of one to four bytes.
BYTES = st.sampled_from([*b"abab", *"é€😀".encode(), *"€".encode()])
STOPS = st.lists(st.text(st.sampled_from(["a", "b", "é", "€", "😀", REPLACEMENT]), min_size=1, max_size=6), max_size=4)
RUNS = st.lists(st.integers(1, 8), min_size=40, max_size=40)


@st.composite
def outputs(draw: st.DrawFn) -> list[bytes]:
    """Pieces of arbitrary bytes, or of whole characters cut anywhere; special tokens in between."""
    if draw(st.booleans()):
        return draw(st.lists(st.lists(BYTES, max_size=4).map(bytes), max_size=30))
    text = draw(st.text(st.sampled_from("abé€😀"), max_size=30))
    return split(text.encode(), draw(st.lists(st.integers(1, 5), min_size=90, max_size=90)))


@settings(max_examples=600, deadline=None)
@given(pieces=outputs(), stops=STOPS, minimum=st.integers(0, 12), lengths=RUNS)
def test_same_as_searching_the_whole_text_after_each_token(
    pieces: list[bytes], stops: list[str], minimum: int, lengths: list[int]
) -> None:
    vocabulary = Pieces(piece for piece in pieces if piece)
    tokens = vocabulary.tokens(pieces)
    expected = plain_cut(vocabulary.tokenizer, tokens, stops, minimum)
    for every in (lengths, [1] * 40, [8] * 40):
        assert matched(vocabulary.tokenizer, runs_of(tokens, [*every, *[8] * 40]), stops, minimum) == expected
    if expected.matched:
        # what the stop string is made of begins no later than in the last token kept, and is complete with it
        assert any(stop in vocabulary.tokenizer.decode(tokens[: expected.kept]) for stop in stops)


@settings(max_examples=300, deadline=None)
@given(pieces=outputs(), stops=STOPS)
def test_no_more_is_held_back_than_may_become_a_stop(pieces: list[bytes], stops: list[str]) -> None:
    """After each token, all certain text is released but its longest end that begins a stop string."""
    vocabulary = Pieces(piece for piece in pieces if piece)
    tokens = vocabulary.tokens(pieces)
    matcher, released = StopMatcher(vocabulary.tokenizer.stream(), stops), ""
    for count, token in enumerate(tokens, start=1):
        released += matcher.push([token]).text
        if matcher.matched:
            break
        text = certain_text(vocabulary.tokenizer, tokens[:count])
        beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
        held = max((len(beginning) for beginning in beginnings if text.endswith(beginning)), default=0)
        assert released == text[: len(text) - held]


# --- what was decided -------------------------------------------------------------------------------------------------------


def one_by_one(pieces: Sequence[bytes], stops: Sequence[str], minimum: int = 0) -> tuple[list[str], str, bool]:
    """What each token released, what the end released, and whether a stop string was found."""
    vocabulary = Pieces(piece for piece in pieces if piece)
    matcher = StopMatcher(vocabulary.tokenizer.stream(), stops, minimum)
    released = [matcher.push([token]).text for token in vocabulary.tokens(pieces)]
    return released, matcher.finish(), matcher.matched


def test_of_strings_complete_with_one_token_the_first_to_start_cuts() -> None:
    assert one_by_one([b"xabcdy"], ["bc", "abcd", "d"]) == (["x"], "", True)
    # one that is complete earlier wins, wherever the other began
    assert one_by_one([b"xabc", b"dy"], ["bc", "abcd"]) == (["xa", ""], "", True)


def test_held_text_comes_out_when_it_becomes_no_stop_and_at_the_end() -> None:
    assert one_by_one([b"a", b"b", b"c", b"a", b"b"], ["abd"]) == (["", "", "abc", "", ""], "ab", False)
    assert one_by_one([b"aa", b"a", b"ab"], ["aab"]) == (["", "a", "a"], "", True)


def test_strings_before_the_minimum_end_nothing_and_later_ones_do() -> None:
    pieces = [b"ab", b"x", b"a", b"b", b"y"]
    assert one_by_one(pieces, ["ab"], 1) == ([""] * 5, "", True)
    assert one_by_one(pieces, ["ab"], 2) == (["ab", "x", "", "", ""], "", True)
    # begun before the minimum, complete with the token that reaches it
    assert one_by_one(pieces, ["ab"], 4) == (["ab", "x", "", "", ""], "", True)
    assert one_by_one(pieces, ["ab"], 5) == (["ab", "x", "", "ab", "y"], "", False)
    # the end of one that ended nothing begins the next one
    assert one_by_one([b"aba", b"ba"], ["aba"], 2) == (["ab", ""], "", True)


def test_bytes_that_form_no_character_count_once_they_are_certain() -> None:
    euro = "€".encode()
    # the replacement character is certain only with the next token, which is kept although the text ends before it
    assert one_by_one([b"x", euro[:2], b"y"], [REPLACEMENT]) == (["x", "", ""], "", True)
    assert one_by_one([b"x", euro[:2], euro[2:]], [REPLACEMENT]) == (["x", "", "€"], "", False)
    # or with the end of the output
    assert one_by_one([b"x", euro[:2]], [f"x{REPLACEMENT}"]) == (["", ""], "", True)
    assert one_by_one([b"x", euro[:2]], ["xy"]) == (["", ""], f"x{REPLACEMENT}", False)


def test_nothing_is_kept_behind_a_match() -> None:
    vocabulary = Pieces([b"a", b"b"])
    matcher = StopMatcher(vocabulary.tokenizer.stream(), ["b"])
    first, second = matcher.push([0, 0, 1, 0, 1]), matcher.push([0, 1])
    assert (first.text, first.kept, first.matched) == ("aa", 3, True)
    assert (second.text, second.kept, second.matched) == ("", 0, True)
    assert matcher.finish() == ""
