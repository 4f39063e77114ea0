"""Prefix checkpoints: what a finished piece of work leaves for later requests that begin with the same tokens.

An entry at P consumed tokens references the pages of its tokens and holds the rest of the state. Pages of which every row
belongs to the prefix are shared with the request that wrote them; a partly filled one is copied, because its owner goes on
writing into it. The rows of pool i are P for a target and P − 1 for a drafter whose row i pairs token i with token i + 1, so at
a page boundary the drafter's last page is a partial one.

Host bookkeeping without torch: states are opaque here, and page copies are returned as work for the caller.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from specdec.errors import CapacityError
from specdec.state.pages import PagePool
from specdec.state.prefix_records import (
    Claim,
    Lost,
    PageCopy,
    PrefixEntry,
    PrefixHash,
    PrefixStatistics,
    common_prefix,
)

# Prefixes that were dropped or refused and are remembered by digest, so that the loss can be told from a new prompt.
REMEMBERED = 4096


class PrefixCache:
    """Checkpoints by prefix, least recently used ones evicted first. Not thread-safe; the owner of the request loop calls it.

    ``budget`` bounds the bytes of held states plus held pages (a page counts once, whoever else references it); token ids are
    not counted. Eviction only drops references: pages of running requests stay theirs.
    """

    def __init__(self, *, pools: Sequence[PagePool], page_bytes: Sequence[int], budget: int) -> None:
        self.pools = tuple(pools)
        self.page_bytes = tuple(page_bytes)
        self.budget = budget
        self.statistics = PrefixStatistics()
        #: Whether checkpoints have draft state; None until somebody uses the cache.
        self.drafts: bool | None = None
        self._entries: OrderedDict[bytes, PrefixEntry] = OrderedDict()
        self._held: tuple[Counter[int], ...] = tuple(Counter() for _ in self.pools)
        self._state_bytes = 0
        self._missed: OrderedDict[bytes, tuple[int, Lost]] = OrderedDict()
        self._lengths: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[PrefixEntry]:
        """Entries, least recently used first."""
        return iter(tuple(self._entries.values()))

    @property
    def nbytes(self) -> int:
        """Bytes that count against the budget."""
        pages = sum(len(held) * size for held, size in zip(self._held, self.page_bytes, strict=True))
        return self._state_bytes + pages

    # --- lookup ----------------------------------------------------------------------------------------------------

    def longest(self, tokens: array[int]) -> PrefixEntry | None:
        """The longest checkpoint that ``tokens`` begins with, itself included. Changes nothing."""
        return self._search(tokens)[0]

    def _search(self, tokens: array[int]) -> tuple[PrefixEntry | None, tuple[int, Lost] | None]:
        """The longest checkpoint and the longest remembered loss beyond it."""
        digest, keys = PrefixHash(), []
        for length in sorted(length for length in self._lengths if length <= len(tokens)):
            digest.extend(tokens[digest.length : length])
            keys.append(digest.digest())
        missed = None
        for key in reversed(keys):
            entry = self._entries.get(key)
            if entry is not None and entry.matches(tokens):
                return entry, missed
            missed = missed or self._missed.get(key)
        return None, missed

    def claim(self, owner: int, tokens: array[int], reach: int, *, reuse: bool = True) -> Claim:
        """Gives a new request its pages: shared ones of the longest checkpoint and private ones for ``reach`` tokens in all.

        reuse: False looks for no checkpoint, and the statistics count no lookup. Evicts entries if pages are short. The copied
        page and the entry's state stay valid until ``settle``. Raises CapacityError, leaving ``owner`` without pages and the
        cache as it was, if running requests hold too many.
        """
        if not reuse:
            return self._claim(owner, None, reach)
        entry, missed = self._search(tokens)
        if entry is not None:
            try:
                claim = self._claim(owner, entry, reach)
            except CapacityError:
                # the entry's own partial page was one too many: it goes, and the prompt is consumed from the start
                missed, entry = (entry.length, Lost.PAGES), None
        if entry is None:
            claim = self._claim(owner, None, reach)
        self._count(claim.consumed, missed, tokens)
        return claim

    def _claim(self, owner: int, entry: PrefixEntry | None, reach: int) -> Claim:
        if entry is not None:
            self._entries.move_to_end(entry.key)
            for number, pool in enumerate(self.pools):
                pool.adopt(owner, entry.pages[number][: entry.rows[number] // pool.page_tokens])
                pool.share(self._partial(entry, number))
        try:
            self._make_room([pool.needed(reach) - len(pool.owned(owner)) for pool in self.pools])
            reserved = [pool.reserve(owner, reach) for pool in self.pools]
        except CapacityError:
            self.release(owner)
            self.settle(Claim(entry=entry, copies=()))
            raise
        copies = []
        if entry is not None:
            for number, pool in enumerate(self.pools):
                full, rows = divmod(entry.rows[number], pool.page_tokens)
                for source in self._partial(entry, number):
                    copies.append(PageCopy(pool=number, source=source, destination=reserved[number][full], rows=rows))
        return Claim(entry=entry, copies=tuple(copies))

    def extend(self, owner: int, reach: int) -> tuple[bool, ...]:
        """Gives a slot private pages for ``reach`` tokens in all, evicting entries if pages are short.

        Returns, by pool, whether it got any. Raises CapacityError, leaving its pages as they were, if running requests hold
        too many.
        """
        missing = [pool.needed(reach) - len(pool.owned(owner)) for pool in self.pools]
        if max(missing, default=0) <= 0:
            return (False,) * len(self.pools)
        self._make_room(missing)
        for pool, count in zip(self.pools, missing, strict=True):
            if count > 0:
                pool.reserve(owner, reach)
        return tuple(count > 0 for count in missing)

    def settle(self, claim: Claim) -> None:
        """Ends the protection of what ``claim`` copies from."""
        if claim.entry is not None:
            for number, pool in enumerate(self.pools):
                pool.drop(self._partial(claim.entry, number))

    def release(self, owner: int) -> None:
        """Drops every page reference of a slot."""
        for pool in self.pools:
            pool.release(owner)

    def _partial(self, entry: PrefixEntry, number: int) -> tuple[int, ...]:
        """The entry's own page of a pool, if it has one."""
        return entry.pages[number][entry.rows[number] // self.pools[number].page_tokens :]

    def _count(self, reused: int, missed: tuple[int, Lost] | None, tokens: array[int]) -> None:
        statistics = self.statistics
        statistics.lookups += 1
        statistics.full_hits += reused == len(tokens)
        statistics.partial_hits += 0 < reused < len(tokens)
        statistics.prompt_tokens += len(tokens)
        statistics.reused_tokens += reused
        known = reused
        if missed is not None and missed[0] > known:
            statistics.lost_tokens[missed[1]] += missed[0] - known
            known = missed[0]
        common = max((common_prefix(entry, tokens) for entry in self._entries.values()), default=0)
        if common > known:
            statistics.lost_tokens[Lost.NO_CHECKPOINT] += common - known

    # --- publication -----------------------------------------------------------------------------------------------

    def touch(self, key: bytes, tokens: array[int], length: int) -> bool:
        """Whether the first ``length`` tokens have a checkpoint; it becomes the most recently used."""
        entry = self._entries.get(key)
        if entry is None or entry.length != length or not entry.matches(tokens):
            return False
        self._entries.move_to_end(key)
        return True

    def publish(
        self,
        owner: int,
        key: bytes,
        tokens: array[int],
        length: int,
        rows: Sequence[int],
        state: Any,
        state_bytes: int,
    ) -> tuple[PageCopy, ...]:
        """Adds a checkpoint of the first ``length`` tokens, all of them consumed and acknowledged, from the pages of ``owner``.

        rows: entries of each pool that belong to it. Returns the page copies that the caller makes at once; none if nothing was
        added, because the prefix has a checkpoint or no room could be made for it. Never raises for lack of room.
        """
        if self.touch(key, tokens, length):
            return ()
        if key in self._entries:  # another sequence of the same digest
            self._evict(key)
        shared = [pool.owned(owner)[: count // pool.page_tokens] for pool, count in zip(self.pools, rows, strict=True)]
        partial = [int(count % pool.page_tokens > 0) for pool, count in zip(self.pools, rows, strict=True)]
        if not self._fits(shared, partial, state_bytes):
            self._remember(key, length, Lost.BUDGET)
            return ()
        try:
            self._make_room(partial)
        except CapacityError:
            self._remember(key, length, Lost.PAGES)
            return ()
        pages, copies = [], []
        for number, pool in enumerate(self.pools):
            pool.share(shared[number])
            own = pool.take(partial[number])
            pages.append((*shared[number], *own))
            full, rest = divmod(rows[number], pool.page_tokens)
            for destination in own:
                source = pool.owned(owner)[full]
                copies.append(PageCopy(pool=number, source=source, destination=destination, rows=rest))
            self._held[number].update(pages[number])
        self._entries[key] = PrefixEntry(
            key=key,
            sequence=tokens,
            length=length,
            rows=tuple(rows),
            pages=tuple(pages),
            state=state,
            state_bytes=state_bytes,
        )
        self._forget(key)
        self._lengths[length] += 1
        self._state_bytes += state_bytes
        self.statistics.published += 1
        return tuple(copies)

    # --- room ------------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Drops every entry."""
        for key in tuple(self._entries):
            self._evict(key)

    def _fits(self, shared: Sequence[tuple[int, ...]], partial: Sequence[int], state_bytes: int) -> bool:
        """Evicts until one more entry fits the budget; evicts nothing if it never would."""
        alone = sum(size * (len(s) + p) for size, s, p in zip(self.page_bytes, shared, partial, strict=True))
        if alone + state_bytes > self.budget:
            return False
        while True:
            added = state_bytes
            for held, size, pages, own in zip(self._held, self.page_bytes, shared, partial, strict=True):
                added += size * (own + sum(page not in held for page in pages))
            if self.nbytes + added <= self.budget:
                return True
            self._evict(next(iter(self._entries)))

    def _make_room(self, wanted: Sequence[int]) -> None:
        """Evicts least recently used entries until that many pages of each pool are free.

        Raises CapacityError, evicting nothing, if evicting all of them would not do.
        """
        for number, (pool, count) in enumerate(zip(self.pools, wanted, strict=True)):
            if pool.free + sum(map(self._reclaims(number), self._held[number])) < count:
                raise CapacityError(
                    f"page pool {number}: {count} more pages of {pool.page_tokens} tokens are needed, {pool.free} of "
                    f"{pool.pages} are free and running requests or other prefix caches hold the rest; lower the concurrency, "
                    "the context or the number of new tokens, or clear caches that are not in use"
                )
        for number, (pool, count) in enumerate(zip(self.pools, wanted, strict=True)):
            reclaims = self._reclaims(number)
            for entry in self:
                if pool.free >= count:
                    break
                if any(map(reclaims, entry.pages[number])):
                    self._evict(entry.key)

    def _reclaims(self, number: int) -> Callable[[int], bool]:
        """Says whether only entries hold a page, so that evicting them frees it."""
        pool, held = self.pools[number], self._held[number]
        return lambda page: pool.references(page) == held[page]

    def _evict(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        for number, pool in enumerate(self.pools):
            pool.drop(entry.pages[number])
            held = self._held[number]
            held.subtract(entry.pages[number])
            for page in entry.pages[number]:
                if not held[page]:
                    del held[page]
        self._shorten(entry.length)
        self._state_bytes -= entry.state_bytes
        self.statistics.evicted += 1
        self._remember(key, entry.length, Lost.EVICTED)

    def _remember(self, key: bytes, length: int, reason: Lost) -> None:
        self._forget(key)
        self._missed[key] = (length, reason)
        self._lengths[length] += 1
        if len(self._missed) > REMEMBERED:
            self._forget(next(iter(self._missed)))

    def _forget(self, key: bytes) -> None:
        missed = self._missed.pop(key, None)
        if missed is not None:
            self._shorten(missed[0])

    def _shorten(self, length: int) -> None:
        self._lengths[length] -= 1
        if not self._lengths[length]:
            del self._lengths[length]
