"""Choice of a sampler, its refusals, and FlashInfer's calls against kernels that are followed literally on the CPU."""

from __future__ import annotations

import sys
from importlib import metadata

import fake_flashinfer
import numpy as np
import pytest
import sampling_oracle as oracle
import torch

from specdec.errors import DeviceError, ExitCode, UsageError
from specdec.preparation import PreparationConfig
from specdec.sampling.flashinfer import FlashInferSampler, flashinfer_sampling
from specdec.sampling.law import LawParams
from specdec.sampling.params import SamplingParams
from specdec.sampling.philox import DRAFT_DOMAIN, TARGET_DOMAIN
from specdec.sampling.qualification import _ORDERED, Check, _hashed, qualify
from specdec.sampling.sampler import ReferenceSampler, RoundWords, sampler_for

CPU = torch.device("cpu")
CURE = "pip install 'specdec-core[cuda]'"
VOCABULARIES = (5, 6, 100, 2050)


def failed(checks: list[Check]) -> list[str]:
    return [check.name for check in checks if not check.ok]


def missing(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


def test_words_are_those_of_the_position() -> None:
    """Against Philox in plain integers: domain 0 and 1, K_max + 2 words a position."""
    seeds, consumed = [0, 5, (1 << 63) - 1], [1, 70, 1 << 20]
    words = RoundWords.of(torch.tensor(seeds), torch.tensor(consumed), 7)
    for domain in (TARGET_DOMAIN, DRAFT_DOMAIN):
        for lane, (seed, position) in enumerate(zip(seeds, consumed, strict=True)):
            first = domain * 2**60 + position * 9
            assert words.numbers[domain, lane].tolist() == list(range(first, first + 9))
            assert words.uniforms(domain)[lane].tolist() == oracle.draws(seed, first, 9).tolist()


def test_a_cpu_is_sampled_by_the_reference() -> None:
    for requested in ("auto", "reference"):
        sampler = sampler_for(CPU, requested)
        assert sampler.name == "reference" and sampler.note is None


def test_a_gpu_without_flashinfer_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", missing)
    sampler = sampler_for(torch.device("cuda"))
    assert sampler.name == "reference"
    assert sampler.note is not None and "plain torch operations on cuda" in sampler.note and CURE in sampler.note
    assert sampler_for(torch.device("cuda"), "reference").note is None


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="sampler is 'fast'; allowed: auto, reference, flashinfer"):
        sampler_for(CPU, "fast")
    with pytest.raises(UsageError, match="needs a CUDA device, this is cpu"):
        sampler_for(CPU, "flashinfer")
    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(DeviceError, match="FlashInfer is not installed") as raised:
        sampler_for(torch.device("cuda"), "flashinfer")
    assert CURE in str(raised.value) and "0.7.4 or later" in str(raised.value)
    assert raised.value.exit_code is ExitCode.DEVICE == 6


def test_preparations_name_a_sampler() -> None:
    with pytest.raises(UsageError, match="sampler is 'fast'; allowed"):
        PreparationConfig(recipe="any", speculative_widths=(1,), sampler="fast")


@pytest.mark.parametrize("version", ["0.7.3", "0.6.12", "0.7.4rc1"])
def test_older_flashinfer_is_refused_by_its_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(DeviceError, match=f"FlashInfer {version} is too old"):
        flashinfer_sampling()


def test_a_flashinfer_that_cannot_be_imported_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.7.4")
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", None)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(DeviceError, match=r"FlashInfer 0\.7\.4 cannot be imported") as raised:
        flashinfer_sampling()
    assert CURE in str(raised.value) and "\n" not in str(raised.value)


def test_kernels_that_fail_or_differ_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = fake_flashinfer.module()

    def unbuilt(*args: object, **kwargs: object) -> None:
        raise RuntimeError("Could not find nvcc\nand more")

    kernels.chain_speculative_sampling = unbuilt
    with pytest.raises(DeviceError, match="cannot be built or run on cpu: RuntimeError: Could not find nvcc;"):
        fake_flashinfer.fake_sampler(monkeypatch, kernels)

    def shifted(*args: object, offset: torch.Tensor, **kwargs: object) -> object:
        return fake_flashinfer.chain_speculative_sampling(*args, offset=offset + 1, **kwargs)

    kernels.chain_speculative_sampling = shifted
    with pytest.raises(DeviceError, match=r"gives \[.*\] on cpu where \[2730, 4096, 5375, 2, 2\] is known"):
        fake_flashinfer.fake_sampler(monkeypatch, kernels)


def test_the_reference_qualifies() -> None:
    checks = list(qualify(ReferenceSampler(), CPU, VOCABULARIES))
    assert failed(checks) == [] and len(checks) == 7 and all(check.cases >= 4 for check in checks)


def test_calls_of_the_kernels_qualify(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments, dummy columns, counters, −1 and NaN, for every number of drafts and each lane's own count."""
    assert failed(list(qualify(fake_flashinfer.fake_sampler(monkeypatch), CPU, VOCABULARIES))) == []


class LaneWords(ReferenceSampler):
    """A lane's words depend on its place."""

    def _moved(self, words: RoundWords) -> RoundWords:
        return RoundWords(seed=words.seed + torch.arange(len(words.seed)), first=words.first, count=words.count)

    def draw(self, probs, words, domain, index):
        return super().draw(probs, self._moved(words), domain, index)

    def verify(self, tokens, draft, target, words, counts=None):
        return super().verify(tokens, draft, target, self._moved(words), counts)


class OwnWords(ReferenceSampler):
    """A lane with fewer drafts draws its token with the word behind them."""

    def verify(self, tokens, draft, target, words, counts=None):
        outcome = super().verify(tokens, draft, target, words, counts)
        if counts is None:
            return outcome
        own = [
            super(OwnWords, self).verify(
                tokens[lane : lane + 1, :count],
                draft[lane : lane + 1, :count],
                target[lane : lane + 1, : count + 1],
                RoundWords(seed=words.seed[lane : lane + 1], first=words.first[:, lane : lane + 1], count=words.count),
            )
            for lane, count in enumerate(counts.tolist())
        ]
        for lane, one in enumerate(own):
            outcome.tokens[lane, : one.tokens.shape[1]] = one.tokens[0]
        return outcome


class PlainSums(ReferenceSampler):
    """Draws by a running sum in the order of the ids."""

    def draw(self, probs, words, domain, index):
        sums = probs.cumsum(-1)
        u = words.uniforms(domain)[:, index] * sums[:, -1]
        return (sums > u.unsqueeze(-1)).int().argmax(-1)

    def verify(self, tokens, draft, target, words, counts=None):
        outcome = super().verify(tokens, draft, target, words, counts)
        lanes, drafts = tokens.shape
        limit = torch.full((lanes,), drafts) if counts is None else counts
        for lane in range(lanes):
            at = int(outcome.accepted[lane])
            residual = target[lane, at].nan_to_num()
            if at < int(limit[lane]):
                residual = (residual - draft[lane, at]).clamp(min=0)
            if float(residual.sum()):
                sums = residual.cumsum(0)
                u = words.uniforms(TARGET_DOMAIN)[lane, drafts + (at < drafts)] * sums[-1]
                outcome.tokens[lane, at] = int((sums > u).int().argmax())
        return outcome


class SoftGreedy(ReferenceSampler):
    """Greedy lanes share the mass among equal logits."""

    def law(self, logits, params, vocab_size=None):
        probs = super().law(logits, params, vocab_size)
        best = (logits == logits[..., : vocab_size or logits.shape[-1]].amax(-1, keepdim=True)).float()
        return torch.where(params.greedy.view(-1, 1, 1), best / best.sum(-1, keepdim=True), probs)


def test_known_draws_are_those_of_the_kernel_followed_lane_by_lane() -> None:
    for vocab, seed, token in _ORDERED:
        weights = _hashed(vocab).numpy()
        u = oracle.draws(seed, 5, 1)[0]
        assert oracle.draw(weights, u) == token
        for precision in (np.float32, np.float64):
            sums = np.cumsum(weights, dtype=precision)
            assert int(np.searchsorted(sums, precision(u) * sums[-1], side="right")) != token


@pytest.mark.parametrize(
    ("broken", "noticed"),
    [
        (LaneWords(), {"draws equal the CPU's", "verifications equal the CPU's", "lanes do not depend on others"}),
        (OwnWords(), {"verifications equal the CPU's"}),
        (PlainSums(), {"order of additions"}),
        (SoftGreedy(), {"laws equal the CPU's"}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_broken_samplers_do_not_qualify(broken: ReferenceSampler, noticed: set[str]) -> None:
    assert noticed <= set(failed(list(qualify(broken, CPU, (5, 100, 8192)))))


def test_a_law_of_wide_rows_goes_through_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64 over sorted lists, away from the thresholds."""
    sampler: FlashInferSampler = fake_flashinfer.fake_sampler(monkeypatch)
    requests = [
        {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
        {"min_p": 0.02},
        {"temperature": 1.4, "top_p": 0.5, "min_p": 0.001},
        {"greedy": True},
    ]
    logits = torch.randn(4, 2, 2100, generator=torch.Generator().manual_seed(4)) * 2
    params = LawParams.of([SamplingParams(**one) for one in requests])
    found = sampler.law(logits, params, 2060)
    assert bool((found[..., 2060:] == 0).all())
    for lane, options in enumerate(requests):
        for row in range(2):
            expected, margin = oracle.law(logits[lane, row, :2060].tolist(), **options)
            assert margin > 1e-6
            torch.testing.assert_close(
                found[lane, row, :2060].double(), torch.tensor(expected, dtype=torch.float64), rtol=3e-6, atol=0
            )
