"""The page pool against a model of it: any sequence of reservations and releases keeps every page with one owner."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from specdec.errors import CapacityError, ExitCode
from specdec.state.pages import PagePool

OWNERS = st.integers(min_value=0, max_value=3)


class PagePoolMachine(RuleBasedStateMachine):
    """owned: what each owner must hold, kept by plain list arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.owned: dict[int, tuple[int, ...]] = {}

    @initialize(pages=st.integers(0, 9), page_tokens=st.sampled_from([1, 4, 64]))
    def build(self, pages: int, page_tokens: int) -> None:
        self.pages, self.page_tokens = pages, page_tokens
        self.pool = PagePool(pages=pages, page_tokens=page_tokens)

    @property
    def free(self) -> int:
        return self.pages - sum(len(held) for held in self.owned.values())

    @rule(owner=OWNERS, whole=st.integers(0, 10), part=st.integers(0, 63))
    def reserve(self, owner: int, whole: int, part: int) -> None:
        tokens = whole * self.page_tokens + min(part, self.page_tokens - 1)
        wanted = whole + (tokens % self.page_tokens > 0)
        held = self.owned.get(owner, ())
        if wanted - len(held) > self.free:
            before = dict(self.owned)
            with pytest.raises(CapacityError):
                self.pool.reserve(owner, tokens)
            assert self.owned == before
            return
        got = tuple(self.pool.reserve(owner, tokens))
        assert got[: len(held)] == held
        assert len(got) == max(wanted, len(held))
        self.owned[owner] = got

    @rule(owner=OWNERS)
    def release(self, owner: int) -> None:
        self.pool.release(owner)
        self.owned.pop(owner, None)

    @rule(owner=OWNERS)
    def holds_what_it_got(self, owner: int) -> None:
        if owner in self.owned:
            assert tuple(self.pool.reserve(owner, 0)) == self.owned[owner]

    @invariant()
    def every_page_has_one_owner_and_trash_has_none(self) -> None:
        if not hasattr(self, "pool"):
            return
        handed = [page for held in self.owned.values() for page in held]
        assert len(set(handed)) == len(handed)
        assert set(handed) <= set(range(1, self.pages + 1))
        assert self.pool.free == self.free


PagePoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
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
