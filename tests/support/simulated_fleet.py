"""Small simulated fleets for tests: arrivals, a device and a scheduler in a line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from specdec.scheduling.scheduler import Scheduler
from specdec.serving.request import Request
from specdec.simulation.acceptance import Category
from specdec.simulation.costs import CostModel
from specdec.simulation.device import Nature, SimulatedDevice
from specdec.simulation.fleet import Natures, Replica, Run, simulate
from specdec.simulation.history import SimulatedHistory
from specdec.simulation.policies import named_policy
from specdec.simulation.workload import Arrival

WIDTHS = (1, 2, 3, 4)
COSTS = CostModel(base=1.0, draft=0.1, first=0.1, chunk=0.2, prompt_token=0.001)
CATEGORY = Category(conditional=(0.8, 0.6))


def arrival(index: int, time: float = 0.0, prompt: int = 8, output: int = 20, **more: Any) -> Arrival:
    """One arrival of the only category."""
    values = {"category": "only", "max_new_tokens": output, **more}
    return Arrival(index=index, time=time, prompt_tokens=prompt, output_tokens=output, **values)


def replica_maker(
    nature: Callable[[Request], Nature],
    policy: str,
    costs: CostModel,
    *,
    widths: Sequence[int] = WIDTHS,
    queue_depth: int = 1,
    chunks_per_step: int | None = 1,
    reserved_output: int | None = None,
    copying: bool = False,
    **device: Any,
) -> Callable[[], Replica]:
    """Makes replicas of one configuration."""
    named = named_policy(policy, widths)

    def make() -> Replica:
        simulated = SimulatedDevice(costs, nature, widths=widths, plain=named.plain, **device)
        history = SimulatedHistory() if copying else None
        scheduler = Scheduler(
            simulated,
            named.make(),
            queue_depth=queue_depth,
            chunks_per_step=chunks_per_step,
            reserved_output=reserved_output,
            history=history,
        )
        return Replica(device=simulated, scheduler=scheduler, history=history)

    return make


def run(
    arrivals: Sequence[Arrival],
    policy: str = "adaptive",
    costs: CostModel | None = None,
    *,
    category: Category = CATEGORY,
    seed: int = 0,
    replicas: int = 1,
    dispatch: str = "round-robin",
    **options: Any,
) -> Run:
    """Simulates arrivals of one category to their ends."""
    natures = Natures(arrivals, {"only": category}, seed)
    costs = COSTS if costs is None else costs
    make = replica_maker(natures, policy, costs, **options)
    return simulate(arrivals, make, natures, replicas=replicas, dispatch=dispatch)
