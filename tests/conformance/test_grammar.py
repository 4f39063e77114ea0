"""Rounds under a grammar: one mask for every verified row, the emitted law is the masked one, forbidden drafts are rejections.

The model is a Markov chain over single letters, so the law under a grammar can be written down. The grammar changes what it
allows after x: before it a and b, behind it c and d.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from markov import MarkovModel, random_table
from pieces import Pieces
from prepared import Prepared
from round_driver import Driver
from torch import Tensor

from specdec.catalog import RoundShape
from specdec.preparation import PreparationConfig
from specdec.recipes import recipe_book
from specdec.round.allocated import AllocatedRound
from specdec.round.completion import Completion, Finish
from specdec.round.transaction import ChainRound
from specdec.sampling.law import LawParams
from specdec.sampling.sampler import ReferenceSampler
from specdec.serving.grammar import Grammar, GrammarCompiler, GrammarState
from specdec.serving.model import LoadedModel
from specdec.testing import CapturableGuard
from specdec.testing.conformance.oracles import chi_square
from specdec.testing.scripted import ScriptedDrafter

LETTERS = Pieces([b"a", b"b", b"c", b"d", b"x"])
A, B, C, D, X, STOP = range(6)
#: Two ids without text, so that the model's vocabulary is wider than the tokenizer's.
VOCAB = 8
TEXT = "abcdx"
PATTERN = "[ab]*x[cd]*"
BEFORE, AFTER = {A, B, X}, {C, D, STOP}
SLOTS, DRAFTS, DEPTH = 64, 3, 3
SIGNIFICANCE = 1e-3


def allowed(prefix: Sequence[int]) -> set[int]:
    """The oracle: what PATTERN allows after a prefix."""
    return AFTER if X in prefix else BEFORE


class Run:
    """Requests under PATTERN on one model, driven as a scheduler would: masks of each row, a round, then the emitted tokens."""

    compiler = GrammarCompiler(LETTERS.tokenizer, VOCAB)

    def __init__(
        self,
        *,
        seed: int = 0,
        kind: type[ChainRound] = ChainRound,
        pattern: str = PATTERN,
        table: Tensor | None = None,
        slots: int = SLOTS,
    ) -> None:
        confidence = torch.full((VOCAB,), 0.9) if kind is AllocatedRound else None
        self.model = MarkovModel.build(
            random_table(VOCAB, seed, spread=1.2) if table is None else table,
            random_table(VOCAB, seed + 1),
            slots=slots,
            confidence=confidence,
            grammar=True,
        )
        self.script = ScriptedDrafter(self.model.drafter, slots=slots, max_draft_tokens=7)
        self.driver = Driver(self.model, drafter=self.script, kind=kind)
        self.pattern = pattern
        self.states: dict[int, GrammarState] = {}
        self.accepted: set[int] = set()
        self.reuse = False
        self.extended = False

    @property
    def masks(self) -> Any:
        assert self.model.arena.masks is not None
        return self.model.arena.masks

    def admit(self, slot: int, *, output: Sequence[int] = (), stops: Sequence[int] = (STOP,), **options: Any) -> None:
        self.model.admit(slot, [A], output=output, stops=stops, **options)
        self.states[slot] = self.compiler.state(
            Grammar(kind="regex", text=self.pattern),
            stop_ids=stops,
            output=output,
            min_new_tokens=options.get("min_new_tokens", 0),
        )

    def _take(self, completions: Sequence[Completion]) -> None:
        for done in completions:
            taken = [self.states[done.slot].accept(token) for token in done.tokens]
            assert self.reuse or all(taken)

    def start(self, slots: list[int]) -> list[Completion]:
        for slot in slots:
            self.masks.write(slot, self.states[slot].rows())
        completions = self.driver.start(slots, masked=True, extended=self.extended)
        self._take(completions)
        return completions

    def round(self, slots: list[int], proposals: dict[int, list[int]], drafts: int = DRAFTS) -> list[Completion]:
        """proposals: drafts by slot, as many as the round has. All of them are verified, forbidden or not."""
        self.script.write(proposals)
        for slot in slots:
            rows = self.states[slot].rows(proposals[slot])
            # the fault: the mask of the round's beginning for every row
            self.masks.write(slot, [rows[0]] * (drafts + 1) if self.reuse else rows)
        completions = self.driver.round(slots, drafts, masked=True, extended=self.extended)
        self._take(completions)
        return completions


def text_of(tokens: Sequence[int]) -> str:
    return "".join(TEXT[token] for token in tokens if token != STOP)


# --- rows -----------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
@pytest.mark.parametrize("kind", [ChainRound, AllocatedRound])
@pytest.mark.parametrize(
    "drafts", [[A, X, B, C], [A, X, C, D], [X, C, C, STOP], [A, B, A, B], [C, X, C, C]], ids=text_of
)
def test_b20_every_row_is_masked_by_its_own_prefix(kind: type[ChainRound], drafts: list[int]) -> None:
    """A mode change inside the drafts: what the law of each row is made from, bonus row included, row by row."""
    seen: list[Tensor] = []

    class Watched(ReferenceSampler):
        def law(self, logits: Tensor, params: LawParams, vocab_size: int | None = None) -> Tensor:
            seen.append(logits.clone())
            return super().law(logits, params, vocab_size)

    run = Run(kind=kind)
    run.admit(0, output=[A])
    run.model.arena.sampler = Watched()
    (done,) = run.round([0], {0: drafts}, drafts=4)
    (logits,) = seen
    assert logits.shape == (1, 5, VOCAB)
    judged = 0
    for row in range(5):
        prefix = drafts[:row]
        if all(draft in allowed(drafts[:place]) for place, draft in enumerate(prefix)) and STOP not in prefix:
            finite = {token for token in range(VOCAB) if logits[0, row, token] > -torch.inf}
            assert finite == allowed(prefix), f"row {row}"
            judged += 1
    assert judged == {"ab": 5, "ax": 3, "xc": 4, "cx": 1}[text_of(drafts)[:2]] + (drafts == [A, X, C, D]) * 2
    assert done.verified == 4 and done.finish in (Finish.NONE, Finish.STOP)


@torch.inference_mode()
@pytest.mark.parametrize("greedy", [True, False])
def test_b22_drafts_that_are_forbidden_at_the_second_place_are_silent_rejections(
    greedy: bool, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """A drafter that never learns: every round emits, and the output is a text of the grammar."""
    caplog.set_level(logging.DEBUG)
    run, slots, accepted = Run(seed=3), list(range(16)), set()
    for slot in slots:
        run.admit(slot, budget=24, seed=slot, greedy=greedy)
    run.start(slots)
    for _ in range(24):
        running = run.driver.running(slots)
        if not running:
            break
        for done in run.round(running, {slot: [A, C, A] if not slot % 2 else [C, A, C] for slot in running}):
            assert done.emitted >= 1
            assert done.finish in (Finish.NONE, Finish.STOP, Finish.LENGTH)
            # a and c are never both allowed
            assert done.accepted <= 1
            accepted.add(done.accepted)
    assert not run.driver.running(slots) and (greedy or accepted == {0, 1})
    for slot in slots:
        last, text = run.driver.completions[slot][-1], text_of(run.driver.tokens(slot))
        assert re.fullmatch(PATTERN, text) or (last.finish is Finish.LENGTH and set(text) <= {"a", "b"})
        assert run.states[slot].tokens == last.generated == len(run.driver.tokens(slot))
    assert not caplog.records and capfd.readouterr() == ("", "")


@torch.inference_mode()
def test_b21_drafts_of_an_earlier_state_are_rejected_like_any_other() -> None:
    """Preempted between draft and verification, resumed in another state: rows follow the new state, the old drafts die."""
    run = Run(seed=5)
    for stale, output, survivors in (([A, B, A], [A, X], 0), ([C, D, C], [A], 0), ([X, A, C], [A, B], 1)):
        for seed in range(20):
            run.admit(0, output=output, budget=30, seed=seed)
            before = run.states[0].tokens
            (done,) = run.round([0], {0: stale})
            assert done.finish in (Finish.NONE, Finish.STOP) and done.emitted >= 1
            assert done.accepted <= survivors
            assert run.states[0].tokens == before + done.emitted
            # drafts of that round are gone: the next one has its own
            if done.finish is Finish.NONE:
                good = [C, D, C] if X in (*output, *done.tokens) else [A, B, A]
                (done,) = run.round([0], {0: good})
                assert done.emitted >= 1


@torch.inference_mode()
def test_a_slot_that_is_used_again_is_free_of_the_old_masks() -> None:
    """Lanes without grammar get in masked rounds what ordinary rounds give them, beside lanes that have one."""
    outputs = []
    for masked in (False, True):
        run = Run(seed=7)
        if masked:
            run.admit(1, output=[A, X], seed=1)
            run.round([1], {1: [C, D, C]})
            run.masks.clear(1)
            run.admit(0, output=[A], seed=2)
            run.masks.write(0, run.states[0].rows([X, C, D]))
        else:
            run.model.admit(0, [A], output=[A], seed=2)
        run.model.admit(1, [A], output=[B], seed=9, top_k=6)
        run.script.write({0: [X, C, D], 1: [D, X, A]})
        run.driver.completions.clear()
        for _ in range(4):
            run.driver.round([0, 1], DRAFTS, masked=masked)
        outputs.append(run.driver.tokens(1))
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) >= 4


# --- the law ----------------------------------------------------------------------------------------------------------------


def filtered(logits: np.ndarray, *, temperature: float = 1.0, top_k: int = 0) -> np.ndarray:
    """Temperature and top-k, written again. logits: [V] float64, forbidden tokens −inf."""
    law = np.exp((logits - logits.max()) / temperature)
    if top_k:
        law = np.where(law >= np.sort(law)[-top_k], law, 0)
    return law / law.sum()


def joint_law(table: Tensor, masked: bool = True, **options: Any) -> Tensor:
    """Probability of the first three tokens after token a, [V³]; after a stop token comes token 0 for certain."""
    joint = np.zeros((VOCAB,) * DEPTH)

    def follow(prefix: tuple[int, ...], weight: float) -> None:
        if len(prefix) == DEPTH:
            joint[prefix] += weight
            return
        if STOP in prefix:
            follow((*prefix, 0), weight)
            return
        logits = table[(A, *prefix)[-1]].double().numpy().copy()
        if masked:
            logits[[token for token in range(VOCAB) if token not in allowed(prefix)]] = -np.inf
        for token, share in enumerate(filtered(logits, **options)):
            if share:
                follow((*prefix, token), weight * share)

    follow((), 1.0)
    return torch.from_numpy(joint).flatten()


def outcomes(run: Run, batches: int, **options: Any) -> list[int]:
    """First three tokens of many requests; the first comes from the prompt, the others from rounds with random drafts.

    Drafts are what a host would propose without looking at the grammar, so that forbidden ones take part at every depth.
    """
    draw, found, slots = np.random.default_rng(11), [], list(range(SLOTS))
    for batch in range(batches):
        for slot in slots:
            run.admit(slot, seed=batch * SLOTS + slot, budget=16, **options)
        run.driver.completions.clear()
        run.start(slots)
        while short := [s for s in run.driver.running(slots) if len(run.driver.tokens(s)) < DEPTH]:
            proposals = {slot: draw.choice([A, B, C, D, X, STOP, 6], DRAFTS).tolist() for slot in short}
            run.accepted |= {done.accepted for done in run.round(short, proposals)}
        for slot in slots:
            tokens = [*run.driver.tokens(slot), 0, 0][:DEPTH]
            found.append(int(np.ravel_multi_index(tokens, (VOCAB,) * DEPTH)))
    return found


OPTIONS = {"plain": {}, "filtered": {"temperature": 0.8, "top_k": 2}}


@torch.inference_mode()
@pytest.mark.parametrize("kind", [ChainRound, AllocatedRound])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_emitted_tokens_follow_the_masked_law(kind: type[ChainRound], options: dict[str, Any]) -> None:
    """Filters see what the mask leaves: the two most probable tokens are two of the allowed ones."""
    run = Run(seed=1, kind=kind)
    found = outcomes(run, 120, **options)
    assert run.accepted == {0, 1, 2, 3}
    assert chi_square(found, joint_law(run.model.target.table, **options)) > SIGNIFICANCE
    # the controls: another law is told apart
    assert chi_square(found, joint_law(run.model.target.table, masked=False, **options)) < SIGNIFICANCE**2
    assert chi_square(found, joint_law(run.model.target.table, temperature=1.5)) < SIGNIFICANCE**2


@torch.inference_mode()
def test_one_mask_for_all_rows_breaks_the_law() -> None:
    """The control of the rows: the mask of the round's beginning at every row emits what the grammar forbids."""
    run = Run(seed=1)
    run.reuse = True
    found = outcomes(run, 10)
    assert chi_square(found, joint_law(run.model.target.table)) < SIGNIFICANCE**2


# --- greedy -----------------------------------------------------------------------------------------------------------------


def plain(table: Tensor, length: int) -> list[int]:
    """Constrained decoding one token at a time."""
    tokens: list[int] = []
    while len(tokens) < length and STOP not in tokens:
        row = table[(A, *tokens)[-1]]
        tokens.append(max(sorted(allowed(tokens)), key=lambda token: float(row[token])))
    return tokens


@torch.inference_mode()
@pytest.mark.parametrize("kind", [ChainRound, AllocatedRound])
def test_greedy_output_is_that_of_plain_constrained_decoding(kind: type[ChainRound]) -> None:
    lengths, accepted = set(), 0
    for seed in range(12):
        run, draw = Run(seed=seed, kind=kind, slots=2), np.random.default_rng(seed)
        wanted = plain(run.model.target.table, 20)
        for slot in (0, 1):
            run.admit(slot, greedy=True, budget=20)
        run.start([0, 1])
        while running := run.driver.running([0, 1]):
            proposals = {}
            for slot in running:
                place = len(run.driver.tokens(slot))
                right = [*wanted[place : place + DRAFTS], *[A] * DRAFTS][:DRAFTS]
                # one slot has the right drafts with some wrong ones among them, the other arbitrary ones
                wrong = draw.integers(0, VOCAB, DRAFTS)
                keep = draw.random(DRAFTS) < (0.7 if slot else 0)
                proposals[slot] = [int(r if k else w) for r, w, k in zip(right, wrong, keep, strict=True)]
            accepted += sum(done.accepted for done in run.round(running, proposals))
        assert run.driver.tokens(0) == run.driver.tokens(1) == wanted
        lengths.add(len(wanted))
    assert len(lengths) > 2 and accepted > 20


@torch.inference_mode()
def test_copies_are_verified_as_far_as_the_grammar_goes_and_learned_drafts_are_not() -> None:
    """A scheduler's way: the ceiling is what the grammar takes of the copy, and what the drafter adds behind it is not judged."""
    run = Run(seed=4, slots=2)
    shape = RoundShape(batch=2, draft_tokens=DRAFTS, verify_width=DRAFTS + 1)
    round_ = ChainRound(
        target=run.model.target,
        drafter=run.model.drafter,
        shape=shape,
        arena=run.model.arena,
        max_draft_tokens=7,
        history_drafts=True,
    )
    wanted = plain(run.model.target.table, 16)
    for slot in (0, 1):
        run.admit(slot, greedy=True, budget=16)
    run.start([0, 1])
    accepted = 0
    while running := run.driver.running([0, 1]):
        copies = []
        for slot in running:
            place = len(run.driver.tokens(slot))
            # the right two tokens and one more, or one that is forbidden behind the right one
            copies.append([*wanted[place : place + 2], A] if slot else [*wanted[place : place + 1], 6])
        rows = [run.states[slot].rows(copy) for slot, copy in zip(running, copies, strict=True)]
        for slot, masks in zip(running, rows, strict=True):
            run.masks.write(slot, masks)
        ceilings = [len(masks) - 1 for masks in rows]
        round_.submit(running, ceilings, run.driver.number, copies=copies, masked=True)
        for done, ceiling in zip(run.driver._read(running), ceilings, strict=True):
            assert done.offered <= ceiling and done.copy_sources == (1 << done.offered) - 1
            assert 0 <= done.accepted <= done.offered and done.emitted >= 1
            accepted += done.accepted
            run._take([done])
    assert run.driver.tokens(0) == run.driver.tokens(1) == wanted and accepted >= 6


@torch.inference_mode()
def test_penalties_come_first_and_the_mask_has_the_last_word() -> None:
    """A bias cannot bring a forbidden token back, a minimum keeps stop ids away, log-probabilities stay the target's own."""
    run = Run(seed=2)
    run.extended = True
    for slot in range(8):
        run.admit(
            slot,
            seed=slot,
            budget=12,
            min_new_tokens=5,
            logit_bias={D: 90.0, X: 3.0, STOP: 60.0},
            frequency_penalty=0.5,
        )
    slots = list(range(8))
    run.start(slots)
    while running := run.driver.running(slots):
        for done in run.round(running, {slot: [X, D, D] for slot in running}):
            before = run.driver.tokens(done.slot)[: -done.emitted]
            ((logprob, _), *_) = run.model.arena.read_logprobs(done.round % 2, [done.slot])[0]
            own = run.model.target.table[before[-1]].log_softmax(-1)[done.tokens[0]]
            assert logprob == pytest.approx(float(own), abs=1e-5)
    for slot in slots:
        tokens = run.driver.tokens(slot)
        assert re.fullmatch(PATTERN, text_of(tokens)) and D in tokens
        assert STOP not in tokens[:5]


# --- the program ----------------------------------------------------------------------------------------------------------


@torch.inference_mode()
@pytest.mark.parametrize("kind", [ChainRound, AllocatedRound])
def test_masked_rounds_pass_the_guard(kind: type[ChainRound]) -> None:
    run = Run(kind=kind, slots=2)
    run.model.admit(0, [A], output=[A])
    run.driver.round([0, 1], DRAFTS, masked=True)
    round_ = next(iter(run.driver._rounds.values()))
    for extended in (False, True):
        with CapturableGuard():
            round_.run(masked=True, extended=extended)


def test_an_arena_without_masks_refuses_masked_rounds() -> None:
    model = MarkovModel.build(random_table(VOCAB, 1), random_table(VOCAB, 2))
    model.admit(0, [A], output=[A])
    with pytest.raises(ValueError, match="grammar masks need an arena with grammar=True"):
        Driver(model).round([0], 1, masked=True)


# --- a model ----------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_a_small_checkpoint_writes_json_with_copied_drafts_as_without() -> None:
    """Drafts are the plain output with faults in it: some are accepted, the text is the same, json reads it."""
    torch.set_num_threads(1)
    recipe = recipe_book().recipe("qwen3.8-flash")
    config = PreparationConfig.for_recipe(
        recipe, concurrency=1, max_draft_tokens=DRAFTS, context=192, prefill_tokens=(64,), grammar=True
    )
    loaded = LoadedModel.prepare(recipe, config, dtype="float64")
    model = Prepared(target=loaded.target, drafter=loaded.drafter, arena=loaded.arena, capacities=loaded.capacities)
    masks, stops = loaded.arena.masks, loaded.defaults.stop_ids
    assert masks is not None
    compiler = GrammarCompiler(loaded.tokenizer, loaded.target.vocab_size)
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}, "kind": {"enum": ["é", "world"]}},
        "required": ["name", "kind"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    script = ScriptedDrafter(loaded.drafter, slots=1, max_draft_tokens=7)

    def generate(wanted: Sequence[int] | None) -> tuple[list[int], int]:
        driver = Driver(model, drafter=script)
        model.admit(0, loaded.tokenizer.encode("def parse("), budget=100, stops=stops, greedy=True)
        state = compiler.state(Grammar.json_schema(schema), stop_ids=stops)
        masks.write(0, state.rows())
        (done,), accepted = driver.start([0], masked=True), 0
        while True:
            assert all(state.accept(token) for token in done.tokens)
            if done.finish is not Finish.NONE:
                return driver.tokens(0), accepted
            drafts: list[int] = []
            if wanted is not None:
                place = len(driver.tokens(0))
                drafts = [*wanted[place : place + DRAFTS], *[1] * DRAFTS][:DRAFTS]
                drafts[place % DRAFTS] = drafts[place % DRAFTS] if place % 2 else 77
            script.write({0: drafts})
            masks.write(0, state.rows(drafts))
            (done,) = driver.round([0], len(drafts), masked=True)
            accepted += done.accepted

    tokens, _ = generate(None)
    again, accepted = generate(tokens)
    assert again == tokens and accepted >= 5
    assert tokens[-1] in stops
    value = json.loads(loaded.tokenizer.decode(tokens))
    assert value.keys() == {"name", "kind"} and value["kind"] in ("é", "world") and len(value["name"]) <= 9
