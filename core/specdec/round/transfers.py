"""How what a round writes for the host gets there: pinned copies on a stream of their own, one for each frame."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class FrameTransfers:
    """Frames on their way to the host.

    A round's records are read when its own copy is done, whatever is queued behind it; a round that will write a frame again
    waits on the device for the copy of what was there. On a CPU the frames are where the host reads them; nothing is copied.
    """

    def __init__(self, buffers: Sequence[Tensor], device: torch.device) -> None:
        """buffers: [2 · rows, …] each, whose halves alternate by round. device: where they are."""
        self._buffers = tuple(buffers)
        self._device = device
        self._cuda = device.type == "cuda"
        self._hosts: tuple[Tensor, ...] = ()
        self._copied: list[torch.cuda.Event | None] = [None, None]
        if self._cuda:
            self._hosts = tuple(torch.empty(b.shape, dtype=b.dtype, pin_memory=True) for b in self._buffers)
            self._stream = torch.cuda.Stream(device)
            self._begun = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._ended = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def begin(self, number: int) -> None:
        """Before anything of round ``number`` is queued, on its stream: what the host has of this frame is no longer the last
        round's. Every staged round calls it."""
        if not self._cuda:
            return
        half = number % 2
        stream, copied = torch.cuda.current_stream(self._device), self._copied[half]
        if copied is not None:
            stream.wait_event(copied)
            self._copied[half] = None
        self._begun[half].record(stream)

    def end(self, number: int) -> None:
        """After round ``number`` was submitted: queues the copy of its frame. Does not wait. Whoever reads rounds without it
        reads the buffers themselves."""
        if not self._cuda:
            return
        half, ended = number % 2, self._ended[number % 2]
        ended.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(ended)
        with torch.cuda.stream(self._stream):
            for buffer, host in zip(self._buffers, self._hosts, strict=True):
                rows = buffer.shape[0] // 2
                part = slice(half * rows, (half + 1) * rows)
                host[part].copy_(buffer[part], non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        self._copied[half] = copied

    def seconds(self, number: int) -> float | None:
        """The device's time for round ``number``, after waiting for its copy; None on a CPU."""
        if self.host(number % 2) is None:
            return None
        return self._begun[number % 2].elapsed_time(self._ended[number % 2]) / 1000

    def host(self, half: int) -> tuple[Tensor, ...] | None:
        """The host's copies of the buffers, of which this half is that of the last round; waits for it. None where the host reads
        the buffers themselves: on a CPU, and after rounds whose copy was not asked for."""
        copied = self._copied[half]
        if copied is None:
            return None
        copied.synchronize()
        return self._hosts
