"""MTP rows as a whole against the layer composed from transformers' modules, teacher-forced over complete sequences."""

from __future__ import annotations

import pytest
import torch
from attrs import frozen
from mtp_oracle import MtpOracle
from prepared import Prepared
from qwen_models import prepare, write_random_checkpoint
from recorder import Recorder

from specdec.state.requests import CONSUMED, PENDING, Lanes

LENGTH = 100
EOS = 500
VOCABULARY = 512
# The oracle is exact, so the error is that of the compared precision; logits have a spread of about 0.7.
TOLERANCES = {"float32": 2e-5, "float64": 1e-12}


@frozen(kw_only=True, eq=False)
class Case:
    """A sequence, what the oracle says about it, and a checkpoint of the same weights."""

    directory: object
    oracle: MtpOracle
    tokens: torch.Tensor  # [LENGTH]
    feedback: torch.Tensor  # [LENGTH, D]
    logits: torch.Tensor  # [LENGTH − 1, V], row i drafts token i + 2
    dtype: str
    tolerance: float


@pytest.fixture(scope="module", params=[(0, "float32"), (1, "float64")], ids=lambda param: param[1])
def case(request, tmp_path_factory):
    seed, dtype = request.param
    oracle = MtpOracle(seed)
    tokens = torch.randint(0, 500, (LENGTH,), generator=torch.Generator().manual_seed(seed + 70))
    tokens[[20, 61, 62]] = EOS
    feedback = oracle.feedback(tokens)
    return Case(
        directory=write_random_checkpoint(tmp_path_factory.mktemp("tiny"), seed),
        oracle=oracle,
        tokens=tokens,
        feedback=feedback,
        logits=oracle.rows(feedback[:-1], tokens[1:]).logits,
        dtype=dtype,
        tolerance=TOLERANCES[dtype],
    )


def lanes_of(model: Prepared, consumed: dict[int, int], tokens: torch.Tensor) -> Lanes:
    """Lanes whose requests consumed the first tokens of ``tokens``; the next one is pending."""
    for slot, count in consumed.items():
        model.arena.requests.integers[slot, CONSUMED] = count
        model.arena.requests.integers[slot, PENDING] = tokens[count]
    return model.arena.requests.lanes(torch.tensor(list(consumed)))


def wrong(token: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A token that is not ``token``."""
    return (token + torch.randint(1, VOCABULARY, token.shape, generator=generator)) % VOCABULARY


@torch.inference_mode()
def test_first_draft_after_every_prompt_length(case):
    model = prepare(case.directory, dtype=case.dtype, slots=3)
    worst = 0.0
    for first in range(1, LENGTH - 1, 3):
        consumed = {slot: first + slot for slot in range(3) if first + slot < LENGTH}
        for slot, count in consumed.items():
            model.admit(slot, case.tokens[:count].tolist(), chunks=(count // 3,) if count > 5 else ())
        lanes = lanes_of(model, consumed, case.tokens)
        recorder = Recorder(torch.zeros(len(consumed), 1, dtype=torch.int64))
        model.drafter.propose(lanes, 1, recorder)
        rows = torch.tensor(list(consumed.values())) - 1
        worst = max(worst, (recorder.logits[0] - case.logits[rows]).abs().max().item())
        assert model.drafter.faults(lanes.slots).eq(0).all() and model.target.faults(lanes.slots).eq(0).all()
        # the round that proposed ends with one emitted token: row N−1 is history
        model.drafter.absorb(lanes, torch.zeros(len(consumed), 1, dtype=torch.int64), torch.ones_like(rows))
        model.drafter.commit(lanes, torch.ones_like(rows))
        assert model.drafter.store["rows"][0, lanes.slots, 0].tolist() == list(consumed.values())
    assert worst <= case.tolerance


@torch.inference_mode()
@pytest.mark.parametrize("consumed", [1, 2, 23, 60, 64, 91])
def test_recursive_rows_follow_the_multi_stream_residual(case, consumed):
    depths = 7
    generator = torch.Generator().manual_seed(consumed)
    drafts = torch.randint(0, VOCABULARY, (depths,), generator=generator)
    model = prepare(case.directory, dtype=case.dtype, slots=1)
    model.admit(0, case.tokens[:consumed].tolist())
    recorder = Recorder(drafts.unsqueeze(0))
    model.drafter.propose(lanes_of(model, {0: consumed}, case.tokens), depths, recorder)
    ours = torch.cat(recorder.logits)
    history = case.feedback[:consumed], case.tokens[1 : consumed + 1]
    expected = case.oracle.proposals(*history, drafts.tolist())
    assert (ours - expected).abs().max() <= case.tolerance
    # a collapsed vector in every stream is another recursion, from depth 1 on
    repeated = case.oracle.proposals(*history, drafts.tolist(), repeat_vector=True)
    assert torch.equal(repeated[0], expected[0])
    assert ((ours - repeated)[1:].abs().amax(-1) > 0.1).all()


@torch.inference_mode()
@pytest.mark.parametrize("seed", range(3))
def test_first_draft_after_rounds_with_rejected_drafts(case, seed):
    """Every round drafts and verifies a correct prefix followed by wrong tokens, at widths 1 to 8, in two lanes at once."""
    generator = torch.Generator().manual_seed(seed)
    model = prepare(case.directory, dtype=case.dtype, slots=2)
    consumed = {0: 3, 1: 17}
    for slot, count in consumed.items():
        model.admit(slot, case.tokens[:count].tolist())
    target, drafter = model.target, model.drafter
    worst, emissions = 0.0, set()
    while max(consumed.values()) + 9 < LENGTH:
        drafts = int(torch.randint(0, 8, (), generator=generator))
        taken = torch.randint(1, drafts + 2, (2,), generator=generator)
        lanes = lanes_of(model, consumed, case.tokens)
        starts = torch.tensor(list(consumed.values()))
        follow = case.tokens[starts.unsqueeze(1) + torch.arange(1, drafts + 2)]
        right = torch.arange(drafts) < (taken - 1).unsqueeze(1)
        proposed = torch.where(right, follow[:, :drafts], wrong(follow[:, :drafts], generator))
        recorder = Recorder(proposed)
        drafter.propose(lanes, drafts, recorder)
        if drafts:
            worst = max(worst, (recorder.logits[0] - case.logits[starts - 1]).abs().max().item())
        target.verify(torch.cat([lanes.pending.unsqueeze(1), proposed], dim=1), lanes)
        emitted = torch.where(torch.arange(drafts + 1) < taken.unsqueeze(1), follow, -1)
        drafter.absorb(lanes, emitted, taken)
        drafter.commit(lanes, taken)
        target.commit(lanes, taken)
        consumed = {slot: count + int(taken[slot]) for slot, count in consumed.items()}
        assert drafter.store["rows"][0, :2, 0].tolist() == [count - 1 for count in consumed.values()]
        # selector protocol: the next interval, row N − 1, starts at the anchor plus the rows that stand, at least one
        stands = (taken - 1).clamp(min=1)
        assert (drafter.store["anchor"][0, :2, 0] + stands).tolist() == [count - 1 for count in consumed.values()]
        assert (drafter.faults(lanes.slots) + target.faults(lanes.slots)).eq(0).all()
        emissions.add((drafts, *taken.tolist()))
    assert len(emissions) > 5
    assert worst <= case.tolerance
    # deeper rows read the same repaired history
    recorder = Recorder(torch.randint(0, VOCABULARY, (2, 7), generator=generator))
    drafter.propose(lanes_of(model, consumed, case.tokens), 7, recorder)
    count = consumed[1]
    expected = case.oracle.proposals(case.feedback[:count], case.tokens[1 : count + 1], recorder.forced[1].tolist())
    assert (torch.stack(recorder.logits)[:, 1] - expected).abs().max() <= case.tolerance
