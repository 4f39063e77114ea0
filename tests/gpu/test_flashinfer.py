"""FlashInfer's sampler on this GPU: qualification, capture on forked streams, and whole rounds against the reference sampler."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest
import torch
from captured_rounds import CapturedRun, Case, captured, folders
from command import specdec
from cuda_graphs import node_kinds, nothing_allocated_nor_synchronised
from gpu_results import record
from law_cases import REQUESTS
from torch import Tensor

from specdec.ops.select import reference_operators
from specdec.preparation import PreparationConfig
from specdec.recipes import recipe_book
from specdec.sampling.chain import ChainOutcome, resolve_empty
from specdec.sampling.flashinfer import FlashInferSampler
from specdec.sampling.law import LawParams, law
from specdec.sampling.params import SamplingParams
from specdec.sampling.philox import DRAFT_DOMAIN, TARGET_DOMAIN
from specdec.sampling.qualification import qualify
from specdec.sampling.sampler import ReferenceSampler, RoundWords, Sampler
from specdec.serving.model import LoadedModel


def installed() -> bool:
    try:
        metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        return False
    return True


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not installed(), reason="needs FlashInfer"),
]

MOST = 7
FIELDS = ("tokens", "accepted", "matched", "words", "empty")

folders = pytest.fixture(folders, scope="module")


@pytest.fixture(scope="module")
def sampler() -> FlashInferSampler:
    """Builds the kernels if this machine has not: FLASHINFER_WORKSPACE_BASE names a folder for them."""
    return FlashInferSampler(torch.device("cuda"))


def test_this_gpu_qualifies(sampler: FlashInferSampler) -> None:
    checks = list(qualify(sampler, sampler.device))
    for check in checks:
        record(test="flashinfer_qualification", check=check.name, cases=check.cases, failures=list(check.failures[:3]))
    assert [(check.name, check.failures[:3]) for check in checks if not check.ok] == []
    assert len(checks) == 7


def test_the_command_prints_what_it_compared(capsys: pytest.CaptureFixture[str], sampler: FlashInferSampler) -> None:
    found = specdec(capsys, "qualify", "--json")
    assert found.code == 0, found
    data = json.loads(found.stdout)
    assert data["ok"] and data["flashinfer"] == metadata.version("flashinfer-python")
    assert data["device"] == torch.cuda.get_device_name()
    assert len(data["checks"]) == 7 and not any(check["failures"] for check in data["checks"])


class Buffers:
    """A round's inputs on the device: everything that a replay reads."""

    def __init__(self, lanes: int, drafts: int, vocab: int) -> None:
        generator = torch.Generator().manual_seed(lanes * 1000 + drafts * 100 + vocab)
        draft = torch.randn(lanes, drafts, vocab, generator=generator) * 2
        target = torch.randn(lanes, drafts + 1, vocab, generator=generator)
        target[:, :drafts] = draft + 0.5 * target[:, :drafts]
        self.draft_logits, self.target_logits = draft.cuda(), target.cuda()
        # the columns of a request table, as rounds see them
        table = torch.zeros(lanes, 11, dtype=torch.int64)
        table[:, 0] = torch.arange(lanes) * 31
        table[:, 7] = torch.arange(5, 5 + lanes)
        self.table = table.cuda()
        self.counts = (drafts - torch.arange(lanes) % (drafts + 1)).cuda()
        requests = [
            SamplingParams(top_k=20, top_p=0.95),
            SamplingParams(temperature=0.6, min_p=0.05),
            SamplingParams(greedy=True),
        ]
        self.params = LawParams.of([requests[lane % 3] for lane in range(lanes)], "cuda")

    def round(self, sampler: Sampler) -> tuple[ChainOutcome, Tensor, Tensor, Tensor]:
        """Outcome, draft tokens, draft laws and target laws."""
        lanes, drafts, vocab = self.draft_logits.shape
        words = RoundWords.of(self.table[:, 7], self.table[:, 0], MOST)
        p = torch.zeros(lanes, drafts, vocab, device="cuda")
        tokens = torch.zeros(lanes, drafts, dtype=torch.int64, device="cuda")
        for depth in range(drafts):
            p[:, depth] = sampler.law(self.draft_logits[:, depth], self.params)
            tokens[:, depth] = sampler.draw(p[:, depth], words, DRAFT_DOMAIN, depth)
        q = sampler.law(self.target_logits, self.params)
        outcome = sampler.verify(tokens, p, q, words, self.counts)
        return resolve_empty(outcome, tokens), tokens, p, q


@pytest.mark.parametrize("drafts", [0, 1, 5, 7])
@pytest.mark.parametrize(("lanes", "vocab"), [(1, 512), (4, 512), (20, 512), (3, 4099), (2, 151_936)])
@torch.inference_mode()
def test_a_captured_round_replays_the_eager_one_and_the_cpu(
    sampler: FlashInferSampler, drafts: int, lanes: int, vocab: int
) -> None:
    """Thirty rounds that each continue where the last ended, counts differing by lane."""
    buffers = Buffers(lanes, drafts, vocab)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        buffers.round(sampler)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, stream=stream):
        outcome, tokens, p, q = buffers.round(sampler)
        buffers.table[:, 0] += outcome.accepted + 1
    graph.instantiate()
    kinds = node_kinds(graph)
    record(
        test="flashinfer_round_nodes",
        batch=lanes,
        drafts=drafts,
        vocab=vocab,
        nodes=dict(kinds),
    )
    assert "host" not in kinds and "memory allocation" not in kinds
    reference, accepted = ReferenceSampler(), 0
    for number in range(30):
        before = buffers.table.clone()
        if number == 1:
            with nothing_allocated_nor_synchronised():
                graph.replay()
        else:
            graph.replay()
        after = buffers.table.clone()
        buffers.table.copy_(before)
        eager, eager_tokens, *_ = buffers.round(sampler)
        assert torch.equal(tokens, eager_tokens)
        for name in FIELDS:
            assert torch.equal(getattr(outcome, name), getattr(eager, name)), name
        words = RoundWords.of(before[:, 7].cpu(), before[:, 0].cpu(), MOST)
        here = resolve_empty(
            reference.verify(tokens.cpu(), p.cpu(), q.cpu(), words, buffers.counts.cpu()), tokens.cpu()
        )
        for name in FIELDS:
            assert torch.equal(getattr(outcome, name).cpu(), getattr(here, name)), name
        for depth in range(drafts):
            drawn = reference.draw(p[:, depth].cpu(), words, DRAFT_DOMAIN, depth)
            assert torch.equal(tokens[:, depth].cpu(), drawn)
        assert bool((outcome.tokens.gather(1, outcome.accepted.unsqueeze(1)) >= 0).all())
        accepted += int(outcome.accepted.sum())
        buffers.table.copy_(after)
        assert torch.equal(after[:, 0], before[:, 0] + outcome.accepted + 1)
    assert not drafts or accepted > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("vocab", "kept"), [(1, 1), (24, 20), (512, 512), (700, 511), (2048, 2048)])
@torch.inference_mode()
def test_laws_of_small_vocabularies_are_those_of_the_plain_operations(
    vocab: int, kept: int, dtype: torch.dtype
) -> None:
    """Ordinary rows, rows of ties, forbidden ids, and rows without a law; parameters are columns of a table."""
    logits = (torch.randn(len(REQUESTS), 6, vocab, generator=torch.Generator().manual_seed(vocab)) * 3).to(
        "cuda", dtype
    )
    logits[:, 1] = logits[:, 1].round()
    logits[:, 2, ::2] = -torch.inf
    logits[:, 2, 0] = 1.0
    logits[:, 3, kept // 2] = torch.nan
    logits[:, 4, kept // 2] = torch.inf
    logits[:, 5] = -torch.inf
    logits[..., kept:] = 90.0
    params = LawParams.of([SamplingParams(**one) for one in REQUESTS], "cuda")
    table = torch.stack([params.temperature, params.top_p, params.min_p], 1)
    columns = LawParams(
        temperature=table[:, 0], top_p=table[:, 1], min_p=table[:, 2], top_k=params.top_k, greedy=params.greedy
    )
    found = law(logits, columns, kept)
    with reference_operators("law"):
        wanted = law(logits, columns, kept)
    torch.testing.assert_close(found, wanted, rtol=3e-6, atol=0, equal_nan=True)
    assert torch.equal(found.isnan(), wanted.isnan()) and torch.equal(found > 0, wanted > 0)
    assert torch.equal(found[4].nan_to_num(), wanted[4].nan_to_num())


@torch.inference_mode()
def test_rows_without_a_law_are_faults_and_equal_laws_are_resolved(sampler: FlashInferSampler) -> None:
    half = torch.tensor([0.25, 0.25, 0.5, 0.0])
    # lanes: empty residual, NaN target row, ids out of range, bonus row without mass, no drafts and no mass
    target = torch.stack([half / 2, half]).repeat(6, 1, 1)
    target[1, 0], target[4, 1], target[5, 0] = torch.nan, 0.0, 0.0
    draft, tokens = half.expand(6, 1, 4).contiguous(), torch.tensor([[2], [2], [4], [-1], [2], [2]])
    counts, seeds = torch.tensor([1, 1, 1, 1, 1, 0]), torch.arange(400)
    seen: set[tuple[int, ...]] = set()
    for seed in seeds.tolist():
        words = RoundWords.of(torch.full((6,), seed), torch.full((6,), 3), MOST)
        moved = RoundWords.of(words.seed.cuda(), torch.full((6,), 3).cuda(), MOST)
        found = sampler.verify(tokens.cuda(), draft.cuda(), target.cuda(), moved, counts.cuda())
        wanted = ReferenceSampler().verify(tokens, draft, target, words, counts)
        for name in FIELDS:
            assert torch.equal(getattr(found, name).cpu(), getattr(wanted, name)), (name, seed)
        seen.add(tuple(found.empty.tolist()))
    assert {flags[0] for flags in seen} == {True, False}
    assert all(not any(flags[1:4]) and not flags[5] for flags in seen)


@torch.inference_mode()
def test_a_draw_does_not_disturb_its_counters_or_inputs(sampler: FlashInferSampler) -> None:
    probs = torch.rand(5, 600, device="cuda")
    kept = probs.clone()
    words = RoundWords.of(torch.arange(5, device="cuda"), torch.arange(5, device="cuda"), MOST)
    first = sampler.draw(probs, words, TARGET_DOMAIN, 0)
    for _ in range(20):
        assert torch.equal(sampler.draw(probs, words, TARGET_DOMAIN, 0), first)
    assert torch.equal(probs, kept) and int(sampler._nothing) == 0


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(("recipe", "drafts"), [("qwen3.8-flash", 5), ("glm-5.3-flash", 5), ("deepseek-v4.1-flash", 7)])
@torch.inference_mode()
def test_captured_rounds_emit_what_the_reference_sampler_emits(
    folders: dict[str, Path], sampler: FlashInferSampler, recipe: str, drafts: int, batch: int
) -> None:
    """Same model, same laws, other sampler: the records are equal, draft by draft."""
    case, rounds = Case(recipe=recipe, batch=batch, drafts=drafts), 25
    budget = 8 * rounds + 8
    plain = CapturedRun(case, folders[recipe], budget=budget, dtype="float32", device="cuda")
    plain.bench.arena.sampler = ReferenceSampler()
    ours = CapturedRun(case, folders[recipe], budget=budget, dtype="float32", device="cuda")
    ours.bench.arena.sampler = sampler
    assert ours.first == plain.first
    for _ in plain.play(rounds, plain.run):
        pass
    graph = captured(ours.run)
    for _ in ours.play(rounds, graph.replay):
        pass
    assert ours.played == plain.played
    # random weights seldom agree; one lane alone may reject everything
    assert batch == 1 or sum(one.accepted for records in ours.played for one in records) > 0


@pytest.mark.parametrize(("asked", "name"), [("auto", "flashinfer"), ("reference", "reference")])
def test_preparation_takes_the_sampler_that_is_asked_for(sampler: FlashInferSampler, asked: str, name: str) -> None:
    recipe = recipe_book().recipe("qwen3.8-flash")
    config = PreparationConfig.for_recipe(
        recipe, concurrency=1, context=128, prefill_tokens=(64,), speculative_widths=(1, 2), sampler=asked
    )
    model = LoadedModel.prepare(recipe, config, device="cuda")
    assert model.arena.sampler.name == name and model.notes == ()
