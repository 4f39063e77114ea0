"""Bit masks against booleans: every size of vocabulary, padded logits, frames by slot."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specdec.round.arena import Arena
from specdec.sampling.law import LawParams, law
from specdec.sampling.masks import MaskFrames, forbid, mask_words
from specdec.sampling.params import SamplingParams
from specdec.state.requests import Lanes, RequestTable
from specdec.testing import CapturableGuard

CPU = torch.device("cpu")
VOCABULARIES = (1, 6, 31, 32, 33, 64, 100, 515)


def random_allowed(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """[…, V] bool, about half of it true and token 0 always."""
    allowed = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    allowed[..., 0] = True
    return allowed


def pack(allowed: Tensor, padding: bool = False) -> list[bytes]:
    """Masks of [N, V] bool as the host writes them, bit by bit; padding: value of bits from V on."""
    rows = []
    for row in allowed.tolist():
        bits = [*row, *[padding] * (-len(row) % 32)]
        rows.append(bytes(sum(bits[place + i] << i for i in range(8)) for place in range(0, len(bits), 8)))
    return rows


def words_of(allowed: Tensor, padding: bool = False) -> Tensor:
    """[B, W, words] int32 of [B, W, V] bool."""
    rows = pack(allowed.flatten(0, 1), padding)
    words = [[int.from_bytes(row[i : i + 4], "little", signed=True) for i in range(0, len(row), 4)] for row in rows]
    return torch.tensor(words, dtype=torch.int32).unflatten(0, allowed.shape[:2])


def lanes_of(table: RequestTable, slots: list[int]) -> Lanes:
    for slot in slots:
        if slot < table.slots:
            table.admit(slot, request=slot, epoch=1, consumed=1, budget=9, sampling=SamplingParams(seed=1), stop_ids=())
    return table.lanes(torch.tensor(slots, device=table.device))


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("more", [0, 1, 40])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_bits_forbid_what_booleans_forbid(vocab: int, more: int, padding: bool) -> None:
    """more: padded ids of the logits; padding: unused bits of the last word, which mean nothing."""
    allowed = random_allowed((3, 2, vocab), vocab)
    logits = torch.randn(3, 2, vocab + more, generator=torch.Generator().manual_seed(1))
    kept = logits.clone()
    masked = forbid(logits, words_of(allowed, padding), vocab)
    assert torch.equal(masked, torch.where(allowed, logits[..., :vocab], -torch.inf))
    assert torch.equal(logits, kept)
    assert mask_words(vocab) == words_of(allowed).shape[-1]


@pytest.mark.parametrize(
    ("dtype", "result"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_dtypes_keep_their_values(dtype: torch.dtype, result: torch.dtype) -> None:
    allowed = random_allowed((2, 3, 50))
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(2)).to(dtype)
    masked = forbid(logits, words_of(allowed), 50)
    assert masked.dtype == result
    assert torch.equal(masked[allowed], logits[allowed].to(result))


def test_what_is_broken_stays_visible() -> None:
    """A NaN logit under a forbidden token, and a row that allows nothing, have no law."""
    logits = torch.zeros(1, 3, 40)
    logits[0, 0, 7] = torch.nan
    allowed = torch.ones(1, 3, 40, dtype=torch.bool)
    allowed[0, 0, 7] = False
    allowed[0, 1] = False
    probs = law(forbid(logits, words_of(allowed), 40), LawParams.of([SamplingParams()]))
    assert torch.isnan(probs[0, :2]).all()
    assert torch.equal(probs[0, 2], torch.full((40,), 1 / 40))


def test_frames_are_read_by_slot_and_row() -> None:
    vocab, width = 70, 4
    frames = MaskFrames(slots=3, width=width, vocab_size=vocab, device=CPU)
    table = RequestTable(slots=3, stop_ids=2, device=CPU)
    lanes = lanes_of(table, [2, 0, 3, 1])
    allowed = random_allowed((4, width, vocab), 3)
    frames.write(2, pack(allowed[0]))
    # two rows are known, what is behind them allows everything
    frames.write(0, pack(allowed[1][:2]))
    frames.write(1, pack(allowed[3]))
    frames.clear(1)
    allowed[1, 2:] = allowed[2] = allowed[3] = True
    logits = torch.randn(4, width, vocab + 5, generator=torch.Generator().manual_seed(4))
    for rows in (1, 2, 4):
        wanted = torch.where(allowed[:, :rows], logits[:, :rows, :vocab], -torch.inf)
        assert torch.equal(frames.apply(lanes, logits[:, :rows]), wanted)
    # fewer rows than before leave none of the old ones
    frames.write(2, pack(allowed[0][:1]))
    assert torch.equal(frames.words[2, 1:], torch.full_like(frames.words[2, 1:], -1))
    # the rows of a lane whose request has ended are the spare slot's
    table.integers[2] = table.integers[3]
    assert torch.equal(frames.apply(table.lanes(torch.tensor([2])), logits[:1]), logits[:1, :, :vocab])


def test_writing_twice_while_a_round_is_queued_leaves_its_rows_alone() -> None:
    """The two host copies alternate, so that a copy that is still under way is not overwritten."""
    frames = MaskFrames(slots=1, width=1, vocab_size=32, device=CPU)
    hosts = frames._hosts
    frames.write(0, [b"\1\0\0\0"])
    frames.write(0, [b"\2\0\0\0"])
    assert {int(host[0, 0, 0]) for host in hosts} == {1, 2}
    assert int(frames.words[0, 0, 0]) == 2


def test_wrong_rows_are_refused() -> None:
    frames = MaskFrames(slots=1, width=2, vocab_size=33, device=CPU)
    with pytest.raises(ValueError, match="3 masks for slot 0: a round verifies at most 2 rows"):
        frames.write(0, [bytes(8)] * 3)
    with pytest.raises(ValueError, match="a mask of 5 bytes for slot 0: 33 tokens take 8"):
        frames.write(0, [bytes(8), bytes(5)])
    with pytest.raises(ValueError, match="vocabulary size"):
        Arena(slots=1, max_draft_tokens=1, stop_ids=1, device=CPU, grammar=True)
    bare = Arena(slots=1, max_draft_tokens=1, stop_ids=1, device=CPU)
    assert bare.masks is None
    with pytest.raises(ValueError, match="grammar=True"):
        bare.masked(lanes_of(bare.requests, [0]), torch.zeros(1, 1, 4))


def test_masking_passes_the_guard() -> None:
    frames = MaskFrames(slots=2, width=3, vocab_size=45, device=CPU)
    table = RequestTable(slots=2, stop_ids=2, device=CPU)
    lanes = lanes_of(table, [0, 1])
    frames.write(0, pack(random_allowed((3, 45))))
    logits = torch.zeros(2, 3, 48)
    with torch.inference_mode(), CapturableGuard() as guard:
        guard.allow(frames.apply(lanes, logits))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("vocab", [512, 4099, 151_936])
def test_a_captured_graph_reads_the_masks_of_the_day(vocab: int) -> None:
    """Masks written between replays, from pinned memory in the stream's order, are those that the next replay applies."""
    cuda = torch.device("cuda")
    frames = MaskFrames(slots=2, width=3, vocab_size=vocab, device=cuda)
    table = RequestTable(slots=2, stop_ids=2, device=cuda)
    lanes = lanes_of(table, [1, 0])
    logits = torch.randn(2, 3, vocab + 7, device=cuda)
    with torch.inference_mode():
        frames.apply(lanes, logits)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = frames.apply(lanes, logits)
        for seed in range(5):
            allowed = random_allowed((2, 3, vocab), seed)
            frames.write(1, pack(allowed[0]))
            frames.write(0, pack(allowed[1]))
            graph.replay()
            assert torch.equal(found, torch.where(allowed.cuda(), logits[..., :vocab], -torch.inf))
