"""Penalties, bias, minimum length and stop ids in real rounds: greedy output against a loop that decodes one token at a time.

The loop takes logits after each prefix from an ordinary prompt pass over it, in float64, and applies the options in Python
numbers. Drafts are scripted so that every accepted count occurs; counts are compared with histograms after every round.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from markov import MarkovModel, random_table
from options_bench import (
    COMBINATIONS,
    GEOMETRY,
    PROMPTS,
    Bench,
    assert_combinations_matter,
    assert_counted,
    drafts_for,
)
from options_oracle import plain_greedy
from qwen_models import Prepared, prepare, write_random_checkpoint
from round_driver import Driver

from specdec.round.completion import Completion, Finish
from specdec.testing.guard import CapturableGuard
from specdec.testing.scripted import ScriptedDrafter

BUDGET = 14


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench.build(tmp_path_factory.mktemp("options"))


@pytest.fixture(scope="module")
def expected(bench: Bench) -> list[list[int]]:
    """Oracle output of each combination; combination c runs with prompt c mod 4."""
    return [plain_greedy(bench.logits_of, PROMPTS[c % 4], BUDGET, **options) for c, options in enumerate(COMBINATIONS)]


def test_the_combinations_matter(bench: Bench, expected: list[list[int]]) -> None:
    assert_combinations_matter(bench.logits_of, BUDGET, expected)


def run_scripted(model: Any, runs: list[tuple[list[int], dict[str, Any], list[int]]], drafts: int, seed: int) -> Driver:
    """Runs (prompt, options, expected output) triples in one batch; every lane gets its own accepted count each round.

    Counters, counts and alignment are checked round by round.
    """
    generator = torch.Generator().manual_seed(seed)
    drafter = ScriptedDrafter(model.drafter, slots=model.arena.slots, max_draft_tokens=7)
    driver = Driver(model, drafter=drafter)
    slots = list(range(len(runs)))
    for slot, (prompt, options, _) in enumerate(runs):
        model.admit(slot, prompt, budget=BUDGET, **options)
    driver.start(slots, extended=True)
    assert_counted(model, driver, slots)
    while running := driver.running(slots):
        counts = {slot: int(torch.randint(0, drafts + 1, (1,), generator=generator)) for slot in running}
        done = {slot: len(driver.tokens(slot)) for slot in running}
        drafter.write({s: drafts_for(runs[s][2], done[s], counts[s], drafts, model.target.vocab_size) for s in running})
        # dead lanes before, between and after the live ones
        idle = model.arena.slots
        lanes = [idle, *running, idle] if len(running) < 3 else running
        for completion in driver.round(running, drafts, lanes=lanes, extended=True):
            slot = completion.slot
            left = len(runs[slot][2]) - done[slot]
            assert completion.emitted == min(counts[slot] + 1, left)
            assert completion.generated == len(driver.tokens(slot))
        assert_counted(model, driver, slots)
    return driver


@torch.inference_mode()
@pytest.mark.parametrize("drafts", range(8))
def test_greedy_output_equals_plain_decoding(bench: Bench, expected: list[list[int]], drafts: int) -> None:
    """All 64 combinations, four different ones in each batch, at every width."""
    shuffled = torch.randperm(len(COMBINATIONS), generator=torch.Generator().manual_seed(drafts)).tolist()
    for first in range(0, len(shuffled), 4):
        chosen = shuffled[first : first + 4]
        runs = [(PROMPTS[c % 4], {"greedy": True, **COMBINATIONS[c]}, expected[c]) for c in chosen]
        driver = run_scripted(bench.model, runs, drafts, seed=first)
        for slot, c in enumerate(chosen):
            assert driver.tokens(slot) == expected[c], COMBINATIONS[c]
            last = driver.completions[slot][-1]
            stopped = expected[c][-1] in COMBINATIONS[c].get("stops", ())
            assert last.finish is (Finish.STOP if stopped else Finish.LENGTH)


@torch.inference_mode()
@pytest.mark.parametrize("drafts", [0, 2, 7])
def test_the_models_own_drafts_change_nothing(bench: Bench, expected: list[list[int]], drafts: int) -> None:
    """The drafter knows nothing of the options: what it proposes is judged by the law that does."""
    for first in range(0, len(COMBINATIONS), 12):
        chosen = list(range(first, min(first + 4, len(COMBINATIONS))))
        for slot, c in enumerate(chosen):
            bench.model.admit(slot, PROMPTS[c % 4], budget=BUDGET, greedy=True, **COMBINATIONS[c])
        driver, slots = Driver(bench.model), list(range(len(chosen)))
        driver.start(slots, extended=True)
        while running := driver.running(slots):
            driver.round(running, drafts, extended=True)
            assert_counted(bench.model, driver, slots)
        assert [driver.tokens(slot) for slot in slots] == [expected[c] for c in chosen]


# --- loops, minimum lengths --------------------------------------------------------------------------------------------


def cycle_table() -> torch.Tensor:
    """Greedy decoding runs 0, 1, 2, 0, 1, 2 … by a margin of about two."""
    table = random_table(8, 0, spread=0.25)
    for token in range(3):
        table[token, (token + 1) % 3] += 2.0
    return table


@torch.inference_mode()
@pytest.mark.parametrize("drafts", range(8))
@pytest.mark.parametrize("penalty", ["frequency_penalty", "presence_penalty", "repetition_penalty"])
def test_penalties_break_a_loop_where_plain_decoding_does(drafts: int, penalty: str) -> None:
    table = cycle_table()
    model = MarkovModel.build(table, table)
    ends = []
    for strength in (0.25, 0.5, 2.0):
        options: dict[str, Any] = {penalty: strength if penalty != "repetition_penalty" else 1 + 4 * strength}
        output = plain_greedy(lambda sequence: table[sequence[-1]].tolist(), [4, 2], 30, **options)
        ends.append(next((i for i, token in enumerate(output) if token != i % 3), len(output)))
        for perfect in (True, False):
            drafter = ScriptedDrafter(model.drafter, slots=4, max_draft_tokens=7) if perfect else None
            driver = Driver(model, drafter=drafter)
            model.admit(1, [4, 2], budget=30, greedy=True, **options)
            driver.start([1], extended=True)
            while driver.running([1]):
                if drafter is not None:
                    drafter.write({1: drafts_for(output, len(driver.tokens(1)), drafts, drafts, 8)})
                driver.round([1], drafts, extended=True)
                assert_counted(model, driver, [1])
            assert driver.tokens(1) == output
            if perfect and drafts:
                # counted per token: with a counter per round these drafts would not all be accepted
                assert all(completion.accepted == drafts for completion in driver.completions[1][1:-1])
    if penalty == "frequency_penalty":
        assert ends[0] > ends[1] > ends[2] > 0, "the loop breaks, later for a weaker penalty"


@torch.inference_mode()
@pytest.mark.parametrize("minimum", range(14))
def test_end_of_text_is_allowed_after_exactly_the_minimum(minimum: int) -> None:
    """Four tokens per round, the stop id favoured beyond all else: the output has the minimum and the stop id, nothing more."""
    stop = 7
    table = random_table(8, 1)
    options: dict[str, Any] = {"logit_bias": {stop: 100.0}, "min_new_tokens": minimum, "stops": (stop, 3)}
    output = plain_greedy(lambda sequence: table[sequence[-1]].tolist(), [4], 20, **options)
    assert len(output) == minimum + 1 and output[-1] == stop and not {stop, 3} & set(output[:-1])
    model = MarkovModel.build(table, table)
    drafter = ScriptedDrafter(model.drafter, slots=4, max_draft_tokens=7)
    driver = Driver(model, drafter=drafter)
    model.admit(0, [4], budget=20, greedy=True, **options)
    # its neighbour has no minimum and ends at once; another one has no stop ids
    model.admit(1, [4], budget=20, greedy=True, logit_bias={stop: 100.0}, stops=(stop,))
    model.admit(2, [4], budget=3, greedy=True, logit_bias={stop: 100.0}, min_new_tokens=3)
    driver.start([0, 1, 2], extended=True)
    while running := driver.running([0, 1, 2]):
        drafter.write({0: drafts_for(output, len(driver.tokens(0)), 3, 3, 8)})
        completions = driver.round(running, 3, extended=True)
        assert completions[0].slot != 0 or completions[0].accepted <= 3
    assert driver.tokens(0) == output
    assert driver.completions[0][-1].finish is Finish.STOP
    assert all(completion.accepted == 3 for completion in driver.completions[0][1:-1])
    assert driver.tokens(1) == [stop] and driver.tokens(2) == [stop] * 3


# --- variants, faults, capture -----------------------------------------------------------------------------------------


def sampled_run(
    model: Prepared, options: list[dict[str, Any]], drafts: int, *, extended: bool
) -> tuple[Driver, dict[str, torch.Tensor]]:
    """Six rounds of a sampled batch; the completions, and what the request table and the stores hold then."""
    slots = list(range(len(options)))
    for store in (model.target.store, model.drafter.store):
        for slot in range(model.arena.slots):
            store.reset(slot)
    for slot in slots:
        model.admit(slot, PROMPTS[slot], seed=50 + slot, **options[slot])
    driver = Driver(model)
    driver.start(slots, extended=extended)
    for _ in range(6):
        driver.round(slots, drafts, extended=extended)
    state = {"requests": model.arena.requests.integers[: len(slots)].clone()}
    for owner, store in (("target", model.target.store), ("drafter", model.drafter.store)):
        state[f"{owner}.selected"] = store.selected[: len(slots)].clone()
        for name, tensor in store.tensors.items():
            state[f"{owner}.{name}"] = tensor.clone()
    return driver, state


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    directory = write_random_checkpoint(tmp_path_factory.mktemp("single"), 8, GEOMETRY)
    return prepare(directory, context=64)


@torch.inference_mode()
@pytest.mark.parametrize("drafts", [0, 1, 4])
def test_lanes_without_options_get_the_same_from_either_variant(single: Prepared, drafts: int) -> None:
    plain: list[dict[str, Any]] = [
        {},
        {"top_k": 5, "temperature": 1.5},
        {"greedy": True},
        {"min_p": 0.05, "top_p": 0.9},
    ]
    (ordinary, before), (extended, after) = (
        sampled_run(single, plain, drafts, extended=variant) for variant in (False, True)
    )
    assert ordinary.completions == extended.completions
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    mixed = [{**plain[0]}, {"frequency_penalty": 2.0, "logit_bias": {3: 5.0}}, plain[2], {"repetition_penalty": 3.0}]
    neighbours, _ = sampled_run(single, mixed, drafts, extended=True)
    for slot in (0, 2):
        assert neighbours.completions[slot] == ordinary.completions[slot]
    assert neighbours.completions[1] != ordinary.completions[1]


@torch.inference_mode()
@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_a_target_row_of_nan_ends_that_request_only(drafts: int) -> None:
    """Token 7 leads to a NaN row. Options neither hide the fault nor spread it."""
    table = random_table(8, 2)
    broken = table.clone()
    broken[7, 3] = torch.nan
    options: list[dict[str, Any]] = [
        {"seed": 1, "presence_penalty": 1.0},
        # masks the very entry that is NaN, and drives the output to token 7
        {"seed": 2, "logit_bias": {7: 100.0}, "min_new_tokens": 12, "stops": (3,)},
        {"seed": 3, "frequency_penalty": 0.5},
    ]
    results: list[dict[int, list[Completion]]] = []
    for faulty in (True, False):
        model = MarkovModel.build(broken, table)
        model.target.table = broken if faulty else table
        driver = Driver(model)
        slots = [0, 1, 2] if faulty else [0, 2]
        for slot in slots:
            # others never see token 7
            bias = {"logit_bias": {7: -100.0}} if slot != 1 else {}
            model.admit(slot, [slot], budget=12, **{**options[slot], **bias})
        driver.start(slots, extended=True)
        while running := driver.running(slots):
            driver.round(running, drafts, extended=True)
        results.append(driver.completions)
    assert results[0][1][-1].finish is Finish.FAULT
    assert [token for completion in results[0][1] for token in completion.tokens] == [7]
    for slot in (0, 2):
        assert [c.tokens for c in results[0][slot]] == [c.tokens for c in results[1][slot]]
        assert results[0][slot][-1].finish is Finish.LENGTH


@torch.inference_mode()
@pytest.mark.parametrize("drafts", range(8))
def test_extended_rounds_are_capturable(single: Prepared, drafts: int) -> None:
    for slot in range(3):
        single.admit(
            slot, PROMPTS[slot], seed=slot, frequency_penalty=0.5, logit_bias={4: 2.0}, min_new_tokens=4, stops=(2,)
        )
    driver = Driver(single)
    driver.start([0, 1, 2], extended=True)
    driver.round([0, 1, 2], drafts, lanes=[0, 1, 2, 4], extended=True)
    runner = driver._rounds[(4, drafts)]
    runner.staging.write([0, 1, 2], [drafts] * 3, driver.number)
    with CapturableGuard() as guard:
        runner.run(extended=True)
    assert guard.operations > 100
    assert all(completion.emitted >= 1 for completion in driver._read([0, 1, 2]))
