"""Rounds that allocate target rows inside: fewer rows than drafts change speed and nothing else.

For recipes whose rounds forecast (``Recipe.confidence_width``); the tests are skipped for others.
"""

from __future__ import annotations

import pytest
import torch

from specdec.round.completion import Completion
from specdec.testing.conformance.base import Conformance, next_tokens
from specdec.testing.conformance.bench import Bench
from specdec.testing.conformance.emitted_law import SIGNIFICANCE, Crowd
from specdec.testing.conformance.near_ties import PlainText
from specdec.testing.conformance.states import poison
from specdec.testing.drafters import GuidedDrafter
from specdec.testing.guard import CapturableGuard

#: Drafts of a smaller survival are never verified.
LEAST_SURVIVAL = 1e-6


def admitted(forecasts: list[list[float]], offered: list[int], rows: int) -> list[int]:
    """Drafts per lane that ``rows`` go to: the greatest products of forecasts first, ties by depth and then lane."""
    pairs = []
    for lane, row in enumerate(forecasts):
        survival = torch.tensor(1.0)
        for depth in range(offered[lane]):
            survival = survival * torch.tensor(row[depth]).clamp(0, 1)
            if float(survival) >= LEAST_SURVIVAL:
                pairs.append((-float(survival), depth, lane))
    taken = [lane for _, _, lane in sorted(pairs)[:rows]]
    return [taken.count(lane) for lane in range(len(forecasts))]


class AllocationConformance(Conformance):
    """What is verified is decided inside the round; what is emitted is not."""

    @staticmethod
    def _require_forecasts(bench: Bench) -> None:
        if not bench.recipe.confidence_width:
            pytest.skip("rounds of this recipe allocate nothing")

    def test_packed_rounds_equal_plain_decoding(
        self, bench: Bench, reference: Bench, plain: list[PlainText], draft_rows: int
    ) -> None:
        """Fault class: packed rows read another lane's or a later row's context; rows that were not packed committed. Own drafts
        at several capacities, widest and one alternating; tokens and state."""
        self._require_forecasts(bench)
        deepest = bench.recipe.max_draft_tokens
        slots = self.admit_all(bench)
        driver = self.driver(bench, draft_rows=draft_rows)
        driver.start(slots)
        turn = 0
        while running := driver.running(slots):
            done = driver.round(running, 0 if turn % 3 == 2 else deepest)
            assert sum(record.verified for record in done) <= draft_rows
            turn += 1
        self.check_text(driver, slots, plain)
        self.check_all(bench, reference, driver, slots, self.prompts(bench))

    def test_admitted_drafts_are_judged(
        self, bench: Bench, reference: Bench, plain: list[PlainText], draft_rows: int
    ) -> None:
        """Fault class: logits of packed rows scattered to the wrong lane or place. Right drafts with dead lanes between: all that
        are verified are accepted, and not one more; everything else is poisoned between rounds."""
        self._require_forecasts(bench)
        deepest = bench.recipe.max_draft_tokens
        slots = self.admit_all(bench)
        driver = self.driver(
            bench,
            drafter=self.scripted(bench),
            draft_rows=draft_rows,
            between=lambda own: poison(bench, {slot: own.consumed(slot) for slot in slots}),
        )
        driver.start(slots)
        while running := driver.running(slots):
            script = {s: next_tokens(plain[s], len(driver.tokens(s)), deepest, bench.vocab, deepest) for s in running}
            driver.drafter.write(script)  # type: ignore[union-attr]
            lanes = [bench.spare, *running[::-1], bench.spare]
            for done in driver.round(running, deepest, lanes=lanes):
                if self.on_text(driver, done.slot, plain[done.slot]):
                    assert done.accepted == done.verified
        self.check_text(driver, slots, plain)
        self.check_all(bench, reference, driver, slots, self.prompts(bench))

    def test_admission_follows_the_published_forecasts(self, bench: Bench, draft_rows: int) -> None:
        """Fault class: survival, ceilings or tie rule other than declared. Recomputed from the forecasts in the frames, for
        lanes with their own ceilings."""
        self._require_forecasts(bench)
        deepest = bench.recipe.max_draft_tokens
        slots = self.admit_all(bench, seed=3, temperature=1.5)
        driver = self.driver(bench, draft_rows=draft_rows)
        driver.start(slots)
        for turn in range(5):
            ceilings = {slot: max(deepest - (2 * slot + turn) % 5, 0) for slot in slots}
            done = driver.round(slots, deepest, ceilings=ceilings)
            forecasts = bench.arena.read_forecasts((driver.number - 1) % 2, slots)
            assert all(0 <= value <= 1 for row in forecasts for value in row[:deepest])
            rows = min(draft_rows, len(slots) * deepest)
            assert [record.verified for record in done] == admitted(forecasts, [r.offered for r in done], rows)

    def test_a_drawn_token_changes_no_decision_made_before_it(self, bench: Bench) -> None:
        """Fault class: a forecast or an admission that knows the token it decides about, which biases the emitted law. Each
        draft of one lane in turn is another token; forecasts and admissions up to it stay, and behind the last one all do."""
        self._require_forecasts(bench)
        deepest, slots = bench.recipe.max_draft_tokens, self.admit_all(bench)
        script = self.scripted(bench)
        driver = self.driver(bench, drafter=script, draft_rows=2 * deepest)
        driver.start(slots)
        driver.round(slots, deepest)
        image, number = bench.image(), driver.number
        draws = torch.randint(
            0, bench.vocab, (len(slots), deepest), generator=torch.Generator().manual_seed(2)
        ).tolist()

        def run(tokens: list[list[int]]) -> tuple[list[Completion], list[list[float]]]:
            bench.rewind(image)
            again = self.driver(bench, drafter=script, draft_rows=2 * deepest)
            again.open(slots)
            again.number = number
            script.write(dict(enumerate(tokens)))
            return again.round(slots, deepest), bench.arena.read_forecasts(number % 2, slots)

        before, forecasts = run(draws)
        moved = 0
        for depth in range(deepest):
            other = [list(row) for row in draws]
            other[1][depth] = (other[1][depth] + 1) % bench.vocab
            after, changed = run(other)
            assert changed[1][: depth + 1] == forecasts[1][: depth + 1]
            assert min(after[1].verified, depth + 1) == min(before[1].verified, depth + 1)
            assert [changed[lane] for lane in (0, 2, 3)] == [forecasts[lane] for lane in (0, 2, 3)]
            moved += changed[1] != forecasts[1]
            if depth == deepest - 1:
                assert [r.verified for r in after] == [r.verified for r in before]
        assert moved, "forecasts look at no token at all; a Markov drafter's would"

    def test_emitted_law_with_fewer_rows_than_drafts(self, crowd: Crowd) -> None:
        """Fault class: allocation biases what is emitted. Drafts that know the target, rows for part of them."""
        self._require_forecasts(crowd.bench)
        guided = GuidedDrafter(crowd.bench.drafter, crowd.guide)
        outcomes = crowd.sample(guided, 2, draft_rows=len(crowd.slots))
        assert crowd.fit(outcomes) > SIGNIFICANCE

    def test_packed_round_is_capturable(self, bench: Bench) -> None:
        """Fault class: a captured program with shapes that follow data. One dead lane among four."""
        self._require_forecasts(bench)
        deepest, slots = bench.recipe.max_draft_tokens, self.admit_all(bench, seed=3)
        driver = self.driver(bench, draft_rows=deepest)
        driver.start(slots[:3])
        driver.round(slots[:3], deepest, lanes=[0, bench.spare, 1, 2])
        with CapturableGuard():
            driver.captured(4, deepest).run()
