"""Records of prefix checkpoints: entries, claims, page copies, digests and counts. No torch; states are opaque here."""

from __future__ import annotations

from array import array
from collections import Counter
from enum import StrEnum
from hashlib import blake2b
from typing import Any

from attrs import define, field, frozen


class Lost(StrEnum):
    """Why tokens that were seen before had to be consumed again."""

    #: the common prefix goes beyond the last checkpoint in it
    NO_CHECKPOINT = "no_checkpoint"
    #: the checkpoint was evicted for the byte budget or for pages of running requests
    EVICTED = "evicted"
    #: the checkpoint alone is larger than the byte budget
    BUDGET = "budget"
    #: no page was free for the copy of a partly filled one, or beside the copy for the request
    PAGES = "pages"


@define(kw_only=True)
class PrefixStatistics:
    """Counts since the cache was made. Lookups are admissions: full_hits + partial_hits + misses = lookups."""

    lookups: int = 0
    full_hits: int = 0
    partial_hits: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    lost_tokens: Counter[Lost] = field(factory=Counter)
    published: int = 0
    evicted: int = 0

    @property
    def misses(self) -> int:
        """Lookups that reused nothing."""
        return self.lookups - self.full_hits - self.partial_hits


class PrefixHash:
    """Digest of a growing token sequence: BLAKE2b over the ids as 64-bit integers."""

    def __init__(self) -> None:
        self.length = 0
        self._hash = blake2b(digest_size=16)

    def extend(self, tokens: array[int]) -> None:
        """Adds tokens at the end; each token is hashed once however often a digest is asked for."""
        self._hash.update(tokens.tobytes())
        self.length += len(tokens)

    def digest(self) -> bytes:
        """Digest of everything so far."""
        return self._hash.digest()


@frozen(kw_only=True)
class PageCopy:
    """Rows 0 … rows−1 of page ``source`` go to page ``destination`` of pool ``pool``."""

    pool: int
    source: int
    destination: int
    rows: int


@frozen(kw_only=True, eq=False)
class PrefixEntry:
    """One checkpoint. sequence: tokens of which the first ``length`` are the prefix (one array serves all entries of a request).
    pages: per pool in order; rows: per pool. state: what the owner of the tensors gave, of ``state_bytes`` bytes."""

    key: bytes
    sequence: array[int]
    length: int
    rows: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]
    state: Any
    state_bytes: int

    def matches(self, tokens: array[int]) -> bool:
        """Whether ``tokens`` begins with this prefix; the digest alone is not trusted."""
        return self.sequence[: self.length] == tokens[: self.length]


@frozen(kw_only=True, eq=False)
class Claim:
    """Pages of an admitted request. entry: the checkpoint it continues from, or None. copies must be done, and the entry's
    state restored, before ``PrefixCache.settle``."""

    entry: PrefixEntry | None
    copies: tuple[PageCopy, ...]

    @property
    def consumed(self) -> int:
        """Prompt tokens that need not be consumed again."""
        return self.entry.length if self.entry else 0


def common_prefix(entry: PrefixEntry, tokens: array[int]) -> int:
    """Length of the common prefix of an entry's tokens and ``tokens``, by bisection."""
    low, high = 0, min(entry.length, len(tokens))
    while low < high:
        middle = (low + high + 1) // 2
        if entry.sequence[low:middle] == tokens[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
