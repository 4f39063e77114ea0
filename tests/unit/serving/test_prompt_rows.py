"""Prompts cut into the chunks that graphs are captured for, and chunks whose position is a tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from captured_rounds import WRITERS
from hypothesis import given
from hypothesis import strategies as st

from specdec.catalog import chunk_sizes
from specdec.errors import CaptureError
from specdec.round.graphs import GraphPool, Program, Variant, prepared_variants
from specdec.serving.prompt_rows import PromptRows, cut
from specdec.testing import CapturableGuard
from specdec.testing.conformance.bench import Bench

SIZES = st.sets(st.integers(1, 600), min_size=1, max_size=3)


@given(SIZES, st.integers(0, 3000), st.integers(2, 700))
def test_any_length_is_made_of_prepared_chunks(asked: set[int], rows: int, context: int) -> None:
    prepared = {min(size, context) for size in asked}
    sizes = chunk_sizes(asked, context)
    assert prepared <= set(sizes)
    assert max(sizes) <= context
    assert list(sizes) == sorted(sizes, reverse=True)
    parts = list(cut(rows, sizes))
    assert sum(parts) == rows
    assert set(parts) <= set(sizes)
    # only the greatest may be needed more often than the powers of two make it
    below = [part for part in parts if part < min(prepared)]
    assert len(below) == len(set(below))


def test_chunk_sizes_of_a_common_preparation() -> None:
    assert chunk_sizes((512,), 4096) == (512, 256, 128, 64, 32, 16, 8, 4, 2, 1)
    assert chunk_sizes((48, 128), 192) == (128, 48, 32, 16, 8, 4, 2, 1)
    assert chunk_sizes((1,), 192) == (1,)


@torch.inference_mode()
@pytest.mark.parametrize("recipe", WRITERS)
def test_chunks_at_a_position_on_the_device_equal_chunks_at_a_number(tmp_path: Path, recipe: str) -> None:
    """What a graph captures, one program for every position, leaves the same state; and it is capturable."""
    folder = WRITERS[recipe](tmp_path)
    tokens = torch.arange(7, 7 + 40)
    benches = [Bench.prepare(recipe, folder, slots=2, context=192) for _ in range(2)]
    for bench, staged in zip(benches, (False, True), strict=True):
        bench.reset(1)
        rows, slot = PromptRows(bench.target, bench.drafter, torch.device("cpu")), torch.tensor([1])
        for start, end in ((0, 1), (1, 17), (17, 18), (18, 40)):
            if staged:
                position = torch.tensor([start])
                with torch.device("meta"), CapturableGuard() as guard:
                    # what prompt scores read
                    guard.allow(rows.run(tokens[start:end], slot, position, begins=start == 0))
                    guard.allow(getattr(bench.target, "_chunk", None))
            else:
                rows.run(tokens[start:end], slot, start)
    for one, other in zip(*(bench.stores for bench in benches), strict=True):
        for name in one.tensors:
            assert torch.equal(one[name], other[name]), name


def test_programs_are_eager_until_they_are_captured() -> None:
    ran: list[dict[str, bool]] = []
    program = Program(lambda **variant: ran.append(variant), "the test's program")
    program(extended=True)
    program()
    assert not program.captured
    assert [list(variant.values()) for variant in ran] == [[False, True, False], [False, False, False]]


def test_a_variant_that_was_not_captured_is_refused() -> None:
    replayed: list[str] = []

    class Graph:
        def replay(self) -> None:
            replayed.append("ordinary")

    program = Program(lambda **variant: pytest.fail("never eager"), "the round of 2 lanes and width 3")
    program.graphs[Variant()] = Graph()  # type: ignore[assignment]
    program()
    assert replayed == ["ordinary"]
    with pytest.raises(CaptureError, match="round of 2 lanes and width 3 was captured without its variant boundary"):
        program(boundary=True)


def test_variants_are_those_that_were_prepared() -> None:
    assert prepared_variants(boundary=False, extended=False, masked=False) == (Variant(),)
    assert len(set(prepared_variants(boundary=True, extended=True, masked=True))) == 8


def test_graphs_need_a_cuda_device() -> None:
    with pytest.raises(CaptureError, match="cuda_graphs=False"):
        GraphPool(torch.device("cpu"))
