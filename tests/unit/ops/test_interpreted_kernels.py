"""Kernels against their references in Triton's interpreter, on a machine without a GPU.

Run with ``TRITON_INTERPRET=1``, which must be set before triton is imported; skipped without it, since interpreted kernels
would take the place of the real ones for every other test of the process.
"""

from __future__ import annotations

import importlib
import os

import pytest
import torch
from operator_cases import MARGIN, SMALL, OperatorCase, assert_within_bound, tuple_of, widened

pytest.importorskip("triton")
# The interpreter truncates to bfloat16 where the device rounds.
TRUNCATED = {**MARGIN, torch.bfloat16: 4.0}
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")


def kernel_of(case: OperatorCase):
    module = importlib.import_module(f"specdec.ops.cuda.{case.kernel[0]}")
    return case.kernel[1](module) if callable(case.kernel[1]) else getattr(module, case.kernel[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_kernels_keep_the_bound_of_their_reference(case: OperatorCase, dtype: torch.dtype) -> None:
    operands = case.operands(dtype)
    exact = tuple_of(case.run(*widened(operands)))
    assert_within_bound(tuple_of(kernel_of(case)(*operands)), tuple_of(case.run(*operands)), exact, TRUNCATED)


def test_replay_repeats_the_bits_of_the_rows() -> None:
    from specdec.ops.cuda.delta_rule import delta_rule_replay, delta_rule_rows

    case = next(case for case in SMALL if case.name.startswith("delta_rule_rows"))
    state, q, k, v, decay, beta = case.operands(torch.float32)
    _, corrections, states = delta_rule_rows(state, q, k, v, decay, beta)
    for taken in range(len(states) + 1):
        count = torch.full((state.shape[0],), taken)
        records = (x.unsqueeze(0) for x in (corrections, k, decay))
        found = delta_rule_replay(state.unsqueeze(0), *records, count, len(states))
        assert torch.equal(found[0], state if taken == 0 else states[taken - 1])
