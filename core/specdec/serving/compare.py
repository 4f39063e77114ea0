"""Runs the same requests with different draft counts in one process and compares them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from attrs import define, evolve, field

from specdec.round.completion import Completion, Finish
from specdec.scheduling.policy import width_policy
from specdec.scheduling.scheduler import Scheduler
from specdec.serving.device import ModelDevice
from specdec.serving.generate import Generator
from specdec.serving.model import LoadedModel
from specdec.serving.request import Emission, Progress, Request
from specdec.serving.statistics import DraftStatistics


@define(kw_only=True, eq=False)
class Arm:
    """One way to run the requests, and what came of it.

    draft_tokens: None is plain decoding without a drafter, 0 keeps draft state at width one. seconds: in steps of rounds alone.
    timed_tokens: what those steps emitted. passes: tokens per second of each pass over the requests. outputs: tokens by request,
    of the last pass. fault: the record of a request that ended as FAULT.
    """

    name: str
    draft_tokens: int | None
    generator: Generator | Scheduler
    statistics: DraftStatistics = field(factory=DraftStatistics)
    seconds: float = 0.0
    timed_tokens: int = 0
    passes: list[float] = field(factory=list)
    outputs: dict[int, list[int]] = field(factory=dict)
    fault: Completion | None = None

    @property
    def tokens_per_second(self) -> float:
        """Tokens over seconds of the steps that ran a round alone; steps with prompts or first tokens are outside both."""
        return self.timed_tokens / self.seconds if self.seconds else 0.0

    def as_data(self, baseline: float) -> dict[str, Any]:
        """Plain types for JSON; baseline: tokens per second of the arm everything is compared with."""
        statistics = self.statistics
        return {
            "name": self.name,
            "draft_tokens": self.draft_tokens,
            "tokens": statistics.tokens,
            "rounds": statistics.rounds,
            "tokens_per_round": statistics.tokens_per_round,
            "judged_by_depth": statistics.judged_by_depth,
            "acceptance_by_depth": statistics.acceptance_by_depth,
            "survival_by_depth": statistics.survival_by_depth,
            "seconds": self.seconds,
            "timed_tokens": self.timed_tokens,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_by_pass": list(self.passes),
            "speed_ratio": self.tokens_per_second / baseline if baseline else 0.0,
        }


def run_arm(arm: Arm, requests: Sequence[Request], *, counted: bool = True, batch: int = 1) -> None:
    """Runs all requests once through an arm, adding to its counts unless ``counted`` is False (warm-up).

    batch: how many run at once, the next one from where one has ended; the arm's model must be prepared for so many.
    """
    generator = arm.generator
    waiting = deque(enumerate(requests))
    running: dict[int, int] = {}
    outputs: dict[int, list[int]] = {}
    seconds, tokens = 0.0, 0
    while waiting or running:
        while waiting and len(running) < batch:
            place, request = waiting.popleft()
            running[generator.submit(request)], outputs[place] = place, []
        started = time.perf_counter()
        events = list(generator.step())
        elapsed = time.perf_counter() - started
        if not any(isinstance(event, Progress) or event.completion.generated == 1 for event in events):
            seconds += elapsed
            tokens += sum(len(event.tokens) for event in events if isinstance(event, Emission))
        for event in events:
            if isinstance(event, Emission):
                outputs[running[event.request]].extend(event.tokens)
                if event.finish:
                    del running[event.request]
                if event.finish is Finish.FAULT:
                    arm.fault = event.completion
                if counted:
                    # no round leaves a request with one token
                    arm.statistics.add(event.completion, in_round=event.completion.generated > 1)
    if counted:
        arm.seconds += seconds
        arm.timed_tokens += tokens
        arm.outputs.update(outputs)


def compare(
    arms: Sequence[Arm], requests: Sequence[Request], *, passes: int = 1, warm_up: int = 1, batch: int = 1
) -> None:
    """Runs every arm over the requests, alternating the order of arms from pass to pass; results stay in the arms.

    batch: see ``run_arm``.
    """
    for arm in arms:
        run_arm(arm, requests[:warm_up], counted=False, batch=batch)
    for number in range(passes):
        ordered = arms if number % 2 == 0 else list(reversed(arms))
        for arm in ordered:
            tokens, seconds = arm.timed_tokens, arm.seconds
            run_arm(arm, requests, batch=batch)
            tokens, seconds = arm.timed_tokens - tokens, arm.seconds - seconds
            arm.passes.append(tokens / seconds if seconds else 0.0)


def arms_for(speculative: LoadedModel, plain: LoadedModel, draft_tokens: Sequence[int | None]) -> list[Arm]:
    """Arms over two prepared models: None runs on ``plain``, a count on ``speculative`` at that many drafts."""
    arms = []
    for count in draft_tokens:
        model = plain if count is None else speculative
        name = "plain" if count is None else f"{count} draft{'s' if count != 1 else ''}"
        generator = Generator(model, width=1 if count is None else count + 1)
        arms.append(Arm(name=name, draft_tokens=count, generator=generator))
    return arms


def adaptive_arm(speculative: LoadedModel) -> Arm:
    """An arm that chooses the drafts of every round among those prepared; it learns on from pass to pass."""
    policy = width_policy(evolve(speculative.config, fixed_width=None))
    scheduler = Scheduler(ModelDevice(speculative), policy)
    return Arm(name="adaptive", draft_tokens=speculative.config.max_draft_tokens, generator=scheduler)
