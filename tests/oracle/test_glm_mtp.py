"""MTP rows as a whole against the layer composed from transformers' modules, in float64, over complete sequences.

Feedback is the oracle's own: the target does not run, its feedback columns are written by the test.
"""

from __future__ import annotations

import pytest
import torch
from attrs import frozen
from glm_models import prepare, write_random_checkpoint
from glm_oracle import MtpOracle, TargetOracle
from prepared import Prepared
from recorder import Recorder

from specdec.state.requests import CONSUMED, FINISH, PENDING, Lanes

LENGTH = 140
VOCABULARY = 512
# The oracle is exact, so the error is that of the compared precision; logits have a spread of about one.
TOLERANCES = {"float32": 1e-5, "float64": 1e-12}


@frozen(kw_only=True, eq=False)
class Case:
    """A sequence, what the oracles say about it, and a checkpoint of the same weights."""

    directory: object
    oracle: MtpOracle
    tokens: torch.Tensor  # [LENGTH]
    feedback: torch.Tensor  # [LENGTH, H]
    logits: torch.Tensor  # [LENGTH − 1, V], row i drafts token i + 2
    dtype: str
    tolerance: float


@pytest.fixture(
    scope="module", params=[*((seed, "float32") for seed in range(4)), (0, "float64")], ids=lambda p: f"{p[1]}-{p[0]}"
)
def case(request, tmp_path_factory):
    seed, dtype = request.param
    oracle = MtpOracle(seed)
    tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(seed + 70))
    feedback = TargetOracle(seed).rows(tokens)
    return Case(
        directory=write_random_checkpoint(tmp_path_factory.mktemp("tiny"), seed),
        oracle=oracle,
        tokens=tokens,
        feedback=feedback,
        logits=oracle.rows(feedback[:-1], tokens[1:]).logits,
        dtype=dtype,
        tolerance=TOLERANCES[dtype],
    )


def open_model(case: Case, slots: int, ring: int = 12) -> Prepared:
    return prepare(case.directory, dtype=case.dtype, slots=slots, ring_extent=ring)


def start(model: Prepared, case: Case, slot: int, count: int, chunks: tuple[int, ...] = ()) -> None:
    """A slot whose request consumed the first ``count`` tokens, absorbed in chunks of the given sizes."""
    store = model.drafter.store
    store.reset(slot)
    reach = store.page_table.shape[1]
    store.set_pages(slot, range(1 + slot * reach, 1 + (slot + 1) * reach))
    rows, first = case.feedback.to(getattr(torch, case.dtype)), 0
    for size in [*chunks, count - 1 - sum(chunks)]:
        if size:
            last = first + size
            model.drafter.prefill(rows[first:last], case.tokens[first + 1 : last + 1], torch.tensor([slot]), first)
            first = last
    give_feedback(model, case, {slot: count - 1}, 1)
    model.target.store.selected[slot] = 0


def give_feedback(model: Prepared, case: Case, first: dict[int, int], rows: int) -> None:
    """The target's feedback columns as if it had verified ``rows`` inputs from position ``first`` of each slot."""
    for slot, position in first.items():
        model.target.store["feedback"][0, slot, :rows] = case.feedback[position : position + rows]


def lanes_of(model: Prepared, consumed: dict[int, int], tokens: torch.Tensor) -> Lanes:
    """Lanes whose requests consumed the first tokens of ``tokens``; the next one is pending."""
    for slot, count in consumed.items():
        model.arena.requests.integers[slot, CONSUMED] = count
        model.arena.requests.integers[slot, PENDING] = tokens[count]
        model.arena.requests.integers[slot, FINISH] = 0
    return model.arena.requests.lanes(torch.tensor(list(consumed)))


@torch.inference_mode()
def test_first_draft_after_every_prompt_length(case):
    model = open_model(case, 3)
    worst = 0.0
    for first in range(1, LENGTH - 3, 3):
        consumed = {slot: first + slot for slot in range(3)}
        for slot, count in consumed.items():
            start(model, case, slot, count, (count // 3, 2) if count > 5 else ())
        lanes = lanes_of(model, consumed, case.tokens)
        recorder = Recorder(torch.zeros(3, 1, dtype=torch.int64))
        model.drafter.propose(lanes, 1, recorder)
        rows = torch.tensor(list(consumed.values())) - 1
        worst = max(worst, (recorder.logits[0] - case.logits[rows]).abs().max().item())
        assert model.drafter.faults(lanes.slots).eq(0).all()
        # the round that proposed ends with one emitted token: row N−1 is history
        model.drafter.absorb(lanes, torch.zeros(3, 1, dtype=torch.int64), torch.ones_like(rows))
        model.drafter.commit(lanes, torch.ones_like(rows))
        assert model.drafter.store["rows"][0, lanes.slots, 0].tolist() == list(consumed.values())
    assert worst <= case.tolerance


@torch.inference_mode()
@pytest.mark.parametrize("consumed", [1, 2, 23, 60, 64, 131])
def test_recursive_rows_take_the_normed_output(case, consumed):
    depths = 7
    generator = torch.Generator().manual_seed(consumed)
    drafts = torch.randint(0, VOCABULARY, (depths,), generator=generator)
    model = open_model(case, 1)
    start(model, case, 0, consumed)
    recorder = Recorder(drafts.unsqueeze(0))
    model.drafter.propose(lanes_of(model, {0: consumed}, case.tokens), depths, recorder)
    ours = torch.cat(recorder.logits)
    history = case.feedback[:consumed], case.tokens[1 : consumed + 1]
    expected = case.oracle.proposals(*history, drafts.tolist())
    assert (ours - expected).abs().max() <= case.tolerance
    # carrying the vector before the last norm is another recursion, from depth 1 on
    wrong = case.oracle.proposals(*history, drafts.tolist(), before_norm=True)
    assert torch.equal(wrong[0], expected[0])
    assert ((ours - wrong)[1:].abs().amax(-1) > 0.01).all()


@torch.inference_mode()
@pytest.mark.parametrize(("seed", "ring"), [(0, 12), (1, 12), (2, 10)])
def test_rows_after_polluted_drafts_and_absorption(case, seed, ring):
    """Rounds of random drafts, of which a prefix of any length turns out right, in two lanes at once: absorption replaces what
    proposals left, whatever was accepted of them."""
    generator = torch.Generator().manual_seed(seed)
    model = open_model(case, 2, ring)
    drafter = model.drafter
    consumed = {0: 3, 1: 30}
    for slot, count in consumed.items():
        start(model, case, slot, count)
    worst, emissions, rounds = 0.0, set(), 0
    while max(consumed.values()) + 9 < LENGTH:
        drafts = int(torch.randint(0, 8, (), generator=generator))
        taken = torch.randint(1, drafts + 2, (2,), generator=generator)
        lanes = lanes_of(model, consumed, case.tokens)
        starts = torch.tensor(list(consumed.values()))
        # what the drafter is told it drew: its recursion is conditioned on wrong tokens even where the target accepts others
        recorder = Recorder(torch.randint(0, VOCABULARY, (2, drafts), generator=generator))
        drafter.propose(lanes, drafts, recorder)
        if drafts:
            worst = max(worst, (recorder.logits[0] - case.logits[starts - 1]).abs().max().item())
        give_feedback(model, case, consumed, drafts + 1)
        # feedback of inputs that were not consumed belongs to other tokens
        for lane, count in enumerate(taken.tolist()):
            model.target.store["feedback"][0, lane, count : drafts + 1] = 100.0
        follow = case.tokens[starts.unsqueeze(1) + torch.arange(1, drafts + 2)]
        drafter.absorb(lanes, torch.where(torch.arange(drafts + 1) < taken.unsqueeze(1), follow, -1), taken)
        drafter.commit(lanes, taken)
        model.target.store.selected[:2] = taken - 1
        consumed = {slot: count + int(taken[slot]) for slot, count in consumed.items()}
        assert drafter.store["rows"][0, :2, 0].tolist() == [count - 1 for count in consumed.values()]
        # the next interval, row N − 1, starts at the anchor plus the rows that stand, at least one
        stands = (taken - 1).clamp(min=1)
        assert (drafter.store["anchor"][0, :2, 0] + stands).tolist() == [count - 1 for count in consumed.values()]
        assert drafter.faults(lanes.slots).eq(0).all()
        emissions.add((drafts, *taken.tolist()))
        rounds += 1
    assert rounds > 15 and len(emissions) > 8
    assert worst <= case.tolerance
    # deeper rows read the same repaired history
    recorder = Recorder(torch.randint(0, VOCABULARY, (2, 7), generator=generator))
    drafter.propose(lanes_of(model, consumed, case.tokens), 7, recorder)
    for slot, count in consumed.items():
        history = case.feedback[:count], case.tokens[1 : count + 1]
        expected = case.oracle.proposals(*history, recorder.forced[slot].tolist())
        assert (torch.stack(recorder.logits)[:, slot] - expected).abs().max() <= case.tolerance


@torch.inference_mode()
def test_absorption_writes_what_drafting_writes(case):
    """Latents, group keys and ring of absorbed rows are those of the same rows run through the whole layer."""
    models = [open_model(case, 1) for _ in range(2)]
    for model in models:
        start(model, case, 0, 61)
    rows = case.feedback.to(getattr(torch, case.dtype))[60:67]
    positions, slot = torch.arange(60, 67), torch.tensor([0])
    models[0].drafter.absorb_rows(rows, case.tokens[61:68], models[0].drafter.plan(slot, positions.unsqueeze(0)))
    for row, step in zip(range(7), models[1].drafter.plan(slot, positions.unsqueeze(0)).steps(), strict=True):
        models[1].drafter.step(rows[row : row + 1], case.tokens[61 + row : 62 + row], step)
    for name in ("latents", "group_keys", "raw_keys", "raw_tags"):
        ours, theirs = (
            model.drafter.store[name][:, 1:] if name in ("latents", "group_keys") else model.drafter.store[name]
            for model in models
        )
        assert (ours - theirs).abs().max() <= case.tolerance
