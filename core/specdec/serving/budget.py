"""The memory plan of a preparation against what the device has, checked before anything is allocated."""

from __future__ import annotations

import torch

from specdec.checkpoint.reader import Checkpoint
from specdec.declaration import Recipe
from specdec.errors import UsageError
from specdec.memory import MemoryPlan
from specdec.memory_plan import plan_memory
from specdec.ops.select import uses_cuda
from specdec.preparation import PreparationConfig

__all__ = ["checked_plan", "free_bytes"]


def free_bytes(device: torch.device) -> int:
    """Bytes of a CUDA device that this process may still allocate: the driver's, and those its allocator keeps unused."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def checked_plan(
    recipe: Recipe, config: PreparationConfig, checkpoint: Checkpoint, *, device: torch.device, dtype: str
) -> MemoryPlan | None:
    """The plan of this preparation, which fits; None where nothing limits it or the recipe declares no memory.

    The budget is ``config.memory_bytes``, and on a CUDA device never more than what is free there. Allocates nothing.

    Raises CapacityError if the plan does not fit; the line names the shortage and the options that would cure it. Raises
    UsageError if ``memory_bytes`` is given for a recipe that declares no memory.
    """
    budget, source = config.memory_bytes, "memory_bytes"
    if recipe.memory is None:
        if budget is not None:
            raise UsageError(
                f"memory_bytes is {budget}, but recipe {recipe.name!r} declares no memory to check it against; leave it out"
            )
        return None
    if device.type == "cuda":
        free = free_bytes(device)
        if budget is None or free < budget:
            budget, source = free, f"what {device} has free"
    if budget is None:
        return None
    plan = plan_memory(
        recipe,
        config,
        settings=checkpoint.config,
        checkpoint=checkpoint,
        dtype=dtype,
        device=device.type,
        kernels=uses_cuda("mixture", torch.empty(0, dtype=getattr(torch, dtype), device=device)),
        budget=budget,
        budget_source=source,
    )
    plan.check()
    return plan
