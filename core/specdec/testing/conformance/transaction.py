"""Committed state after rounds equals the state of one prompt pass over the committed tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specdec.places import method_of
from specdec.testing.conformance.base import Conformance, next_tokens
from specdec.testing.conformance.bench import Bench
from specdec.testing.conformance.explanations import prompt_feedback, shift_of, undeclared
from specdec.testing.conformance.near_ties import PlainText
from specdec.testing.conformance.states import poison_slot


class TransactionConformance(Conformance):
    """A rejected draft leaves no trace."""

    def test_state_after_every_accepted_count(
        self, bench: Bench, reference: Bench, plain: list[PlainText], drafts: int
    ) -> None:
        """Fault classes: recurrent state not rolled back after rejection; convolution window too short to hold
        candidates plus rollback, or not shifted; early return in one commit path skips a second kind of state.
        Accepted counts 0 … K, another one on every lane, then a round of width one, then the same counts again."""
        prompts = self.prompts(bench)
        for accepted in range(drafts + 1):
            slots = self.admit_all(bench)
            driver = self.driver(bench, drafter=self.scripted(bench))
            driver.start(slots)
            counts = {slot: (accepted + slot) % (drafts + 1) for slot in slots}
            for width in (drafts, 0, drafts):
                script = {
                    s: next_tokens(plain[s], len(driver.tokens(s)), width, bench.vocab, min(counts[s], width))
                    for s in slots
                }
                driver.drafter.write(script)  # type: ignore[union-attr]
                for done in driver.round(slots, width):
                    right = min(counts[done.slot], width)
                    if self.on_text(driver, done.slot, plain[done.slot]):
                        assert (done.offered, done.accepted, done.emitted) == (width, right, right + 1)
                if width:
                    self.check_state(bench, reference, accepted % 4, self._sequence(prompts, driver, accepted % 4))
            self.check_all(bench, reference, driver, slots, prompts)

    @staticmethod
    def _sequence(prompts: list[list[int]], driver: object, slot: int) -> list[int]:
        return [*prompts[slot], *driver.tokens(slot)[:-1]]  # type: ignore[attr-defined]

    def test_state_after_every_round(self, bench: Bench, reference: Bench) -> None:
        """Fault class: recurrent state not rolled back after rejection, noticed in the round where it happens.
        Widest, one, widest; all of three and then none; random counts and widths: state of one slot is compared after
        each round."""
        prompts = self.prompts(bench)
        widths = [width - 1 for width in bench.recipe.widths.widths]
        deepest, shallow = widths[-1], widths[min(3, len(widths) - 1)]
        draws = torch.randint(0, 1000, (24, 2), generator=torch.Generator().manual_seed(5)).tolist()
        fixed = [
            (deepest, deepest),
            (0, 0),
            (deepest, deepest),
            (shallow, shallow),
            (0, 0),
            (widths[1], widths[1]),
            (deepest, 0),
        ]
        rounds = fixed + [(widths[a % len(widths)], b % min(widths[a % len(widths)] + 1, 3)) for a, b in draws]
        budget = sum(right + 1 for _, right in rounds) + 2
        outputs = [self.decode(reference, prompt, budget) for prompt in prompts]
        slots = self.admit_all(bench, budget=budget)
        driver = self.driver(bench, drafter=self.scripted(bench))
        driver.start(slots)
        for turn, (drafts, right) in enumerate(rounds):
            script = {s: next_tokens(outputs[s], len(driver.tokens(s)), drafts, bench.vocab, right) for s in slots}
            driver.drafter.write(script)  # type: ignore[union-attr]
            driver.round(slots, drafts)
            slot = turn % 4
            self.on_text(driver, slot, outputs[slot])
            self.check_state(bench, reference, slot, self._sequence(prompts, driver, slot))

    def test_state_of_plain_rounds(self, bench: Bench, reference: Bench, plain: list[PlainText]) -> None:
        """Fault classes: optimistic host mirror used as committed history (a frozen or guessed token history);
        pending token counted as draft, rate from configured width. Nine rounds with the drafter and no draft."""
        prompts = self.prompts(bench)
        slots = self.admit_all(bench)
        driver = self.driver(bench)
        driver.start(slots)
        for _ in range(9):
            for done in driver.round(slots, 0):
                assert (done.offered, done.accepted, done.emitted) == (0, 0, 1), (
                    "width one adds nothing to what was offered"
                )
        self.check_all(bench, reference, driver, slots, prompts)
        self.check_text(driver, slots, [output[:10] for output in plain])

    def test_feedback_is_the_row_of_the_last_consumed_token(
        self, bench: Bench, reference: Bench, plain: list[PlainText], accepted: int
    ) -> None:
        """Fault class: number of drafted rows not tracked, wrong feedback row after partial accept. Also when a stop
        id clips what was accepted, so that the last consumed input is an earlier one. All state after this one round, and the
        rows that a drafter absorbs: those of the inputs, from the first on."""
        prompts, deepest = self.prompts(bench), bench.recipe.max_draft_tokens
        for right, stopping in ((accepted, False), (deepest, True)):
            slots = self.admit_all(bench)
            for slot in slots:
                stops = [plain[slot][max(accepted, 1)]] if stopping else []
                bench.enter(slot, prompts[slot], budget=self.budget, stops=stops, greedy=True)
            driver = self.driver(bench, drafter=self.scripted(bench))
            driver.start(slots)
            script = {s: next_tokens(plain[s], 1, deepest, bench.vocab, right) for s in slots}
            driver.drafter.write(script)  # type: ignore[union-attr]
            if driver.running(slots):
                driver.round(slots, deepest)
            for slot in slots:
                sequence = self._sequence(prompts, driver, slot)
                self.check_state(bench, reference, slot, sequence)
                inputs = [driver.tokens(slot)[0], *script[slot]]
                self._check_feedback(bench, reference, slot, prompts[slot], inputs, sequence)
                reference.admit(0, sequence, greedy=True)
                ours = bench.target.first_logits(bench.where(slot))
                theirs = reference.target.first_logits(reference.where(0))
                self.check_values(ours, theirs, f"logits of slot {slot}")

    def _check_feedback(
        self,
        bench: Bench,
        reference: Bench,
        slot: int,
        prompt: Sequence[int],
        inputs: Sequence[int],
        sequence: Sequence[int],
    ) -> None:
        """Saved feedback and absorbed rows of a slot that consumed ``sequence``: its prompt, then one round of ``inputs``."""
        rows, where = prompt_feedback(reference, [*prompt, *inputs]), bench.where(slot)
        taken = len(sequence) - len(prompt)
        checks = [("feedback", bench.target.feedback(where), len(sequence) - 1)]
        if taken:
            checks.append(("feedback_rows", bench.target.feedback_rows(where, taken)[0], len(prompt)))
        for method, found, place in checks:
            wrong = self.allowed().differences(found, rows[place : place + len(found)])
            if wrong is not None:
                by = shift_of(found, rows, place, lambda a, b: self.allowed().differences(a, b) is None)
                shifted = (
                    "" if by is None else f": it is that of the input {abs(by)} {'later' if by > 0 else 'earlier'}"
                )
                raise AssertionError(
                    f"{method} of slot {slot} after {taken} of {len(inputs)} inputs: {wrong}{shifted}; look at "
                    f"{method_of(bench.target, method)}"
                )

    def test_prefixes_around_groups_and_pages(self, bench: Bench, reference: Bench, length: int) -> None:
        """Fault classes: stale ring tags; a group key of rejected members; page addressing at a boundary. Prompts of
        1 … 5 and 61 … 68 tokens, rounds that cross groups of four and the page by every offset."""
        prompt = self.text(bench, length)
        output = self.decode(reference, prompt, 24)
        deepest = bench.recipe.max_draft_tokens
        slots = [0, 1, 2, 3]
        for slot in slots:
            bench.admit(slot, prompt, budget=24, greedy=True)
        driver = self.driver(bench, drafter=self.scripted(bench))
        driver.start(slots)
        for turn in range(3):
            counts = {slot: (2 * slot + turn) % (deepest + 1) for slot in slots}
            running = driver.running(slots)
            script = {s: next_tokens(output, len(driver.tokens(s)), deepest, bench.vocab, counts[s]) for s in running}
            driver.drafter.write(script)  # type: ignore[union-attr]
            driver.round(running, deepest)
            for slot in slots:
                self.on_text(driver, slot, output)
        self.check_all(bench, reference, driver, slots, [prompt] * 4)

    def test_snapshots_continue_elsewhere(
        self, bench: Bench, reference: Bench, plain: list[PlainText], accepted: int
    ) -> None:
        """Fault classes: recurrent state and draft history restored at different lengths; draft features missing for
        cached tokens; abort in the middle of a request. State of one slot, taken between rounds, continues in a slot
        that was NaN throughout."""
        prompts, deepest = self.prompts(bench), bench.recipe.max_draft_tokens
        source, destination = 3, 1
        slots = self.admit_all(bench)
        driver = self.driver(bench, drafter=self.scripted(bench))
        driver.start(slots)
        for width in (deepest, 0, deepest):
            count = min(accepted, width)
            script = {s: next_tokens(plain[s], len(driver.tokens(s)), width, bench.vocab, count) for s in slots}
            driver.drafter.write(script)  # type: ignore[union-attr]
            driver.round(slots, width)
        consumed, done = driver.consumed(source), driver.tokens(source)
        where = bench.where(source)
        taken = bench.target.snapshot(where), bench.drafter.snapshot(where)
        for owner, store, state in zip((bench.target, bench.drafter), bench.stores, taken, strict=True):
            missing = [name for name in store.state_after(where, torch.zeros_like(where)) if name not in state]
            assert not missing, f"{method_of(owner, 'snapshot')} leaves out {', '.join(missing)}; see store.state_after"
        self._restore(bench, source, destination, consumed, taken[0], taken[1])
        self.check_state(bench, reference, destination, [*prompts[source], *done[:-1]])
        bench.enter(destination, prompts[source], budget=self.budget, output=done, request=777, greedy=True)
        driver.open([destination])
        for width in (0, deepest, deepest):
            pair = [destination, source]
            so_far = {s: len(done) + len(driver.tokens(s)) if s == destination else len(driver.tokens(s)) for s in pair}
            script = {s: next_tokens(plain[source], so_far[s], width, bench.vocab, 2) for s in pair}
            driver.drafter.write(script)  # type: ignore[union-attr]
            first, second = driver.round(pair, width)
            assert (first.tokens, first.accepted) == (second.tokens, second.accepted), (
                f"the restored request goes on differently: {list(first.tokens)} against {list(second.tokens)}; what it depends "
                f"on is not in the snapshot{undeclared(bench)}"
            )
        assert [*done, *driver.tokens(destination)] == driver.tokens(source)

    def test_state_at_a_crossed_page_boundary(self, bench: Bench, reference: Bench) -> None:
        """Fault classes: recurrent state and draft history restored at different lengths; publication of what was not
        accepted. Rounds that cross a page boundary by every offset keep the state exactly at the boundary, open group
        of the drafter included."""
        page, deepest = bench.target.store.layout.page_tokens, bench.recipe.max_draft_tokens
        for short in range(1, deepest + 2):
            # the text that greedy decoding goes on with, cut so that the boundary lies ``short`` tokens ahead
            prompt = self.text(bench, page - short)
            future = self.decode(reference, prompt, deepest + 2)
            for accepted in {short - 1, deepest}:
                bench.admit(0, prompt, budget=self.budget, greedy=True)
                driver = self.driver(bench, drafter=self.scripted(bench))
                driver.start([0])
                driver.drafter.write({0: next_tokens(future, 1, deepest, bench.vocab, accepted)})  # type: ignore[union-attr]
                done = driver.round([0], deepest, boundary=True)[0]
                if not self.on_text(driver, 0, future) and done.consumed < page:
                    continue
                assert done.consumed >= page
                kept = driver.captured(1, deepest, boundary=True).boundary_state
                self._restore(bench, 0, 2, page, kept["target"], kept["drafter"])
                self.check_state(bench, reference, 2, [*prompt, *driver.tokens(0)][:page])

    @staticmethod
    def _restore(
        bench: Bench,
        source: int,
        destination: int,
        consumed: int,
        target: Mapping[str, Tensor],
        drafter: Mapping[str, Tensor],
    ) -> None:
        """Puts snapshots of one lane into another slot that was NaN throughout, with copies of the source's pages."""
        bench.reset(destination)
        poison_slot(bench, destination)
        bench.move(source, destination, target, drafter, consumed)
