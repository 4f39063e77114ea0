"""Lanes, slots and capture: who is in a batch, and what a captured program may contain."""

from __future__ import annotations

from itertools import product

import torch

from specdec.round.completion import Field, Finish
from specdec.testing.conformance.base import Conformance, next_tokens
from specdec.testing.conformance.bench import Bench, altered_verification
from specdec.testing.conformance.invariants import parse
from specdec.testing.conformance.near_ties import PlainText, follows
from specdec.testing.guard import CapturableGuard

#: Orders of four slots in four lanes.
ORDERS = ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0])


class BatchingConformance(Conformance):
    """A lane is a place in a batch and nothing more."""

    def test_live_and_dead_lanes_at_every_position(self, bench: Bench, plain: list[PlainText]) -> None:
        """Fault classes: padding metadata not neutralised; row index used as identity; padded lanes writing a real
        slot. Every pattern of live and dead lanes, slots in three orders, counts that differ by lane; the driver
        compares all other state byte for byte."""
        slots = self.admit_all(bench)
        start = self.driver(bench)
        start.start(slots)
        image, deepest = bench.image(), bench.recipe.max_draft_tokens
        for number, pattern in enumerate(product((True, False), repeat=4)):
            order = ORDERS[number % len(ORDERS)]
            live = [slot for slot, alive in zip(order, pattern, strict=True) if alive]
            lanes = [slot if alive else bench.spare for slot, alive in zip(order, pattern, strict=True)]
            if not live:
                continue
            bench.rewind(image)
            driver = self.driver(bench, drafter=self.scripted(bench))
            driver.open(slots)
            driver.number = 1
            for drafts in (deepest, 0, deepest):
                counts = {slot: (slot + number) % (drafts + 1) for slot in live}
                script = {
                    s: next_tokens(plain[s], 1 + len(driver.tokens(s)), drafts, bench.vocab, counts[s]) for s in live
                }
                driver.drafter.write(script)  # type: ignore[union-attr]
                for done in driver.round(live, drafts, lanes=lanes):
                    found = [*start.tokens(done.slot), *driver.tokens(done.slot)]
                    if follows(found, plain[done.slot], self.near_tie):
                        assert done.accepted == counts[done.slot], f"slot {done.slot} in lanes {lanes}"

    def test_finished_lanes_between_live_ones(self, bench: Bench, plain: list[PlainText]) -> None:
        """Fault class: stale padded request metadata. Requests finish in three lanes one after the other and stay in
        the batch."""
        prompts, deepest = self.prompts(bench), bench.recipe.max_draft_tokens
        budgets = {0: 3, 1: self.budget, 2: 1, 3: 9}
        for slot, budget in budgets.items():
            bench.admit(slot, prompts[slot], budget=budget, greedy=True)
        slots = [2, 0, 1, 3]
        driver = self.driver(bench, drafter=self.scripted(bench))
        driver.start(slots)
        while running := driver.running(slots):
            script = {s: next_tokens(plain[s], len(driver.tokens(s)), deepest, bench.vocab, 2) for s in running}
            driver.drafter.write(script)  # type: ignore[union-attr]
            driver.round(slots, deepest)
        self.check_text(driver, sorted(budgets), [plain[slot][: budgets[slot]] for slot in sorted(budgets)])
        for slot, budget in budgets.items():
            assert sum(done.emitted for done in driver.completions[slot]) == budget

    def test_round_is_capturable(self, bench: Bench, any_drafts: int) -> None:
        """Fault class: a captured program that reads tensors on the host, has data-dependent shapes, draws from a
        generator or leaves memory behind. One dead lane among four."""
        slots = self.admit_all(bench, seed=3)
        driver = self.driver(bench)
        driver.start(slots[:3])
        driver.round(slots[:3], any_drafts, lanes=[0, bench.spare, 1, 2])
        captured = driver.captured(4, any_drafts)
        with CapturableGuard() as guard:
            captured.run()
        assert guard.operations > 20
        for record in bench.arena.read_frame((driver.number - 1) % 2, slots[:3]):
            assert record[Field.EMITTED] >= 1

    def test_broken_target_row_ends_that_request_only(
        self, bench: Bench, plain: list[PlainText], fault_row: int
    ) -> None:
        """Fault class: numeric fault crosses lanes. One verify row of one lane is NaN: what was accepted before it is
        emitted, the request ends with a fault, its neighbours' text holds."""
        deepest = bench.recipe.max_draft_tokens
        for victim in range(4):
            slots = self.admit_all(bench)
            driver = self.driver(bench, drafter=self.scripted(bench), eager=True)
            driver.start(slots)

            def broken(logits: torch.Tensor, victim: int = victim) -> torch.Tensor:
                here = torch.zeros(logits.shape[:2], dtype=torch.bool, device=logits.device)
                here[victim, fault_row] = True
                return logits.masked_fill(here.unsqueeze(-1), torch.nan)

            script = {s: next_tokens(plain[s], 1, deepest, bench.vocab, deepest) for s in slots}
            driver.drafter.write(script)  # type: ignore[union-attr]
            with altered_verification(bench.target, broken):
                found = driver.round(slots, deepest)
            if self.on_text(driver, victim, plain[victim]):
                assert found[victim].finish is Finish.FAULT
                assert len(found[victim].tokens) == fault_row
            while running := driver.running(slots):
                script = {s: next_tokens(plain[s], len(driver.tokens(s)), deepest, bench.vocab, 3) for s in running}
                driver.drafter.write(script)  # type: ignore[union-attr]
                driver.round(running, deepest)
            self.check_text(driver, [slot for slot in slots if slot != victim], plain)


class RecordConformance(Conformance):
    """Completion records: identity, frames, zero emission."""

    def test_late_records_are_recognised(self, bench: Bench, plain: list[PlainText], drafts: int) -> None:
        """Fault classes: late completion applied to a reset request; row index used as identity. A slot gets a new
        owner between a round and the reading of its record: the record still names the old request and epoch, and the
        new owner starts clean."""
        slots = self.admit_all(bench)
        prompts = self.prompts(bench)
        driver = self.driver(bench)
        driver.start(slots)
        number = driver.number
        driver.captured(4, drafts).submit(slots, [drafts] * 4, number)
        bench.admit(1, prompts[2], budget=self.budget, request=555, epoch=2, greedy=True)
        late = [parse(record, number) for record in bench.arena.read_frame(number % 2, slots)]
        assert [(done.request, done.epoch, done.round) for done in late] == [(100 + slot, 1, number) for slot in slots]
        assert (late[1].request, late[1].epoch) != (555, 2)
        driver.number = number + 1
        driver.start([1])
        while driver.running([1]):
            done = driver.round([1], drafts)[0]
            assert (done.request, done.epoch) == (555, 2)
        if self.on_text(driver, 1, plain[2]):
            assert len(driver.tokens(1)) == self.budget

    def test_two_rounds_in_flight(self, bench: Bench, plain: list[PlainText], drafts: int) -> None:
        """Fault classes: accounting assumes at least one emitted token; optimistic host mirror used as committed
        history; late commit revives a finished request. Two rounds are submitted before a record is read: both frames
        are intact, and a lane that ended in the first emits nothing in the second."""
        prompts = self.prompts(bench)
        for slot in range(4):
            bench.admit(slot, prompts[slot], budget=2 if slot % 2 else self.budget, greedy=True)
        slots = [0, 1, 2, 3]
        driver = self.driver(bench)
        driver.start(slots)
        captured, number = driver.captured(4, drafts), driver.number
        captured.submit(slots, [drafts] * 4, number)
        captured.submit(slots, [drafts] * 4, number + 1)
        first, second = ([parse(r, n) for r in bench.arena.read_frame(n % 2, slots)] for n in (number, number + 1))
        for slot in slots:
            follows([*driver.tokens(slot), *first[slot].tokens, *second[slot].tokens], plain[slot], self.near_tie)
            if slot % 2:
                assert first[slot].finish is second[slot].finish is Finish.LENGTH
                assert (second[slot].emitted, second[slot].offered, second[slot].accepted) == (0, 0, 0)
                assert second[slot].generated == 2
            else:
                assert second[slot].emitted >= 1

    def test_retired_slots_report_nothing(self, bench: Bench, drafts: int) -> None:
        """Fault class: inactive rows keep old counters. A slot that was retired is a neutral lane."""
        slots = self.admit_all(bench)
        driver = self.driver(bench)
        driver.start(slots)
        driver.round(slots, drafts)
        bench.arena.requests.retire(2)
        del driver.accounts[2]
        driver.number += 1
        live = [0, 1, 3]
        driver.round(live, drafts, lanes=[0, 1, 2, 3])
        record = parse(bench.arena.read_frame((driver.number - 1) % 2, [2])[0], driver.number - 1)
        assert (record.emitted, record.offered, record.accepted, record.generated) == (0, 0, 0, 0)
        assert record.finish is not Finish.NONE
