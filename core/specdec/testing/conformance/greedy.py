"""Greedy decoding gives the tokens of plain decoding, whatever is drafted and however wide rounds are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specdec.round.completion import Finish
from specdec.testing.conformance.base import Conformance, next_tokens, require_logits, width_sequences
from specdec.testing.conformance.bench import Bench, altered_verification, replaced
from specdec.testing.conformance.driver import Driver
from specdec.testing.conformance.near_ties import PlainText
from specdec.testing.drafters import AlteredLogits, RecordingDrafter

#: Share of the tokens of plain decoding that must be decided by more than a near tie.
DECIDED = 0.7


class GreedyConformance(Conformance):
    """Drafts change speed, never text."""

    def _run(
        self, driver: Driver, slots: list[int], widths: Any, script: Callable[[int, int], list[int]] | None = None
    ) -> None:
        """Rounds until every slot ended. script: proposals by (slot, drafts), written to the driver's drafter."""
        for drafts in widths:
            running = driver.running(slots)
            if not running:
                return
            if script is not None:
                driver.drafter.write({slot: script(slot, drafts) for slot in running})  # type: ignore[union-attr]
            driver.round(running, drafts)
        raise AssertionError("requests did not end")

    def _expect(self, driver: Driver, slots: list[int], plain: list[PlainText]) -> None:
        self.check_text(driver, slots, plain)
        for slot in slots:
            assert driver.completions[slot][-1].finish is Finish.LENGTH

    def test_plain_outputs_are_worth_comparing(self, plain: list[PlainText]) -> None:
        """Outputs of one repeated token would hide faults; a checkpoint like that proves nothing. Nor does one whose tokens are
        mostly decided by less than a near tie."""
        margins = [margin for output in plain for margin in output.margins()]
        decided = sum(margin >= self.near_tie for margin in margins) / len(margins)
        assert decided >= DECIDED, f"{decided:.0%} of the tokens are decided by near_tie = {self.near_tie:g} or more"
        for output in plain:
            assert len(output) == self.budget
            assert len(set(output)) >= 5, (
                f"the checkpoint repeats itself: {list(output)}; choose another seed or ``prompts``"
            )
        assert len({output.tokens for output in plain}) == len(plain), (
            "prompts that end in one text tell no slots apart"
        )

    def test_greedy_equals_plain_decoding(self, bench: Bench, plain: list[PlainText], any_drafts: int) -> None:
        """Fault class: missing verification, or different arithmetic at width 1 and width W. The drafter's own
        proposals."""
        slots = self.admit_all(bench)
        driver = self.driver(bench)
        driver.start(slots)
        self._run(driver, slots, [any_drafts] * 100)
        self._expect(driver, slots, plain)

    def test_width_sequences_equal_plain_decoding(self, bench: Bench, plain: list[PlainText], sequence: str) -> None:
        """Fault class: per-width metadata layout differs; a wide round's accepted count lost by a narrow one."""
        slots = self.admit_all(bench)
        driver = self.driver(bench)
        driver.start(slots)
        self._run(driver, slots, width_sequences(bench.recipe.widths.widths)[sequence])
        self._expect(driver, slots, plain)

    def test_perfect_drafts_are_all_accepted(self, bench: Bench, plain: list[PlainText], drafts: int) -> None:
        """Fault class: verification rows shifted by one (right drafts refused), draft counts lost; every row full but
        the last."""
        slots = self.admit_all(bench)
        driver = self.driver(bench, drafter=self.scripted(bench))
        driver.start(slots)

        def right(slot: int, count: int) -> list[int]:
            return next_tokens(plain[slot], len(driver.tokens(slot)), count, bench.vocab, count)

        self._run(driver, slots, [drafts] * 100, right)
        self._expect(driver, slots, plain)
        for slot in slots:
            if self.on_text(driver, slot, plain[slot]):
                for done in driver.completions[slot][1:-1]:
                    assert (done.offered, done.accepted, done.emitted) == (drafts, drafts, drafts + 1)

    def test_wrong_drafts_are_never_accepted(self, bench: Bench, plain: list[PlainText], drafts: int) -> None:
        """Fault class: verification rows shifted by one (first draft taken unverified). Wrong first, right afterwards."""
        slots = self.admit_all(bench)
        driver = self.driver(bench, drafter=self.scripted(bench))
        driver.start(slots)

        def wrong_first(slot: int, count: int) -> list[int]:
            tokens = next_tokens(plain[slot], len(driver.tokens(slot)), count, bench.vocab, count)
            return [(tokens[0] + 1) % bench.vocab, *tokens[1:]] if tokens else []

        self._run(driver, slots, [drafts] * 100, wrong_first)
        self._expect(driver, slots, plain)
        for slot in slots:
            if self.on_text(driver, slot, plain[slot]):
                assert all((done.accepted, done.emitted) == (0, 1) for done in driver.completions[slot])

    def test_right_and_wrong_rounds_alternate(self, bench: Bench, plain: list[PlainText], drafts: int) -> None:
        """Fault class: rejected tokens leave traces in recurrent memory; every round's outcome is the scripted one."""
        slots = self.admit_all(bench)
        driver = self.driver(bench, drafter=self.scripted(bench))
        driver.start(slots)
        turn = 0
        while running := driver.running(slots):
            counts = {slot: drafts if (turn + slot) % 2 else 0 for slot in running}
            script = {s: next_tokens(plain[s], len(driver.tokens(s)), drafts, bench.vocab, counts[s]) for s in running}
            driver.drafter.write(script)  # type: ignore[union-attr]
            for done in driver.round(running, drafts):
                if not done.finish and self.on_text(driver, done.slot, plain[done.slot]):
                    assert done.accepted == counts[done.slot]
            turn += 1
        self._expect(driver, slots, plain)

    def test_empty_drafts_are_ordinary_rounds(self, bench: Bench, plain: list[PlainText], drafts: int) -> None:
        """Fault class: empty draft treated as a draft. Ceiling zero in three rounds of four, full acceptance in the
        fourth."""
        slots = self.admit_all(bench)
        driver = self.driver(bench, drafter=self.scripted(bench))
        driver.start(slots)
        turn = 0
        while running := driver.running(slots):
            ceilings = {slot: drafts if (turn + slot) % 4 == 3 else 0 for slot in running}
            script = {s: next_tokens(plain[s], len(driver.tokens(s)), drafts, bench.vocab, drafts) for s in running}
            driver.drafter.write(script)  # type: ignore[union-attr]
            for done in driver.round(running, drafts, ceilings=ceilings):
                assert done.offered <= ceilings[done.slot]
                if not done.finish and self.on_text(driver, done.slot, plain[done.slot]):
                    assert done.accepted == ceilings[done.slot], "right drafts under the ceiling are accepted"
            turn += 1
        self._expect(driver, slots, plain)

    def test_lanes_with_their_own_ceilings(self, bench: Bench, plain: list[PlainText]) -> None:
        """Fault class: padded proposals with invented probabilities; shared fixed K; counters of a lane that depend
        on its neighbours. Lanes of 0 … K offered drafts in a batch."""
        slots = self.admit_all(bench)
        deepest = bench.recipe.max_draft_tokens
        driver = self.driver(bench, drafter=self.scripted(bench))
        driver.start(slots)
        turn = 0
        while running := driver.running(slots):
            ceilings = {slot: (3 * slot + 2 * turn) % (deepest + 1) for slot in running}
            script = {s: next_tokens(plain[s], len(driver.tokens(s)), deepest, bench.vocab, deepest) for s in running}
            driver.drafter.write(script)  # type: ignore[union-attr]
            for done in driver.round(running, deepest, ceilings=ceilings):
                assert done.emitted <= done.offered + 1
                if not done.finish and self.on_text(driver, done.slot, plain[done.slot]):
                    assert (done.offered, done.accepted) == (ceilings[done.slot],) * 2
            turn += 1
        self._expect(driver, slots, plain)

    def test_nan_draft_rows_cost_acceptance_only(self, bench: Bench, plain: list[PlainText], drafts: int) -> None:
        """Fault class: numeric fault of a drafter reaches the text. Every second depth has NaN logits, in every
        second lane."""
        require_logits(self)

        def blind(depth: int, logits: torch.Tensor) -> torch.Tensor:
            lanes = torch.arange(logits.shape[0], device=logits.device) % 2 == depth % 2
            return torch.where(lanes.unsqueeze(1), torch.nan, logits)

        slots = self.admit_all(bench)
        driver = self.driver(bench, drafter=AlteredLogits(bench.drafter, blind))
        driver.start(slots)
        self._run(driver, slots, [drafts] * 100)
        self._expect(driver, slots, plain)

    @pytest.mark.parametrize("offset", [-1, 0, 5])
    def test_ids_outside_the_vocabulary_are_rejected(self, bench: Bench, plain: list[PlainText], offset: int) -> None:
        """Fault class: padding rows treated as tokens. Proposals −1, V and V + 5 at every depth, right tokens around
        them."""
        slots = self.admit_all(bench)
        deepest = bench.recipe.max_draft_tokens
        outside = -1 if offset < 0 else bench.vocab + offset
        driver = self.driver(bench, drafter=self.scripted(bench))
        driver.start(slots)
        turn = 0
        while running := driver.running(slots):
            script = {s: next_tokens(plain[s], len(driver.tokens(s)), deepest, bench.vocab, deepest) for s in running}
            for slot in running:
                script[slot][(turn + slot) % deepest] = outside
            driver.drafter.write(script)  # type: ignore[union-attr]
            for done in driver.round(running, deepest):
                if not done.finish and self.on_text(driver, done.slot, plain[done.slot]):
                    assert done.accepted == (turn + done.slot) % deepest
            turn += 1
        self._expect(driver, slots, plain)

    def test_padded_vocabulary_is_never_proposed(self, bench: Bench, plain: list[PlainText]) -> None:
        """Fault class: padding rows treated as tokens. A drafter whose head is padded to V + 8 with great logits."""
        require_logits(self)

        def pad(depth: int, logits: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.pad(logits, (0, 8), value=1e4)

        slots = self.admit_all(bench)
        recorder = RecordingDrafter(AlteredLogits(bench.drafter, pad))
        driver = self.driver(bench, drafter=recorder)
        driver.start(slots)
        own = self.driver(bench)
        while running := driver.running(slots):
            driver.round(running, bench.recipe.default_draft_tokens)
            assert all(0 <= token < bench.vocab for slot in running for token in recorder.tokens(slot))
        assert own.drafter is bench.drafter
        self._expect(driver, slots, plain)

    def test_equal_logits_take_the_lowest_id(self, bench: Bench, drafts: int) -> None:
        """Fault class: ties broken by the order of a kernel. Logits rounded to a few levels, so that most rows are
        tied."""
        steps: list[torch.Tensor] = []

        def coarse(logits: torch.Tensor) -> torch.Tensor:
            spread = logits.amax(-1, keepdim=True) - logits.amin(-1, keepdim=True)
            rounded = ((logits - logits.amin(-1, keepdim=True)) / spread * 3).floor().clamp(max=1)
            steps.append(rounded.clone())
            return rounded

        def lowest(row: torch.Tensor) -> int:
            return int((row == row.max()).nonzero()[0])

        slots = self.admit_all(bench)
        target = bench.target
        first_logits = target.first_logits
        with (
            altered_verification(target, coarse),
            replaced(target, "first_logits", lambda *a, **k: coarse(first_logits(*a, **k))),
        ):
            driver = self.driver(bench, drafter=self.scripted(bench), eager=True)
            for done in driver.start(slots):
                assert done.tokens == (lowest(steps[-1][done.slot]),)
            for _ in range(4):
                driver.drafter.write({})  # type: ignore[union-attr]
                for done in driver.round(slots, drafts):
                    expected = [lowest(row) for row in steps[-1][done.slot, : done.emitted]]
                    assert list(done.tokens) == expected, "the lowest id among equals"
