"""Rounds that allocate their target rows: the emitted law holds, decisions look at nothing that was drawn after them, records
say what was offered and what was verified.

The model is a Markov chain, so every law can be written down. The counterexample is the published one: rounds per second of 1,
0.5 and 0.45 at one, two and three rows, a first draft that is accepted with probability 0.8. A rule that picks the best length
with the whole block in sight verifies a drafted A and not a drafted B, and emits A with probability 0.85 where the target says
0.7.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import sampling_oracle as oracle
import torch
from admission import admit_while_improving
from markov import MarkovModel, random_table
from torch import Tensor

from specdec.catalog import RoundShape
from specdec.round import allocated
from specdec.round.allocated import AllocatedRound
from specdec.round.allocation import admit_top
from specdec.round.completion import Completion
from specdec.round.proposer import ChainProposer
from specdec.round.temperature_proposers import BoundedProposer, GumbelProposer
from specdec.round.transaction import ChainRound
from specdec.testing import CapturableGuard
from specdec.testing.conformance.oracles import chi_square
from specdec.testing.scripted import ScriptedDrafter

LANES, DEPTH = 64, 3
SIGNIFICANCE = 1e-3
SPEED = {1: 1.0, 2: 0.5, 3: 0.45}

Rule = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def exhaustive(survival: Tensor, ceilings: Tensor, live: Tensor, rows: int) -> Tensor:
    """The biased rule: for each lane the length of greatest throughput, all of the block in sight."""
    expected = torch.cat([torch.ones_like(survival[:, :1]), 1 + survival.cumsum(1)], dim=1)
    speed = torch.tensor([SPEED[length + 1] for length in range(expected.shape[1])])
    return torch.minimum((expected * speed).argmax(1), ceilings) * live


def stopping(survival: Tensor, ceilings: Tensor, live: Tensor, rows: int) -> Tensor:
    """The same objective, admitted draft by draft."""
    lengths = []
    for row, ceiling in zip(survival.tolist(), ceilings.tolist(), strict=True):
        forecasts = [after / before if before else 0.0 for before, after in zip([1.0, *row], row)]
        lengths += admit_while_improving([forecasts], SPEED, [ceiling]).lengths
    return torch.tensor(lengths) * live


def build(model: MarkovModel, drafts: int, *, lanes: int, rows: int = 0, drafter: object = None) -> AllocatedRound:
    shape = RoundShape(batch=lanes, draft_tokens=drafts, verify_width=drafts + 1, packed_rows=rows)
    return AllocatedRound(
        target=model.target,
        drafter=drafter or model.drafter,
        shape=shape,
        arena=model.arena,
        max_draft_tokens=7,
    )


def records(model: MarkovModel, number: int, slots: Sequence[int]) -> list[Completion]:
    return [Completion.parse(record) for record in model.arena.read_frame(number % 2, list(slots))]


def outcomes(model: MarkovModel, drafts: int, rows: int, batches: int, lanes: int = LANES) -> list[tuple[int, ...]]:
    """First three tokens of many requests, all after token 0."""
    round_, found = build(model, drafts, lanes=lanes, rows=rows), []
    slots = list(range(lanes))
    for batch in range(batches):
        tokens: dict[int, list[int]] = {slot: [] for slot in slots}
        for slot in slots:
            model.admit(slot, [0], output=[0], budget=30, seed=batch * lanes + slot)
        number = 0
        while any(len(emitted) < DEPTH for emitted in tokens.values()):
            round_.submit(slots, [drafts] * lanes, number)
            for done in records(model, number, slots):
                tokens[done.slot] += done.tokens
            number += 1
        found += [tuple(emitted[:DEPTH]) for emitted in tokens.values()]
    return found


def fit(found: list[tuple[int, ...]], table: Tensor) -> float:
    """p-value of the outcomes under the chain with logits ``table``, started at token 0."""
    vocab, law = table.shape[0], table.double().softmax(-1)
    joint = law[0]
    for _ in range(DEPTH - 1):
        joint = (joint.view(-1, vocab, 1) * law).flatten()
    numbers = [sum(token * vocab ** (DEPTH - 1 - place) for place, token in enumerate(row)) for row in found]
    return chi_square(numbers, joint)


@pytest.fixture
def counterexample() -> MarkovModel:
    """Target (0.7, 0.3), drafts (0.5, 0.5): c1 = 0.8, and c2 is high after A, low after B."""
    target = torch.tensor([[0.7, 0.3]] * 2, dtype=torch.float64).log()
    confidence = torch.tensor([[0.8, 0.8], [0.9, 0.1]])
    return MarkovModel.build(target, torch.zeros(2, 2, dtype=torch.float64), slots=LANES, confidence=confidence)


@torch.inference_mode()
def test_a_rule_with_the_whole_block_in_sight_is_biased(
    counterexample: MarkovModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the first token is A with probability 0.85."""
    monkeypatch.setattr(allocated, "admit_top", exhaustive)
    found = outcomes(counterexample, 2, 0, batches=60)
    share = sum(row[0] == 0 for row in found) / len(found)
    assert share == pytest.approx(0.85, abs=0.02)
    assert fit(found, counterexample.target.table) < SIGNIFICANCE**2


@torch.inference_mode()
@pytest.mark.parametrize(
    ("rule", "rows"), [(stopping, 0), *((admit_top, rows) for rows in (0, LANES, LANES + 20, 2 * LANES))]
)
def test_the_emitted_law_is_the_targets(
    counterexample: MarkovModel, monkeypatch: pytest.MonkeyPatch, rule: Rule, rows: int
) -> None:
    """Top-P at every capacity, lanes competing for rows, and admission by throughput that stops at the first loss."""
    monkeypatch.setattr(allocated, "admit_top", rule)
    assert fit(outcomes(counterexample, 2, rows, batches=60), counterexample.target.table) > SIGNIFICANCE


@torch.inference_mode()
@pytest.mark.parametrize("rows", [LANES + 40, 2 * LANES])
def test_the_law_holds_where_forecasts_follow_tokens(rows: int) -> None:
    """Random chains of five tokens, forecasts that differ by token and depth, three drafts, capacity for part of them."""
    target, drafter = random_table(5, 1, spread=1.0), random_table(5, 2, spread=1.0)
    confidence = torch.rand(3, 5, generator=torch.Generator().manual_seed(7))
    model = MarkovModel.build(target, drafter, slots=LANES, confidence=confidence)
    assert fit(outcomes(model, 3, rows, batches=60), target) > SIGNIFICANCE


def _sampled(monkeypatch: pytest.MonkeyPatch, lanes: int, flat: bool) -> float:
    """p-value of a model whose rounds of several lanes draft from two tokens of five. flat: what is kept is not what was drawn
    from, but the mean of it and a uniform law."""

    def draw(self: ChainProposer, depth: int, logits: Tensor) -> Tensor:
        token = ChainProposer.draw(self, depth, logits)
        if flat:
            self.probs[:, depth] = (self.probs[:, depth] + 1 / self.vocab_size) / 2
        return token

    for proposer, options in ((BoundedProposer, {"bound": 2}), (GumbelProposer, {})):
        kind = type(proposer.__name__, (proposer,), {"draw": draw})
        monkeypatch.setattr(allocated, proposer.__name__, partial(kind, **options))
    target, drafter = random_table(5, 1, spread=1.0), random_table(5, 2, spread=1.5)
    confidence = torch.rand(3, 5, generator=torch.Generator().manual_seed(7)) * 0.5 + 0.5
    model = MarkovModel.build(target, drafter, slots=LANES, confidence=confidence)
    rows = 2 * lanes if lanes > 1 else 0
    found = outcomes(model, 3, rows, batches=(60 * LANES if lanes > 1 else 1200) // lanes, lanes=lanes)
    return fit(found, target)


@torch.inference_mode()
@pytest.mark.parametrize("lanes", [LANES, 1], ids=["bounded", "whole vocabulary"])
def test_the_law_holds_for_the_proposals_of_every_batch(monkeypatch: pytest.MonkeyPatch, lanes: int) -> None:
    """A bound that most tokens are outside of, and the Gumbel draw of a single lane. What a bounded law never proposes comes from
    corrections alone."""
    assert _sampled(monkeypatch, lanes, flat=False) > SIGNIFICANCE


@torch.inference_mode()
@pytest.mark.parametrize("lanes", [LANES, 1], ids=["bounded", "whole vocabulary"])
def test_a_kept_law_that_was_not_drawn_from_is_noticed(monkeypatch: pytest.MonkeyPatch, lanes: int) -> None:
    """The control."""
    assert _sampled(monkeypatch, lanes, flat=True) < SIGNIFICANCE**2


def _verified(model: MarkovModel, script: dict[int, list[int]], rows: int, lanes: int, drafts: int) -> list[int]:
    """Drafts verified per lane when the drafter draws what the script says."""
    scripted = ScriptedDrafter(model.drafter, slots=lanes, max_draft_tokens=7)
    scripted.write(script)
    for slot in range(lanes):
        model.admit(slot, [slot % 5], output=[slot % 5], budget=30, seed=slot)
    build(model, drafts, lanes=lanes, rows=rows, drafter=scripted).submit(list(range(lanes)), [drafts] * lanes, 0)
    return [done.verified for done in records(model, 0, range(lanes))]


def _changed_admissions(rows: int, lanes: int, drafts: int) -> int:
    """How many decisions change that were made before the token was drawn that changes."""
    model = MarkovModel.build(
        random_table(5, 1),
        random_table(5, 2),
        slots=lanes,
        confidence=torch.rand(drafts, 5, generator=torch.Generator().manual_seed(7)) * 0.6 + 0.4,
    )
    draws = torch.randint(0, 5, (lanes, drafts), generator=torch.Generator().manual_seed(9)).tolist()
    before = _verified(model, dict(enumerate(draws)), rows, lanes, drafts)
    assert 0 < sum(before) < lanes * drafts
    changed = 0
    for lane in range(lanes):
        for depth in range(drafts):
            other = [list(row) for row in draws]
            other[lane][depth] = (other[lane][depth] + 1) % 5
            after = _verified(model, dict(enumerate(other)), rows, lanes, drafts)
            changed += min(after[lane], depth + 1) != min(before[lane], depth + 1)
            if depth == drafts - 1:
                changed += after != before
    return changed


@torch.inference_mode()
def test_a_drawn_token_changes_no_decision_made_before_it() -> None:
    """Every draft of every lane in turn is another token: the drafts up to it are admitted as before, and behind the last
    draft nothing changes anywhere."""
    assert _changed_admissions(rows=11, lanes=4, drafts=4) == 0


@torch.inference_mode()
def test_a_rule_that_looks_ahead_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: survival of each draft taken from the forecast behind it."""

    def ahead(survival: Tensor, ceilings: Tensor, live: Tensor, rows: int) -> Tensor:
        shifted = torch.cat([survival[:, 1:], survival[:, -1:] * 0.5], dim=1)
        return admit_top(shifted, ceilings, live, rows)

    monkeypatch.setattr(allocated, "admit_top", ahead)
    assert _changed_admissions(rows=11, lanes=4, drafts=4) > 0


@pytest.fixture
def model() -> MarkovModel:
    confidence = torch.rand(7, 5, generator=torch.Generator().manual_seed(7)) * 0.5 + 0.5
    return MarkovModel.build(random_table(5, 1), random_table(5, 2), slots=4, confidence=confidence)


@torch.inference_mode()
def test_records_say_what_was_offered_and_what_was_verified(model: MarkovModel) -> None:
    """Offered is the ceiling, cut by the budget; verified follows from the published forecasts by the rule in plain Python."""
    drafts, rows = 5, 13
    round_ = build(model, drafts, lanes=4, rows=rows)
    ceilings, budgets = [5, 2, 5, 0], [30, 30, 4, 30]
    for slot in range(4):
        model.admit(slot, [slot], output=[slot], budget=budgets[slot], seed=slot)
    round_.submit(list(range(4)), ceilings, 0)
    done = records(model, 0, range(4))
    assert [record.offered for record in done] == [5, 2, 2, 0]
    forecasts = model.arena.read_forecasts(0, list(range(4)))
    pairs = []
    for lane, row in enumerate(forecasts):
        survival = 1.0
        for depth in range(done[lane].offered):
            survival *= row[depth]
            pairs.append((-survival, depth, lane))
    taken = [lane for _, _, lane in sorted(pairs)[: rows - 4]]
    assert [record.verified for record in done] == [taken.count(lane) for lane in range(4)]
    assert sum(record.verified for record in done) == rows - 4
    for record in done:
        assert record.offered >= record.verified >= record.accepted >= record.emitted - 1
        assert record.verify_width == drafts + 1
    assert all(value != value for row in forecasts for value in row[drafts:]), "no forecasts beyond the round's depth"


@torch.inference_mode()
@pytest.mark.parametrize(("ceilings", "rows"), [([0, 0, 0, 0], 0), ([5, 5, 5, 5], 4)], ids=["no ceiling", "no room"])
def test_a_round_that_may_verify_nothing_emits_one_token(model: MarkovModel, ceilings: list[int], rows: int) -> None:
    """Pending tokens alone: each emitted token is drawn from the target's row with the last word of five rejected drafts, and
    forecasts are published."""
    for slot in range(4):
        model.admit(slot, [slot], output=[slot], budget=30, seed=slot)
    round_, pending = build(model, 5, lanes=4, rows=rows), [0, 1, 2, 3]
    for number in range(4):
        round_.submit(list(range(4)), ceilings, number)
        done = records(model, number, range(4))
        assert all((record.verified, record.accepted, record.emitted) == (0, 0, 1) for record in done)
        assert [record.offered for record in done] == ceilings
        forecasts = model.arena.read_forecasts(number % 2, list(range(4)))
        assert all(0 < value < 1 for row in forecasts for value in row[:5])
        for slot, record in enumerate(done):
            law = model.target.table[pending[slot]].softmax(-1).float().numpy()
            # one consumed token before the first round, one more after each
            assert list(record.tokens) == [oracle.draw(law, oracle.draws(slot, 9 * (1 + number), 7)[6])]
        pending = [record.tokens[0] for record in done]


@torch.inference_mode()
def test_with_room_for_all_it_judges_as_the_chain_round_does(model: MarkovModel) -> None:
    """Same drafts, same words: same acceptance, corrections and bonus tokens."""
    likely, seen = model.target.table.argmax(-1).tolist(), []
    for kind in (AllocatedRound, ChainRound):
        scripted = ScriptedDrafter(model.drafter, slots=4, max_draft_tokens=7)
        shape = RoundShape(batch=4, draft_tokens=4, verify_width=5)
        round_ = kind(target=model.target, drafter=scripted, shape=shape, arena=model.arena, max_draft_tokens=7)
        for slot in range(4):
            model.admit(slot, [slot], output=[slot], budget=30, seed=slot)
        found: list[list[Completion]] = []
        pending = [0, 1, 2, 3]
        for number in range(5):
            chains = {slot: [pending[slot]] for slot in range(4)}
            for chain in chains.values():
                for _ in range(4):
                    chain.append(likely[chain[-1]])
            scripted.write({slot: chain[1:] for slot, chain in chains.items()})
            round_.submit(list(range(4)), [4, 3, 4, 4], number)
            found.append(records(model, number, range(4)))
            pending = [record.pending for record in found[-1]]
        seen.append(found)
    assert seen[0] == seen[1]
    assert sum(record.accepted for found in seen[0] for record in found) > 5


@torch.inference_mode()
@pytest.mark.parametrize("lanes", [1, 4])
def test_an_allocated_round_is_capturable(model: MarkovModel, lanes: int) -> None:
    """One dead lane, temperatures, fewer rows than drafts."""
    shape = RoundShape(batch=lanes, draft_tokens=5, verify_width=6, packed_rows=3 * lanes)
    round_ = AllocatedRound(
        target=model.target,
        drafter=model.drafter,
        shape=shape,
        arena=model.arena,
        max_draft_tokens=7,
        temperatures=[1.5] * 5,
    )
    for slot in range(lanes):
        model.admit(slot, [slot], output=[slot], budget=30, seed=slot)
    slots = [*range(lanes - 1), 4] if lanes > 1 else [0]
    round_.submit(slots, [5] * lanes, 0, extended=True)
    with CapturableGuard() as guard:
        round_.run(extended=True)
    assert guard.operations > 20


@torch.inference_mode()
def test_temperatures_change_what_is_published_and_admitted(model: MarkovModel) -> None:
    """A temperature below 1 makes forecasts above one half surer."""
    published, verified = [], []
    for temperatures in (None, [0.25] * 3 + [4.0] * 2):
        shape = RoundShape(batch=1, draft_tokens=5, verify_width=6)
        round_ = AllocatedRound(
            target=model.target,
            drafter=model.drafter,
            shape=shape,
            arena=model.arena,
            max_draft_tokens=7,
            temperatures=temperatures,
        )
        model.admit(0, [1], output=[1], budget=30, seed=3)
        round_.submit([0], [5], 0)
        published.append(torch.tensor(model.arena.read_forecasts(0, [0])[0][:5], dtype=torch.float64))
        verified.append(records(model, 0, [0])[0].verified)
    scaled = torch.logit(published[0]) / torch.tensor([0.25] * 3 + [4.0] * 2)
    torch.testing.assert_close(published[1], torch.sigmoid(scaled), rtol=1e-4, atol=1e-6)
    assert verified == [5, 5]


def test_rounds_that_cannot_allocate_are_refused(model: MarkovModel) -> None:
    with pytest.raises(ValueError, match="width one"):
        build(model, 0, lanes=1)
    shape = RoundShape(batch=1, draft_tokens=3, verify_width=4)
    common = {"target": model.target, "drafter": model.drafter, "shape": shape, "max_draft_tokens": 7}
    with pytest.raises(ValueError, match="temperatures"):
        AllocatedRound(**common, arena=model.arena, temperatures=[1.0])
    silent = MarkovModel.build(random_table(5, 1), random_table(5, 2))
    with pytest.raises(ValueError, match="confidence_width"):
        AllocatedRound(**common, arena=silent.arena)
