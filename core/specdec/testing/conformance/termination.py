"""Requests end at the first stop id, at the budget and at the context, in the transaction and not only in what is
shown."""

from __future__ import annotations

from specdec.round.completion import Finish
from specdec.testing.conformance.base import Conformance, next_tokens
from specdec.testing.conformance.bench import Bench
from specdec.testing.conformance.driver import Driver
from specdec.testing.conformance.near_ties import PlainText


class TerminationConformance(Conformance):
    """State, counters and pending token follow the clipped length."""

    def _perfect(self, bench: Bench, plain: list[PlainText], slots: list[int], drafts: int, extra: list[int]) -> Driver:
        """Right drafts until all requests ended; ``extra`` slots stay in the batch after they ended."""
        driver = self.driver(bench, drafter=self.scripted(bench))
        driver.start(slots)
        while running := driver.running(slots):
            script = {s: next_tokens(plain[s], len(driver.tokens(s)), drafts, bench.vocab, drafts) for s in running}
            driver.drafter.write(script)  # type: ignore[union-attr]
            lanes = [slot for slot in slots if slot in running or slot in extra]
            driver.round(lanes, drafts)
        return driver

    def test_stop_id_at_every_offset(self, bench: Bench, reference: Bench, plain: list[PlainText]) -> None:
        """Fault classes: stop check sees only the last committed token; presentation clipped, transaction not. Every
        token of the output in turn is the stop id, with right drafts: the output ends with its first occurrence, and
        so does the state."""
        prompts, deepest = self.prompts(bench), bench.recipe.max_draft_tokens
        slots = [0, 1, 2, 3]
        for offset in range(2 * deepest + 2):
            stops = {slot: plain[slot][(offset + slot) % self.budget] for slot in slots}
            for slot in slots:
                bench.admit(slot, prompts[slot], budget=self.budget, greedy=True, stops=(bench.vocab + 3, stops[slot]))
            driver = self._perfect(bench, plain, slots, deepest, extra=[0, 2])
            for slot in slots:
                end = plain[slot].index(stops[slot]) + 1
                if self.on_text(driver, slot, plain[slot]):
                    assert len(driver.tokens(slot)) == end
                    last = driver.completions[slot][-1]
                    assert last.finish is Finish.STOP and last.pending == stops[slot]
            slot = offset % 4
            self.check_state(bench, reference, slot, [*prompts[slot], *driver.tokens(slot)[:-1]])

    def test_budget_at_every_offset(self, bench: Bench, reference: Bench, plain: list[PlainText], drafts: int) -> None:
        """Fault class: emitted count larger than the budget; drafts offered that cannot be used. Budgets 1 … K + 3."""
        prompts = self.prompts(bench)
        slots = [0, 1, 2, 3]
        for first in range(1, drafts + 4, 4):
            budgets = {slot: first + slot for slot in slots}
            for slot in slots:
                bench.admit(slot, prompts[slot], budget=budgets[slot], greedy=True)
            driver = self._perfect(bench, plain, slots, drafts, extra=[1])
            self.check_text(driver, slots, [plain[slot][: budgets[slot]] for slot in slots])
            for slot in slots:
                assert driver.completions[slot][-1].finish is Finish.LENGTH
                self.check_state(bench, reference, slot, [*prompts[slot], *driver.tokens(slot)[:-1]])

    def test_budget_ends_a_request_whatever_was_accepted(
        self, bench: Bench, reference: Bench, plain: list[PlainText], accepted: int
    ) -> None:
        """Fault class: budget clip missing when it falls on an accepted, corrected or bonus token. Budgets around
        each count."""
        prompts, deepest = self.prompts(bench), bench.recipe.max_draft_tokens
        slots = [0, 1, 2, 3]
        for slot in slots:
            bench.admit(slot, prompts[slot], budget=max(accepted + slot, 1), greedy=True)
        driver = self.driver(bench, drafter=self.scripted(bench))
        driver.start(slots)
        while running := driver.running(slots):
            script = {s: next_tokens(plain[s], len(driver.tokens(s)), deepest, bench.vocab, accepted) for s in running}
            driver.drafter.write(script)  # type: ignore[union-attr]
            driver.round(running, deepest)
        self.check_text(driver, slots, [plain[slot][: max(accepted + slot, 1)] for slot in slots])
        self.check_all(bench, reference, driver, slots, prompts)

    def test_stop_before_budget_and_budget_before_stop(self, bench: Bench, plain: list[PlainText]) -> None:
        """Fault class: two ends in one accepted run. The earlier one counts; a stop id on the last token of the
        budget is a stop."""
        prompts, deepest = self.prompts(bench), bench.recipe.max_draft_tokens
        slots = [0, 1, 2, 3]
        at = {slot: next(i for i in range(2, self.budget) if plain[slot].index(plain[slot][i]) == i) for slot in slots}
        for shift in (-1, 0, 1):
            for slot in slots:
                budget = at[slot] + 1 + shift
                bench.admit(slot, prompts[slot], budget=budget, greedy=True, stops=(plain[slot][at[slot]],))
            driver = self._perfect(bench, plain, slots, deepest, extra=[])
            for slot in slots:
                last = driver.completions[slot][-1]
                if self.on_text(driver, slot, plain[slot]):
                    assert len(driver.tokens(slot)) == at[slot] + min(shift, 0) + 1
                    assert last.finish is (Finish.LENGTH if shift < 0 else Finish.STOP)

    def test_context_end(self, bench: Bench, reference: Bench, drafts: int) -> None:
        """Fault classes: stale draft buffer on a skipped path; draft limit not enforced per request; off-by-one in
        capacity. A request that fills the context exactly: the last rounds offer only what can still be emitted, and
        the tokens are those of plain decoding."""
        context = bench.capacities.context
        for slot, room in enumerate((1, 2, drafts + 2, 2 * drafts + 3)):
            prompt = self.text(bench, context - room, seed=room)
            output = self.decode(reference, prompt, room)
            bench.admit(slot, prompt, budget=room, greedy=True)
            driver = self.driver(bench, drafter=self.scripted(bench))
            driver.start([slot])
            while driver.running([slot]):
                script = next_tokens(output, len(driver.tokens(slot)), drafts, bench.vocab, drafts)
                driver.drafter.write({slot: script})  # type: ignore[union-attr]
                remaining = room - len(driver.tokens(slot))
                done = driver.round([slot], drafts)[0]
                assert done.offered == min(drafts, remaining - 1)
            if self.on_text(driver, slot, output):
                assert len(driver.tokens(slot)) == room
            self.check_state(bench, reference, slot, [*prompt, *driver.tokens(slot)[:-1]])

    def test_finished_requests_do_nothing(self, bench: Bench, plain: list[PlainText], drafts: int) -> None:
        """Fault class: padding metadata not neutralised. A finished request stays in the batch for rounds: its
        records repeat its end with nothing emitted, its state does not move (compared byte for byte after every
        round), its neighbours' text holds."""
        prompts = self.prompts(bench)
        slots = [0, 1, 2, 3]
        for slot in slots:
            budget = 1 if slot == 0 else 3 if slot == 2 else self.budget
            bench.admit(slot, prompts[slot], budget=budget, greedy=True)
        driver = self._perfect(bench, plain, slots, drafts, extra=[0, 2])
        self.check_text(driver, slots, [plain[0][:1], plain[1], plain[2][:3], plain[3]])
        assert sum(done.emitted for done in driver.completions[0]) == 1
