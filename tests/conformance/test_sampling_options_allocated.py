"""Sampling options in allocated rounds of DeepSeek-V4.1-Flash: one lane with Gumbel draws, and four with rows for a part of the
drafts. What is verified changes from round to round; the text is the one that plain decoding with the options gives.

Greedy outputs and log-probabilities are compared with prompt passes in float64 and Python numbers. The law of sampled outputs is
in ``test_sampling_options_law``, what the generation loop adds in ``test_sampling_options_allocated_serving``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import frozen
from deepseek_conformance import DeepseekConformance
from options_bench import COMBINATIONS, PROMPTS, assert_combinations_matter, assert_counted, drafts_for, logits_after
from options_oracle import LogitsOf, plain_greedy, ranked_logprobs

from specdec.round.completion import Finish
from specdec.testing.conformance.bench import Bench
from specdec.testing.conformance.driver import Driver

BUDGET, BLOCK = 14, 7
#: Lanes, and target rows beside one per lane: a whole block for one lane, nine rows for the 28 drafts of four.
SHAPES = {"one lane": (1, BLOCK), "four lanes": (4, 9)}
#: Numbers of options that the chosen combinations have: each option by itself and all of them, in batches also every pair.
SIZES = {"one lane": (1, 6), "four lanes": (0, 1, 2, 6)}


@frozen(kw_only=True, eq=False)
class Model:
    """bench: what is tested. expected: oracle output of each combination; combination c runs with prompt c mod 4."""

    bench: Bench
    logits_of: LogitsOf
    expected: list[list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.set_num_threads(1)
    folder = DeepseekConformance.checkpoint(tmp_path_factory)
    bench, reference = (Bench.prepare(DeepseekConformance.recipe, folder, slots=n, context=64) for n in (4, 1))
    logits_of = logits_after(reference)
    expected = [plain_greedy(logits_of, PROMPTS[c % 4], BUDGET, **options) for c, options in enumerate(COMBINATIONS)]
    return Model(bench=bench, logits_of=logits_of, expected=expected)


def test_the_combinations_matter(model: Model) -> None:
    assert_combinations_matter(model.logits_of, BUDGET, model.expected)


def decode(model: Model, shape: str, chosen: list[int], *, scripted: bool) -> Driver:
    """Greedy outputs of some combinations in one batch, checked round by round. scripted: drafts that are right up to a place
    that moves; else the drafter's own."""
    bench, (_, draft_rows) = model.bench, SHAPES[shape]
    drafter = DeepseekConformance.scripted(bench) if scripted else bench.drafter
    driver = DeepseekConformance.driver(bench, drafter=drafter, draft_rows=draft_rows, extended=True)
    slots = list(range(len(chosen)))
    for slot, c in enumerate(chosen):
        bench.admit(slot, PROMPTS[c % 4], budget=BUDGET, greedy=True, **COMBINATIONS[c])
    driver.start(slots)
    turn = 0
    while running := driver.running(slots):
        right = {slot: (3 * slot + 2 * turn + 4) % (BLOCK + 1) for slot in running}
        if scripted:
            outputs = {slot: model.expected[chosen[slot]] for slot in running}
            script = {s: drafts_for(outputs[s], len(driver.tokens(s)), right[s], BLOCK, bench.vocab) for s in running}
            driver.drafter.write(script)  # type: ignore[union-attr]
        for done in driver.round(running, BLOCK):
            if scripted and not done.finish:
                assert done.accepted == min(right[done.slot], done.verified)
        assert_counted(bench, driver, slots)
        turn += 1
    return driver


def batches(shape: str) -> list[list[int]]:
    """The chosen combinations in lanes of a shape, in an order that mixes them."""
    lanes = SHAPES[shape][0]
    chosen = [c for c, options in enumerate(COMBINATIONS) if len(options) in SIZES[shape]]
    order = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(lanes)).tolist()
    return [[chosen[c] for c in order[first : first + lanes]] for first in range(0, len(order), lanes)]


@torch.inference_mode()
@pytest.mark.parametrize("scripted", [False, True], ids=["own drafts", "right drafts"])
@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_output_equals_plain_decoding(model: Model, shape: str, scripted: bool) -> None:
    """Penalties, bias, minimum length, stop ids and budget, alone and together."""
    records = []
    for chosen in batches(shape):
        driver = decode(model, shape, chosen, scripted=scripted)
        for slot, c in enumerate(chosen):
            assert driver.tokens(slot) == model.expected[c], COMBINATIONS[c]
            stopped = model.expected[c][-1] in COMBINATIONS[c].get("stops", ())
            assert driver.completions[slot][-1].finish is (Finish.STOP if stopped else Finish.LENGTH)
            records += driver.completions[slot]
    assert len({record.accepted for record in records}) >= (4 if scripted else 2)
    if shape == "four lanes":
        assert sum(0 < record.verified < record.offered for record in records) > 20, "rows must be scarce"


@torch.inference_mode()
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 2.0}, {"frequency_penalty": 1.0, "logit_bias": {4: 6.0}}], ids=str
)
@pytest.mark.parametrize("shape", SHAPES)
def test_logprobs_are_those_of_the_unmodified_target(model: Model, shape: str, options: dict[str, Any]) -> None:
    """First, accepted, corrected and bonus tokens of sampled rounds; packed rows come back to their lanes."""
    bench, (lanes, draft_rows) = model.bench, SHAPES[shape]
    driver = DeepseekConformance.driver(bench, draft_rows=draft_rows, extended=True)
    slots, accepted = list(range(lanes)), 0
    for slot in slots:
        bench.admit(slot, PROMPTS[slot], budget=24, seed=slot, **options)
    driver.start(slots)
    while running := driver.running(slots):
        before = {slot: driver.tokens(slot) for slot in running}
        rounds = driver.round(running, BLOCK)
        frames = bench.arena.read_logprobs((driver.number - 1) % 2, running)
        for done, columns in zip(rounds, frames, strict=True):
            accepted += done.accepted
            for place, (token, (chosen, top)) in enumerate(zip(done.tokens, columns)):
                prefix = (*PROMPTS[done.slot], *before[done.slot], *done.tokens[:place])
                wanted, ranking = ranked_logprobs(model.logits_of(prefix), token, 5)
                assert chosen == pytest.approx(wanted, abs=2e-6)
                assert [t for t, _ in top[:5]] == [t for t, _ in ranking]
                assert [v for _, v in top[:5]] == pytest.approx([v for _, v in ranking], abs=2e-6)
    assert accepted > 0
