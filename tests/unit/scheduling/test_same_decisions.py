"""A loaded model and a simulated device that costs and accepts what the model did lead the scheduler to the same decisions.

The script runs on a small random model with a trace. The simulation takes round seconds and accepted counts from that trace and
output tokens from the run, and nothing else; its own trace must be the same, line by line, but for the time of day.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from serving_runs import FEW_TOKENS, FEW_TOKENS_SEED
from small_checkpoint import write_small_checkpoint

from specdec.control.trace import TraceWriter, read_trace
from specdec.drafting.history import HistoryRing
from specdec.errors import UsageError
from specdec.preparation import PreparationConfig
from specdec.recipes import recipe_book
from specdec.sampling.params import SamplingParams
from specdec.scheduling.device import LanePlan
from specdec.scheduling.policy import WidthPolicy
from specdec.scheduling.scheduler import Scheduler
from specdec.serving.device import ModelDevice
from specdec.serving.engine import width_policy
from specdec.serving.model import LoadedModel
from specdec.serving.request import Emission, Request
from specdec.simulation.acceptance import STOP, Category, Luck
from specdec.simulation.costs import CostModel
from specdec.simulation.device import Nature, SimulatedDevice

CONCURRENCY, CONTEXT, PREFILL_ROWS, END = 4, 192, 16, FEW_TOKENS.eos_token_id
#: Length of an output that does not end by itself.
NEVER = 10**6
#: When each request of the script comes: the step, its prompt's length, budget, draft ceiling.
ARRIVALS = [
    (step, draw.choice((1, 9, 33, 60)), draw.choice((3, 20, 60, 100)), draw.choice((None, None, None, 0, 2)))
    for draw in [random.Random(8)]
    for step in (0, 0, 1, 9, 20, 21, 22, 40, 60, 61)
]


@frozen(kw_only=True)
class Setting:
    """How the script is served."""

    queue_depth: int = 1
    pages: int | None = None
    copying: bool = False


SETTINGS = [Setting(), Setting(queue_depth=2), Setting(queue_depth=2, copying=True), Setting(pages=4)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Setting], LoadedModel]:
    torch.set_num_threads(1)
    directory = write_small_checkpoint(
        tmp_path_factory.mktemp("decisions") / "checkpoint", seed=FEW_TOKENS_SEED, geometry=FEW_TOKENS
    )
    recipe, made = recipe_book().recipe("qwen3.8-flash"), {}

    def prepare(setting: Setting) -> LoadedModel:
        if setting.pages not in made:
            config = PreparationConfig.for_recipe(
                recipe,
                concurrency=CONCURRENCY,
                max_draft_tokens=7,
                context=CONTEXT,
                prefill_tokens=(PREFILL_ROWS,),
                pages=setting.pages,
            )
            made[setting.pages] = LoadedModel.prepare(recipe, config, directory=directory, dtype="float64")
        return made[setting.pages]

    return prepare


def scripted() -> Iterator[tuple[int, Request]]:
    """The requests, each with the step it comes at; the seed is its place in the script."""
    draw = random.Random(9)
    for number, (step, prompt, budget, drafts) in enumerate(ARRIVALS):
        yield (
            step,
            Request(
                prompt=[draw.randrange(5) for _ in range(prompt)],
                sampling=SamplingParams(greedy=True, seed=number),
                max_new_tokens=budget,
                draft_tokens=drafts,
                stop_ids=(END,) if number % 3 == 2 else (),
            ),
        )


def play(
    device: Any, policy: WidthPolicy, setting: Setting, path: Path, change: Callable[[Request], Request]
) -> tuple[list[list[int]], int]:
    """Runs the script; returns outputs by request and how many were preempted. The trace is at ``path``."""
    scheduler = Scheduler(
        device,
        policy,
        queue_depth=setting.queue_depth,
        chunks_per_step=1,
        reserved_output=None if setting.pages is None else 8,
        history=HistoryRing() if setting.copying else None,
        trace=(trace := TraceWriter(path)),
    )
    outputs: list[list[int]] = [[] for _ in ARRIVALS]
    coming, step = list(scripted()), 0
    while coming or scheduler.busy:
        while coming and coming[0][0] <= step:
            assert scheduler.submit(change(coming.pop(0)[1])) == len(ARRIVALS) - len(coming) - 1
        for event in scheduler.step():
            if isinstance(event, Emission):
                outputs[event.request].extend(event.tokens)
        step += 1
    trace.close()
    return outputs, scheduler.admission.preemptions


# --- the simulation ------------------------------------------------------------------------------------------------------


def renamed(token: int) -> int:
    """The simulation's name of a token id: 0 ends its outputs, and means nothing else."""
    return token + 1


def restated(request: Request) -> Request:
    return evolve(request, prompt=[renamed(token) for token in request.prompt], stop_ids=())


@frozen(kw_only=True, eq=False)
class Recorded(Nature):
    """Emits what the model emitted. accepted: drafts accepted by a round that begins behind so many output tokens."""

    tokens: Sequence[int]
    accepted: dict[int, int]

    def token(self, position: int) -> int:
        return STOP if position == self.length - 1 else renamed(self.tokens[position])


class RecordedDevice(SimulatedDevice):
    """Judges drafts as the record says; a round from where no recorded one began accepts none."""

    @staticmethod
    def _accepts(nature: Nature, lane: LanePlan, generated: int, depth: int) -> bool:
        assert isinstance(nature, Recorded)
        return depth < nature.accepted.get(generated, 0)


class RecordedCosts(CostModel):
    """Rounds cost what those of a trace did, in order. Where another shape is asked for, decisions are not the recorded ones."""

    def round(self, batch: int, width: int, *, plain: bool = False) -> float:
        one = next(COSTS[self])
        assert (one["batch"], one["width"]) == (batch, width), f"round {one['round']} was of another shape"
        return float(one["seconds"])

    def __hash__(self) -> int:
        return id(self)


#: Rounds still to come, by cost model: those are frozen.
COSTS: dict[RecordedCosts, Iterator[dict[str, Any]]] = {}


def recorded_costs(rounds: list[dict[str, Any]]) -> RecordedCosts:
    costs = RecordedCosts()
    COSTS[costs] = iter(rounds)
    return costs


def natures(rounds: list[dict[str, Any]], outputs: list[list[int]]) -> dict[int, Recorded]:
    """By request."""
    done = dict.fromkeys(range(len(outputs)), 1)
    accepted: dict[int, dict[int, int]] = {number: {} for number in done}
    for one in rounds:
        for lane in one["lanes"]:
            if lane["request"] is not None and lane["emitted"]:
                accepted[lane["request"]][done[lane["request"]]] = lane["accepted"]
                done[lane["request"]] += lane["emitted"]
    assert [done[number] for number in sorted(done)] == [len(output) for output in outputs]
    unused = Category(conditional=(0.0,))
    return {
        number: Recorded(
            category=unused,
            luck=Luck(0, 0),
            length=len(tokens) if stops and tokens[-1] == END else NEVER,
            tokens=tokens,
            accepted=accepted[number],
        )
        for number, (tokens, stops) in enumerate(
            zip(outputs, [bool(one.stop_ids) for _, one in scripted()], strict=True)
        )
    }


def told(known: dict[int, Recorded]) -> list[list[int]]:
    """Outputs as the simulation emits them."""
    return [[one.token(place) for place in range(len(one.tokens))] for one in known.values()]


def simulate(
    model: LoadedModel, costs: CostModel, found: dict[int, Recorded], setting: Setting, path: Path
) -> tuple[list[list[int]], int]:
    device = RecordedDevice(
        costs,
        lambda request: found[request.sampling.seed],
        concurrency=CONCURRENCY,
        widths=model.config.speculative_widths,
        token_capacity=model.config.speculative_token_capacity,
        context=CONTEXT,
        page_tokens=model.target.store.layout.page_tokens,
        prefill_tokens=PREFILL_ROWS,
        pages=setting.pages,
    )
    device.horizon = model.recipe.max_draft_tokens + 1
    return play(device, width_policy(model.config), setting, path, restated)


def decisions(path: Path) -> list[dict[str, Any]]:
    """All of a trace but the time of day: lanes and what was known of them, shape, reason, candidates, outcome."""
    return [{name: value for name, value in one.items() if name != "time"} for one in read_trace(path)]


@pytest.mark.parametrize("setting", SETTINGS, ids=["one", "two", "two with copies", "few pages"])
def test_recorded_costs_and_acceptance_lead_to_the_same_decisions(
    prepared: Callable[[Setting], LoadedModel], tmp_path: Path, setting: Setting
) -> None:
    model = prepared(setting)
    real, made = tmp_path / "real.jsonl", tmp_path / "simulated.jsonl"
    outputs, preempted = play(
        ModelDevice(model, queued=True), width_policy(model.config), setting, real, lambda one: one
    )
    rounds = decisions(real)
    reasons = {one["reason"] for one in rounds}
    assert len(rounds) > 60 and len(reasons) > 2 and len({one["width"] for one in rounds}) > 1
    assert (preempted > 0) is (setting.pages is not None)
    assert any(lane["copied"] for one in rounds for lane in one["lanes"]) is setting.copying
    known = natures(rounds, outputs)
    found, again = simulate(model, recorded_costs(rounds), known, setting, made)
    assert found == told(known)
    assert again == preempted
    assert decisions(made) == rounds


@pytest.mark.parametrize("other", ["costs", "acceptance"])
def test_other_costs_or_acceptance_lead_to_others(
    prepared: Callable[[Setting], LoadedModel], tmp_path: Path, other: str
) -> None:
    """Negative controls: rounds that cost the more the wider they are, drafts that are never accepted."""
    setting = Setting(queue_depth=2)
    model = prepared(setting)
    real, made = tmp_path / "real.jsonl", tmp_path / "simulated.jsonl"
    outputs, _ = play(ModelDevice(model, queued=True), width_policy(model.config), setting, real, lambda one: one)
    rounds = decisions(real)
    known = natures(rounds, outputs)
    if other == "costs":
        found, _ = simulate(model, CostModel(base=1e-6, draft=1.0), known, setting, made)
        assert found == told(known)
        chosen = [[(one["width"], one["reason"]) for one in decisions(path)] for path in (real, made)]
        assert chosen[0] != chosen[1]
        return
    never = {number: evolve(one, accepted={}) for number, one in known.items()}
    with pytest.raises((AssertionError, StopIteration, UsageError), match="was of another shape"):
        simulate(model, recorded_costs(rounds), never, setting, made)
