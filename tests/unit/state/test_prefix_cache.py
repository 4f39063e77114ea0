"""The prefix cache on host data alone: lookup, sharing, budget, page pressure, counters. States are strings here."""

from __future__ import annotations

from array import array
from hashlib import blake2b

import pytest

from specdec.errors import CapacityError
from specdec.state.pages import PagePool
from specdec.state.prefix import REMEMBERED, PrefixCache
from specdec.state.prefix_records import Lost, PageCopy, PrefixHash

PAGE = 4
STATE = 100
PAGE_BYTES = (10, 3)


def run(*tokens: int) -> array[int]:
    return array("q", tokens)


def key_of(tokens: array[int], length: int) -> bytes:
    """The definition: BLAKE2b of the ids as 64-bit integers."""
    return blake2b(tokens[:length].tobytes(), digest_size=16).digest()


class Slots:
    """A cache over two pools, and requests as far as pages are concerned."""

    def __init__(self, *, pages: int = 40, budget: int = 10**6) -> None:
        self.pools = [PagePool(pages=pages, page_tokens=PAGE) for _ in range(2)]
        self.cache = PrefixCache(pools=self.pools, page_bytes=PAGE_BYTES, budget=budget)

    def publish(self, slot: int, tokens: array[int], length: int, state: str = "") -> tuple[PageCopy, ...]:
        """Publishes from a slot that holds pages for the tokens."""
        for pool in self.pools:
            pool.reserve(slot, len(tokens))
        return self.cache.publish(
            slot, key_of(tokens, length), tokens, length, (length, length - 1), state or str(length), STATE
        )

    def leave(self, tokens: array[int], *lengths: int) -> None:
        """A request that came, published at these lengths and ended."""
        for length in lengths:
            self.publish(0, tokens, length)
        self.cache.release(0)

    def lengths(self) -> list[int]:
        return [entry.length for entry in self.cache]


def test_hash_is_that_of_the_whole_prefix_however_it_grew() -> None:
    tokens = run(*range(-3, 200), 2**62)
    for cuts in ([204], [1, 2, 3, 204], [64, 128, 200, 204], [0, 0, 70, 204]):
        digest, start = PrefixHash(), 0
        for cut in cuts:
            digest.extend(tokens[start:cut])
            start = cut
            assert digest.digest() == key_of(tokens, cut)
            assert digest.length == cut
    assert len({key_of(tokens, length) for length in range(205)}) == 205


def test_exact_and_longest_prefix() -> None:
    slots = Slots()
    tokens = run(1, 2, 3, 4, 5, 6, 7, 8, 9)
    slots.leave(tokens, 1, 4, 8, 9)
    found = {length: slots.cache.longest(tokens[:length]) for length in range(1, 10)}
    assert {length: entry.length for length, entry in found.items() if entry} == {
        1: 1,
        2: 1,
        3: 1,
        4: 4,
        5: 4,
        6: 4,
        7: 4,
        8: 8,
        9: 9,
    }
    assert [entry.state for entry in found.values() if entry] == [str(x) for x in (1, 1, 1, 4, 4, 4, 4, 8, 9)]
    assert slots.cache.longest(run(1, 2, 3, 4, 0, 6, 7, 8, 9)).length == 4
    assert slots.cache.longest(run(2, 2, 3)) is None
    assert slots.cache.longest(run()) is None
    longer = slots.cache.longest(run(*tokens, 10, 11))
    assert longer is not None and longer.length == 9


def test_tokens_are_compared_not_only_their_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixHash, "digest", lambda self: bytes([self.length]))
    slots = Slots()
    mine, other = run(1, 2, 3, 4), run(9, 9, 9, 9)
    for pool in slots.pools:
        pool.reserve(0, 4)
    slots.cache.publish(0, bytes([4]), mine, 4, (4, 3), "mine", STATE)
    assert slots.cache.longest(other) is None
    # the later sequence of one digest takes the place of the earlier
    slots.cache.publish(0, bytes([4]), other, 4, (4, 3), "other", STATE)
    assert slots.cache.longest(mine) is None
    assert slots.cache.longest(other).state == "other"
    assert len(slots.cache) == 1 and slots.cache.nbytes == STATE + 10 + 3


def test_which_pages_are_shared_and_which_are_copied() -> None:
    slots = Slots()
    tokens = run(*range(20))
    for pool in slots.pools:
        pool.reserve(3, 20)
    target, draft = (pool.owned(3) for pool in slots.pools)
    for length, target_full, draft_full in (
        (1, 0, 0),
        (3, 0, 0),
        (4, 1, 0),
        (5, 1, 1),
        (8, 2, 1),
        (9, 2, 2),
        (10, 2, 2),
    ):
        copies = slots.publish(3, tokens, length)
        entry = slots.cache.longest(tokens[:length])
        assert entry.rows == (length, length - 1)
        assert entry.pages[0][:target_full] == target[:target_full]
        assert entry.pages[1][:draft_full] == draft[:draft_full]
        # a partly filled page is copied, with the rows that belong to the prefix
        assert {copy.pool: (copy.source, copy.rows) for copy in copies} == {
            **({0: (target[target_full], length % 4)} if length % 4 else {}),
            **({1: (draft[draft_full], (length - 1) % 4)} if (length - 1) % 4 else {}),
        }
        assert {copy.pool: (copy.destination,) for copy in copies} == {
            number: entry.pages[number][full:]
            for number, full in ((0, target_full), (1, draft_full))
            if entry.pages[number][full:]
        }
        for copy in copies:
            assert slots.pools[copy.pool].references(copy.destination) == 1
            assert copy.destination not in slots.pools[copy.pool].owned(3)


def test_claim_shares_full_pages_and_copies_the_partial_one() -> None:
    slots = Slots()
    tokens = run(*range(10))
    slots.leave(tokens, 4, 10)
    for length in (10, 4):
        entry = slots.cache.longest(tokens[:length])
        claim = slots.cache.claim(1, tokens[:length], 15)
        assert claim.entry is entry and claim.consumed == length
        for number, pool in enumerate(slots.pools):
            owned, full = pool.owned(1), (length - number) // 4
            assert len(owned) == 4 and len(set(owned)) == 4
            assert owned[:full] == entry.pages[number][:full]
            assert all(pool.references(page) == 1 for page in owned[full:])
            assert pool.writable(1, length - number, 15 - length + number)
            rest = (length - number) % 4
            copies = [copy for copy in claim.copies if copy.pool == number]
            assert copies == (
                [PageCopy(pool=number, source=entry.pages[number][full], destination=owned[full], rows=rest)]
                if rest
                else []
            )
        slots.cache.settle(claim)
        slots.cache.release(1)


def test_what_a_claim_copies_from_survives_eviction_until_it_is_settled() -> None:
    slots = Slots()
    tokens = run(*range(6))
    slots.leave(tokens, 6)
    claim = slots.cache.claim(1, tokens, 8)
    slots.cache.clear()
    sources = {copy.pool: copy.source for copy in claim.copies}
    assert sources.keys() == {0, 1}
    for number, source in sources.items():
        assert slots.pools[number].references(source) == 1
    slots.cache.settle(claim)
    assert [pool.free for pool in slots.pools] == [38, 38]
    slots.cache.release(1)
    assert [pool.free for pool in slots.pools] == [40, 40]


def test_branches_share_pages_and_each_page_counts_once() -> None:
    slots = Slots()
    stem = range(8)
    slots.leave(run(*stem), 8)
    assert slots.cache.nbytes == STATE + 2 * 10 + (1 + 1) * 3
    for slot, tail in ((1, (50, 51)), (2, (60, 61))):
        claim = slots.cache.claim(slot, run(*stem, *tail), 12)
        slots.cache.settle(claim)
        assert claim.consumed == 8
        slots.publish(slot, run(*stem, *tail), 10)
    stem_pages = slots.cache.longest(run(*stem)).pages[0]
    assert [pool.owned(slot)[:2] for pool in slots.pools[:1] for slot in (1, 2)] == [stem_pages, stem_pages]
    # the two target pages of the stem: its entry, two requests, two entries of branches
    assert [slots.pools[0].references(page) for page in stem_pages] == [5, 5]
    assert slots.cache.nbytes == 3 * STATE + (2 + 1 + 1) * 10 + (1 + 1 + 2 + 2) * 3
    for slot in (1, 2):
        slots.cache.release(slot)
    slots.cache.clear()
    assert slots.cache.nbytes == 0
    assert [pool.free for pool in slots.pools] == [40, 40]


def test_publishing_a_known_prefix_only_renews_it() -> None:
    slots = Slots(budget=2 * (STATE + 26))
    first, second, third = (run(start, 2, 3, 4) for start in (1, 2, 3))
    slots.leave(first, 4)
    slots.leave(second, 4)
    before = slots.cache.longest(first)
    assert slots.publish(0, run(1, 2, 3, 4, 5), 4) == ()
    slots.cache.release(0)
    assert slots.cache.longest(first) is before and slots.cache.statistics.published == 2
    slots.leave(third, 4)
    assert slots.cache.longest(second) is None
    assert slots.cache.longest(first) is before


def test_budget_evicts_the_least_recently_used() -> None:
    each = STATE + 10 + 3
    slots = Slots(budget=3 * each)
    sequences = [run(start, 2, 3, 4) for start in range(5)]
    for tokens in sequences[:3]:
        slots.leave(tokens, 4)
    slots.cache.settle(slots.cache.claim(1, sequences[0], 8))
    slots.cache.release(1)
    for tokens in sequences[3:]:
        slots.leave(tokens, 4)
        assert slots.cache.nbytes == 3 * each
    held = [bool(slots.cache.longest(tokens)) for tokens in sequences]
    assert held == [True, False, False, True, True]
    assert slots.cache.statistics.evicted == 2


def test_shared_pages_cost_nothing_more() -> None:
    slots = Slots(budget=2 * STATE + (2 + 1) * 10 + (1 + 1 + 2) * 3)
    tokens = run(*range(9))
    slots.leave(tokens, 8, 9)
    assert slots.lengths() == [8, 9] and slots.cache.nbytes == slots.cache.budget - 3


def test_entry_larger_than_the_budget_is_refused_and_evicts_nothing() -> None:
    slots = Slots(budget=STATE + 13)
    slots.leave(run(1, 2, 3, 4), 4)
    assert slots.publish(0, run(*range(9)), 9) == ()
    slots.cache.release(0)
    assert slots.lengths() == [4]
    slots.cache.settle(slots.cache.claim(1, run(*range(9)), 9))
    assert slots.cache.statistics.lost_tokens == {Lost.BUDGET: 9}


def test_eviction_never_takes_a_page_of_a_running_request() -> None:
    slots = Slots(pages=6)
    tokens = run(*range(8))
    slots.leave(tokens, 8)
    claim = slots.cache.claim(1, tokens, 12)
    slots.cache.settle(claim)
    held = [pool.owned(1) for pool in slots.pools]
    # a neighbour needs all that is left: the entry goes, the shared pages stay
    slots.cache.settle(slots.cache.claim(2, run(70, 71), 12))
    assert len(slots.cache) == 0
    assert [pool.owned(1) for pool in slots.pools] == held
    for number, pool in enumerate(slots.pools):
        assert all(pool.references(page) == 1 for page in held[number])
        assert not set(pool.owned(2)) & set(held[number])
    # the third finds nothing to evict and is told so; nobody lost anything
    with pytest.raises(CapacityError, match="page pool 0: 1 more pages of 4 tokens are needed, 0 of 6 are free"):
        slots.cache.claim(3, run(80), 4)
    assert [pool.owned(3) for pool in slots.pools] == [(), ()]
    assert [pool.owned(1) for pool in slots.pools] == held


def test_pressure_that_eviction_cannot_relieve_evicts_nothing() -> None:
    slots = Slots(pages=6)
    slots.leave(run(*range(4)), 4)
    slots.leave(run(*range(10, 14)), 4)
    for pool in slots.pools:
        pool.reserve(5, 12)
    with pytest.raises(CapacityError):
        slots.cache.claim(1, run(1, 2), 16)
    assert len(slots.cache) == 2
    # with a hit: neither its shared pages nor the pinned one stay with the slot
    with pytest.raises(CapacityError):
        slots.cache.claim(1, run(*range(4)), 20)
    assert len(slots.cache) == 2 and slots.cache.statistics.lookups == 0
    assert [pool.free for pool in slots.pools] == [1, 1]


def test_entries_that_free_nothing_are_passed_over() -> None:
    slots = Slots(pages=7)
    stem = run(*range(8))
    slots.leave(stem, 8)
    slots.cache.settle(slots.cache.claim(1, stem, 12))  # goes on holding both target pages of the older entry
    slots.leave(run(*range(50, 54)), 4)
    slots.pools[0].reserve(2, 12)
    assert slots.pools[0].free == 0
    with pytest.raises(CapacityError):
        slots.cache.claim(3, run(99), 8)
    slots.cache.settle(slots.cache.claim(3, run(99), 4))
    assert slots.lengths() == [8]


def test_a_hit_gives_way_when_its_own_copy_is_the_page_too_many() -> None:
    slots = Slots(pages=3)
    tokens = run(*range(6))
    slots.leave(tokens, 6)
    # three pages for the request, one more for the copied page: only a cold start fits
    claim = slots.cache.claim(1, tokens, 12)
    assert claim.entry is None and claim.copies == ()
    assert [len(pool.owned(1)) for pool in slots.pools] == [3, 3]
    assert slots.cache.statistics.lost_tokens == {Lost.PAGES: 6}
    assert (slots.cache.statistics.reused_tokens, slots.cache.statistics.misses) == (0, 1)


def test_no_page_for_the_copy_leaves_no_entry() -> None:
    slots = Slots(pages=2)
    tokens = run(*range(8))
    assert slots.publish(0, tokens, 8) == ()  # the draft pool has no page for the copy
    assert len(slots.cache) == 0
    assert [pool.free for pool in slots.pools] == [0, 0]
    slots.cache.release(0)
    assert [pool.free for pool in slots.pools] == [2, 2]
    assert slots.publish(0, run(*range(4)), 4) != ()
    slots.cache.release(0)
    slots.cache.settle(slots.cache.claim(1, tokens, 4))
    assert slots.cache.statistics.lost_tokens == {Lost.PAGES: 4}


def test_identical_prompt_twice_reads_as_reuse() -> None:
    """Two kinds of alignment and a state between them: reuse is up to the longest checkpoint, what is lost is counted."""
    slots = Slots()
    tokens = run(*range(11))
    slots.cache.settle(slots.cache.claim(0, tokens, 12))
    slots.leave(tokens, 4, 8, 11)
    statistics = slots.cache.statistics
    assert (statistics.lookups, statistics.misses, statistics.reused_tokens) == (1, 1, 0)
    slots.cache.settle(slots.cache.claim(1, tokens, 12))
    assert (statistics.lookups, statistics.full_hits, statistics.reused_tokens) == (2, 1, 11)
    slots.cache.settle(slots.cache.claim(2, run(*tokens, 77), 16))
    slots.cache.settle(slots.cache.claim(3, run(*tokens[:10], 77), 16))
    assert (statistics.full_hits, statistics.partial_hits, statistics.misses) == (1, 2, 1)
    assert statistics.reused_tokens == 11 + 11 + 8
    assert statistics.prompt_tokens == 11 + 11 + 12 + 11
    # ten tokens in common, a checkpoint at eight
    assert statistics.lost_tokens == {Lost.NO_CHECKPOINT: 2}


def test_losses_by_eviction_are_told_from_new_prompts() -> None:
    slots = Slots(budget=STATE + 13)
    old, new = run(1, 2, 3, 4), run(5, 6, 7, 8)
    slots.leave(old, 4)
    slots.leave(new, 4)
    for tokens in (run(9, 9, 9, 9), old):
        slots.cache.settle(slots.cache.claim(1, tokens, 8))
        slots.cache.release(1)
    assert slots.cache.statistics.lost_tokens == {Lost.EVICTED: 4}
    slots.leave(old, 4)
    slots.cache.settle(slots.cache.claim(1, old, 8))
    assert slots.cache.statistics.lost_tokens == {Lost.EVICTED: 4}


def test_remembered_losses_are_bounded() -> None:
    slots = Slots(budget=1)
    for number in range(REMEMBERED + 50):
        assert slots.publish(0, run(number), 1) == ()
    assert len(slots.cache._missed) == REMEMBERED
    assert slots.cache._lengths == {1: REMEMBERED}
