"""Whatever widths a policy chooses, and however often it changes its mind, greedy text is that of plain decoding.

Rounds of every plugin's random model in float64 at widths that an adversary chooses, two of them in flight.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from attrs import define, field
from deepseek_conformance import write_serving_checkpoint
from prefix_runs import WRITERS
from serving_runs import run_all, tokens_of

from specdec.control.acceptance import AcceptanceHistory
from specdec.control.controller import Decision, Reason, WidthController
from specdec.drafting.history import HistoryRing
from specdec.preparation import PreparationConfig
from specdec.recipes import recipe_book
from specdec.round.completion import Finish
from specdec.sampling.params import SamplingParams
from specdec.scheduling.device import RoundPlan
from specdec.scheduling.policy import AdaptiveWidth, Outcome, Prospect
from specdec.scheduling.scheduler import Scheduler
from specdec.serving.device import ModelDevice
from specdec.serving.generate import Generator
from specdec.serving.model import LoadedModel
from specdec.serving.request import Emission, Request

#: Recipes, and whether drafts are copied, which one of them offers.
CASES = [("qwen3.8-flash", False), ("qwen3.8-flash", True), ("glm-5.3-flash", False), ("deepseek-v4.1-flash", False)]
ROUNDS, CONTEXT, NEW_TOKENS, DRAFTS = 200, 320, 60, 7
WRITE = {**WRITERS, "deepseek-v4.1-flash": write_serving_checkpoint}

Prepare = Callable[[str, bool], LoadedModel]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepare:
    """The models by recipe, with their drafters and without."""
    torch.set_num_threads(1)
    directories: dict[str, Path] = {}

    @cache
    def prepare(name: str, drafting: bool) -> LoadedModel:
        if name not in directories:
            directories[name] = WRITE[name](tmp_path_factory.mktemp("widths") / "checkpoint")
        recipe = recipe_book().recipe(name)
        config = PreparationConfig.for_recipe(
            recipe,
            concurrency=4,
            speculative=drafting,
            max_draft_tokens=DRAFTS if drafting else None,
            # rows for some of the drafts where a recipe allocates them
            speculative_token_capacity=13 if recipe.confidence_width else None,
            context=CONTEXT,
            prefill_tokens=(48,),
        )
        return LoadedModel.prepare(recipe, config, directory=directories[name], dtype="float64")

    return prepare


# --- adversaries -----------------------------------------------------------------------------------------------------------


@define
class Adversary:
    """Counts what it chose, and how often for a request whose round before was not read yet. Subclasses choose."""

    drafts: int = DRAFTS
    chosen: list[int] = field(factory=list)
    ahead: int = 0
    accepted: int = 0
    copied: int = 0

    def pick(self, batch: int, widths: Sequence[int], lanes: Sequence[Prospect]) -> int:
        raise NotImplementedError

    def choose(self, batch: int, widths: Sequence[int], lanes: Sequence[Prospect]) -> Decision:
        width = self.pick(batch, widths, lanes)
        self.chosen.append(width)
        self.ahead += any(resident.flights for resident, _, _ in lanes)
        return Decision(batch=batch, width=width, reason=Reason.FIXED, candidates={})

    def observe(self, plan: RoundPlan, seconds: float, outcomes: Sequence[Outcome]) -> None:
        for lane, _, done in outcomes:
            self.accepted += done.accepted
            self.copied += min(len(lane.copies), done.accepted)


@define
class Random(Adversary):
    """Any width, from a seed."""

    draw: random.Random = field(factory=lambda: random.Random(12))

    def pick(self, batch: int, widths: Sequence[int], lanes: Sequence[Prospect]) -> int:
        return self.draw.choice(widths)


class Extremes(Adversary):
    """Widest and narrowest in turn."""

    def pick(self, batch: int, widths: Sequence[int], lanes: Sequence[Prospect]) -> int:
        return widths[-(len(self.chosen) % 2)]


@define
class LeastLikely(Adversary):
    """Learns as the adaptive policy does, and takes what that would take last; what it took before, never twice."""

    inner: AdaptiveWidth | None = None

    def pick(self, batch: int, widths: Sequence[int], lanes: Sequence[Prospect]) -> int:
        if self.inner is None:
            self.inner = AdaptiveWidth(WidthController(widths), AcceptanceHistory(DRAFTS))
        candidates = self.inner.choose(batch, widths, lanes).candidates
        others = [width for width in candidates if width not in self.chosen[-1:]] or list(candidates)
        return min(others, key=lambda width: candidates[width][0] / candidates[width][1])

    def observe(self, plan: RoundPlan, seconds: float, outcomes: Sequence[Outcome]) -> None:
        super().observe(plan, seconds, outcomes)
        if self.inner is not None:
            # not the seconds of this machine, which differ from run to run
            self.inner.observe(plan, 1.0 + 0.2 * plan.width, outcomes)


# --- runs ------------------------------------------------------------------------------------------------------------------


def prompts(vocab: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(4)
    return [
        tuple(torch.randint(0, min(vocab - 1, 500), (length,), generator=generator).tolist())
        for length in (7, 61, 1, 70, 20, 49, 3)
    ]


def request(prompt: Sequence[int]) -> Request:
    return Request(prompt=prompt, sampling=SamplingParams(greedy=True), max_new_tokens=NEW_TOKENS, stop_ids=())


class Plain:
    """Outputs of plain decoding, each prompt run once."""

    known: ClassVar[dict[tuple[str, tuple[int, ...]], list[int]]] = {}

    def __init__(self, name: str, model: LoadedModel) -> None:
        self.name, self.model = name, model

    def __call__(self, prompt: tuple[int, ...]) -> list[int]:
        key = self.name, prompt
        if key not in self.known:
            (emissions,) = run_all(Generator(self.model), [request(prompt)]).values()
            self.known[key] = tokens_of(emissions)
        return self.known[key]


def switch(model: LoadedModel, policy: Adversary, plain: Plain, *, copying: bool) -> None:
    """Requests come until the policy has chosen often enough; each must emit what plain decoding does."""
    scheduler = Scheduler(
        ModelDevice(model, queued=True),
        policy,
        queue_depth=2,
        chunks_per_step=1,
        history=HistoryRing(grams=(4, 2)) if copying else None,
    )
    wanted = prompts(model.target.vocab_size)
    asked: dict[int, tuple[int, ...]] = {}
    outputs: dict[int, list[int]] = {}
    ended = 0
    while len(policy.chosen) < ROUNDS or scheduler.busy:
        while len(asked) - ended < 4 and len(policy.chosen) < ROUNDS:
            prompt = wanted[len(asked) % len(wanted)]
            asked[scheduler.submit(request(prompt))] = prompt
        for event in scheduler.step():
            if isinstance(event, Emission):
                outputs.setdefault(event.request, []).extend(event.tokens)
                ended += event.finish is not Finish.NONE
    for number, prompt in asked.items():
        assert outputs[number] == plain(prompt), number


@pytest.mark.parametrize("adversary", [Random, Extremes, LeastLikely])
@pytest.mark.parametrize(("name", "copying"), CASES)
def test_b43_switching_widths_equals_plain_decoding(
    prepared: Prepare, name: str, adversary: Callable[[], Any], copying: bool
) -> None:
    policy, model = adversary(), prepared(name, True)
    switch(model, policy, Plain(name, prepared(name, False)), copying=copying)
    assert len(policy.chosen) >= ROUNDS
    used = Counter(policy.chosen)
    changes = sum(before != after for before, after in zip(policy.chosen, policy.chosen[1:]))
    assert changes > ROUNDS // 3
    assert len(used) > 1
    if adversary is Random:
        assert used.keys() == set(model.config.speculative_widths)
    if adversary is Extremes:
        assert used.keys() == {1, DRAFTS + 1}
    # with copies the host reads each round before the next
    assert policy.ahead == 0 if copying else policy.ahead > ROUNDS // 2
    assert policy.accepted > 40, "drafts that are never right prove little"
    assert (policy.copied > 20) is copying
