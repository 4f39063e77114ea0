"""Logits against an independent run of the same weights by transformers, for prompts and for verified rows."""

import pytest
import torch

from specdec.testing.conformance.bench import Bench
from specdec_smollm2 import gguf_checkpoint

#: Both compute in float32 and sum in another order here and there. Logits of this model reach 40 and one rounding of such a
#: number is 4e-6; over thirty layers the largest difference measured on these texts was 7e-5, and this is seven times that.
TOLERANCE = 5e-4
#: What a wrong model must differ by: every mistake below moves logits by more than 1.
VISIBLE = 0.1


@pytest.fixture(scope="module")
def tokens(tokenizer):
    """A text of 400 tokens: this plugin's reader."""
    with open(gguf_checkpoint.__file__, encoding="utf-8") as source:
        return tokenizer.encode(source.read())[:400]


@pytest.fixture(scope="module")
def wanted(independent, tokens):
    """Logits [400, V] after every token, by transformers."""
    return independent(torch.tensor([tokens])).logits[0]


def ours(bench, tokens, chunks=()):
    """Logits after every token of a prompt that is consumed in chunks of these sizes and a last one."""
    found, start = [], 0
    bench.reset(0)
    for size in (*chunks, len(tokens) - sum(chunks)):
        chunk = torch.tensor(tokens[start : start + size])
        bench.target.prefill(chunk, bench.where(0), start)
        found.append(bench.target.prefill_logits(size))
        start += size
    return torch.cat(found)


@pytest.mark.parametrize("length", [1, 2, 7, 63, 64, 65, 200, 400])
def test_prompts(bench, tokens, wanted, length):
    assert (ours(bench, tokens[:length]) - wanted[:length]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("chunks", [(1, 1, 1), (63, 1), (64,), (100, 7)])
def test_prompts_in_chunks(bench, tokens, wanted, chunks):
    assert (ours(bench, tokens[:130], chunks) - wanted[:130]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("length", [1, 60])
@pytest.mark.parametrize("width", range(1, 9))
def test_verified_rows(bench, tokens, wanted, length, width):
    """Row j of a verification sees the prompt and the inputs up to j; what was rejected before leaves no trace."""
    bench.admit(0, tokens[:length], greedy=True)
    lanes = bench.arena.requests.lanes(bench.where(0))
    rejected = bench.target.verify(torch.tensor([[5] * width]), lanes)
    bench.target.commit(lanes, bench.where(0))
    found = bench.target.verify(torch.tensor([tokens[length : length + width]]), lanes)
    assert (found[0] - wanted[length : length + width]).abs().max() <= TOLERANCE
    assert (rejected - found).abs().max() > VISIBLE


@pytest.mark.parametrize("mistake", ["rope of adjacent pairs", "positions off by one"])
def test_mistakes_are_visible(path, tokens, wanted, monkeypatch, mistake):
    """Negative control: what one would most likely get wrong is far outside the tolerance."""
    if mistake == "rope of adjacent pairs":
        monkeypatch.setattr(gguf_checkpoint, "_half_split", lambda weight, heads: weight)
    wrong = Bench.prepare("smollm2-135m", path, dtype="float32", slots=1, context=128)
    if mistake == "positions off by one":
        at = wrong.target.rope.at
        shifts = iter([0, 1])
        # the second chunk is turned as if it stood one further, the keys of the first are not
        monkeypatch.setattr(type(wrong.target.rope), "at", lambda self, positions: at(positions + next(shifts)))
    assert (ours(wrong, tokens[:60], chunks=(30,)) - wanted[:60]).abs().max() > VISIBLE
