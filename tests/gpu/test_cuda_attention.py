"""Kernels of attention on a CUDA device against the plugins' forms: bound, bits, width, capture, cost."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from attention_cases import (
    CHOICES,
    GROUPS,
    LARGE_GROUPS,
    LARGE_WINDOWS,
    WINDOWS,
    ChoiceCase,
    GroupsCase,
    WindowCase,
)
from attrs import evolve
from cuda_graphs import node_kinds
from gpu_results import record
from operator_cases import assert_within_bound
from torch import Tensor

from specdec.ops.grouped_rows import Chosen, RowPlan
from specdec.ops.select import active_operators, reference_operators
from specdec.ops.sink_attention import attend, attend_window, attends_in_place

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
RUNS = 10


@pytest.fixture(autouse=True)
def kernels_are_active() -> Iterator[None]:
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("kernels are interpreted in this process")
    for name in ("attend", "attend_window", "choose_groups", "grouped_attention"):
        assert active_operators(torch.device("cuda"))[name] == "triton"
    assert not torch.backends.cuda.matmul.allow_tf32
    with torch.inference_mode():
        yield


def by_kernel(case: GroupsCase, q: Tensor, plan: RowPlan, chosen: Chosen | None) -> Tensor:
    found = plan.attend(q, "entries", 0, chosen, scale=case.scale, shared=case.shared)
    assert found is not None
    return found


@DTYPES
@pytest.mark.parametrize("case", [*GROUPS, *LARGE_GROUPS], ids=str)
def test_grouped_attention(case: GroupsCase, dtype: torch.dtype) -> None:
    """The tolerance is measured: what the plugin's form differs by from float64 on the same operands."""
    q, plan, chosen = case.operands(dtype, "cuda")
    found = by_kernel(case, q, plan, chosen)
    for _ in range(RUNS - 1):
        assert torch.equal(by_kernel(case, q, plan, chosen), found)
    with reference_operators():
        assert plan.attend(q, "entries", 0, chosen, scale=case.scale, shared=case.shared) is None
        reference = case.reference(q, plan, chosen)
    assert_within_bound((found,), (reference,), (case.exact(q, plan, chosen),))


@DTYPES
@pytest.mark.parametrize("case", GROUPS, ids=str)
def test_no_row_of_a_group_call_sees_another(case: GroupsCase, dtype: torch.dtype) -> None:
    q, plan, chosen = case.operands(dtype, "cuda")
    together = by_kernel(case, q, plan, chosen)
    for lane in range(plan.batch):
        for row in range(plan.rows):
            one = slice(lane, lane + 1), slice(row, row + 1)
            alone = evolve(
                plan,
                batch=1,
                rows=1,
                slots=plan.slots[one[0]],
                positions=plan.positions[one],
                causal=plan.causal[one],
            )
            picked = None if chosen is None else Chosen(ids=chosen.ids[one], counted=chosen.counted[one])
            assert torch.equal(by_kernel(case, q[one], alone, picked)[0, 0], together[lane, row])


@DTYPES
@pytest.mark.parametrize("case", [*WINDOWS, *LARGE_WINDOWS], ids=str)
def test_window_attention(case: WindowCase, dtype: torch.dtype) -> None:
    operands = case.operands(dtype, "cuda")
    assert attends_in_place(operands[0])
    found = attend_window(*operands)
    for _ in range(RUNS - 1):
        assert torch.equal(attend_window(*operands), found)
    with reference_operators():
        reference = case.reference(*operands)
    assert_within_bound((found,), (reference,), (case.exact(*operands),))


@DTYPES
@pytest.mark.parametrize("shape", [(1, 7, 4, 64, 135), (3, 1, 17, 24, 40), (2, 7, 64, 512, 135)], ids=str)
def test_attention_with_a_sink(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    operands = sink_operands(shape, dtype)
    found = attend(*operands)
    for _ in range(RUNS - 1):
        assert torch.equal(attend(*operands), found)
    with reference_operators():
        reference = attend(*operands)
        exact = attend(*(x.double() for x in operands))
    assert_within_bound((found,), (reference,), (exact,))


@DTYPES
@pytest.mark.parametrize("case", GROUPS, ids=str)
def test_captured_grouped_attention(case: GroupsCase, dtype: torch.dtype) -> None:
    """A replay at other positions gives the eager bits; one kernel attends, or two where a context takes several spans."""
    q, plan, chosen = case.operands(dtype, "cuda")
    plan = evolve(plan, positions=plan.positions.clone())
    graph, result = captured(lambda: by_kernel(case, q, plan, chosen))
    for back in (0, 1):
        if chosen is None:
            plan.positions.sub_(back).clamp_(min=0)
        q.neg_()
        graph.replay()
        assert torch.equal(result, by_kernel(case, q, plan, chosen))
    with reference_operators():
        plain, _ = captured(lambda: case.reference(q, plan, chosen))
    kernels = node_kinds(graph)["kernel"]
    # the chosen ids are made contiguous first
    assert kernels <= (2 if case.name.startswith("spans") else 1) + (chosen is not None)
    cost(f"groups {case.name}", dtype, graph, plain)


@DTYPES
@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_captured_window_attention(case: WindowCase, dtype: torch.dtype) -> None:
    operands = case.operands(dtype, "cuda")
    graph, result = captured(lambda: attend_window(*operands))
    operands[0].neg_()
    graph.replay()
    assert torch.equal(result, attend_window(*operands))
    with reference_operators():
        plain, _ = captured(lambda: case.reference(*operands))
    # listed rows are made contiguous first
    assert node_kinds(graph)["kernel"] <= (3 if case.name.startswith("spans") or case.name == "all-r1" else 2)
    cost(f"window {case.name}", dtype, graph, plain)


@DTYPES
@pytest.mark.parametrize("case", CHOICES, ids=str)
def test_choice_of_groups(case: ChoiceCase, dtype: torch.dtype) -> None:
    """Exact scores decide but for near ties; the same ids every time, and in a graph, which two kernels make."""
    q, weights, plan = case.operands(dtype, "cuda")

    def run() -> Tensor:
        found = plan.choose_scored(q, weights, "keys", 0, factor=case.width**-0.5)
        assert found is not None
        case.check(found, q, weights, plan, 1e-6) if not torch.cuda.is_current_stream_capturing() else None
        return found.ids

    first = run()
    assert all(torch.equal(run(), first) for _ in range(RUNS - 1))
    graph, ids = captured(run)
    graph.replay()
    assert torch.equal(ids, first)
    with reference_operators():
        assert plan.choose_scored(q, weights, "keys", 0, factor=1.0) is None
        plain, _ = captured(lambda: plan.choose(case.scores(q, weights, plan, torch.float32)).ids)
    assert node_kinds(graph)["kernel"] == 2
    cost(f"choice {case.name}", dtype, graph, plain)


@DTYPES
def test_captured_attention_with_a_sink(dtype: torch.dtype) -> None:
    operands = sink_operands((1, 7, 4, 64, 135), dtype)
    graph, result = captured(lambda: attend(*operands))
    operands[0].neg_()
    graph.replay()
    assert torch.equal(result, attend(*operands))
    with reference_operators():
        plain, _ = captured(lambda: attend(*operands))
    assert node_kinds(graph)["kernel"] == 1
    cost("sink", dtype, graph, plain)


def sink_operands(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    groups, queries, heads, width, count = shape
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(groups, queries, heads, width, generator=generator)
    keys = torch.randn(groups, count, width, generator=generator)
    bias = torch.where(torch.rand(groups, 1, count, generator=generator) < 0.3, float("-inf"), 0.0)
    sink = torch.randn(heads, generator=generator)
    return q.to("cuda", dtype), keys.to("cuda", dtype), bias.cuda(), sink.cuda()


def captured(run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, stream=stream):
        result = run()
    graph.instantiate()
    return graph, result


def cost(name: str, dtype: torch.dtype, graph: torch.cuda.CUDAGraph, plain: torch.cuda.CUDAGraph) -> None:
    """Kernels and microseconds of both forms, as a line of the results."""
    times = []
    for each in (graph, plain):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        each.replay()
        begin.record()
        for _ in range(50):
            each.replay()
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end) / 50)
    record(
        test="cuda_attention",
        case=name,
        dtype=str(dtype),
        kernels=node_kinds(graph)["kernel"],
        reference_kernels=node_kinds(plain)["kernel"],
        microseconds=times[0],
        reference_microseconds=times[1],
    )
