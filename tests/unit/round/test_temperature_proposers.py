"""Drafts of both proposers follow the law that is kept for them, which is the softmax they say it is."""

from __future__ import annotations

import math

import pytest
import torch
from sampling_oracle import uniform, word
from torch import Tensor

from specdec.round.temperature_proposers import BoundedProposer, GumbelProposer
from specdec.sampling.gumbel import draft_noise
from specdec.sampling.law import LawParams
from specdec.sampling.params import SamplingParams
from specdec.sampling.sampler import ReferenceSampler, RoundWords
from specdec.testing import CapturableGuard
from specdec.testing.conformance.oracles import chi_square

LANES, DRAFTS, MOST = 40_000, 2, 7
#: A true law fails once in a thousand seeds, and the seeds are fixed.
SIGNIFICANCE = 1e-3


def proposer(
    kind: str, vocab: int, *, lanes: int = LANES, sampling: SamplingParams | None = None, bound: int = 5, first: int = 0
) -> GumbelProposer | BoundedProposer:
    """Lanes differ in their seed, first + lane."""
    seed, consumed = torch.arange(first, first + lanes), torch.full((lanes,), 9)
    common = {
        "params": LawParams.of([sampling or SamplingParams(temperature=0.8)] * lanes),
        "sampler": ReferenceSampler(),
        "words": RoundWords.of(seed, consumed, MOST),
        "tokens": torch.zeros(lanes, DRAFTS, dtype=torch.int64),
        "probs": torch.zeros(lanes, DRAFTS, vocab),
        "vocab_size": vocab,
    }
    if kind == "bounded":
        return BoundedProposer(**common, bound=bound)
    noise = draft_noise(seed, consumed, drafts=DRAFTS, vocab_size=vocab, max_draft_tokens=MOST)
    return GumbelProposer(**common, noise=noise)


def logits_of(vocab: int, seed: int = 3) -> Tensor:
    return torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def expected_law(kind: str, logits: Tensor, temperature: float, bound: int = 5) -> Tensor:
    """float64 [V]."""
    scaled = logits[0] / temperature
    if kind == "bounded":
        kept = scaled.argsort(descending=True, stable=True)[:bound]
        scaled = torch.full_like(scaled, -torch.inf).scatter(0, kept, scaled[kept])
    return scaled.softmax(-1)


@pytest.mark.parametrize("kind", ["gumbel", "bounded"])
@pytest.mark.parametrize("vocab", [7, 24, 130])
def test_draws_follow_the_kept_law(kind: str, vocab: int) -> None:
    """Chi-square at both depths over forty thousand seeds; the same counts do not fit a law at another temperature."""
    logits, one = logits_of(vocab), proposer(kind, vocab)
    for depth in range(DRAFTS):
        tokens = one.draw(depth, logits.expand(LANES, -1))
        law = expected_law(kind, logits, 0.8)
        torch.testing.assert_close(one.probs[17, depth].double(), law, rtol=1e-5, atol=1e-9)
        assert torch.equal(one.tokens[:, depth], tokens)
        assert chi_square(tokens.tolist(), law) > SIGNIFICANCE
        assert chi_square(tokens.tolist(), expected_law(kind, logits, 1.1)) < SIGNIFICANCE**2


@pytest.mark.parametrize("kind", ["gumbel", "bounded"])
def test_depths_are_independent(kind: str) -> None:
    """Pairs of one request's drafts follow the product law."""
    vocab, logits = 6, logits_of(6, seed=8)
    one = proposer(kind, vocab)
    pairs = one.draw(0, logits.expand(LANES, -1)) * vocab + one.draw(1, logits.expand(LANES, -1))
    law = expected_law(kind, logits, 0.8)
    assert chi_square(pairs.tolist(), torch.outer(law, law).flatten()) > SIGNIFICANCE


def test_noise_uses_the_word_of_every_token() -> None:
    """Recomputed from Philox words in plain Python: domain 2, 2^18 words a depth, K_max + 2 depths a position."""
    seeds, consumed = [0, 5, (1 << 63) - 1], [1, 70, 1 << 20]
    found = draft_noise(torch.tensor(seeds), torch.tensor(consumed), drafts=3, vocab_size=5, max_draft_tokens=MOST)
    for lane, (seed, position) in enumerate(zip(seeds, consumed, strict=True)):
        for depth in range(3):
            for token in range(5):
                number = 2 * 2**60 + (position * (MOST + 2) + depth) * 2**18 + token
                expected = -math.log(-math.log1p(-float(uniform(word(seed, number)))))
                assert float(found[lane, depth, token]) == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_noise_is_finite_where_it_wins() -> None:
    """The greatest uniform is exactly 1: it must never be chosen, let alone be infinite."""
    noise = draft_noise(
        torch.arange(2000), torch.ones(2000, dtype=torch.int64), drafts=1, vocab_size=500, max_draft_tokens=7
    )
    assert not noise.isnan().any() and float(noise.max()) < 23
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.01)


@pytest.mark.parametrize("kind", ["gumbel", "bounded"])
def test_greedy_is_the_lowest_id_among_equals(kind: str) -> None:
    one = proposer(kind, 6, lanes=3, sampling=SamplingParams(greedy=True))
    rows = torch.tensor([[0.0, 2.0, 1.0, 2.0, 0.0, 2.0]]).expand(3, -1)
    assert one.draw(0, rows).tolist() == [1, 1, 1]
    assert one.probs[:, 0].tolist() == [[0, 1, 0, 0, 0, 0]] * 3


@pytest.mark.parametrize("kind", ["gumbel", "bounded"])
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("broken", [[math.nan, 0, 0], [0, math.inf, 0], [-math.inf] * 3])
def test_a_row_without_a_law_proposes_token_zero(kind: str, greedy: bool, broken: list[float]) -> None:
    one = proposer(kind, 3, lanes=2, sampling=SamplingParams(greedy=greedy))
    tokens = one.draw(0, torch.tensor([broken, [0.0, 0.0, 9.0]]))
    assert tokens[0] == 0 and one.probs[0, 0].tolist() == [1, 0, 0]
    assert one.probs[1, 0].sum() == pytest.approx(1)


@pytest.mark.parametrize("kind", ["gumbel", "bounded"])
def test_forbidden_and_padding_ids_are_never_drawn(kind: str) -> None:
    one = proposer(kind, 4, lanes=5000)
    rows = torch.tensor([[0.0, -math.inf, 0.3, 0.1, 50.0, math.nan]]).expand(5000, -1)
    assert set(one.draw(0, rows).tolist()) == {0, 2, 3}
    assert one.probs.shape[-1] == 4 and one.probs[0, 0, 1] == 0


def test_ties_at_the_bound_keep_the_lowest_ids() -> None:
    one = proposer("bounded", 6, lanes=2000, bound=3)
    one.draw(0, torch.tensor([[0.0, 1.0, 0.0, 0.0, 1.0, 0.0]]).expand(2000, -1))
    assert (one.probs[0, 0] > 0).tolist() == [True, True, False, False, True, False]


@pytest.mark.parametrize("kind", ["gumbel", "bounded"])
def test_a_lane_draws_the_same_in_any_batch(kind: str) -> None:
    logits = logits_of(50)
    together = proposer(kind, 50, lanes=8).draw(1, logits.expand(8, -1))
    alone = [int(proposer(kind, 50, lanes=1, first=lane).draw(1, logits)) for lane in range(8)]
    assert together.tolist() == alone and len(set(alone)) > 2


@pytest.mark.parametrize("kind", ["gumbel", "bounded"])
def test_drawing_passes_the_guard(kind: str) -> None:
    one, rows = proposer(kind, 40, lanes=2), torch.randn(2, 40)
    seed, consumed = torch.arange(2), torch.full((2,), 9)
    one.words.uniforms(1)  # kept by the words, which a round makes and drops
    with CapturableGuard() as guard:
        draft_noise(seed, consumed, drafts=DRAFTS, vocab_size=40, max_draft_tokens=MOST)
        one.draw(0, rows)
    assert guard.operations < 250
