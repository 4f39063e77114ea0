"""Page pool: which request owns which 64-token page. Host bookkeeping, no torch.

Page 0 is the trash page: dead lanes and masked rows write there, nothing reads it as valid. It is never handed out.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.errors import CapacityError


class PagePool:
    """Free list of pages 1 … ``pages``. Not thread-safe; the owner of the request loop calls it."""

    def __init__(self, *, pages: int, page_tokens: int) -> None:
        self.pages = pages
        self.page_tokens = page_tokens
        self._free = list(range(pages, 0, -1))
        self._owned: dict[int, list[int]] = {}

    @property
    def free(self) -> int:
        """Pages that can still be handed out."""
        return len(self._free)

    def needed(self, tokens: int) -> int:
        """Pages that hold ``tokens`` entries."""
        return -(-tokens // self.page_tokens)

    def reserve(self, owner: int, tokens: int) -> Sequence[int]:
        """Hands ``owner`` enough private pages for ``tokens`` entries and returns all of its pages in order.

        Raises CapacityError, changing nothing, if fewer pages are free than needed.
        """
        held = self._owned.get(owner, [])
        missing = self.needed(tokens) - len(held)
        if missing > len(self._free):
            raise CapacityError(
                f"page pool: slot {owner} needs {missing} more pages of {self.page_tokens} tokens, {len(self._free)} of "
                f"{self.pages} are free; lower the concurrency, the context or the number of new tokens"
            )
        held.extend(self._free.pop() for _ in range(missing))
        self._owned[owner] = held
        return tuple(held)

    def release(self, owner: int) -> None:
        """Takes all pages of ``owner`` back; does nothing if it has none."""
        self._free.extend(reversed(self._owned.pop(owner, [])))
