"""Attention kernels against the plugins' forms in Triton's interpreter; how to run: ``test_interpreted_kernels``."""

from __future__ import annotations

import os

import pytest
import torch
from attention_cases import CHOICES, GROUPS, WINDOWS, ChoiceCase, GroupsCase, WindowCase
from operator_cases import assert_within_bound

from specdec.ops.sink_attention import attend

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")


@pytest.mark.parametrize("case", GROUPS, ids=str)
def test_grouped_attention(case: GroupsCase) -> None:
    from specdec.ops.cuda.gather_attention import attend_groups

    q, plan, chosen = case.operands(torch.float32)
    entries = plan.store.paged("entries", 0)
    found = attend_groups(q, entries, plan, chosen, scale=case.scale, shared=case.shared)
    assert_within_bound((found,), (case.reference(q, plan, chosen),), (case.exact(q, plan, chosen),))


@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_window_attention(case: WindowCase) -> None:
    from specdec.ops.cuda.sink_attention import attend_window

    operands = case.operands(torch.float32)
    assert_within_bound((attend_window(*operands),), (case.reference(*operands),), (case.exact(*operands),))


@pytest.mark.parametrize("shape", [(2, 7, 4, 64, 135), (3, 1, 17, 24, 40)], ids=str)
def test_attention_with_a_sink(shape: tuple[int, ...]) -> None:
    from specdec.ops.cuda.sink_attention import attend_sink

    groups, queries, heads, width, count = shape
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(groups, queries, heads, width, generator=generator)
    keys = torch.randn(groups, count, width, generator=generator)
    bias = torch.where(torch.rand(groups, 1, count, generator=generator) < 0.3, float("-inf"), 0.0)
    sink = torch.randn(heads, generator=generator)
    found, reference = attend_sink(q, keys, bias, sink), attend(q, keys, bias, sink)
    assert_within_bound((found,), (reference,), (attend(*(x.double() for x in (q, keys, bias, sink))),))


@pytest.mark.parametrize("case", CHOICES, ids=str)
def test_choice_of_groups(case: ChoiceCase) -> None:
    from specdec.ops.cuda.group_choice import choose_groups

    q, weights, plan = case.operands(torch.float32)
    found = choose_groups(q, weights, plan.store.paged("keys", 0), plan, factor=case.width**-0.5)
    case.check(found, q, weights, plan, 1e-6)
