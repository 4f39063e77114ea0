"""Every sampling function passes the guard; on a GPU one captured graph gives the CPU's tokens."""

import pytest
import torch

from specdec.sampling.chain import chain_verify, resolve_empty, sample
from specdec.sampling.law import LawParams, law
from specdec.sampling.params import SamplingParams
from specdec.sampling.philox import DRAFT_DOMAIN, TARGET_DOMAIN, philox_words, uniforms
from specdec.sampling.sampler import RoundWords
from specdec.testing import CapturableGuard

MOST = 7


def round_uniforms(seed, consumed):
    """Uniforms of a round in the target and the draft domain."""
    words = RoundWords.of(seed, consumed, MOST)
    return words.uniforms(TARGET_DOMAIN), words.uniforms(DRAFT_DOMAIN)


class Buffers:
    """A round's inputs: everything a replay reads."""

    def __init__(self, lanes, drafts, vocab, device="cpu"):
        generator = torch.Generator().manual_seed(lanes * 1000 + drafts * 100 + vocab)
        self.draft_logits = torch.randn(lanes, drafts, vocab, generator=generator).to(device)
        self.target_logits = torch.randn(lanes, drafts + 1, vocab, generator=generator).to(device)
        self.seed = torch.arange(5, 5 + lanes, device=device)
        self.consumed = torch.arange(lanes, device=device) * 31
        self.counts = (torch.arange(lanes) % (drafts + 1)).flip(0).to(device)
        requests = [
            SamplingParams(top_k=20, top_p=0.95),
            SamplingParams(temperature=0.6, min_p=0.05),
            SamplingParams(greedy=True),
        ]
        self.law = LawParams.of([requests[lane % 3] for lane in range(lanes)], device)


def sampling_round(b, vocab_size=None):
    """Draft laws, drafts, target laws, verification: the sampling part of a round."""
    drafts = b.draft_logits.shape[1]
    target_u, draft_u = round_uniforms(b.seed, b.consumed)
    draft_probs = law(b.draft_logits, b.law, vocab_size) if drafts else b.draft_logits
    tokens = sample(draft_probs, draft_u[:, :drafts])
    target_probs = law(b.target_logits, b.law, vocab_size)
    return resolve_empty(chain_verify(tokens, draft_probs, target_probs, target_u, b.counts), tokens)


@pytest.mark.parametrize("drafts", range(8))
@pytest.mark.parametrize(("lanes", "vocab"), [(1, 512), (4, 100), (2, 4099)])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_sampling_part_of_a_round_passes_the_guard(drafts, lanes, vocab, mode):
    buffers = Buffers(lanes, drafts, vocab)
    with mode(), CapturableGuard() as guard:
        outcome = sampling_round(buffers, vocab - 3)
        guard.allow(outcome)
    assert outcome.tokens.shape == (lanes, drafts + 1)
    assert (outcome.tokens.gather(1, outcome.accepted.unsqueeze(-1)) >= 0).all()
    assert (outcome.tokens < vocab - 3).all()


def test_words_with_subsequences_pass_the_guard():
    seed, offset, subsequence = torch.arange(3), torch.arange(3), torch.arange(3)
    with CapturableGuard():
        uniforms(philox_words(seed, offset, 5, subsequence=subsequence))
        uniforms(philox_words(seed, offset, 5, subsequence=7))


def test_operation_counts_stay_small():
    """Each operation costs microseconds on the CPU and a kernel on a GPU; a jump here is a regression of speed."""
    b = Buffers(1, 5, 512)
    probs, u = law(b.target_logits[:, 0], b.law), torch.rand(1)
    draft_probs, target_probs = law(b.draft_logits, b.law), law(b.target_logits, b.law)
    tokens, target_u = torch.zeros(1, 5, dtype=torch.int64), torch.rand(1, MOST + 2)
    counted = {
        "sample": (lambda: sample(probs, u), 90),
        "chain_verify": (lambda: chain_verify(tokens, draft_probs, target_probs, target_u, b.counts), 155),
        "law": (lambda: law(b.target_logits, b.law), 75),
        "round_uniforms": (lambda: round_uniforms(b.seed, b.consumed), 115),
    }
    for name, (function, most) in counted.items():
        with CapturableGuard() as guard:
            function()
        assert guard.operations <= most, name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("drafts", [0, 1, 5, 7])
@pytest.mark.parametrize(("lanes", "vocab"), [(1, 512), (4, 512), (4, 4099), (2, 151_936)])
def test_a_captured_graph_gives_the_eager_tokens(drafts, lanes, vocab):
    b = Buffers(lanes, drafts, vocab, "cuda")
    with torch.inference_mode():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            sampling_round(b)  # warm-up: kernels load lazily, which capture does not allow
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = sampling_round(b)
            b.consumed.add_(captured.accepted + 1)
        for _ in range(50):
            before = b.consumed.clone()
            graph.replay()
            after = b.consumed.clone()
            b.consumed.copy_(before)
            eager = sampling_round(b)
            b.consumed.copy_(after)
            assert torch.equal(captured.tokens, eager.tokens)
            assert torch.equal(after, before + eager.accepted + 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("vocab", [5, 6, 512, 4097, 4100, 151_936])
def test_chain_and_words_are_bit_equal_on_both_devices(vocab):
    b = Buffers(4, 5, vocab)
    target_u, draft_u = round_uniforms(b.seed, b.consumed)
    draft_probs, target_probs = law(b.draft_logits, b.law), law(b.target_logits, b.law)
    tokens = sample(draft_probs, draft_u[:, :5])
    here = chain_verify(tokens, draft_probs, target_probs, target_u, b.counts)
    gpu_target_u, gpu_draft_u = round_uniforms(b.seed.cuda(), b.consumed.cuda())
    assert torch.equal(gpu_target_u.cpu(), target_u) and torch.equal(gpu_draft_u.cpu(), draft_u)
    there = chain_verify(tokens.cuda(), draft_probs.cuda(), target_probs.cuda(), gpu_target_u, b.counts.cuda())
    assert torch.equal(sample(draft_probs.cuda(), gpu_draft_u[:, :5]).cpu(), tokens)
    for name in ("tokens", "accepted", "matched", "words", "empty"):
        assert torch.equal(getattr(there, name).cpu(), getattr(here, name)), name
    gpu_law = law(b.target_logits.cuda(), LawParams.of([SamplingParams(top_k=20)] * 4, "cuda"))
    cpu_law = law(b.target_logits, LawParams.of([SamplingParams(top_k=20)] * 4))
    assert torch.allclose(gpu_law.cpu(), cpu_law, rtol=1e-5, atol=0)
