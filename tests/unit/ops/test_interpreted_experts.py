"""The kernels of the expert block against it in Triton's interpreter; how to run: ``test_interpreted_kernels``."""

from __future__ import annotations

import os

import pytest
import torch
from expert_cases import EXPERTS, ExpertCase, routed_as
from operator_cases import assert_within_bound

from specdec.checkpoint.nvfp4 import quantise_activation, unpack_e2m1
from specdec.ops.block_quantisation import fp8_ue8m0

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("case", EXPERTS, ids=str)
def test_expert_block(monkeypatch: pytest.MonkeyPatch, case: ExpertCase, rows: int) -> None:
    from specdec.ops.cuda.moe import mixture

    # bfloat16 is left to the device: the interpreter truncates to it
    block, wide = (case.build(monkeypatch, torch.float32, wide=wide) for wide in (False, True))
    m = case.inputs(rows, torch.float32)
    exact = routed_as(block, wide, m)(m.double())
    assert_within_bound((mixture(block, m),), (block(m),), (exact,))


def test_no_row_sees_another(monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec.ops.cuda.moe import mixture

    block = EXPERTS[0].build(monkeypatch, torch.float32)
    m = EXPERTS[0].inputs(4, torch.float32)
    together = mixture(block, m)
    assert all(torch.equal(mixture(block, m[row : row + 1])[0], together[row]) for row in range(4))


def test_block_formats_are_those_of_the_references() -> None:
    """Every code, and quantised values of blocks that are ordinary, zero, tiny and beyond the largest scale."""
    from format_kernels import QUANTISE_FP8, QUANTISE_NVFP4, decode, quantise

    x = 3 * torch.randn(16, 64, generator=torch.Generator().manual_seed(2))
    x[3], x[4], x[5], x[6, 0] = 0, x[4] * 1e-9, x[5] * 1e5, torch.nan
    x[7] = torch.arange(64) * 0.25 - 8
    for pairs in (False, True):
        for value in (0.5, 0.01, 1e-3):
            scale, out = torch.tensor([value]), torch.empty_like(x)
            quantise[(16,)](x, out, scale, QUANTISE_NVFP4, 16, pairs)
            # what a block with NaN becomes is no format's concern but that it stays visible
            wanted = quantise_activation(x, scale[0])
            assert out[6, 0].isnan()
            assert torch.equal(out[x.isfinite().all(1)], wanted[x.isfinite().all(1)])
        quantise[(16,)](x, out, scale, QUANTISE_FP8, 32, pairs)
        assert out[6, 0].isnan()
        assert torch.equal(out[x.isfinite().all(1)], fp8_ue8m0(x)[x.isfinite().all(1)])
    codes = torch.arange(256, dtype=torch.uint8)
    found = [torch.empty(256) for _ in range(3)]
    decode[(1,)](codes, *found)
    wanted = [
        unpack_e2m1(codes)[0::2],
        codes.view(torch.float8_e4m3fn).float(),
        codes.view(torch.float8_e8m0fnu).float(),
    ]
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours.nan_to_num(-1), theirs.nan_to_num(-1))
