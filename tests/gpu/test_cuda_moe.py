"""Kernels of the expert block on a CUDA device against the block as a tensor program: bound, bits, width, capture, cost."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from cuda_graphs import node_kinds
from expert_cases import EXPERTS, LARGE_EXPERTS, ExpertCase, routed_as
from gpu_results import record
from operator_cases import MARGIN

from specdec.checkpoint import mixtures
from specdec.checkpoint.nvfp4 import quantise_activation, unpack_e2m1
from specdec.ops.block_quantisation import fp8_ue8m0
from specdec.ops.moe import GatheredMixture
from specdec.ops.select import active_operators, reference_operators

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
# Another order of addition may move a value across the boundary of a rounding step of E2M1 or E4M3, or a bfloat16 logit by one
# step; such rows differ by more than sums do. One in 16 may, and then by no more than a few steps of bfloat16.
STEPPED = 1 / 16
RUNS = 10


@pytest.fixture(autouse=True)
def kernels_are_active() -> Iterator[None]:
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("kernels are interpreted in this process")
    assert active_operators(torch.device("cuda"))["mixture"] == "triton"
    with torch.inference_mode():
        yield


@DTYPES
@pytest.mark.parametrize("rows", [1, 6, 128])
@pytest.mark.parametrize("case", EXPERTS, ids=str)
def test_kernels_keep_the_bound_of_the_block(
    monkeypatch: pytest.MonkeyPatch, case: ExpertCase, dtype: torch.dtype, rows: int
) -> None:
    """The tolerance is measured: what the block differs by on the same operands when it computes in float64."""
    block, wide = (case.build(monkeypatch, dtype, "cuda", wide=wide) for wide in (False, True))
    m = case.inputs(rows, dtype, "cuda")
    before = m.clone()
    found = block(m)
    assert torch.equal(m, before), "an operand was changed"
    with reference_operators():
        reference = block(m)
        exact = routed_as(block, wide, m)(m.double())
    differs = (found.double() - exact).abs().amax(1)
    bound = MARGIN[dtype] * (reference.double() - exact).abs().max() + 2**-22 * exact.abs().max()
    stepped = differs > bound
    assert stepped.double().mean() <= STEPPED, (differs.max(), bound)
    assert (differs <= 2**-5 * exact.abs().max() + bound).all(), (differs.max(), bound)


@DTYPES
@pytest.mark.parametrize("case", LARGE_EXPERTS, ids=str)
def test_sizes_of_real_models(monkeypatch: pytest.MonkeyPatch, case: ExpertCase, dtype: torch.dtype) -> None:
    block = case.build(monkeypatch, dtype, "cuda")
    m = case.inputs(2, dtype, "cuda")
    found = block(m)
    with reference_operators():
        reference = block(m)
    scale = reference.double().abs().max()
    assert (found.double() - reference.double()).abs().max() <= 2**-5 * scale
    assert (found.double() - reference.double()).abs().mean() <= 2**-8 * scale


@DTYPES
@pytest.mark.parametrize("case", EXPERTS, ids=str)
def test_bits_repeat_and_no_row_sees_another(
    monkeypatch: pytest.MonkeyPatch, case: ExpertCase, dtype: torch.dtype
) -> None:
    block, m = case.build(monkeypatch, dtype, "cuda"), case.inputs(8, dtype, "cuda")
    first = block(m)
    assert all(torch.equal(block(m), first) for _ in range(RUNS - 1))
    alone = torch.cat([block(m[row : row + 1]) for row in range(len(m))])
    if block.router.numel() > 1 << 15:
        # a large router is a matrix product of a library, whose order of addition follows the number of rows
        torch.testing.assert_close(alone, first, rtol=2e-2, atol=2e-3)
    else:
        assert torch.equal(alone, first)


@DTYPES
@pytest.mark.parametrize("case", EXPERTS, ids=str)
def test_captured_block(monkeypatch: pytest.MonkeyPatch, case: ExpertCase, dtype: torch.dtype) -> None:
    """A replay on other operands gives the eager bits; how many kernels a block is, and how long, goes to the results."""
    block, m = case.build(monkeypatch, dtype, "cuda"), case.inputs(6, dtype, "cuda")
    graph, result = _captured(block, m)
    for seed in (5, 6):
        m.copy_(case.inputs(6, dtype, "cuda", seed))
        graph.replay()
        assert torch.equal(result, block(m))
    with reference_operators():
        plain, _ = _captured(block, m)
    kernels, before = node_kinds(graph)["kernel"], node_kinds(plain)["kernel"]
    fused = block.router.numel() <= 1 << 15
    assert kernels == 2 if fused else kernels <= 6
    record(
        test="cuda_moe",
        case=case.name,
        dtype=str(dtype),
        rows=6,
        kernels=kernels,
        reference_kernels=before,
        microseconds=_time(graph),
        reference_microseconds=_time(plain),
    )


def test_small_packed_experts_stay_packed_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU these are decoded into two matrices; kernels read them as they are stored."""
    case = next(case for case in EXPERTS if case.name == "deepseek")
    limit = mixtures.DENSE_LIMIT_BYTES
    build = mixtures.build_mixture
    # ``case.build`` sets the limit to 0, which would make every block a gathered one
    monkeypatch.setattr(mixtures, "build_mixture", lambda *args, **more: _with_limit(build, limit, args, more))
    assert isinstance(case.build(monkeypatch, torch.bfloat16, "cuda"), GatheredMixture)


def test_block_formats_are_those_of_the_references() -> None:
    from format_kernels import QUANTISE_FP8, QUANTISE_NVFP4, decode, quantise

    x = 3 * torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    x[3], x[4], x[5] = 0, x[4] * 1e-9, x[5] * 1e5
    x[7] = torch.arange(64) * 0.25 - 8
    x = x.cuda()
    for pairs in (False, True):
        for value in (0.5, 0.01, 1e-3):
            scale, out = torch.tensor([value], device="cuda"), torch.empty_like(x)
            quantise[(64,)](x, out, scale, QUANTISE_NVFP4, 16, pairs)
            assert torch.equal(out, quantise_activation(x, scale[0]))
        quantise[(64,)](x, out, scale, QUANTISE_FP8, 32, pairs)
        assert torch.equal(out, fp8_ue8m0(x))
    codes = torch.arange(256, dtype=torch.uint8, device="cuda")
    found = [torch.empty(256, device="cuda") for _ in range(3)]
    decode[(1,)](codes, *found)
    wanted = [
        unpack_e2m1(codes)[0::2],
        codes.view(torch.float8_e4m3fn).float(),
        codes.view(torch.float8_e8m0fnu).float(),
    ]
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours.nan_to_num(-1), theirs.nan_to_num(-1))


def _with_limit(build, limit: int, args: tuple, more: dict):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixtures, "DENSE_LIMIT_BYTES", limit)
        return build(*args, **more)


def _captured(block: GatheredMixture, m: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            block(m)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, stream=stream):
        result = block(m)
    graph.instantiate()
    return graph, result


def _time(graph: torch.cuda.CUDAGraph, replays: int = 50) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return 1000 * begin.elapsed_time(end) / replays
