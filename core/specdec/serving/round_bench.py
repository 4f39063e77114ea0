"""What a round costs beside what it must cost: replays of its graph back to back, the engine's rounds, and its phases.

The replay of a shape's graph over lanes that are staged once is the floor: no host work, no staging, no transfer. The engine runs
the same requests at the same shape with two rounds in flight; its time per round is the distance between two collected rounds.
What it has above the floor is native overhead. On a CPU rounds run eagerly in both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from specdec.errors import SpecdecError, UsageError
from specdec.round.graphs import GraphPool, Program, Variant
from specdec.round.phases import PhaseMarks
from specdec.round.transaction import ChainRound
from specdec.scheduling.policy import FixedWidth
from specdec.scheduling.scheduler import Scheduler
from specdec.serving.device import ModelDevice
from specdec.serving.engine import Engine, Stream
from specdec.serving.metrics import Metrics
from specdec.serving.model import LoadedModel
from specdec.serving.request import Emission, Request
from specdec.serving.round_times import WARM_UP, AdaptiveTimes, EngineRound, ShapeTimes, output_tokens
from specdec.state.requests import FINISH

__all__ = ["QUEUE_DEPTH", "RoundBench"]

#: Rounds in flight in the engine.
QUEUE_DEPTH = 2


class _Watch(Metrics):
    """Keeps the times of full rounds of one batch capacity and says when it has enough."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[tuple[float, int, float]] = []
        self._batch = self._lanes = self._wanted = 0
        self._enough: Callable[[], None] | None = None

    def watch(self, batch: int, lanes: int, rounds: int, enough: Callable[[], None]) -> None:
        """Begins anew. enough: called once, by the engine's thread, when ``rounds`` rounds are measured."""
        self._seen = []
        self._batch, self._lanes, self._wanted = batch, lanes, WARM_UP + rounds
        self._enough = enough

    def measured(self) -> list[EngineRound]:
        """Rounds behind the warm-up."""
        kept = self._seen[WARM_UP - 1 :]
        return [
            EngineRound(width, now - before, seconds) for (before, *_), (now, width, seconds) in zip(kept, kept[1:])
        ]

    def round(self, batch: int, width: int, seconds: float, records: Iterable[Any]) -> None:
        """See ``Metrics.round``."""
        now, lanes = time.perf_counter(), list(records)
        super().round(batch, width, seconds, lanes)
        if self._enough is None:
            return
        if batch != self._batch or len(lanes) != self._lanes:
            self._seen = []
            return
        self._seen.append((now, width, seconds))
        if len(self._seen) == self._wanted:
            enough, self._enough = self._enough, None
            enough()


class RoundBench:
    """Measures rounds of one loaded model, which nobody else may use meanwhile."""

    def __init__(self, model: LoadedModel, prompts: Sequence[Sequence[int]], *, rounds: int) -> None:
        """prompts: token ids, taken in turn by lanes. rounds: measured in every run.

        Raises UsageError if the model's rounds have no program of their own to replay.
        """
        self.model = model
        self.prompts = prompts
        self.rounds = rounds
        self._chain: dict[tuple[int, int], ChainRound] = {}
        for key, one in sorted(model.rounds.items()):
            if not isinstance(one, ChainRound):
                raise UsageError(
                    f"recipe {model.recipe.name!r} builds rounds of its own kind ({type(one).__name__}); only chain rounds can "
                    "be replayed alone"
                )
            self._chain[key] = one
        self.shapes = [
            ShapeTimes(batch=batch, width=width, target_rows=one.shape.target_rows, lanes=self._lanes(batch))
            for (batch, width), one in self._chain.items()
        ]
        batches = sorted({batch for batch, _ in self._chain}) if len(model.config.speculative_widths) > 1 else []
        self.adaptive = [AdaptiveTimes(batch=batch, lanes=self._lanes(batch)) for batch in batches]

    def run(self, passes: int, report: Callable[[str], None]) -> None:
        """Every arm once a pass, in an order that turns round from pass to pass; then the phases. report: told of progress.

        Raises SpecdecError if a request ends early.
        """
        watch = _Watch()
        with self._engine(watch) as engine:
            for one in self.adaptive:
                # what rounds cost is learnt before anything is measured
                self._served(engine, watch, one.batch, one.lanes, self.model.config.speculative_widths[-1])
            for number in range(passes):
                report(f"pass {number + 1} of {passes}")
                arms: list[Callable[[], None]] = []
                for shape in self.shapes:
                    arms += [partial(self._floor, shape), partial(self._fixed, shape)]
                arms += [partial(self._chosen, one, engine, watch) for one in self.adaptive]
                for arm in arms if number % 2 == 0 else reversed(arms):
                    arm()
        report("phases")
        for shape in self.shapes:
            self._phases(shape)

    def _lanes(self, batch: int) -> int:
        return min(batch, self.model.config.concurrency)

    def _requests(self, lanes: int, width: int) -> list[Request]:
        """Requests that no stop id ends."""
        return [
            Request(
                prompt=tuple(self.prompts[lane % len(self.prompts)]),
                sampling=self.model.defaults.sampling(seed=lane),
                max_new_tokens=output_tokens(self.rounds, width, lanes),
                stop_ids=(),
            )
            for lane in range(lanes)
        ]

    # --- the engine ------------------------------------------------------------------------------------------------

    def _engine(self, watch: _Watch, width: int | None = None) -> Engine:
        """An engine at one width, or one that chooses."""
        return Engine(
            self.model,
            adaptive_verification=True if width is None else None,
            fixed_width=width,
            queue_depth=QUEUE_DEPTH,
            chunks_per_step=self.model.config.concurrency,
            metrics=watch,
        )

    def _fixed(self, shape: ShapeTimes) -> None:
        watch = _Watch()
        with self._engine(watch, shape.width) as engine:
            shape.engine.append(self._served(engine, watch, shape.batch, shape.lanes, shape.width))

    def _chosen(self, one: AdaptiveTimes, engine: Engine, watch: _Watch) -> None:
        widest = self.model.config.speculative_widths[-1]
        one.engine.append(self._served(engine, watch, one.batch, one.lanes, widest))

    def _served(self, engine: Engine, watch: _Watch, batch: int, lanes: int, width: int) -> list[EngineRound]:
        """Rounds of a full batch, with a caller that takes the text as it comes."""
        streams: list[Stream] = []

        def enough() -> None:
            for stream in streams:
                stream.cancel()

        watch.watch(batch, lanes, self.rounds, enough)
        streams += [engine.submit(request) for request in self._requests(lanes, width)]
        for stream in streams:
            error = stream.result().error
            if error is not None:
                raise SpecdecError(
                    f"a request of the benchmark ended early: {error}; cure that, then run the benchmark again"
                )
        while not engine.idle:
            # the next arm has the model for itself
            time.sleep(0.001)
        found = watch.measured()
        if len(found) < self.rounds:
            raise SpecdecError(
                f"{len(found)} of {self.rounds} rounds had {lanes} lanes: requests ended or stepped back before; prepare with "
                "more context"
            )
        return found

    # --- the round alone -------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _floor(self, shape: ShapeTimes) -> None:
        program = self._chain[shape.batch, shape.width].program
        with self._staged(shape):
            for _ in range(WARM_UP):
                program()
            self._wait()
            begun = time.perf_counter()
            for _ in range(self.rounds):
                program()
            self._wait()
            shape.floors.append((time.perf_counter() - begun) / self.rounds)

    @torch.inference_mode()
    def _phases(self, shape: ShapeTimes) -> None:
        """One round at a time. Captured rounds have no marks, so one with marks is captured here and left behind."""
        captured, arena = self._chain[shape.batch, shape.width], self.model.arena
        marks = PhaseMarks(arena.device)
        program = captured.program
        arena.phases = marks
        try:
            if program.captured:
                captured.staging.write([], [], 0)
                program = Program(lambda **variant: captured.run(**variant), f"{program.name}, with marks")
                program.capture(GraphPool(arena.device), [Variant()])
            with self._staged(shape):
                for number in range(WARM_UP + self.rounds):
                    program()
                    seconds = marks.seconds()
                    if number >= WARM_UP:
                        shape.phases.append(seconds)
        finally:
            arena.phases = None

    @contextmanager
    def _staged(self, shape: ShapeTimes) -> Iterator[None]:
        """The shape's round with running requests in its lanes, all drafts allowed, in its staging buffer.

        Raises SpecdecError if one has ended when the caller is done: a dead lane costs less than a live one.
        """
        scheduler = Scheduler(ModelDevice(self.model), FixedWidth(1))
        numbers = [scheduler.submit(request) for request in self._requests(shape.lanes, shape.width)]
        try:
            # prompts and first tokens of all
            started = sum(isinstance(event, Emission) for event in scheduler.step())
            slots = list(scheduler.admission.residents)
            if not started == len(slots) == shape.lanes:
                raise SpecdecError(f"{started} of {shape.lanes} requests could start together; prepare with more pages")
            staging = self._chain[shape.batch, shape.width].staging
            staging.write(slots, [shape.width - 1] * len(slots), 0)
            yield
            self._wait()
            table = self.model.arena.requests.integers[:, FINISH].tolist()
            if any(table[slot] for slot in slots):
                raise SpecdecError(
                    f"a request ended within {self.rounds} rounds of {shape.batch} lanes, width {shape.width}; "
                    "prepare with more context"
                )
        finally:
            for number in numbers:
                scheduler.cancel(number)
            while scheduler.busy:
                for _ in scheduler.step():
                    pass

    def _wait(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
