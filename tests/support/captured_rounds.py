"""The three models on small random checkpoints, prepared through their recipes' hooks, with the rounds that are captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen
from deepseek_conformance import write_serving_checkpoint
from glm_models import write_random_checkpoint as write_glm
from qwen_models import write_random_checkpoint as write_qwen

from specdec.round.completion import Completion
from specdec.round.transaction import ChainRound, FirstToken
from specdec.testing.conformance.bench import Bench

PROMPTS = [[5, 9, 300, 17, 44, 500, 3], [411, 2, 2, 8, 77, 130, 256, 19, 73, 6, 41], [7], list(range(60, 125))]
#: Writes a checkpoint into a folder and returns it.
WRITERS: dict[str, Callable[[Path], Path]] = {
    "qwen3.8-flash": lambda folder: write_qwen(folder, 5),
    "glm-5.3-flash": lambda folder: write_glm(folder, 5),
    "deepseek-v4.1-flash": write_serving_checkpoint,
}


@frozen(kw_only=True)
class Case:
    """A round of B lanes with D drafts; rows: physical target rows of a packed round, 0 for one for every draft and pending
    token."""

    recipe: str
    batch: int
    drafts: int
    rows: int = 0

    def __str__(self) -> str:
        return f"{self.recipe} B{self.batch} D{self.drafts} P{self.rows or self.batch * (self.drafts + 1)}"


#: Chain rounds of width one and six, allocated rounds of a block of seven with rows for all drafts and for nine of them.
CASES = [
    *(
        Case(recipe=recipe, batch=batch, drafts=drafts)
        for recipe, depths in (("qwen3.8-flash", (0, 5)), ("glm-5.3-flash", (0, 5)), ("deepseek-v4.1-flash", (0, 7)))
        for drafts in depths
        for batch in (1, 4)
    ),
    Case(recipe="deepseek-v4.1-flash", batch=4, drafts=7, rows=13),
]


class CapturedRun:
    """Sampled requests in slots 0 … B − 1 of a fresh bench, their first tokens drawn, and the round of a case.

    first: record of each first token; played: records of each round so far.
    """

    def __init__(
        self,
        case: Case,
        folder: Path,
        *,
        budget: int,
        dtype: str,
        device: str,
        options: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """options: of each slot's request, for extended rounds; without them requests filter and rounds are ordinary ones."""
        self.bench = Bench.prepare(case.recipe, folder, dtype=dtype, slots=case.batch, context=512, device=device)
        self.slots = list(range(case.batch))
        self.ceilings = [case.drafts] * case.batch
        self.extended = bool(options)
        for slot in self.slots:
            chosen = options[slot] if options else {"top_k": 20, "top_p": 0.95}
            self.bench.admit(slot, PROMPTS[slot], budget=budget, seed=40 + slot, **chosen)
        bench = self.bench
        first = FirstToken(target=bench.target, drafter=bench.drafter, arena=bench.arena, batch=case.batch)
        first.submit(self.slots, 0, extended=self.extended)
        self.first = self._records(0)
        self.played: list[list[Completion]] = []
        built = bench.capture(case.drafts, case.batch, bench.drafter, case.rows)
        assert isinstance(built, ChainRound), "graphs are captured behind the staging copy"
        self.round = built

    def _records(self, number: int) -> list[Completion]:
        return [Completion.parse(row) for row in self.bench.arena.read_frame(number % 2, self.slots)]

    def run(self) -> None:
        """The round's program."""
        self.round.run(extended=self.extended)

    def play(self, rounds: int, run: Callable[[], None]) -> Iterator[int]:
        """The next rounds: stages all slots, calls ``run`` and keeps the records of each. Yields the frame just written."""
        for _ in range(rounds):
            number = len(self.played) + 1
            self.round.staging.write(self.slots, self.ceilings, number)
            run()
            self.played.append(self._records(number))
            yield number % 2

    def tokens(self, slot: int) -> list[int]:
        """Everything a slot has emitted."""
        return [token for records in [self.first, *self.played] for token in records[slot].tokens]


def captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """The program as one graph. It runs three times before: rounds must be staged so that no request advances."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph


def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random checkpoints by recipe."""
    return {recipe: write(tmp_path_factory.mktemp("tiny")) for recipe, write in WRITERS.items()}
