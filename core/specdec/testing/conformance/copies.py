"""Copied drafts: a speed-up like any other draft, judged as a point mass, and continued from by the drafter."""

from __future__ import annotations

import pytest
import torch

from specdec.errors import UsageError
from specdec.testing.conformance.base import Conformance, next_tokens, require_copies
from specdec.testing.conformance.bench import Bench
from specdec.testing.conformance.near_ties import PlainText
from specdec.testing.drafters import RecordingDrafter


class CopyConformance(Conformance):
    """Rounds in which the host brings the first drafts of some lanes. Recipes that declare no history drafts refuse them."""

    def test_copies_that_do_not_fit_are_refused(self, bench: Bench, any_drafts: int) -> None:
        """Fault class: copies taken where they were not declared. One clear line and no round; without copies the same call
        runs."""
        slots = self.admit_all(bench)
        driver = self.driver(bench)
        driver.start(slots)
        captured = driver.captured(4, any_drafts)
        image = bench.image()
        declared = bench.recipe.supports_history_drafts
        refused = {
            "history_drafts" if not declared else "shorten the copy": [[0] * (any_drafts + 1), [], [], []],
            **({"4 lanes|the round 4": [[0]] * 5} if declared else {}),
        }
        for message, copies in refused.items():
            with pytest.raises(UsageError, match=message) as caught:
                captured.submit(slots, [any_drafts] * 4, driver.number, copies=copies)
            assert "\n" not in str(caught.value)
        for found, expected in zip(bench.image().copies, image.copies, strict=True):
            # what earlier tests poisoned and nobody committed may be NaN
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        assert all(done.emitted for done in driver.round(slots, any_drafts, copies={}))

    def test_greedy_with_copies_equals_plain_decoding(self, bench: Bench, plain: list[PlainText], drafts: int) -> None:
        """Fault classes: copied drafts taken unverified; copies of one lane in another. Right, wrong, half right and no copies
        of every length side by side, ids outside the vocabulary among them."""
        require_copies(bench)
        slots = self.admit_all(bench)
        driver = self.driver(bench)
        driver.start(slots)
        turn = 0
        while running := driver.running(slots):
            copies, right = {}, {}
            for slot in running:
                count = (turn + 2 * slot) % (drafts + 1)
                right[slot] = count if (turn + slot) % 3 else (turn + slot) // 3 % (count + 1)
                copies[slot] = next_tokens(plain[slot], len(driver.tokens(slot)), count, bench.vocab, right[slot])
                if right[slot] < count and turn % 2:
                    copies[slot][right[slot]] = (-1, bench.vocab)[turn // 2 % 2]
            for done in driver.round(running, drafts, copies=copies):
                if done.finish or not self.on_text(driver, done.slot, plain[done.slot]):
                    continue
                agreed = right[done.slot]
                if agreed < len(copies[done.slot]):
                    assert done.accepted == agreed, f"copies {copies[done.slot]}: {done}"
                else:
                    assert done.accepted >= agreed, f"right copies {copies[done.slot]} were rejected: {done}"
            turn += 1
        self.check_text(driver, slots, plain)

    def test_state_after_every_copy_count_equals_plain_decoding(
        self, bench: Bench, reference: Bench, plain: list[PlainText], drafts: int
    ) -> None:
        """Fault classes: draft history keeps the rows of replaced proposals; accepted copies counted elsewhere. Right copies of
        0 … K in front of wrong drafts, then all of them wrong, then a round of width one."""
        require_copies(bench)
        prompts = self.prompts(bench)
        for count in range(drafts + 1):
            slots = self.admit_all(bench)
            script = self.scripted(bench)
            driver = self.driver(bench, drafter=script)
            driver.start(slots)
            for right in (count, 0, count):
                script.write({s: next_tokens(plain[s], len(driver.tokens(s)), drafts, bench.vocab, 0) for s in slots})
                copies = {s: next_tokens(plain[s], len(driver.tokens(s)), count, bench.vocab, right) for s in slots}
                for done in driver.round(slots, drafts, copies=copies):
                    if self.on_text(driver, done.slot, plain[done.slot]):
                        assert (done.offered, done.accepted, done.emitted) == (drafts, right, right + 1)
            driver.round(slots, 0, copies={})
            self.check_all(bench, reference, driver, slots, prompts)
            for slot in slots:
                self.on_text(driver, slot, plain[slot])

    def test_ceilings_and_budgets_count_copies(self, bench: Bench, plain: list[PlainText]) -> None:
        """Fault class: copies beyond what a lane may still emit. Right copies of the full width under every ceiling; source bits
        end with what was offered."""
        require_copies(bench)
        slots, deepest = self.admit_all(bench, budget=deepest_budget(bench)), bench.recipe.max_draft_tokens
        driver = self.driver(bench)
        driver.start(slots)
        turn = 0
        while running := driver.running(slots):
            ceilings = {slot: (turn + 3 * slot) % (deepest + 1) for slot in running}
            copies = {s: next_tokens(plain[s], len(driver.tokens(s)), deepest, bench.vocab, deepest) for s in running}
            for done in driver.round(running, deepest, ceilings=ceilings, copies=copies):
                assert done.copy_sources == 2**done.offered - 1
                if self.on_text(driver, done.slot, plain[done.slot]):
                    assert done.accepted == done.offered
            turn += 1
        self.check_text(driver, slots, [text[: deepest_budget(bench)] for text in plain])

    def test_drafts_behind_copies_continue_from_them(self, bench: Bench, accepted: int) -> None:
        """Fault class: the drafter goes on from the token it drew. Draft logits at every depth, or placed tokens, equal those of
        a round in which the same tokens were forced; without the copies they differ behind the first one, placed ones of some
        lane."""
        require_copies(bench)
        slots, deepest = self.admit_all(bench, seed=3, temperature=1.5), bench.recipe.max_draft_tokens
        recorder = RecordingDrafter(bench.drafter)
        script = self.scripted(bench, recorder)
        driver = self.driver(bench, drafter=recorder)
        driver.start(slots)
        driver.round(slots, deepest)
        image, number = bench.image(), driver.number
        driver.round(slots, deepest)
        own = {slot: (recorder.given(slot), recorder.tokens(slot)) for slot in slots}
        copies = {s: [(token + 1) % bench.vocab for token in own[s][1]][: min(accepted + s, deepest)] for s in slots}

        def again(drafter: RecordingDrafter | object, **options: object) -> None:
            bench.rewind(image)
            following = self.driver(bench, drafter=drafter)
            following.open(slots)
            following.number = number
            following.round(slots, deepest, **options)  # type: ignore[arg-type]

        again(recorder, copies=copies)
        found = {slot: (recorder.given(slot), recorder.tokens(slot)) for slot in slots}
        script.write({slot: [*copies[slot], *found[slot][1][len(copies[slot]) :]] for slot in slots})
        again(script)
        placed = self.proposals == "placed"
        moved = []
        for slot in slots:
            count = len(copies[slot])
            given = found[slot][0]
            assert torch.equal(given, recorder.given(slot)), f"slot {slot} with {count} copies"
            assert torch.equal(given[:1], own[slot][0][:1])
            if count:
                changed = (given[1:] - own[slot][0][1:]).abs().amax(-1)
                moved += changed.tolist()
                assert placed or bool((changed > 0).all()), f"copies do not reach the drafts behind them: {changed}"
        assert deepest == 1 or any(moved), "copies reach none of the drafts behind them"

    def test_lanes_without_copies_draw_as_always(self, bench: Bench) -> None:
        """Fault class: one lane's copies reach another's. Proposals, laws, records and all state of the lanes without copies
        are the same bit for bit."""
        require_copies(bench)
        slots, deepest = self.admit_all(bench, seed=11, temperature=1.2), bench.recipe.max_draft_tokens
        recorder = RecordingDrafter(bench.drafter)
        driver = self.driver(bench, drafter=recorder)
        driver.start(slots)
        image, number = bench.image(), driver.number
        runs = []
        for copies in (None, {}, {1: [0, 1, 2][:deepest], 3: [1] * deepest}):
            bench.rewind(image)
            following = self.driver(bench, drafter=recorder)
            following.open(slots)
            following.number = number
            done = following.round(slots, deepest, copies=copies)
            laws = [proposal.law[[0, 2]].clone() for proposal in recorder.seen if proposal.law is not None]
            state = [
                tensor[:, slot].clone()
                for store in bench.stores
                for name, tensor in store.tensors.items()
                if store.fields[name].kind.value != "paged"
                for slot in (0, 2)
            ]
            runs.append((done[0], done[2], [recorder.tokens(0), recorder.tokens(2)], laws, state))
        for run in runs[1:]:
            assert run[:3] == runs[0][:3]
            assert len(run[3]) == deepest
            for ours, theirs in zip((*run[3], *run[4]), (*runs[0][3], *runs[0][4]), strict=True):
                assert torch.equal(ours, theirs)


def deepest_budget(bench: Bench) -> int:
    """Ends inside the second full round."""
    return bench.recipe.max_draft_tokens + 5
