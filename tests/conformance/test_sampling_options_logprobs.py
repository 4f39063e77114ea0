"""Log-probabilities of every emitted token, read from real rounds, against log-softmaxes of prompt passes in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from options_bench import PROMPTS, Bench, drafts_for
from options_oracle import plain_greedy, ranked_logprobs
from round_driver import Driver

from specdec.sampling.logprobs import LogprobColumn
from specdec.testing.scripted import ScriptedDrafter

BUDGET = 14
TOP = 3
#: Float32 rounding of numbers up to about twenty.
CLOSE = 2e-6


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench.build(tmp_path_factory.mktemp("logprobs"))


def collect(driver: Driver, slots: list[int], found: dict[int, list[LogprobColumn]]) -> None:
    """Columns of the last record of each slot, as many as it emitted."""
    columns = driver.model.arena.read_logprobs((driver.number - 1) % 2, slots)
    for slot, row in zip(slots, columns, strict=True):
        found.setdefault(slot, []).extend(row[: driver.completions[slot][-1].emitted])


def decode(
    bench: Bench, options: dict[str, Any], drafts: int, *, script: list[list[int]] | None = None, seed: int = 0
) -> tuple[dict[int, list[LogprobColumn]], Driver]:
    """All prompts in one batch. script: tokens to propose, with a new accepted count in every round; None draws drafts."""
    drafter = ScriptedDrafter(bench.model.drafter, slots=4, max_draft_tokens=7) if script else None
    generator = torch.Generator().manual_seed(seed)
    driver, slots = Driver(bench.model, drafter=drafter), list(range(len(PROMPTS)))
    found: dict[int, list[LogprobColumn]] = {}
    for slot in slots:
        bench.model.admit(slot, PROMPTS[slot], budget=BUDGET, seed=slot + 10 * seed, **options)
    driver.start(slots, extended=True)
    collect(driver, slots, found)
    while running := driver.running(slots):
        if drafter is not None and script is not None:
            accepted = torch.randint(0, drafts + 1, (len(slots),), generator=generator).tolist()
            done = [len(driver.tokens(slot)) for slot in slots]
            drafter.write({s: drafts_for(script[s], done[s], accepted[s], drafts, 16) for s in running})
        driver.round(running, drafts, extended=True)
        collect(driver, running, found)
    return found, driver


def assert_exact(bench: Bench, found: dict[int, list[LogprobColumn]], driver: Driver) -> None:
    """One column per emitted token: its value and the top ones are the target's own at that prefix."""
    for slot, columns in found.items():
        tokens = driver.tokens(slot)
        assert len(columns) == len(tokens) == BUDGET
        for place, (token, (chosen, top)) in enumerate(zip(tokens, columns, strict=True)):
            raw = bench.logits_of((*PROMPTS[slot], *tokens[:place]))
            wanted, ranking = ranked_logprobs(raw, token, 16)
            assert chosen == pytest.approx(wanted, abs=CLOSE)
            assert [t for t, _ in top] == [t for t, _ in ranking]
            assert [v for _, v in top] == pytest.approx([v for _, v in ranking], abs=CLOSE)
            assert chosen < 0 and dict(top)[token] == chosen


@torch.inference_mode()
@pytest.mark.parametrize("drafts", range(8))
def test_greedy_tokens_have_the_numbers_of_plain_decoding(bench: Bench, drafts: int) -> None:
    """First, accepted, corrected and bonus tokens: every accepted count occurs."""
    outputs = [plain_greedy(bench.logits_of, prompt, BUDGET) for prompt in PROMPTS]
    plain, alone = decode(bench, {"greedy": True}, 0)
    assert_exact(bench, plain, alone)
    found, driver = decode(bench, {"greedy": True}, drafts, script=outputs, seed=drafts)
    assert [driver.tokens(slot) for slot in range(4)] == outputs == [alone.tokens(slot) for slot in range(4)]
    assert_exact(bench, found, driver)
    for slot in found:
        for one, other in zip(found[slot], plain[slot], strict=True):
            assert one[0] == pytest.approx(other[0], abs=1e-7, rel=1e-6)
            assert [t for t, _ in one[1][:TOP]] == [t for t, _ in other[1][:TOP]]
    accepted = {c.accepted for slot in found for c in driver.completions[slot][1:]}
    assert accepted == set(range(drafts + 1)) or drafts > 4


@torch.inference_mode()
@pytest.mark.parametrize("drafts", [0, 1, 4])
def test_options_do_not_change_what_is_reported(bench: Bench, drafts: int) -> None:
    """Sampled output under penalties and filters; the numbers stay those of the unmodified distribution."""
    options: list[dict[str, Any]] = [
        {"temperature": 2.0},
        {"temperature": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 2.0, "presence_penalty": -1.0},
        {"top_k": 3, "logit_bias": {4: 6.0}, "min_new_tokens": 14, "stops": (2, 7)},
    ]
    classes = set()
    for seed, chosen in enumerate(options):
        found, driver = decode(bench, chosen, drafts, seed=seed + 1)
        assert_exact(bench, found, driver)
        classes |= {min(c.accepted, 1) for slot in range(4) for c in driver.completions[slot]}
    assert classes == ({0, 1} if drafts else {0})
