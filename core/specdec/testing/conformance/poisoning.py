"""What is not committed may be anything: NaN in scratch, candidates, stale pages and spare rows changes nothing."""

from __future__ import annotations

from typing import Any

import torch

from specdec.testing.conformance.base import Conformance, next_tokens
from specdec.testing.conformance.bench import Bench
from specdec.testing.conformance.driver import Driver
from specdec.testing.conformance.near_ties import PlainText
from specdec.testing.conformance.states import poison, poison_slot
from specdec.testing.drafters import RecordingDrafter


class PoisonConformance(Conformance):
    """No later round reads what an earlier one left behind."""

    def _poisoned(self, bench: Bench, slots: list[int]) -> Any:
        return lambda driver: poison(bench, {slot: driver.consumed(slot) for slot in slots})

    def test_poison_between_rounds_changes_nothing(
        self, bench: Bench, reference: Bench, plain: list[PlainText], drafts: int
    ) -> None:
        """Fault classes: scratch aliasing / lifetime; candidates read as history; stale drafts. Everything that is
        not committed becomes NaN between rounds: tokens, states and counts stay, every draft logit of a live lane is
        finite, every placed draft a token."""
        slots = self.admit_all(bench)
        recorder = RecordingDrafter(bench.drafter)
        script = self.scripted(bench, recorder)
        driver = self.driver(bench, drafter=script, between=self._poisoned(bench, slots))
        driver.start(slots)
        turn = 0
        while running := driver.running(slots):
            width = 0 if turn % 3 == 2 else drafts
            counts = {slot: (slot + turn) % (width + 1) for slot in running}
            script.write(
                {s: next_tokens(plain[s], len(driver.tokens(s)), width, bench.vocab, counts[s]) for s in running}
            )
            for done in driver.round(running, width, lanes=[*running, *[bench.spare] * (4 - len(running))]):
                if not done.finish and self.on_text(driver, done.slot, plain[done.slot]):
                    assert done.accepted == counts[done.slot]
            for slot in running:
                found = recorder.given(slot) if width else torch.zeros(0)
                sound = found.isfinite() if found.is_floating_point() else (found >= 0) & (found < bench.vocab)
                assert bool(sound.all()), "NaN, or an id that is no token, reached a proposal"
            turn += 1
        self.check_text(driver, slots, plain)
        self.check_all(bench, reference, driver, slots, self.prompts(bench))

    def test_poison_leaves_proposals_as_they_are(self, bench: Bench, drafts: int) -> None:
        """Fault class: buffer reused before its last reader. The drafter's own proposals, drawn, with and
        without poison."""
        seen = []
        for poisoned in (False, True):
            slots = self.admit_all(bench, seed=21, temperature=1.5, top_k=4)
            recorder = RecordingDrafter(bench.drafter)
            driver = self.driver(bench, drafter=recorder, between=self._poisoned(bench, slots) if poisoned else None)
            driver.start(slots)
            rounds = []
            for _ in range(4):
                driver.round(slots, drafts)
                rounds.append([recorder.tokens(slot) for slot in slots])
            seen.append((rounds, [driver.tokens(slot) for slot in slots]))
        assert seen[0] == seen[1]

    def test_a_slot_forgets_its_earlier_owner(self, bench: Bench, reference: Bench, plain: list[PlainText]) -> None:
        """Fault class: drafter state crosses request boundaries. A slot that is NaN throughout, pages included,
        serves the next request as if it were new."""
        prompts, deepest = self.prompts(bench), bench.recipe.max_draft_tokens
        slots = self.admit_all(bench, budget=20)
        first = self.driver(bench)
        first.start(slots)
        for _ in range(3):
            first.round(slots, deepest)
        for slot in slots:
            poison_slot(bench, slot)
        order = [3, 0, 1, 2]
        for slot, owner in enumerate(order):
            bench.admit(slot, prompts[owner], budget=self.budget, greedy=True, request=200 + slot, epoch=2)
        driver: Driver = self.driver(bench, drafter=self.scripted(bench))
        driver.start(slots)
        while running := driver.running(slots):
            script = {s: next_tokens(plain[order[s]], len(driver.tokens(s)), deepest, bench.vocab, 2) for s in running}
            driver.drafter.write(script)  # type: ignore[union-attr]
            driver.round(running, deepest)
        self.check_text(driver, slots, [plain[owner] for owner in order])
        self.check_all(bench, reference, driver, slots, [prompts[owner] for owner in order])

    def test_spare_slot_and_trash_page_are_never_read(self, bench: Bench, plain: list[PlainText], drafts: int) -> None:
        """Fault class: dead lanes leak into live ones. Dead lanes run on NaN beside live ones, in every round."""
        slots = self.admit_all(bench)
        driver = self.driver(bench, between=self._poisoned(bench, slots))
        driver.start(slots)
        for _ in range(4):
            driver.round(slots[:2], drafts, lanes=[bench.spare, 1, bench.spare, 0])
        for slot in slots[:2]:
            self.on_text(driver, slot, plain[slot])
        assert torch.isfinite(bench.target.feedback(bench.where(0, 1))).all()
