"""Decoded history of a simulated device: copies by declared rates, in place of a ring of real text.

A scheduler takes it for a ``HistoryRing``. Whether a copied token is right is settled when the copy is made, by the request's
luck at that position; the device compares it with what the target emits.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define

from specdec.drafting.history import Copy, HistoryRing
from specdec.simulation.device import Nature

#: Every token of a simulated prompt.
PROMPT_TOKEN = 1


@define(eq=False)
class _Response:
    """committed: its tokens so far; end: the last two of prompt and output, by which a lookup finds it."""

    nature: Nature
    committed: int = 0
    end: tuple[int, int] = (PROMPT_TOKEN, PROMPT_TOKEN)


class SimulatedHistory(HistoryRing):
    """Copies for the requests of one replica. Simulated tokens are random, so two of them name their response."""

    def __init__(self) -> None:
        super().__init__(capacity=1)
        self._simulated: dict[int, _Response] = {}
        self._ends: dict[tuple[int, int], _Response] = {}

    def expect(self, number: int, nature: Nature) -> None:
        """The request of this number will be like this; to be called before its first token."""
        self._simulated[number] = _Response(nature)

    def response(self, number: int) -> None:
        """Begins a response; nothing of it can be found before its first token."""

    def append(self, number: int, tokens: Sequence[int]) -> None:
        """The next committed tokens of a response."""
        response = self._simulated[number]
        if tokens:
            self._ends.pop(response.end, None)
            before, last = (response.end[1], *tokens)[-2:]
            response.end = before, last
            response.committed += len(tokens)
            self._ends[response.end] = response

    def lookup(self, tail: Sequence[int]) -> Copy | None:
        """A continuation of the response that ends with these tokens."""
        response = self._ends.get((tail[-2], tail[-1])) if len(tail) > 1 else None
        if response is None:
            return None
        found = response.nature.category.copy(response.nature.luck, response.committed)
        return None if found is None else Copy(*found)

    def end(self, number: int) -> None:
        """Closes a response. Unknown numbers are ignored."""
        response = self._simulated.pop(number, None)
        if response is not None:
            self._ends.pop(response.end, None)
