"""Consuming a prompt: rows of the target, and of the draft history that follows it; eagerly, or as captured chunks.

A captured chunk has a fixed number of rows. A prompt is cut into the largest prepared ones that fit, so that no row is padding;
powers of two below the smallest prepared chunk make every length possible.

Letters: T rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from specdec.errors import CaptureError
from specdec.interfaces import Drafter, Target
from specdec.round.contract import expect
from specdec.round.graphs import GraphPool
from specdec.state.upload import upload


def cut(rows: int, sizes: Sequence[int]) -> Iterator[int]:
    """Sizes that make up ``rows``, greatest first. sizes: decreasing, the last one 1."""
    for size in sizes:
        while rows >= size:
            yield size
            rows -= size


class PromptRows:
    """Prompt rows of one model. Captured chunks have one graph at the beginning of a prompt and one behind it."""

    def __init__(self, target: Target, drafter: Drafter | None, device: torch.device) -> None:
        self.target = target
        self.drafter = drafter
        self.device = device
        self._chunks: dict[int, CapturedChunk] = {}

    @property
    def captured(self) -> bool:
        """Whether ``consume`` replays graphs."""
        return bool(self._chunks)

    def consume(self, tokens: Sequence[int], slot: int, start: int) -> None:
        """Consumes and commits rows ``start`` … of one request, target and draft history. Host side, between rounds.

        Raises ValueError for more rows at once than were prepared.
        """
        if not self._chunks:
            self.run(upload(tokens, torch.int64, self.device), upload([slot], torch.int64, self.device), start)
            return
        done = 0
        for rows in cut(len(tokens), tuple(self._chunks)):
            self._chunks[rows].replay(tokens[done : done + rows], slot, start + done)
            done += rows

    def run(
        self,
        chunk: Tensor,
        slot: Tensor,
        start: int | Tensor,
        *,
        begins: bool | None = None,
        between: Callable[[], None] | None = None,
    ) -> None:
        """The tensor program of a chunk. chunk: [T] int64; slot: [1] int64; start: inputs consumed before, a number or [1] int64.

        begins: whether the chunk begins its prompt; needed where ``start`` is a tensor. between: called when the target has
        consumed the chunk and the drafter, whose scratch may be where the chunk's hidden states are, has not.
        """
        target, drafter = self.target, self.drafter
        begins = not start if begins is None else begins
        # read before the chunk overwrites it: with lag 1 the row before the chunk pairs with the chunk's first token
        tail = target.feedback(slot)
        feedback = target.prefill(chunk, slot, start)
        expect(tail, (1, None), "B, D", of=target, method="feedback")
        expect(feedback, (len(chunk), tail.shape[1]), "T, D", of=target, method="prefill")
        if between is not None:
            between()
        if drafter is None:
            return
        if not drafter.lag:
            drafter.prefill(feedback, chunk, slot, start)
        elif not begins:
            drafter.prefill(torch.cat([tail, feedback[:-1]]), chunk, slot, start - 1)
        elif len(chunk) > 1:
            drafter.prefill(feedback[:-1], chunk[1:], slot, start)

    def capture(self, pool: GraphPool, sizes: Iterable[int], spare: int) -> None:
        """Captures chunks of these rows, decreasing to 1. Preparation only; the spare slot is written. Raises CaptureError."""
        chunks = {rows: CapturedChunk(self, rows) for rows in sizes}
        if list(chunks) != sorted(chunks, reverse=True) or 1 not in chunks:
            raise CaptureError(f"chunks of {list(chunks)} rows; sizes must decrease to 1")
        for chunk in chunks.values():
            chunk.capture(pool, True, spare)
            chunk.capture(pool, False, spare)
        self._chunks = chunks


class CapturedChunk:
    """A chunk of T rows as graphs, one that begins a prompt and one that does not; they read [slot | start | tokens T] int64."""

    def __init__(self, rows: PromptRows, size: int) -> None:
        self.rows = rows
        self.size = size
        self._staged = torch.zeros(size + 2, dtype=torch.int64, device=rows.device)
        self._graphs: dict[bool, torch.cuda.CUDAGraph] = {}

    def capture(self, pool: GraphPool, begins: bool, spare: int) -> None:
        """Captures the chunk that begins a prompt, or the other one; again does nothing. The spare slot is written.

        Raises CaptureError.
        """
        if begins in self._graphs:
            return
        self._staged.copy_(upload([spare, 0 if begins else 1, *[0] * self.size], torch.int64, self.rows.device))
        slot, start, tokens = self._staged[:1], self._staged[1:2], self._staged[2:]
        run = partial(self.rows.run, tokens, slot, start, begins=begins)
        self._graphs[begins] = pool.capture(run, f"a prompt chunk of {self.size} rows")

    def replay(self, tokens: Sequence[int], slot: int, start: int) -> None:
        """Copies the chunk to the device and runs it; waits for nothing."""
        self._staged.copy_(upload([slot, start, *tokens], torch.int64, self.rows.device))
        self._graphs[start == 0].replay()
