"""What a captured CUDA graph consists of, and whether a stretch of work allocated or synchronised."""

from __future__ import annotations

import ctypes
import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

#: ``cudaGraphNodeType`` of the CUDA runtime API (driver_types.h).
NODE_KINDS = {
    0: "kernel",
    1: "memcpy",
    2: "memset",
    3: "host",
    4: "graph",
    5: "empty",
    6: "wait event",
    7: "event record",
    8: "external signal",
    9: "external wait",
    10: "memory allocation",
    11: "memory free",
    13: "conditional",
}


def node_kinds(graph: torch.cuda.CUDAGraph) -> Counter[str]:
    """How many nodes of each kind a graph has that was made with ``keep_graph=True``."""
    runtime = ctypes.CDLL(None)
    if not hasattr(runtime, "cudaGraphGetNodes"):
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        runtime = ctypes.CDLL(next(line.split()[-1] for line in maps if "libcudart.so" in line))
    handle = ctypes.c_void_p(graph.raw_cuda_graph())
    count = ctypes.c_size_t(0)
    assert runtime.cudaGraphGetNodes(handle, None, ctypes.byref(count)) == 0
    nodes = (ctypes.c_void_p * count.value)()
    assert runtime.cudaGraphGetNodes(handle, nodes, ctypes.byref(count)) == 0
    kinds: Counter[str] = Counter()
    for node in nodes:
        kind = ctypes.c_int(-1)
        assert runtime.cudaGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        kinds[NODE_KINDS.get(kind.value, str(kind.value))] += 1
    return kinds


def allocations() -> tuple[int, int, int]:
    """Allocations ever made by the caching allocator, bytes allocated, bytes reserved."""
    statistics = torch.cuda.memory_stats()
    return (
        statistics["allocation.all.allocated"],
        statistics["allocated_bytes.all.current"],
        statistics["reserved_bytes.all.current"],
    )


@contextmanager
def nothing_allocated_nor_synchronised() -> Iterator[None]:
    """Fails if the block allocates from the caching allocator, or calls anything of torch that waits for the device."""
    # garbage of earlier tests, collected inside the block, would look like memory given back
    gc.collect()
    gc.disable()
    before = allocations()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
        gc.enable()
    assert allocations() == before
