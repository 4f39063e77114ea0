"""Captured programs against eager ones on the same device: alternating shapes round by round, whole requests in the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from captured_rounds import PROMPTS, WRITERS, folders

from specdec.declaration import StateKind
from specdec.preparation import PreparationConfig
from specdec.recipes import recipe_book
from specdec.round.completion import Completion
from specdec.round.graphs import GraphPool, Variant
from specdec.round.transaction import FirstToken
from specdec.serving.engine import Engine
from specdec.serving.model import LoadedModel
from specdec.serving.request import Request
from specdec.testing.conformance.bench import Bench

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

folders = pytest.fixture(folders, scope="module")

#: (capacity, drafts, slots): wide to narrow and back, padded lanes, other capacities and orders of lanes.
SCHEDULE = [
    (4, 7, [0, 1, 2, 3]),
    (1, 0, [0]),
    (1, 7, [0]),
    (1, 0, [0]),
    (4, 7, [2, 0, 3]),
    (2, 0, [3, 1]),
    (4, 7, [3, 2, 1, 0]),
    (4, 0, [0, 1, 2, 3]),
    (2, 7, [1]),
]
#: The third request ends early and is a dead lane from then on.
BUDGETS = [400, 400, 9, 400]


class Alternating:
    """Four requests and rounds of every shape of the schedule; captured into one pool, or eager."""

    def __init__(self, recipe: str, folder: Path, dtype: str, *, captured: bool) -> None:
        self.bench = Bench.prepare(recipe, folder, dtype=dtype, slots=4, context=512, device="cuda")
        bench = self.bench
        self.rounds = {(lanes, drafts): bench.capture(drafts, lanes, bench.drafter) for lanes, drafts, _ in SCHEDULE}
        first = FirstToken(target=bench.target, drafter=bench.drafter, arena=bench.arena, batch=4)
        if captured:
            pool = GraphPool(torch.device("cuda"))
            for program in (first.program, *(one.program for one in self.rounds.values())):
                program.capture(pool, [Variant()])
        for slot, budget in enumerate(BUDGETS):
            bench.admit(slot, PROMPTS[slot], budget=budget, seed=40 + slot, top_k=20, top_p=0.95)
        first.submit([0, 1, 2, 3], 0)
        self.number = 0

    def play(self, lanes: int, drafts: int, slots: list[int]) -> list[Completion]:
        self.number += 1
        ceilings = [max(drafts - place, 0) for place in range(len(slots))]
        self.rounds[lanes, drafts].submit(slots, ceilings, self.number)
        return [Completion.parse(row) for row in self.bench.arena.read_frame(self.number % 2, slots)]


@torch.inference_mode()
@pytest.mark.parametrize("recipe", WRITERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_alternating_captured_shapes_equal_eager_ones(folders: dict[str, Path], recipe: str, dtype: str) -> None:
    eager, ours = (Alternating(recipe, folders[recipe], dtype, captured=captured) for captured in (False, True))
    ended = 0
    for lanes, drafts, slots in SCHEDULE * 3:
        # what another round of the same pool may have left
        ours.bench.arena.poison()
        wanted, found = (run.play(lanes, drafts, slots) for run in (eager, ours))
        assert found == wanted
        ended += any(one.finish for one in found)
    assert ended, "a request ended and was a dead lane"
    for store, wanted in zip(ours.bench.stores, eager.bench.stores, strict=True):
        assert torch.equal(store.selected[:4], wanted.selected[:4])
        for name, tensor in store.tensors.items():
            # page 0 and the spare slot are trash
            kept = slice(1, None) if store.fields[name].kind is StateKind.PAGED else slice(0, 4)
            assert torch.equal(tensor[:, kept], wanted[name][:, kept]), name
    assert torch.equal(ours.bench.arena.requests.integers[:4], eager.bench.arena.requests.integers[:4])


def serve(name: str, *, graphs: bool, **options: Any) -> list[tuple[tuple[int, ...], Any]]:
    """Tokens and finish of eight requests. Prompts are cut alike with and without graphs."""
    recipe = recipe_book().recipe(name)
    config = PreparationConfig.for_recipe(
        recipe,
        concurrency=4,
        context=256,
        prefill_tokens=(64,),
        adaptive_verification=False,
        cuda_graphs=graphs,
        **options,
    )
    model = LoadedModel.prepare(recipe, config, device="cuda", dtype="float32")
    assert (model.graphs is not None) == graphs
    text = list(range(10, 110)) * 2
    with Engine(model) as engine:
        streams = [
            engine.submit(
                Request(
                    prompt=tuple(text[place : place + rows]),
                    max_new_tokens=24 + place,
                    sampling=model.defaults.sampling(seed=place, greedy=place % 2 == 0),
                    ignore_eos=True,
                )
            )
            for place, rows in enumerate((64, 96, 32, 128, 8, 80, 16, 64))
        ]
        return [(tuple(done.tokens), done.finish) for done in (stream.result() for stream in streams)]


@pytest.mark.parametrize("recipe", WRITERS)
def test_the_captured_engine_gives_the_tokens_of_the_eager_one(recipe: str) -> None:
    assert serve(recipe, graphs=True) == serve(recipe, graphs=False)


def test_prefix_checkpoints_of_captured_rounds_continue_requests() -> None:
    """Boundary state that graphs keep: a second request with the text of the first reuses it and goes on as it did."""
    recipe = recipe_book().recipe("qwen3.8-flash")
    config = PreparationConfig.for_recipe(
        recipe, concurrency=2, context=384, prefill_tokens=(64,), snapshot_bytes=1 << 26, adaptive_verification=False
    )
    model = LoadedModel.prepare(recipe, config, device="cuda", dtype="float32")
    prompt = tuple(range(20, 84))

    def ask(engine: Engine, text: tuple[int, ...], new: int) -> tuple[int, ...]:
        sampling = model.defaults.sampling(greedy=True)
        return tuple(
            engine.submit(Request(prompt=text, max_new_tokens=new, sampling=sampling, ignore_eos=True)).result().tokens
        )

    with Engine(model) as engine:
        whole = ask(engine, prompt, 160)
        # checkpoints lie at multiples of 64 tokens: the longest one inside this text came from a round
        rest = ask(engine, prompt + whole[:70], 90)
        reused = engine.metrics.snapshot()["prefix"]
    assert rest == whole[70:160]
    assert reused["reused_tokens"] >= 128, reused
