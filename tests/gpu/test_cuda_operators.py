"""Kernels on a CUDA device against their references on the same operands: bound, repeatability, capture, width."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from operator_cases import LARGE, SMALL, OperatorCase, assert_within_bound, tuple_of, widened
from torch import Tensor

from specdec.ops.channel_delta_rule import channel_delta_rule_rows
from specdec.ops.delta_rule import delta_rule_replay, delta_rule_rows
from specdec.ops.select import active_operators, reference_operators

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
RUNS = 10


@pytest.fixture(autouse=True)
def kernels_are_active() -> Iterator[None]:
    """Every operator has its kernel here, and the device computes float32 as float32."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("kernels are interpreted in this process")
    assert set(active_operators(torch.device("cuda")).values()) == {"triton"}
    assert not torch.backends.cuda.matmul.allow_tf32
    with torch.inference_mode():
        yield


@DTYPES
@pytest.mark.parametrize("case", [*SMALL, *LARGE], ids=str)
def test_kernels_keep_the_bound_of_their_reference(case: OperatorCase, dtype: torch.dtype) -> None:
    """The tolerance is measured: what the reference differs by on the same operands when it computes in float64."""
    operands = case.operands(dtype, "cuda")
    before = [x.clone() for x in operands if isinstance(x, Tensor)]
    found = tuple_of(case.run(*operands))
    for now, then in zip((x for x in operands if isinstance(x, Tensor)), before, strict=True):
        assert torch.equal(now.nan_to_num(7), then.nan_to_num(7)), "an operand was changed"
    with reference_operators():
        reference = tuple_of(case.run(*operands))
        exact = tuple_of(case.run(*widened(operands)))
    assert_within_bound(found, reference, exact)


@DTYPES
@pytest.mark.parametrize("case", [*SMALL, *LARGE], ids=str)
def test_kernels_repeat_their_bits(case: OperatorCase, dtype: torch.dtype) -> None:
    operands = case.operands(dtype, "cuda")
    first = tuple_of(case.run(*operands))
    for _ in range(RUNS - 1):
        for again, once in zip(tuple_of(case.run(*operands)), first, strict=True):
            assert torch.equal(again, once)


@DTYPES
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_kernels_are_captured(case: OperatorCase, dtype: torch.dtype) -> None:
    """A graph replayed on new operands gives the bits of a call."""
    operands = case.operands(dtype, "cuda")
    case.run(*operands)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = tuple_of(case.run(*operands))
    other = case.operands(dtype, "cuda", seed=1)
    for mine, theirs in zip(operands, other, strict=True):
        # a tensor of stride 0 is one row seen many times
        if isinstance(mine, Tensor) and 0 not in mine.stride():
            mine.copy_(theirs)
    graph.replay()
    eager = tuple_of(case.run(*operands))
    for replayed, called in zip(captured, eager, strict=True):
        assert torch.equal(replayed, called)


@pytest.mark.parametrize("sizes", [(2, 3, 24, 8, 24), (4, 16, 384, 128, 128)], ids=str)
def test_delta_rows_do_not_depend_on_the_width_and_replay_repeats_them(sizes: tuple[int, ...]) -> None:
    batch, heads, width, value, dim = sizes
    rows, group = 8, width // value
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).cuda()

    state, v = normal(batch, heads, width, dim), normal(batch, rows, heads, width)
    q, k = normal(batch, rows, heads, dim) * dim**-0.5, normal(batch, rows, heads, dim) * dim**-0.5
    decay, beta = normal(batch, rows, heads, group).sigmoid(), normal(batch, rows, heads, group).sigmoid()
    wide = delta_rule_rows(state, q, k, v, decay, beta)
    for count in (1, 3):
        narrow = delta_rule_rows(state, *(x[:, :count].contiguous() for x in (q, k, v, decay, beta)))
        assert torch.equal(narrow.outputs, wide.outputs[:, :count])
        assert torch.equal(narrow.corrections, wide.corrections[:, :count])
        assert torch.equal(narrow.states[-1], wide.states[count - 1])
    assert delta_rule_rows(state, q, k, v, decay, beta, keep_states=False).states == []
    for shift in range(rows + 1):
        taken = (torch.arange(batch, device="cuda") + shift) % (rows + 1)
        found = delta_rule_replay(state[None], wide.corrections[None], k[None], decay[None], taken, rows)[0]
        for lane, count in enumerate(taken.tolist()):
            assert torch.equal(found[lane], state[lane] if count == 0 else wide.states[count - 1][lane])


def test_channel_delta_rows_do_not_depend_on_the_width() -> None:
    batch, rows, heads, dim = 4, 8, 32, 128
    generator = torch.Generator().manual_seed(4)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).cuda()

    state = normal(batch, heads, dim, dim)
    q, k, v = (normal(batch, rows, heads, dim) * dim**-0.5 for _ in range(3))
    decay, beta = -5 * normal(batch, rows, heads, dim).sigmoid(), normal(batch, rows, heads).sigmoid()
    outputs, states = channel_delta_rule_rows(state, q, k, v, decay, beta)
    for count in (1, 3):
        narrow = channel_delta_rule_rows(state, *(x[:, :count].contiguous() for x in (q, k, v, decay, beta)))
        assert torch.equal(narrow[0], outputs[:, :count])
        assert torch.equal(narrow[1], states[:, :count])


@DTYPES
@pytest.mark.parametrize("hidden", [128, 4096])
def test_rows_of_hyper_connections_and_norms_do_not_depend_on_their_number(hidden: int, dtype: torch.dtype) -> None:
    for prefix in ("mixes", "collapse", "expand", "rms_norm"):
        sized = [case for case in LARGE if case.name.startswith(prefix) and f"x{hidden}" in case.name]
        for case in sized:
            operands = case.operands(dtype, "cuda")
            rows = operands[0].shape[0]
            narrow = [x[:3] if isinstance(x, Tensor) and x.shape[0] == rows else x for x in operands]
            for few, many in zip(tuple_of(case.run(*narrow)), tuple_of(case.run(*operands)), strict=True):
                assert torch.equal(few, many[:3]), case.name
