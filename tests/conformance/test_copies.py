"""Rounds of Qwen3.8-Flash with drafts from a real ring: capture, batches with dead lanes, and the ring's own copies.

What must hold of copies in every recipe is in the conformance suite (``specdec.testing.conformance.copies``).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from qwen_conformance import QwenConformance

from specdec.drafting.history import HistoryRing
from specdec.round.completion import Finish
from specdec.testing.conformance import Bench
from specdec.testing.guard import CapturableGuard


class Facts(QwenConformance):
    """The random checkpoint of few tokens."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Facts.checkpoint(tmp_path_factory)


@pytest.fixture(scope="module")
def bench(folder: Path) -> Bench:
    return Facts.build(folder)


@torch.inference_mode()
@pytest.mark.parametrize("drafts", range(1, 8))
def test_one_capturable_program_with_and_without_copies(bench: Bench, drafts: int) -> None:
    """The same operations run whatever was copied: nothing of the program depends on it."""
    slots = Facts.admit_all(bench, seed=2, top_k=20, top_p=0.95)
    driver = Facts.driver(bench)
    driver.start(slots)
    driver.round(slots[:3], drafts, lanes=[0, 1, 2, bench.spare])
    captured = driver.captured(4, drafts)
    counts = []
    for extended in (False, True):
        for copies in (None, [[]] * 3, [[1] * drafts, [], [2]]):
            captured.staging.write([0, 1, 2], [drafts] * 3, driver.number, copies)
            driver.number += 1
            with CapturableGuard() as guard:
                captured.run(extended=extended)
            counts.append((extended, guard.operations))
    assert len(set(counts)) == 2


@torch.inference_mode()
@pytest.mark.parametrize("drafts", [2, 5, 7])
def test_drafts_from_a_ring_change_speed_and_not_text(folder: Path, bench: Bench, drafts: int) -> None:
    """Requests run twice: the second time the ring holds their outputs, and most tokens are copied. Two slots end early, so that
    lanes move and dead ones stay in the batch."""
    reference = Facts.build(folder, slots=1)
    plain = Facts.plain_outputs(reference)
    prompts = Facts.prompts(bench)
    ring, rounds = HistoryRing(grams=(4, 2)), []
    for run in range(2):
        budgets = [Facts.budget, 11, Facts.budget, 23]
        for slot, prompt in enumerate(prompts):
            bench.admit(slot, prompt, budget=budgets[slot], greedy=True)
            ring.response(4 * run + slot)
        slots = [0, 1, 2, 3]
        driver = Facts.driver(bench)
        for done in driver.start(slots):
            ring.append(4 * run + done.slot, done.tokens)
        count = copied = 0
        while running := driver.running(slots):
            copies = {}
            for slot in running:
                found = ring.lookup([*prompts[slot], *driver.tokens(slot)][-4:])
                copies[slot] = () if found is None else found.tokens[:drafts]
            for done in driver.round(slots, drafts, lanes=slots[::-1] if count % 2 else slots, copies=copies):
                ring.append(4 * run + done.slot, done.tokens)
                copied += min(done.copy_sources.bit_count(), done.accepted)
            count += 1
        for slot in slots:
            ring.end(4 * run + slot)
            assert driver.tokens(slot) == list(plain[slot][: budgets[slot]])
            assert driver.completions[slot][-1].finish is not Finish.NONE
        rounds.append((count, copied))
    assert len(ring) == 2 * sum(budgets)
    # with everything known the longest request takes about budget / (drafts + 1) rounds
    assert rounds[1][0] < rounds[0][0] and rounds[1][1] > rounds[0][1]
    assert rounds[1][1] >= sum(budgets) // 2


@torch.inference_mode()
def test_first_tokens_know_nothing_of_copies(bench: Bench) -> None:
    """The round before left copies in its own buffer."""
    slots = Facts.admit_all(bench, seed=5)
    driver = Facts.driver(bench)
    before = driver.start(slots)
    driver.round(slots, 3, copies={slot: [1, 2, 3] for slot in slots})
    again = Facts.driver(bench)
    assert slots == Facts.admit_all(bench, seed=5)
    after = again.start(slots)
    assert [done.tokens for done in after] == [done.tokens for done in before]
    assert all(done.copy_sources == 0 for done in after)
