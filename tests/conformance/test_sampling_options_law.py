"""Emitted tokens follow the target's law after penalties, bias, minimum length and filters, in every position class.

Target and drafter are tables of logits by last token, so the probability of everything that one round may do can be written
down: which drafts are accepted, what a correction or a bonus token is. Thousands of rounds that differ in their seed only are
counted against it. Controls compare the same counts with laws in which one rule is missing; they must fail. Chain rounds and
allocated ones: these draw from the temperature alone, by Gumbel noise or from a bounded law, and verify a part of the drafts.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from markov import MarkovModel, random_table
from options_oracle import plain_law, shaped
from round_driver import Driver
from scipy.stats import chi2

from specdec.interfaces import Proposer
from specdec.round.allocated import AllocatedRound
from specdec.round.proposer import ChainProposer
from specdec.round.transaction import ChainRound
from specdec.sampling.sampler import RoundWords
from specdec.state.requests import SEED, Lanes

VOCAB = 7
SLOTS = 512
ROUNDS = 40
#: A true law fails once in a thousand seeds, and the seeds are fixed.
SIGNIFICANCE = 1e-3
PROMPT, OUTPUT = [1, 4, 4, 2], [3, 0, 3]
TARGET = random_table(VOCAB, 21, spread=1.2, dtype=torch.float32)
DRAFTER = (TARGET + random_table(VOCAB, 22, spread=0.8, dtype=torch.float32)).contiguous()
FILTERS: dict[str, Any] = {"temperature": 1.2, "min_p": 0.08, "top_k": 5, "top_p": 0.9}
PENALTIES: dict[str, Any] = {
    "presence_penalty": 0.5,
    "frequency_penalty": 0.75,
    "repetition_penalty": 1.5,
    "logit_bias": {5: 1.25, 2: -1.0},
}

Outcome = tuple[str, tuple[int, ...]]


class OneLaneDraws(AllocatedRound):
    """Many lanes that draw as a round of one lane does: Gumbel noise depends on seed and position, not on neighbours."""

    def proposer(self, lanes: Lanes, words: RoundWords) -> ChainProposer:
        shape, self.shape = self.shape, evolve(self.shape, batch=1, packed_rows=0)
        try:
            return super().proposer(lanes, words)
        finally:
            self.shape = shape


@frozen(kw_only=True)
class Kind:
    """A class of rounds. draft_rows: see ``Driver``. verified: how many drafts are verified by which share of the lanes, if all
    forecasts are the same: ties go to the smaller depth, then to the lower lane. proposals: filters that the draft law has."""

    rounds: type[ChainRound]
    draft_rows: int | None
    verified: dict[int, float]
    proposals: tuple[str, ...] = ("temperature",)

    def model(self, table: torch.Tensor, confidence: torch.Tensor) -> MarkovModel:
        forecasts = None if self.rounds is ChainRound else confidence
        return MarkovModel.build(TARGET, table, slots=SLOTS, confidence=forecasts)

    def driver(self, model: MarkovModel, drafter: Any = None) -> Driver:
        return Driver(model, drafter=drafter, kind=self.rounds, draft_rows=self.draft_rows)


KINDS = {
    "chain": Kind(rounds=ChainRound, draft_rows=None, verified={2: 1.0}, proposals=tuple(FILTERS)),
    "gumbel": Kind(rounds=OneLaneDraws, draft_rows=None, verified={2: 1.0}),
    "bounded": Kind(rounds=AllocatedRound, draft_rows=SLOTS + SLOTS // 4, verified={1: 0.75, 2: 0.25}),
}
SAME_FORECASTS = torch.full((VOCAB,), 0.9)


def law_after(tokens: tuple[int, ...], options: dict[str, Any], counted: tuple[int, ...] | None = None) -> np.ndarray:
    """Target law [V] of the token after pending token and drafts ``tokens``; counted: the drafts that penalties see."""
    last = tokens[-1] if tokens else OUTPUT[-1]
    output = [*OUTPUT, *(tokens if counted is None else counted)]
    filters = {name: options[name] for name in FILTERS if name in options}
    rest = {name: value for name, value in options.items() if name not in FILTERS}
    return plain_law(shaped(TARGET[last].tolist(), PROMPT, output, **rest), **filters)


def draft_law(tokens: tuple[int, ...], options: dict[str, Any], proposals: tuple[str, ...]) -> np.ndarray:
    """What the drafter draws from: these filters apply to it, the penalties do not."""
    filters = {name: options[name] for name in proposals if name in options}
    return plain_law(DRAFTER[tokens[-1] if tokens else OUTPUT[-1]].tolist(), **filters)


def outcome_law(kind: Kind, options: dict[str, Any], *, blind: bool = False) -> dict[Outcome, float]:
    """Probability of every (class, tokens) of one round. blind: penalties that do not see the drafts before a row."""
    law: dict[Outcome, float] = {}

    def add(label: str, tokens: tuple[int, ...], weight: float) -> None:
        law[label, tokens] = law.get((label, tokens), 0.0) + weight

    def go(prefix: tuple[int, ...], weight: float, verified: int) -> None:
        p = law_after(prefix, options, () if blind else None)
        if len(prefix) == verified:
            for token in range(VOCAB):
                add(f"bonus after {verified}", (*prefix, token), weight * p[token])
            return
        q = draft_law(prefix, options, kind.proposals)
        for token in range(VOCAB):
            add(f"corrected at {len(prefix)}", (*prefix, token), weight * max(p[token] - q[token], 0.0))
            if min(p[token], q[token]) > 0:
                go((*prefix, token), weight * min(p[token], q[token]), verified)

    for verified, share in kind.verified.items():
        go((), share, verified)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-9)
    return law


def fit(observed: Counter[Any], law: dict[Any, float]) -> float:
    """p-value of Pearson's chi-square; cells expected fewer than eight times are put together.

    0 if something impossible occurred.
    """
    total = sum(observed.values())
    mass = sum(law.values())
    if any(law.get(outcome, 0.0) == 0.0 for outcome in observed):
        return 0.0
    cells = [[0.0, 0.0]]
    for outcome, weight in sorted(law.items(), key=lambda item: -item[1]):
        if weight == 0.0:
            continue
        if cells[-1][0] >= 8:
            cells.append([0.0, 0.0])
        cells[-1][0] += weight / mass * total
        cells[-1][1] += observed[outcome]
    if cells[-1][0] < 8 and len(cells) > 1:
        last = cells.pop()
        cells[-1] = [cells[-1][0] + last[0], cells[-1][1] + last[1]]
    assert len(cells) > 2, "the law is too narrow to test"
    wanted, seen = np.array(cells).T
    return float(chi2.sf(((seen - wanted) ** 2 / wanted).sum(), len(cells) - 1))


def by_class(counts: Any) -> dict[str, Any]:
    split: dict[str, Any] = {}
    for (label, tokens), value in counts.items():
        split.setdefault(label, type(counts)())[tokens] = value
    return split


def fits(observed: Counter[Outcome], law: dict[Outcome, float]) -> dict[str, float]:
    """p-value of each class on its own, and of how often the classes occur."""
    seen, wanted = by_class(observed), by_class(law)
    found = {label: fit(counts, wanted.get(label, {})) for label, counts in seen.items()}
    sizes = {label: sum(counts.values()) for label, counts in wanted.items()}
    found["classes"] = fit(Counter({label: sum(counts.values()) for label, counts in seen.items()}), sizes)
    return found


def seeded_batches(model: MarkovModel, batches: int) -> Any:
    """After one admission of every slot: puts the state back and gives every slot a new seed, for each batch."""
    table = model.arena.requests
    buffers = [table.integers, table.options.counts, model.target.last]
    kept = [buffer.clone() for buffer in buffers]
    for batch in range(batches):
        for buffer, copy in zip(buffers, kept, strict=True):
            buffer.copy_(copy)
        table.integers[:SLOTS, SEED] = batch * SLOTS + torch.arange(SLOTS)
        yield


def play(
    kind: Kind, drafts: int, options: dict[str, Any], drafter: Any = None, table: torch.Tensor = DRAFTER
) -> Counter[Outcome]:
    """Rounds that follow ``PROMPT`` and ``OUTPUT``, each with its own seed."""
    model = kind.model(table, SAME_FORECASTS)
    driver = kind.driver(model, drafter(model.drafter) if drafter else None)
    observed: Counter[Outcome] = Counter()
    slots = list(range(SLOTS))
    with torch.inference_mode():
        for slot in slots:
            model.admit(slot, PROMPT, output=OUTPUT, budget=99, **options)
        for _ in seeded_batches(model, ROUNDS):
            for completion in driver.round(slots, drafts, extended=True):
                full = completion.accepted == completion.verified
                label = f"{'bonus after' if full else 'corrected at'} {completion.accepted}"
                observed[(label, completion.tokens)] += 1
    return observed


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def observed(kind: Kind) -> Counter[Outcome]:
    torch.set_num_threads(1)
    return play(kind, 2, {**FILTERS, **PENALTIES})


def test_every_position_class_follows_the_law(kind: Kind, observed: Counter[Outcome]) -> None:
    assert sum(observed.values()) >= 20_000
    law = outcome_law(kind, {**FILTERS, **PENALTIES})
    found = fits(observed, law)
    bonus = {f"bonus after {verified}" for verified in kind.verified}
    assert set(found) == {"corrected at 0", "corrected at 1", "classes"} | bonus
    assert min(found.values()) > SIGNIFICANCE, found
    # accepted drafts, by depth: every round that got past the draft, whatever followed
    for depth in range(2):
        accepted: Counter[tuple[int, ...]] = Counter()
        expected: dict[tuple[int, ...], float] = {}
        for counts, source in ((accepted, observed), (expected, law)):
            for (_, tokens), value in source.items():
                if len(tokens) > depth + 1:
                    counts[tokens[: depth + 1]] = counts.get(tokens[: depth + 1], 0) + value  # type: ignore[assignment,operator]
        assert fit(accepted, expected) > SIGNIFICANCE


@pytest.mark.parametrize(
    "change",
    [
        {"min_p": 0.0},
        {"top_k": 0},
        {"top_p": 1.0},
        {"temperature": 1.1},
        {"presence_penalty": 0.0},
        {"frequency_penalty": 0.5},
        {"frequency_penalty": 1.0},
        {"repetition_penalty": 1.2},
        {"logit_bias": {5: 1.25}},
        {"logit_bias": {}},
    ],
    ids=str,
)
def test_a_law_without_one_of_the_rules_fails(kind: Kind, observed: Counter[Outcome], change: dict[str, Any]) -> None:
    """The control of every option, where it matters: no class may be blind to it."""
    found = fits(observed, outcome_law(kind, {**FILTERS, **PENALTIES, **change}))
    assert min(found.values()) < SIGNIFICANCE**2


def test_penalties_that_do_not_see_the_drafts_fail(kind: Kind, observed: Counter[Outcome]) -> None:
    """The control of prefixes: row 0 sees no draft, so its corrections fit either law; later rows do not."""
    found = fits(observed, outcome_law(kind, {**FILTERS, **PENALTIES}, blind=True))
    assert found.pop("corrected at 0") > SIGNIFICANCE
    found.pop("classes")
    assert max(found.values()) < SIGNIFICANCE**2


class _WrongLaw:
    """Draws from the real law and keeps a flatter one."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, lanes: Lanes, draft_tokens: int, proposer: Proposer) -> torch.Tensor | None:
        forecasts = self.inner.propose(lanes, draft_tokens, proposer)
        proposer.probs.sqrt_()  # type: ignore[attr-defined]
        proposer.probs.div_(proposer.probs.sum(-1, keepdim=True))  # type: ignore[attr-defined]
        return forecasts


def test_a_wrong_draft_law_fails(kind: Kind) -> None:
    options = {**FILTERS, **PENALTIES}
    assert min(fits(play(kind, 2, options, _WrongLaw), outcome_law(kind, options)).values()) < SIGNIFICANCE**2


@pytest.mark.parametrize("drafts", range(4))
def test_a_bias_of_a_hundred_decides_every_class(drafts: int) -> None:
    """min-p with it: accepted, corrected and bonus tokens are the favoured one, and no other."""
    favoured = 6
    # proposed often enough that it is accepted, and rejected for others often enough
    table = torch.zeros(VOCAB, VOCAB)
    table[:, favoured] = 1.5
    found = play(KINDS["chain"], drafts, {"min_p": 0.2, "logit_bias": {favoured: 100.0}}, table=table)
    assert {token for _, tokens in found for token in tokens} == {favoured}
    assert len({label for label, _ in found}) == drafts + 1


@pytest.mark.parametrize(
    ("name", "drafts"), [*(("chain", drafts) for drafts in (0, 1, 3)), ("gumbel", 3), ("bounded", 2), ("bounded", 3)]
)
def test_first_tokens_and_rounds_together(name: str, drafts: int) -> None:
    """From the first token on: the joint law of up to three tokens, with stop ids that only the third may be. What is verified
    depends on what was drawn, by forecasts that follow tokens."""
    stops, depth = (0, 5), 3
    options: dict[str, Any] = {**FILTERS, **PENALTIES, "min_new_tokens": 2, "stops": stops}

    def joint(**changes: Any) -> dict[tuple[int, ...], float]:
        chosen = {**options, **changes}
        filters = {name: chosen.pop(name) for name in FILTERS}
        law: dict[tuple[int, ...], float] = {}

        def go(output: tuple[int, ...], weight: float) -> None:
            if len(output) == depth or (output and output[-1] in stops):
                law[output] = weight
                return
            raw = TARGET[output[-1] if output else PROMPT[-1]].tolist()
            for token, p in enumerate(plain_law(shaped(raw, PROMPT, output, **chosen), **filters)):
                if p > 0:
                    go((*output, token), weight * p)

        go((), 1.0)
        return law

    confidence = torch.rand(7, VOCAB, generator=torch.Generator().manual_seed(7))
    model = KINDS[name].model(DRAFTER, confidence)
    driver, slots, outcomes = KINDS[name].driver(model), list(range(SLOTS)), Counter()
    with torch.inference_mode():
        for slot in slots:
            model.admit(slot, PROMPT, budget=16, **options)
        for _ in seeded_batches(model, 24):
            driver.completions.clear()
            driver.start(slots, extended=True)
            for _ in range(depth - 1):
                # lanes that have enough simply go on; lanes that ended are dead
                driver.round(slots, drafts, extended=True)
            outcomes.update(tuple(driver.tokens(slot)[:depth]) for slot in slots)
    assert fit(outcomes, joint()) > SIGNIFICANCE
    assert fit(outcomes, joint(min_new_tokens=1)) < SIGNIFICANCE**2
    assert fit(outcomes, joint(min_new_tokens=3)) < SIGNIFICANCE**2
    assert fit(outcomes, joint(frequency_penalty=0.25)) < SIGNIFICANCE**2
