"""Page pool: who references which 64-token page. Host bookkeeping, no torch.

A page is *private* while its one reference is a slot's: the request in that slot may write it. It becomes *shared* when
somebody else takes a reference too, a prefix checkpoint or another request that continues from one; from then on nobody writes
it. A page returns to the free list when its last reference is dropped, so ending a request or evicting a checkpoint never
takes a page from anybody else.

Page 0 is the trash page: dead lanes and masked rows write there, nothing reads it as valid. It is never handed out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from specdec.errors import CapacityError


class PagePool:
    """Pages 1 … ``pages`` with reference counts. Not thread-safe; the owner of the request loop calls it.

    Misuse (a reference to a page that nobody holds, a second drop of one reference) raises ValueError and changes nothing.
    """

    def __init__(self, *, pages: int, page_tokens: int) -> None:
        self.pages = pages
        self.page_tokens = page_tokens
        self._free = list(range(pages, 0, -1))
        self._references = [0] * (pages + 1)
        self._owned: dict[int, list[int]] = {}

    @property
    def free(self) -> int:
        """Pages that can still be handed out."""
        return len(self._free)

    def needed(self, tokens: int) -> int:
        """Pages that hold ``tokens`` entries."""
        return -(-tokens // self.page_tokens)

    def owned(self, owner: int) -> tuple[int, ...]:
        """Pages of ``owner`` in order, shared ones first; empty if it has none."""
        return tuple(self._owned.get(owner, ()))

    def references(self, page: int) -> int:
        """How many slots and checkpoints hold this page."""
        return self._references[page]

    def writable(self, owner: int, first: int, tokens: int) -> bool:
        """Whether ``owner`` has private pages for entries first … first+tokens−1: what a round's window may touch."""
        held = self._owned.get(owner, ())
        window = held[first // self.page_tokens : self.needed(first + tokens)]
        enough = len(held) * self.page_tokens >= first + tokens
        return enough and all(self._references[page] == 1 for page in window)

    # --- slots -----------------------------------------------------------------------------------------------------

    def reserve(self, owner: int, tokens: int) -> Sequence[int]:
        """Hands ``owner`` enough further private pages for ``tokens`` entries in all and returns all of its pages in order.

        A round's reach counts: the pages that its speculative window touches are reserved before it. Raises CapacityError,
        changing nothing, if fewer pages are free than needed.
        """
        held = self._owned.get(owner, [])
        missing = self.needed(tokens) - len(held)
        if missing > len(self._free):
            raise CapacityError(
                f"page pool: slot {owner} needs {missing} more pages of {self.page_tokens} tokens, {len(self._free)} of "
                f"{self.pages} are free; lower the concurrency, the context or the number of new tokens"
            )
        self._owned[owner] = [*held, *self._hand_out(max(missing, 0))]
        return tuple(self._owned[owner])

    def adopt(self, owner: int, pages: Sequence[int]) -> None:
        """Makes ``pages`` the first pages of an owner that has none yet; they are shared, with one more reference each."""
        if self._owned.get(owner):
            raise ValueError(f"slot {owner} holds pages already; shared pages come first")
        self.share(pages)
        self._owned[owner] = list(pages)

    def release(self, owner: int) -> None:
        """Drops the references of ``owner`` to all of its pages; does nothing if it has none."""
        self.drop(reversed(self._owned.pop(owner, [])))

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def take(self, count: int) -> tuple[int, ...]:
        """Hands out ``count`` pages that no slot owns, one reference each, for copies that a checkpoint keeps.

        Raises CapacityError, changing nothing, if fewer are free.
        """
        if count > len(self._free):
            raise CapacityError(
                f"page pool: a prefix checkpoint needs {count} more pages of {self.page_tokens} tokens, {len(self._free)} of "
                f"{self.pages} are free; raise the snapshot budget or lower the concurrency"
            )
        return self._hand_out(count)

    def share(self, pages: Iterable[int]) -> None:
        """Adds one reference to each page; all of them must be referenced already."""
        pages = list(pages)
        for page in pages:
            if not 0 < page <= self.pages or not self._references[page]:
                raise ValueError(f"page {page} is not in use; only a page that somebody holds can be shared")
        for page in pages:
            self._references[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """Drops one reference to each page; a page without references is free again."""
        pages = list(pages)
        for page, count in Counter(pages).items():
            if not 0 < page <= self.pages or self._references[page] < count:
                raise ValueError(
                    f"page {page} is dropped more often than it was taken; every reference is dropped once"
                )
        for page in pages:
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)

    def _hand_out(self, count: int) -> tuple[int, ...]:
        handed = tuple(self._free.pop() for _ in range(count))
        for page in handed:
            self._references[page] = 1
        return handed
