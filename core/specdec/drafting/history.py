"""Drafts copied from decoded history: what any request emitted lately may be emitted again.

A ring keeps the last generated tokens of all requests of one loaded model, in the order in which they were committed. Two exact
indexes lead from the last eight and from the last four tokens of a request to the place where the same tokens stood before, and
what followed there is proposed. Torch-free, host memory only, bounded: what leaves the ring leaves the indexes.

Responses interleave in the ring. Each stored token is linked to the next one of its own response, so that neither a matched gram
nor a copy ever runs from one response into another.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, frozen

from specdec.catalog import require_integer
from specdec.errors import UsageError

__all__ = ["Copy", "HistoryRing"]

#: Bits of a token id inside a packed gram.
_TOKEN_BITS = 32
_TOKEN_LIMIT = 1 << _TOKEN_BITS


@frozen
class Copy:
    """A proposed continuation. tokens: at least one; match_length: length of the gram that led to it."""

    tokens: tuple[int, ...]
    match_length: int


@define
class _Response:
    """An open response. stored: its tokens so far; last: position of the newest; packed: its last tokens as one integer."""

    stored: int = 0
    last: int = -1
    packed: int = 0


class _Index:
    """Position after the latest occurrence of every gram of one length. A gram is one integer: exact, and nothing for the
    garbage collector to walk."""

    __slots__ = ("gram", "keys", "mask", "places")

    def __init__(self, gram: int, capacity: int) -> None:
        self.gram = gram
        self.mask = (1 << (_TOKEN_BITS * gram)) - 1
        self.places: dict[int, int] = {}
        # the gram that leads to each cell of the ring, to be forgotten with it; −1 where none does
        self.keys = [-1] * capacity


class HistoryRing:
    """The most recent committed generated tokens of one loaded model. Positions count stored tokens from 0 and never repeat."""

    def __init__(self, capacity: int = 65_536, grams: Sequence[int] = (8, 4), most: int = 7) -> None:
        """capacity: stored tokens; grams: lengths that are looked up, in order of preference; most: longest copy.

        Raises UsageError for a number below 1, or grams that do not decrease.
        """
        require_integer("capacity", capacity, 1, None, "a ring holds at least one token")
        require_integer("most", most, 1, None, "a copy has at least one token")
        for gram in grams:
            require_integer("grams", gram, 1, None, "a gram has at least one token")
        if not grams or any(later >= earlier for earlier, later in zip(grams, grams[1:])):
            raise UsageError(f"grams are {tuple(grams)}; give at least one length, longest first")
        self.capacity = capacity
        self.grams = tuple(grams)
        self.most = most
        self._stored = 0
        self._tokens = [0] * capacity
        # position of the next token of the same response, −1 while there is none
        self._following = [-1] * capacity
        self._indexes = [_Index(gram, capacity) for gram in grams]
        self._mask = self._indexes[0].mask
        self._responses: dict[int, _Response] = {}

    def __len__(self) -> int:
        """Tokens held now."""
        return min(self._stored, self.capacity)

    @property
    def entries(self) -> int:
        """Grams that lead somewhere, over all lengths; never more than the tokens held times the number of lengths."""
        return sum(len(index.places) for index in self._indexes)

    def response(self, number: int) -> None:
        """Begins a response. It stays open while its request is preempted. Raises UsageError if ``number`` is open."""
        if number in self._responses:
            raise UsageError(f"response {number} is open; end it before another one takes its number")
        self._responses[number] = _Response()

    def append(self, number: int, tokens: Sequence[int]) -> None:
        """Stores committed tokens of an open response: accepted drafts and target samples, never a prompt or a proposal.

        Raises UsageError if ``number`` is not open or an id is outside 0 … 2³² − 1; then nothing is stored.
        """
        response = self._responses.get(number)
        if response is None:
            raise UsageError(f"response {number} is not open; begin it with response({number})")
        if not all(0 <= token < _TOKEN_LIMIT for token in tokens):
            raise UsageError(f"response {number} stores {tuple(tokens)}; ids are between 0 and {_TOKEN_LIMIT - 1}")
        capacity, following = self.capacity, self._following
        for token in tokens:
            position = self._stored
            cell = position % capacity
            for index in self._indexes:
                left = index.keys[cell]
                # a later occurrence has its own cell
                if left >= 0 and index.places[left] == position - capacity:
                    del index.places[left]
                if response.stored >= index.gram:
                    gram = response.packed & index.mask
                    index.places[gram] = position
                    index.keys[cell] = gram
                else:
                    index.keys[cell] = -1
            if response.last > position - capacity and response.stored:
                following[response.last % capacity] = position
            following[cell] = -1
            self._tokens[cell] = token
            self._stored = position + 1
            response.packed = (response.packed << _TOKEN_BITS | token) & self._mask
            response.last = position
            response.stored += 1

    def end(self, number: int) -> None:
        """Closes a response; its tokens stay. Unknown numbers are ignored: a request may end before its first token."""
        self._responses.pop(number, None)

    def lookup(self, tail: Sequence[int]) -> Copy | None:
        """What followed the last tokens of a request the last time they were generated, or None.

        tail: the last tokens of prompt and output together; tokens before the longest gram are not read, and a shorter tail asks
        only for the grams that it holds. Changes nothing.
        """
        packed = 0
        for token in tail[-self.grams[0] :]:
            packed = packed << _TOKEN_BITS | token
        for index in self._indexes:
            if len(tail) < index.gram:
                continue
            position = index.places.get(packed & index.mask, -1)
            if position >= 0:
                return Copy(self._continuation(position), index.gram)
        return None

    def _continuation(self, position: int) -> tuple[int, ...]:
        tokens: list[int] = []
        while position >= 0 and len(tokens) < self.most:
            cell = position % self.capacity
            tokens.append(self._tokens[cell])
            position = self._following[cell]
        return tuple(tokens)
