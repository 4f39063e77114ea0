"""Emitted tokens follow the target's law: chi-square over whole rounds, with a negative control that must fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen
from torch import Tensor

from specdec.interfaces import Drafter, Proposer
from specdec.testing.conformance.base import Conformance, require_copies, require_logits
from specdec.testing.conformance.bench import Bench
from specdec.testing.conformance.driver import Driver
from specdec.testing.conformance.oracles import chi_square, joint_law, softmax
from specdec.testing.drafters import AlteredLogits, AlteredProposer, GuidedDrafter, PointMassDrafter

#: Emitted tokens of a request that are counted together: the first from the prompt, the others from rounds.
DEPTH = 3
#: A true law fails once in a thousand seeds, and the seeds are fixed.
SIGNIFICANCE = 1e-3
#: Four tokens a position: 64 outcomes of three positions.
LAW: dict[str, Any] = {"temperature": 1.5, "top_k": 4}
PROMPT_TOKENS = 7


@frozen(kw_only=True, eq=False)
class Misreporter:
    """Draws as it should and stores a law that is flatter than the one it drew from."""

    inner: Proposer

    def draw(self, depth: int, logits: Tensor) -> Tensor:
        """Draws, then flattens what was stored."""
        token = self.inner.draw(depth, logits)
        stored: Tensor = self.inner.probs[:, depth]  # type: ignore[attr-defined]
        flat = (stored > 0).to(stored.dtype)
        stored.copy_(flat / flat.sum(-1, keepdim=True).clamp(min=1))
        return token

    def place(self, depth: int, tokens: Tensor) -> Tensor:
        """As the wrapped one."""
        return self.inner.place(depth, tokens)


@frozen(kw_only=True, eq=False)
class OwnLaw:
    """Draws as it should and stores what the drafter's logits say, also where a copied token took the place of the drawn one."""

    inner: Proposer

    def draw(self, depth: int, logits: Tensor) -> Tensor:
        """Draws, then stores the law of the logits."""
        token = self.inner.draw(depth, logits)
        stored: Tensor = self.inner.probs[:, depth]  # type: ignore[attr-defined]
        stored.copy_(self.inner.law(logits)[:, : stored.shape[1]])  # type: ignore[attr-defined]
        return token

    def place(self, depth: int, tokens: Tensor) -> Tensor:
        """As the wrapped one."""
        return self.inner.place(depth, tokens)


class Crowd:
    """Many requests with one prompt on one bench, and the laws of their first three tokens from prompt passes.

    batches: runs of all requests in a sample. near_tie: logits that differ by less may trade places at the edge of the top-k
    filter; outcomes that such a token begins, or goes on, are counted as one.
    """

    def __init__(
        self, bench: Bench, prompt: list[int], draft_lag: int, *, batches: int = 48, near_tie: float = 0.0
    ) -> None:
        self.bench = bench
        self.prompt = prompt
        self.draft_lag = draft_lag
        self.batches = batches
        self.near_tie = near_tie
        self.slots = list(range(bench.capacities.slots))
        self.driver: Driver | None = None
        #: target logits [V] by continuation, for every continuation of less than ``DEPTH`` tokens that the law allows
        self.logits: dict[tuple[int, ...], Tensor] = {}
        prefixes: list[tuple[int, ...]] = [()]
        for _ in range(DEPTH):
            for prefix in prefixes:
                bench.admit(0, [*prompt, *prefix], greedy=True)
                self.logits[prefix] = bench.target.first_logits(bench.where(0))[0].cpu()
            prefixes = [(*p, token) for p in prefixes for token in self.law(p).nonzero().flatten().tolist()]
        for slot in self.slots:
            bench.admit(slot, prompt, budget=16)
        self.image = bench.image()

    def law(self, prefix: tuple[int, ...]) -> Tensor:
        """Law [V] of the token after a continuation."""
        return softmax(self.logits[prefix], **LAW)

    def guide(self, slot: int, drawn: tuple[int, ...]) -> Tensor:
        """Draft logits that know the target: its own, sharpened. Nothing special beyond the counted depth."""
        known = () if self.driver is None or slot not in self.driver.accounts else tuple(self.driver.tokens(slot))
        found = self.logits.get((*known, *drawn))
        return torch.zeros_like(self.logits[()]) if found is None else found * 2

    def copied(self, slot: int) -> tuple[int, ...]:
        """A copy that does not know what will be drawn: the likeliest token, the unlikeliest, or one that the law forbids, and
        behind it as many more; no copy in every fourth slot."""
        law = self.law(tuple(self.driver.tokens(slot))[: DEPTH - 1]) if self.driver else self.law(())
        unlikeliest = int(torch.where(law > 0, law, 2).argmin())
        chosen = (int(law.argmax()), unlikeliest, int(law.argmin()))
        return () if slot % 4 == 3 else (chosen[slot % 4],) * (1 + slot // 4 % 2)

    def sample(
        self,
        drafter: Drafter,
        drafts: int,
        draft_rows: int | None = None,
        copies: Callable[[int], tuple[int, ...]] | None = None,
    ) -> list[tuple[int, ...]]:
        """First three tokens of requests that differ in their seed. draft_rows: see ``Driver``. copies: by slot, every round."""
        outcomes = []
        for batch in range(self.batches):
            self.bench.rewind(self.image)
            for slot in self.slots:
                seed = batch * len(self.slots) + slot
                self.bench.enter(slot, self.prompt, budget=16, seed=seed, request=seed, **LAW)
            self.driver = Driver(self.bench, drafter=drafter, draft_lag=self.draft_lag, draft_rows=draft_rows)
            self.driver.start(self.slots)
            while any(len(self.driver.tokens(slot)) < DEPTH for slot in self.slots):
                given = None if copies is None else {slot: copies(slot) for slot in self.slots}
                self.driver.round(self.slots, drafts, copies=given)
            outcomes += [tuple(self.driver.tokens(slot)[:DEPTH]) for slot in self.slots]
        return outcomes

    def fit(self, outcomes: list[tuple[int, ...]]) -> float:
        """p-value of the outcomes."""
        joint: dict[tuple[int, ...], float] = {}
        for outcome, mass in joint_law({prefix: self.law(prefix) for prefix in self.logits}, DEPTH).items():
            joint[self._counted(outcome)] = joint.get(self._counted(outcome), 0.0) + mass
        index = {outcome: number for number, outcome in enumerate(joint)}
        # the last class is everything that the law forbids
        law = torch.tensor([*joint.values(), 0.0], dtype=torch.float64)
        return chi_square([index.get(self._counted(outcome), len(joint)) for outcome in outcomes], law)

    def _counted(self, outcome: tuple[int, ...]) -> tuple[int, ...]:
        """An outcome, cut behind the first token that is at the edge of its filter, which counts as token −1."""
        for place in range(len(outcome)):
            logits = self.logits.get(outcome[:place])
            if logits is not None and self.near_tie:
                edge = logits.topk(LAW["top_k"] + 1).values[-2:]
                near = abs(float(logits[outcome[place]] - edge[0])) < self.near_tie
                if float(edge[0] - edge[1]) < self.near_tie and near:
                    return (*outcome[:place], -1)
        return outcome


class EmittedLawConformance(Conformance):
    """Accepted, corrected and bonus tokens together are draws from the target."""

    @pytest.fixture(scope="class")
    @classmethod
    def crowd(cls, folder: Path) -> Crowd:
        """Many slots and a short context, float32 or lower: where laws are counted."""
        return cls.build_crowd(folder)

    @classmethod
    @torch.inference_mode()
    def build_crowd(cls, folder: Path) -> Crowd:
        """See ``crowd``."""
        dtype = "float32" if cls.dtype == "float64" else cls.dtype
        bench = cls.build(folder, slots=cls.crowd_slots, context=64, dtype=dtype)
        prompt = cls.text(bench, PROMPT_TOKENS)
        return Crowd(bench, prompt, cls.draft_lag, batches=cls.crowd_batches, near_tie=cls.near_tie)

    def test_emitted_law_with_own_drafts(self, crowd: Crowd) -> None:
        """Fault class: draft sampling uses a different distribution than rejection. The drafter's own proposals."""
        assert crowd.fit(crowd.sample(crowd.bench.drafter, 2)) > SIGNIFICANCE

    def test_emitted_law_with_good_drafts(self, crowd: Crowd) -> None:
        """Fault classes: filter missing on verified rows; correction or bonus drawn from the wrong row. Drafts from
        the target's law, sharpened, so that many are accepted and many corrected."""
        guided = GuidedDrafter(crowd.bench.drafter, crowd.guide)
        assert crowd.fit(crowd.sample(guided, 2)) > SIGNIFICANCE

    def test_wrong_stored_law_is_noticed(self, crowd: Crowd) -> None:
        """The negative control: with a stored law that is not the one drawn from, the same test rejects by a wide
        margin."""
        guided = GuidedDrafter(crowd.bench.drafter, crowd.guide)
        misreported = AlteredProposer(guided, lambda inner: Misreporter(inner=inner))
        assert crowd.fit(crowd.sample(misreported, 2)) < SIGNIFICANCE**2

    def test_point_mass_drafts_keep_the_law(self, crowd: Crowd) -> None:
        """Fault class: temperature not passed to the proposal law. Drafts by argmax are declared as a point mass at
        every temperature."""
        drafter = PointMassDrafter(GuidedDrafter(crowd.bench.drafter, crowd.guide))
        assert crowd.fit(crowd.sample(drafter, 2)) > SIGNIFICANCE

    def test_drafter_without_a_law_keeps_the_law(self, crowd: Crowd) -> None:
        """Fault class: numeric fault of a drafter changes the distribution. All draft logits are NaN."""
        require_logits(self)
        blind = AlteredLogits(crowd.bench.drafter, lambda depth, logits: torch.full_like(logits, torch.nan))
        assert crowd.fit(crowd.sample(blind, 2)) > SIGNIFICANCE

    def test_copied_drafts_keep_the_law(self, crowd: Crowd) -> None:
        """Fault class: copied drafts judged by the drafter's law. Likely, unlikely and impossible copies, own drafts behind some
        of them, and lanes without copies."""
        require_copies(crowd.bench)
        guided = GuidedDrafter(crowd.bench.drafter, crowd.guide)
        assert crowd.fit(crowd.sample(guided, 2, copies=crowd.copied)) > SIGNIFICANCE

    def test_copies_under_the_drafters_law_are_noticed(self, crowd: Crowd) -> None:
        """The negative control: with the drafter's law stored in place of the point mass the same test rejects by a wide
        margin."""
        require_copies(crowd.bench)
        guided = GuidedDrafter(crowd.bench.drafter, crowd.guide)
        judged = AlteredProposer(guided, lambda inner: OwnLaw(inner=inner))
        assert crowd.fit(crowd.sample(judged, 2, copies=crowd.copied)) < SIGNIFICANCE**2
