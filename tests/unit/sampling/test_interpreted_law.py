"""The law's kernel against the reference in Triton's interpreter, without a GPU; see ``test_interpreted_kernels``."""

from __future__ import annotations

import os

import pytest
import torch
from law_cases import REQUESTS

from specdec.sampling.law import LawParams, law
from specdec.sampling.params import SamplingParams

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("vocab", "kept"), [(1, 1), (5, 5), (24, 20), (100, 97)])
def test_rows_are_those_of_the_reference(vocab: int, kept: int, dtype: torch.dtype) -> None:
    """Ordinary rows, rows of ties, forbidden ids, and rows without a law; parameters are columns of a table."""
    from specdec.ops.cuda.law import law_rows

    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(len(REQUESTS), 6, vocab, generator=generator) * 3).to(dtype)
    logits[:, 1] = logits[:, 1].round()
    logits[:, 2, ::2] = -torch.inf
    logits[:, 2, 0] = 1.0
    logits[:, 3, kept // 2] = torch.nan
    logits[:, 4, kept // 2] = torch.inf
    logits[:, 5] = -torch.inf
    logits[..., kept:] = 90.0
    params = LawParams.of([SamplingParams(**one) for one in REQUESTS])
    table = torch.stack([params.temperature, params.top_p, params.min_p], 1)
    found = law_rows(logits, table[:, 0], params.top_k, table[:, 1], table[:, 2], params.greedy, kept)
    wanted = law(logits, params, kept)
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=0, equal_nan=True)
    assert torch.equal(found[4], wanted[4]) or bool(found[4].isnan().any())
    assert torch.equal(found.isnan(), wanted.isnan()) and torch.equal(found > 0, wanted > 0)
