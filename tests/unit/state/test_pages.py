"""The page pool against a model of it: whatever happens, reference counts are exact and no held page is handed out."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from specdec.errors import CapacityError, ExitCode
from specdec.state.pages import PagePool

OWNERS = st.integers(min_value=0, max_value=3)


class PagePoolMachine(RuleBasedStateMachine):
    """owned: pages of each slot, kept: references that checkpoints hold, both kept by plain list arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.owned: dict[int, tuple[int, ...]] = {}
        self.kept: list[int] = []

    @initialize(pages=st.integers(0, 9), page_tokens=st.sampled_from([1, 4, 64]))
    def build(self, pages: int, page_tokens: int) -> None:
        self.pages, self.page_tokens = pages, page_tokens
        self.pool = PagePool(pages=pages, page_tokens=page_tokens)

    @property
    def references(self) -> Counter[int]:
        return Counter(self.kept) + Counter(page for held in self.owned.values() for page in held)

    @property
    def free(self) -> set[int]:
        return set(range(1, self.pages + 1)) - self.references.keys()

    @rule(owner=OWNERS, whole=st.integers(0, 10), part=st.integers(0, 63))
    def reserve(self, owner: int, whole: int, part: int) -> None:
        tokens = whole * self.page_tokens + min(part, self.page_tokens - 1)
        wanted = whole + (tokens % self.page_tokens > 0)
        held, free = self.owned.get(owner, ()), self.free
        if wanted - len(held) > len(free):
            with pytest.raises(CapacityError):
                self.pool.reserve(owner, tokens)
            return
        got = tuple(self.pool.reserve(owner, tokens))
        assert got[: len(held)] == held
        assert len(got) == max(wanted, len(held))
        assert set(got[len(held) :]) <= free
        self.owned[owner] = got

    @rule(owner=OWNERS)
    def release(self, owner: int) -> None:
        self.pool.release(owner)
        self.owned.pop(owner, None)

    @rule(owner=OWNERS)
    def holds_what_it_got(self, owner: int) -> None:
        assert self.pool.owned(owner) == self.owned.get(owner, ())
        if owner in self.owned:
            assert tuple(self.pool.reserve(owner, 0)) == self.owned[owner]

    @rule(owner=OWNERS, first=st.integers(0, 200), tokens=st.integers(1, 8))
    def writable(self, owner: int, first: int, tokens: int) -> None:
        held, references = self.owned.get(owner, ()), self.references
        places = range(first // self.page_tokens, (first + tokens - 1) // self.page_tokens + 1)
        expected = all(place < len(held) and references[held[place]] == 1 for place in places)
        assert self.pool.writable(owner, first, tokens) is expected

    @rule(count=st.integers(0, 4))
    def take(self, count: int) -> None:
        free = self.free
        if count > len(free):
            with pytest.raises(CapacityError):
                self.pool.take(count)
            return
        got = self.pool.take(count)
        assert len(set(got)) == count and set(got) <= free
        self.kept.extend(got)

    @rule(owner=OWNERS, count=st.integers(0, 4))
    def share_with_a_checkpoint(self, owner: int, count: int) -> None:
        pages = self.owned.get(owner, ())[:count]
        self.pool.share(pages)
        self.kept.extend(pages)

    @rule(owner=OWNERS, choice=st.randoms(use_true_random=False))
    def adopt(self, owner: int, choice: object) -> None:
        pages = [page for page in dict.fromkeys(self.kept) if choice.random() < 0.5]  # type: ignore[attr-defined]
        if self.owned.get(owner):
            with pytest.raises(ValueError, match="holds pages already"):
                self.pool.adopt(owner, pages)
            return
        self.pool.adopt(owner, pages)
        self.owned[owner] = tuple(pages)

    @rule(choice=st.randoms(use_true_random=False))
    def drop(self, choice: object) -> None:
        dropped = [page for page in self.kept if choice.random() < 0.5]  # type: ignore[attr-defined]
        self.pool.drop(dropped)
        self.kept = list((Counter(self.kept) - Counter(dropped)).elements())

    @rule(page=st.integers(-1, 10))
    def double_free_and_dead_share_are_refused(self, page: int) -> None:
        if not self.references[page]:
            for misuse in (self.pool.share, self.pool.drop):
                with pytest.raises(ValueError):
                    misuse([page])
            return
        with pytest.raises(ValueError, match="dropped more often"):
            self.pool.drop([page] * (self.references[page] + 1))

    @invariant()
    def counts_are_exact(self) -> None:
        if not hasattr(self, "pool"):
            return
        references = self.references
        assert set(references) <= set(range(1, self.pages + 1))
        assert [self.pool.references(page) for page in range(self.pages + 1)] == [
            references[page] for page in range(self.pages + 1)
        ]
        assert self.pool.free == len(self.free) == self.pages - len(references)

    def teardown(self) -> None:
        """Everything given back leaves every page free."""
        if hasattr(self, "pool"):
            for owner in tuple(self.owned):
                self.pool.release(owner)
            self.pool.drop(self.kept)
            assert self.pool.free == self.pages
            assert sorted(self.pool.take(self.pages)) == list(range(1, self.pages + 1))


PagePoolMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestPagePool = PagePoolMachine.TestCase


def test_shortage_names_the_numbers_and_changes_nothing() -> None:
    pool = PagePool(pages=3, page_tokens=64)
    first = pool.reserve(0, 100)
    with pytest.raises(CapacityError) as raised:
        pool.reserve(7, 129)
    message = str(raised.value)
    assert "slot 7 needs 3 more pages of 64 tokens, 1 of 3 are free" in message
    assert "lower the concurrency" in message and "\n" not in message
    assert raised.value.exit_code is ExitCode.CAPACITY == 5
    with pytest.raises(CapacityError, match="a prefix checkpoint needs 2 more pages of 64 tokens, 1 of 3 are free"):
        pool.take(2)
    assert pool.free == 1
    assert pool.reserve(0, 128) == first
    assert pool.reserve(7, 64) == (3,)


def test_pages_are_reused_after_release() -> None:
    pool = PagePool(pages=4, page_tokens=64)
    for owner in range(20):
        assert len(pool.reserve(owner, 4 * 64)) == 4
        pool.release(owner)
    assert pool.free == 4
    pool.release(99)
    assert pool.free == 4


def test_a_shared_page_outlives_its_owner_and_is_written_by_nobody() -> None:
    pool = PagePool(pages=4, page_tokens=64)
    first, second, third = pool.reserve(0, 150)
    pool.share([first])
    assert not pool.writable(0, 63, 8)
    assert pool.writable(0, 64, 8) and pool.writable(0, 120, 8) and pool.writable(0, 184, 8)
    assert not pool.writable(0, 185, 8)  # beyond what it reserved
    pool.adopt(1, [first])
    assert pool.reserve(1, 128)[0] == first
    pool.release(0)
    assert pool.references(first) == 2 and pool.references(second) == pool.references(third) == 0
    assert not pool.writable(1, 0, 8) and pool.writable(1, 64, 8)
    pool.release(1)
    assert first not in pool.take(3)
    pool.drop([first])
    assert pool.take(1) == (first,)
