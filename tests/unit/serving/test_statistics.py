"""Draft statistics by hand: small sequences of records whose totals a reader can add up."""

from __future__ import annotations

from completion_records import completion as record

from specdec.round.completion import METADATA_FIELDS, Completion, Field, Finish
from specdec.serving.statistics import DraftStatistics


def test_no_round_gives_zeros_and_no_depths() -> None:
    statistics = DraftStatistics()
    statistics.add(record(emitted=1, offered=0, accepted=0), in_round=False)
    assert (statistics.tokens, statistics.rounds, statistics.tokens_in_rounds) == (1, 0, 0)
    assert statistics.tokens_per_round == 0
    assert statistics.acceptance_by_depth == statistics.survival_by_depth == []


def test_hand_counted_rounds() -> None:
    # first token; 3 of 3 accepted; rejected at depth 1; rejected at depth 3; two offered by a clipped budget, one accepted
    statistics = DraftStatistics.of(
        [
            (record(emitted=1, offered=0, accepted=0), False),
            (record(emitted=4, offered=3, accepted=3), True),
            (record(emitted=1, offered=3, accepted=0), True),
            (record(emitted=3, offered=3, accepted=2), True),
            (record(emitted=2, offered=2, accepted=1), True),
        ]
    )
    assert statistics.tokens == 11
    assert statistics.rounds == 4
    assert statistics.tokens_in_rounds == 10
    assert statistics.tokens_per_round == 2.5
    assert (statistics.offered, statistics.accepted) == (11, 6)
    assert statistics.verified_by_depth == [4, 4, 3]
    # depth 2 was judged where depth 1 was accepted (three rounds), depth 3 where depth 2 was and was offered (two)
    assert statistics.judged_by_depth == [4, 3, 2]
    assert statistics.accepted_by_depth == [3, 2, 1]
    assert statistics.acceptance_by_depth == [3 / 4, 2 / 3, 1 / 2]
    assert statistics.survival_by_depth == [3 / 4, 2 / 4, 1 / 3]


def test_width_one_rounds_count_as_rounds_and_add_to_no_depth() -> None:
    drafts = [(record(emitted=2, offered=2, accepted=1), True)]
    plain = [(record(emitted=1, offered=0, accepted=0), True)] * 3
    mixed, alone = DraftStatistics.of(drafts + plain), DraftStatistics.of(drafts)
    assert mixed.rounds == 4 and mixed.tokens_per_round == 5 / 4
    assert mixed.judged_by_depth == alone.judged_by_depth == [1, 1]
    assert mixed.acceptance_by_depth == alone.acceptance_by_depth == [1, 0]
    assert DraftStatistics.of(plain).acceptance_by_depth == []


def test_drafts_that_were_not_verified_are_not_rejections() -> None:
    """Rounds that allocate their rows accept all of two verified drafts, then reject the second."""
    statistics = DraftStatistics.of(
        [
            (record(emitted=3, offered=4, verified=2, accepted=2), True),
            (record(emitted=2, offered=4, verified=3, accepted=1), True),
        ]
    )
    assert (statistics.offered, statistics.accepted) == (8, 3)
    assert statistics.verified_by_depth == [2, 2, 1, 0]
    assert statistics.judged_by_depth == [2, 2, 0, 0]
    assert statistics.acceptance_by_depth == [1, 1 / 2, 0, 0]


def test_depths_that_were_offered_but_never_judged_read_zero() -> None:
    statistics = DraftStatistics.of([(record(emitted=1, offered=4, accepted=0), True)])
    assert statistics.judged_by_depth == [1, 0, 0, 0]
    assert statistics.acceptance_by_depth == [0, 0, 0, 0]


def test_tokens_after_a_stop_are_not_tokens() -> None:
    # the target accepted four drafts, the second emitted token was a stop id
    statistics = DraftStatistics.of([(record(emitted=2, offered=5, accepted=4), True)])
    assert (statistics.tokens, statistics.accepted) == (2, 4)
    assert statistics.tokens_per_round == 2
    assert statistics.judged_by_depth == [1, 1, 1, 1, 1]


def test_parse_takes_the_emitted_tokens_only() -> None:
    row = [*range(METADATA_FIELDS), 11, 12, 13, -1]
    row[Field.EMITTED], row[Field.FINISH] = 3, Finish.STOP
    parsed = Completion.parse(row)
    assert parsed.tokens == (11, 12, 13)
    assert parsed.finish is Finish.STOP
    assert (parsed.request, parsed.epoch, parsed.round, parsed.slot) == (0, 1, 2, 3)
    assert (parsed.consumed, parsed.pending, parsed.draft_rows, parsed.verify_width) == (5, 7, 13, 14)
