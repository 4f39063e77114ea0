"""Programs that run eagerly or as CUDA graphs: one graph for every static variant that preparation asked for.

A captured program never falls back to eager execution: what was not captured is refused. All graphs of a model share one memory
pool, so a graph's intermediate results live where another's did; what must survive a replay is in a state store, the request
table, a frame or the arena's scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from typing import NamedTuple, Protocol

import torch

from specdec.errors import CaptureError
from specdec.places import blamed

__all__ = ["GraphPool", "Program", "Variant", "prepared_variants"]


class Variant(NamedTuple):
    """Static choices of a program; see ``Round.submit``."""

    boundary: bool = False
    extended: bool = False
    masked: bool = False

    def __str__(self) -> str:
        names = [name for name, chosen in zip(self._fields, self) if chosen]
        return " + ".join(names) or "ordinary"


def prepared_variants(*, boundary: bool, extended: bool, masked: bool) -> tuple[Variant, ...]:
    """Every combination of the variants that a preparation may be asked for."""
    choices = [(False, True) if wanted else (False,) for wanted in (boundary, extended, masked)]
    return tuple(Variant(*chosen) for chosen in product(*choices))


class GraphPool:
    """Memory pool and capture stream of one model's graphs. Make it once, at preparation; device: a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise CaptureError(f"CUDA graphs need a CUDA device, got {device}; prepare with cuda_graphs=False there")
        self.device = device
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)
        self.graphs = 0

    @property
    def bytes(self) -> int:
        """Bytes of the device that the pool holds. Synchronises nothing."""
        return sum(
            segment["total_size"]
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) == tuple(self.handle)
        )

    def capture(self, run: Callable[[], None], name: str) -> torch.cuda.CUDAGraph:
        """The program as one graph. It runs once before, so that kernels and libraries are loaded and compiled: its lanes must be
        dead. name: for messages.

        Raises CaptureError with the cause if it cannot be captured: a synchronisation, a copy from unpinned memory, no memory.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.stream):
                run()
            torch.cuda.synchronize(self.device)
            with torch.cuda.graph(graph, pool=self.handle, stream=self.stream):
                run()
        except RuntimeError as error:
            where, cause = blamed(error), str(error).strip().splitlines()[0]
            raise CaptureError(
                f"{name} cannot be captured as a CUDA graph: {cause}{f' ({where})' if where else ''}; "
                "prepare with cuda_graphs=False to run it eagerly; specdec.testing.CapturableGuard says what to write instead"
            ) from error
        # the first replay moves the graph to the device, which should not be a request's time
        graph.replay()
        self.graphs += 1
        return graph


class _Runs(Protocol):
    def __call__(self, *, boundary: bool = False, extended: bool = False, masked: bool = False) -> None: ...


class Program:
    """A tensor program on fixed buffers, eager until it is captured. Calling it runs the variant that is asked for."""

    def __init__(self, run: _Runs, name: str) -> None:
        """run: the program with all its variants; name: for messages."""
        self._run = run
        self.name = name
        self.graphs: dict[Variant, torch.cuda.CUDAGraph] = {}

    @property
    def captured(self) -> bool:
        """Whether calls replay graphs."""
        return bool(self.graphs)

    def capture(self, pool: GraphPool, variants: Iterable[Variant]) -> None:
        """Captures the variants; from then on no other one can be run. Preparation only: every lane that is staged must be dead.

        Raises CaptureError; see ``GraphPool.capture``.
        """
        for variant in variants:
            self.graphs[variant] = pool.capture(partial(self._run, **variant._asdict()), f"{self.name}, {variant}")

    def __call__(self, *, boundary: bool = False, extended: bool = False, masked: bool = False) -> None:
        """Runs on the current stream. Raises CaptureError for a variant that a captured program lacks."""
        variant = Variant(boundary, extended, masked)
        if not self.graphs:
            self._run(**variant._asdict())
            return
        graph = self.graphs.get(variant)
        if graph is None:
            held = "; ".join(map(str, self.graphs))
            raise CaptureError(f"{self.name} was captured without its variant {variant}; captured: {held}")
        graph.replay()
