"""Draft history: which hidden state conditions which row, for prompts, proposals and absorbed rows."""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import cycle
from typing import Any

import pytest
import torch

from specdec.testing.conformance.base import Conformance, next_tokens
from specdec.testing.conformance.bench import Bench, replaced
from specdec.testing.conformance.near_ties import PlainText
from specdec.testing.drafters import RecordingDrafter

#: Sizes of prompt chunks by name; the last chunk takes the rest.
CHUNKINGS = {
    "whole": lambda length: [length],
    "ones": lambda length: [1] * length,
    "sixteens": lambda length: [16] * (length // 16 + 1),
    "one first": lambda length: [1, length - 1],
    "page minus one": lambda length: [63, 1, 1],
    "threes": lambda length: [size for size, _ in zip(cycle([3, 5]), range(length // 4 + 1))],
}


class HistoryConformance(Conformance):
    """A drafter sees real feedback for committed rows and its own output for proposals."""

    def test_prompt_chunkings_leave_the_same_state(self, bench: Bench, reference: Bench, chunking: str) -> None:
        """Fault classes: store before read at chunk boundary (row conditioned on a future hidden state); buffer
        reused before its last reader. Target and draft state of prompts of 37 and 65 tokens."""
        for slot, length in enumerate((37, 65)):
            prompt = self.text(bench, length)
            bench.admit(slot, prompt, chunks=CHUNKINGS[chunking](length), greedy=True)
            self.check_state(bench, reference, slot, prompt)
            ours = bench.target.first_logits(bench.where(slot))
            theirs = reference.target.first_logits(reference.where(0))
            self.check_values(ours, theirs, f"logits of slot {slot}")

    def test_proposals_depend_on_committed_tokens_only(
        self, bench: Bench, reference: Bench, plain: list[PlainText], accepted: int
    ) -> None:
        """Fault classes: recursive proposal states kept as history; absorption skipped; recurrent state and draft
        history restored at different lengths; draft features missing for cached tokens. Draft logits at every depth, or placed
        tokens, equal those of a request that got the same tokens as a prompt."""
        prompts, deepest = self.prompts(bench), bench.recipe.max_draft_tokens
        slots = self.admit_all(bench)
        recorder = RecordingDrafter(bench.drafter)
        script = self.scripted(bench, recorder)
        driver = self.driver(bench, drafter=script)
        driver.start(slots)
        for width in (deepest, deepest, 0, deepest):
            right = {s: min((accepted + s) % (deepest + 1), width) for s in slots}
            script.write({s: next_tokens(plain[s], len(driver.tokens(s)), width, bench.vocab, right[s]) for s in slots})
            running = driver.running(slots)
            before = {slot: driver.tokens(slot) for slot in running}
            driver.round(running, width)
        slot = running[accepted % len(running)]
        found = recorder.given(slot)
        sequence = [*prompts[slot], *before[slot][:-1]]
        seen = RecordingDrafter(reference.drafter)
        cold = self.scripted(reference, seen)
        cold.write({0: script.script[slot].tolist()})
        reference.admit(0, sequence, budget=self.budget, greedy=True, output=before[slot][-1:])
        again = self.driver(reference, drafter=cold)
        again.open([0])
        again.round([0], deepest)
        self.check_values(found, seen.given(0), f"drafts of slot {slot}")

    def test_history_grows_in_rounds_without_drafts(
        self, bench: Bench, reference: Bench, plain: list[PlainText], drafts: int
    ) -> None:
        """Fault class: absorption skipped on the path without drafts. Six rounds of width one, then draft state and
        acceptance."""
        prompts = self.prompts(bench)
        slots = self.admit_all(bench)
        script = self.scripted(bench)
        driver = self.driver(bench, drafter=script)
        driver.start(slots)
        for _ in range(6):
            driver.round(slots, 0)
        self.check_all(bench, reference, driver, slots, prompts)
        script.write({s: next_tokens(plain[s], len(driver.tokens(s)), drafts, bench.vocab, drafts) for s in slots})
        for done in driver.round(slots, drafts):
            if self.on_text(driver, done.slot, plain[done.slot]):
                assert done.accepted == drafts
        self.check_all(bench, reference, driver, slots, prompts)

    def test_the_first_draft_reads_the_saved_feedback(self, bench: Bench) -> None:
        """Fault class: wrong feedback row, or none. Changing one lane's saved feedback changes that lane's draft
        logits from depth 0 on and no other lane's. Where history does not lag, the last row is absorbed in the round before. Of a
        drafter that reads no feedback (``reads_feedback``) it changes nothing."""
        slots, deepest = self.admit_all(bench), bench.recipe.max_draft_tokens
        recorder = RecordingDrafter(bench.drafter)
        script = self.scripted(bench, recorder)
        driver = self.driver(bench, drafter=script)
        driver.start(slots)
        earlier, first = bench.image(), driver.number
        driver.round(slots, deepest)
        image, number = bench.image(), driver.number
        driver.round(slots, deepest)
        before = {slot: recorder.given(slot) for slot in slots}
        bench.rewind(image if bench.drafter.lag else earlier)

        def altered(name: str) -> AbstractContextManager[Any]:
            read = getattr(bench.target, name)

            def changed(wanted: torch.Tensor, *count: int) -> torch.Tensor:
                rows = read(wanted, *count)
                noise = torch.randn(rows.shape[1:], generator=torch.Generator().manual_seed(1)).to(rows)
                here = (wanted == 1).view(-1, *[1] * (rows.dim() - 1))
                return torch.where(here, rows + rows.abs().mean() * noise, rows)

            return replaced(bench.target, name, changed)

        again = self.driver(bench, drafter=script)
        again.open(slots)
        again.number = number if bench.drafter.lag else first
        with altered("feedback"), altered("feedback_rows"):
            again.round(slots, deepest)
            if not bench.drafter.lag:
                again.round(slots, deepest)
        for slot in slots:
            changed = (recorder.given(slot) - before[slot]).abs().amax(-1)
            if slot == 1 and not self.reads_feedback:
                assert bool((changed == 0).all()), "feedback reaches drafts, but reads_feedback is False"
            elif slot == 1:
                assert bool((changed > 1e-6).all()), f"feedback does not reach every depth: {changed.tolist()}"
            else:
                assert bool((changed == 0).all()), "one lane's feedback reached another lane's drafts"

    def test_later_drafts_read_the_drafters_own_output(self, bench: Bench, drafts: int) -> None:
        """Fault classes: wrong hidden source after the first draft step; hidden carried to the next step lacks the
        shared norm that the model expects. Step 0 is conditioned on the target's feedback, step k on what step k − 1
        put out."""
        slots = self.admit_all(bench)
        driver = self.driver(bench, eager=True)
        driver.start(slots)
        driver.round(slots, drafts)
        feedback = bench.target.feedback(bench.where(*slots))
        recording = self.draft_steps(bench)
        if recording is None:
            pytest.skip("the drafter names no recursive steps (draft_steps)")
        with recording as steps:
            driver.round(slots, drafts)
        assert len(steps) == drafts, f"{drafts} drafts took {len(steps)} steps"
        assert torch.equal(steps[0].residual.reshape(feedback.shape), feedback), (
            "step 0 does not read the target's feedback"
        )
        for depth in range(1, drafts):
            assert torch.equal(steps[depth].residual, steps[depth - 1].output), (
                f"step {depth} reads another hidden state"
            )
            again = steps[depth].residual.reshape(feedback.shape)
            assert not torch.equal(again, feedback), f"step {depth} reads the target's feedback again"
