"""Random words are a function of seed, domain and committed position; everything sampled follows them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from specdec.testing.conformance.base import Conformance
from specdec.testing.conformance.bench import Bench, altered_verification
from specdec.testing.conformance.draws import draft_law, drafted_by
from specdec.testing.conformance.oracles import TARGET, drawn_by, softmax, uniform
from specdec.testing.drafters import RecordingDrafter

#: Filters that leave a few tokens, so that a drafter of any quality is right sometimes.
FEW: dict[str, Any] = {"temperature": 1.5, "top_k": 4}


class RandomnessConformance(Conformance):
    """Lanes, batches, widths and abandoned rounds leave no mark on what a seed gives."""

    @pytest.fixture(scope="class")
    @classmethod
    def narrow(cls, folder: Path) -> Bench:
        """bfloat16, one slot."""
        return cls.build(folder, slots=1, dtype="bfloat16")

    def _sample(
        self, bench: Bench, layout: Sequence[int | None], slots: Sequence[int], drafts: int, budget: int = 16
    ) -> dict[int, list[int]]:
        """Tokens by request. layout: lane order as request numbers, None for a dead lane; slots: of the requests in
        lane order. In lower precision than float64 rounds always have four lanes: rounds of other shapes compute other last bits,
        and a drawn token may hang on them."""
        if self.dtype != "float64":
            layout = [*layout, *[None] * (self.slots - len(layout))]
        live = [request for request in layout if request is not None]
        prompts = self.prompts(bench)
        for request, slot in zip(live, slots, strict=True):
            bench.admit(slot, prompts[request], budget=budget, seed=1000 + request, request=request, **FEW)
        driver = self.driver(bench)
        driver.start(list(slots))
        order = iter(slots)
        lanes = [bench.spare if request is None else next(order) for request in layout]
        while driver.running(slots):
            driver.round(list(slots), drafts, lanes=lanes)
        return {request: driver.tokens(slot) for request, slot in zip(live, slots, strict=True)}

    def test_same_seed_gives_same_tokens_anywhere(self, bench: Bench, any_drafts: int) -> None:
        """Fault classes: global RNG in the acceptance path; draft draws outside the request's stream; indexing copy
        instead of view. A seeded request alone, in every lane, in any slot, with neighbours and with dead lanes. Where rounds of
        one lane draw otherwise than wider ones, a request alone has a dead neighbour, and one without is compared with itself."""
        dead: list[int | None] = [] if self.proposals != "temperature" else [None]
        alone = {request: self._sample(bench, [request, *dead], [0], any_drafts)[request] for request in range(4)}
        assert self._sample(bench, [2, *dead], [0], any_drafts)[2] == alone[2]
        assert self._sample(bench, [2], [3], any_drafts) == self._sample(bench, [2], [0], any_drafts)
        for layout, slots in (
            ([0, 1, 2, 3], [0, 1, 2, 3]),
            ([3, 2, 1, 0], [0, 1, 2, 3]),
            ([2, None, 0, None], [3, 1]),
            ([None, 1], [2]),
            ([1, 3, 0], [3, 0, 2]),
        ):
            for request, tokens in self._sample(bench, layout, slots, any_drafts).items():
                assert tokens == alone[request], f"request {request} in lanes {layout}, slots {slots}"

    def test_different_seeds_give_different_tokens(self, bench: Bench) -> None:
        """Fault class: seed ignored. The control of the test above."""
        prompt = self.prompts(bench)[1]
        outputs = set()
        for seed in (0, 1, 1 << 33, (1 << 63) - 1):
            bench.admit(0, prompt, budget=16, seed=seed, temperature=2.0)
            driver = self.driver(bench)
            driver.start([0])
            while driver.running([0]):
                driver.round([0], bench.recipe.default_draft_tokens)
            outputs.add(tuple(driver.tokens(0)))
        assert len(outputs) == 4

    def test_every_draw_uses_the_words_of_its_position(self, bench: Bench, reference: Bench, any_drafts: int) -> None:
        """Fault class: RNG advanced by drafts, not by committed tokens. ``check_draws`` in a round of one lane and, where wider
        ones draw otherwise, beside a dead lane."""
        for lanes in [[0]] if self.proposals != "temperature" else [[0], [bench.spare, 0]]:
            self.check_draws(bench, reference, any_drafts, lanes)

    def check_draws(self, bench: Bench, reference: Bench, any_drafts: int, lanes: Sequence[int]) -> None:
        """Fault classes: RNG advanced by drafts, not by committed tokens; draft and target streams not
        separate; verification rows shifted; stored law is not the drawn one. Each draft, accept test, corrected and
        bonus token of a run is recomputed from Philox words at N · (K_max + 2) of its domain and from the round's own rows,
        which agree with those of prompt passes. Placed drafts take no words and are judged as point masses."""
        prompt, seed, deepest = self.prompts(bench)[0], 77, bench.recipe.max_draft_tokens
        bench.admit(0, prompt, budget=24, seed=seed, **FEW)
        recorder = RecordingDrafter(bench.drafter)
        driver = self.driver(bench, drafter=recorder)
        rows: list[Tensor] = []

        def keep(logits: Tensor) -> Tensor:
            rows[:] = list(logits[list(lanes).index(0)].clone())
            return logits

        def law_of(row: Tensor, tokens: Sequence[int]) -> Tensor:
            reference.admit(0, [*prompt, *tokens], greedy=True)
            self.check_values(row, reference.target.first_logits(reference.where(0))[0], f"logits behind {tokens}")
            return softmax(row, **FEW)

        def word(consumed: int, index: int, domain: int = TARGET) -> float:
            return uniform(seed, consumed, index, max_draft_tokens=deepest, domain=domain)

        def drawn(depth: int, consumed: int, token: int) -> bool:
            if self.proposals == "placed":
                return True
            logits = recorder.logits(0)[depth]
            where = {"seed": seed, "consumed": consumed, "depth": depth, "max_draft_tokens": deepest}
            return drafted_by(self.proposals, logits, token, lanes=len(lanes), **where, **FEW)

        saved = bench.target.first_logits(bench.where(0))[0].clone()
        first = driver.start([0])[0].tokens[0]
        law = law_of(saved, [])
        assert drawn_by(law, word(len(prompt) - 1, 0), first), "the first token is the draw of position N − 1"
        while driver.running([0]):
            done, consumed = driver.tokens(0), driver.consumed(0)
            with altered_verification(bench.target, keep):
                record = driver.round([0], any_drafts, lanes=lanes)[0]
            drafted = recorder.tokens(0) if any_drafts else []
            emitted, accepted = list(record.tokens), 0
            q = self._draft_laws(recorder, bench.vocab, **FEW) if any_drafts else torch.empty(0)
            for depth, token in enumerate(drafted):
                assert drawn(depth, consumed, token), f"draft {depth} at N = {consumed}"
            close = False
            for depth, token in enumerate(drafted[: record.verified]):
                p, u = law_of(rows[depth], [*done, *drafted[:depth]]), word(consumed, depth)
                margin = float(p[token] - u * q[depth][token])
                close = abs(margin) < 1e-6
                if close or margin < 0:
                    break
                accepted += 1
            if close:
                continue
            assert record.accepted == accepted, (
                f"accepted {record.accepted}, the words say {accepted} at N = {consumed}"
            )
            assert emitted[:accepted] == drafted[: len(emitted[:accepted])]
            if len(emitted) > accepted:
                p, rejected = law_of(rows[accepted], [*done, *drafted[:accepted]]), accepted < record.verified
                weights = (p - q[accepted]).clamp(min=0) if rejected else p
                # the words are those of the round's width, however few drafts a lane verified
                u = word(consumed, any_drafts + (accepted < any_drafts))
                assert drawn_by(weights, u, emitted[accepted], slack=1e-4), f"last token at N = {consumed}"

    def _draft_laws(self, recorder: RecordingDrafter, vocab: int, **law: Any) -> Tensor:
        """What the drafts of slot 0 were drawn from in the last round, float64 [K, V]. Raises AssertionError if drafts are placed
        and ``proposals`` says otherwise, or the other way round."""
        logits, placed = recorder.logits(0), self.proposals == "placed"
        made = "drawn from logits" if logits.numel() else "placed"
        assert placed != bool(logits.numel()), f"drafts are {made}, but proposals is {self.proposals!r}"
        return (
            one_hot(torch.tensor(recorder.tokens(0)), vocab).double()
            if placed
            else draft_law(self.proposals, logits, **law)
        )

    def test_the_kept_law_is_the_drawn_one(self, narrow: Bench) -> None:
        """Fault class: dtype mismatch between draw and q. A bfloat16 model: every draft is the draw of its words from the
        law that was kept for it, and that law is the one of the drafter's own logits. The law of a placed draft is its point
        mass."""
        prompt, deepest = self.prompts(narrow)[0], narrow.recipe.max_draft_tokens
        recorder = RecordingDrafter(narrow.drafter)
        for seed in range(5):
            narrow.admit(0, prompt, budget=60, seed=seed, temperature=1.5)
            driver = self.driver(narrow, drafter=recorder)
            driver.start([0])
            while driver.running([0]):
                consumed = driver.consumed(0)
                driver.round([0], deepest)
                assert len(recorder.seen) == deepest
                for proposal in recorder.seen:
                    if self.proposals == "placed":
                        assert not proposal.logits.numel(), "drafts are drawn from logits, but proposals is 'placed'"
                        mass = one_hot(proposal.tokens[0], narrow.vocab)
                        assert proposal.law is None or torch.equal(proposal.law[0].long(), mass)
                        continue
                    where = {"seed": seed, "consumed": consumed, "depth": proposal.depth, "max_draft_tokens": deepest}
                    law = draft_law(self.proposals, proposal.logits[0], temperature=1.5)
                    assert drafted_by(
                        self.proposals, proposal.logits[0], int(proposal.tokens[0]), lanes=1, **where, temperature=1.5
                    ), f"draft {proposal.depth} at N = {consumed}"
                    if proposal.law is not None:
                        torch.testing.assert_close(proposal.law[0].double(), law, rtol=1e-5, atol=1e-7)

    def test_continuation_depends_on_position_only(self, bench: Bench, drafts: int) -> None:
        """Fault class: RNG advanced by drafts, not by committed tokens. A request in the middle of its output and another
        one that was admitted with the same tokens as its prompt continue alike. In lower precision than float64 the other one has
        the state of the first, since a drawn token may hang on the last bits of a prompt pass."""
        prompt = self.prompts(bench)[1]
        bench.admit(0, prompt, budget=60, seed=5, **FEW)
        driver = self.driver(bench)
        driver.start([0])
        for width in (drafts, 0, drafts):
            driver.round([0], width)
        done = driver.tokens(0)
        bench.admit(3, [*prompt, *done[:-1]], budget=60, seed=5, output=done[-1:], **FEW)
        if self.dtype != "float64":
            where = bench.where(0)
            bench.move(0, 3, bench.target.snapshot(where), bench.drafter.snapshot(where), driver.consumed(0))
        driver.open([3])
        for width in (drafts, 0, drafts, drafts):
            driver.round([3, 0], width)
        assert driver.tokens(0)[len(done) :] == driver.tokens(3)

    def test_abandoned_rounds_leave_no_mark(self, bench: Bench, drafts: int) -> None:
        """Fault class: RNG already moved for tokens never shown. A round that is run and thrown away changes nothing
        of the next."""
        slots = self.admit_all(bench, seed=9, **FEW)
        driver = self.driver(bench)
        driver.start(slots)
        image, number = bench.image(), driver.number
        driver.round(slots, drafts)
        bench.rewind(image)
        outputs = []
        for _ in range(2):
            bench.rewind(image)
            again = self.driver(bench)
            again.open(slots)
            again.number = number
            for _ in range(4):
                again.round(slots, drafts)
            outputs.append([again.tokens(slot) for slot in slots])
        assert outputs[0] == outputs[1]
