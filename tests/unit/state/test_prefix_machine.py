"""The prefix cache against a model in which pages have contents: requests come, write, publish, branch and go at random.

Row i of the first pool holds token i; row i of the second holds tokens i and i + 1. Every page is written only while private,
so whatever happens, the pages of an entry hold exactly its prefix.
"""

from __future__ import annotations

from array import array
from collections import Counter
from hashlib import blake2b
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from specdec.errors import CapacityError
from specdec.state.pages import PagePool
from specdec.state.prefix import PrefixCache
from specdec.state.prefix_records import PageCopy

PAGE, PAGES, REACH, STATE = 4, 18, 24, 50
PAGE_BYTES = (10, 3)
SLOTS = st.integers(0, 2)
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


def key_of(tokens: array[int]) -> bytes:
    return blake2b(tokens.tobytes(), digest_size=16).digest()


class PrefixMachine(RuleBasedStateMachine):
    """running: tokens consumed by the request of each slot. contents: rows of every page of both pools."""

    def __init__(self) -> None:
        super().__init__()
        self.running: dict[int, array[int]] = {}
        self.contents: list[dict[int, list[Any]]] = [
            {page: [None] * PAGE for page in range(PAGES + 1)} for _ in range(2)
        ]

    @initialize(budget=st.sampled_from([0, 100, 400, 1000, 10**6]))
    def build(self, budget: int) -> None:
        self.budget = budget
        self.pools = [PagePool(pages=PAGES, page_tokens=PAGE) for _ in range(2)]
        self.cache = PrefixCache(pools=self.pools, page_bytes=PAGE_BYTES, budget=budget)

    def rows(self, tokens: array[int]) -> list[list[Any]]:
        """What the rows of both pools must hold."""
        return [list(tokens), list(zip(tokens, tokens[1:]))]

    def write(self, slot: int, before: int) -> None:
        """Writes the rows of everything consumed after ``before`` tokens, into private pages only."""
        for number, (pool, rows) in enumerate(zip(self.pools, self.rows(self.running[slot]), strict=True)):
            for row in range(max(before - number, 0), len(rows)):
                page = pool.owned(slot)[row // PAGE]
                assert pool.writable(slot, row, 1)
                assert pool.references(page) == 1
                self.contents[number][page][row % PAGE] = rows[row]

    def copy(self, copies: tuple[PageCopy, ...]) -> None:
        for copy in copies:
            rows = self.contents[copy.pool]
            rows[copy.destination] = rows[copy.source][: copy.rows] + ["stale"] * (PAGE - copy.rows)

    def held(self, number: int, pages: tuple[int, ...], count: int) -> list[Any]:
        return [self.contents[number][page][row] for page in pages for row in range(PAGE)][:count]

    @rule(slot=SLOTS, prompt=PROMPTS)
    def admit(self, slot: int, prompt: list[int]) -> None:
        if slot in self.running:
            return
        tokens = array("q", prompt)
        expected = self.cache.longest(tokens)
        entries, free = list(self.cache), [pool.free for pool in self.pools]
        try:
            claim = self.cache.claim(slot, tokens, REACH)
        except CapacityError:
            assert list(map(id, sorted(self.cache, key=id))) == list(map(id, sorted(entries, key=id)))
            assert [pool.free for pool in self.pools] == free
            assert all(not pool.owned(slot) for pool in self.pools)
            return
        assert claim.entry is expected or claim.entry is None
        self.copy(claim.copies)
        self.cache.settle(claim)
        self.running[slot] = tokens
        for number, pool in enumerate(self.pools):
            count = max(claim.consumed - number, 0)
            assert self.held(number, pool.owned(slot), count) == self.rows(tokens[: claim.consumed])[number]
        self.write(slot, claim.consumed)

    @rule(slot=SLOTS, tokens=st.lists(st.integers(0, 1), max_size=5))
    def consume(self, slot: int, tokens: list[int]) -> None:
        if slot in self.running:
            before = len(self.running[slot])
            self.running[slot].extend(tokens[: REACH - before])
            self.write(slot, before)

    @rule(slot=SLOTS, back=st.integers(0, 9))
    def publish(self, slot: int, back: int) -> None:
        if slot not in self.running:
            return
        tokens = self.running[slot]
        length = len(tokens) if back > 4 else len(tokens) // PAGE * PAGE
        if not length:
            return
        prefix = tokens[:length]
        state = tuple(prefix)
        copies = self.cache.publish(slot, key_of(prefix), tokens, length, (length, length - 1), state, STATE)
        self.copy(copies)
        entry = self.cache.longest(prefix)
        if entry is not None and entry.length == length:
            assert entry.state == state

    @rule(slot=SLOTS)
    def end(self, slot: int) -> None:
        self.running.pop(slot, None)
        self.cache.release(slot)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        assert self.cache.nbytes == 0

    @invariant()
    def references_are_exact(self) -> None:
        if not hasattr(self, "cache"):
            return
        for number, pool in enumerate(self.pools):
            owned = Counter(page for slot in range(3) for page in pool.owned(slot))
            kept = Counter(page for entry in self.cache for page in entry.pages[number])
            assert [pool.references(page) for page in range(PAGES + 1)] == [
                owned[page] + kept[page] for page in range(PAGES + 1)
            ]

    @invariant()
    def lengths_to_look_for_are_exact(self) -> None:
        if hasattr(self, "cache"):
            missed = self.cache._missed
            assert not {entry.key for entry in self.cache} & missed.keys()
            lengths = [entry.length for entry in self.cache] + [length for length, _ in missed.values()]
            assert self.cache._lengths == Counter(lengths)

    @invariant()
    def budget_is_kept(self) -> None:
        if hasattr(self, "cache"):
            pages = [{page for entry in self.cache for page in entry.pages[number]} for number in range(2)]
            counted = STATE * len(self.cache) + sum(
                size * len(held) for size, held in zip(PAGE_BYTES, pages, strict=True)
            )
            assert self.cache.nbytes == counted <= self.budget

    @invariant()
    def entries_hold_their_prefixes(self) -> None:
        if not hasattr(self, "cache"):
            return
        entries = list(self.cache)
        assert len({entry.key for entry in entries}) == len(entries)
        for entry in entries:
            prefix = entry.sequence[: entry.length]
            assert entry.state == tuple(prefix) and entry.key == key_of(prefix)
            for number, rows in enumerate(self.rows(prefix)):
                assert self.held(number, entry.pages[number], len(rows)) == rows
            # the longest match of any continuation, by brute force
            longer = prefix + array("q", [1, 0])
            matching = [e.length for e in entries if longer[: e.length] == e.sequence[: e.length]]
            found = self.cache.longest(longer)
            assert found is not None and found.length == max(matching)

    @invariant()
    def requests_hold_what_they_wrote(self) -> None:
        for slot, tokens in self.running.items():
            for number, rows in enumerate(self.rows(tokens)):
                assert self.held(number, self.pools[number].owned(slot), len(rows)) == rows

    def teardown(self) -> None:
        """Nothing leaks."""
        if hasattr(self, "cache"):
            for slot in range(3):
                self.cache.release(slot)
            self.cache.clear()
            assert [pool.free for pool in self.pools] == [PAGES, PAGES]


PrefixMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestPrefixCache = PrefixMachine.TestCase
