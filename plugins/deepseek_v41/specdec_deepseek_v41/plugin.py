"""The plugin's hooks. Nothing heavy is imported here: torch comes with the modules imported inside the hooks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from specdec import hookimpl

from .recipe import RECIPE

if TYPE_CHECKING:
    import torch

    from specdec.catalog import RoundShape
    from specdec.checkpoint.reader import Checkpoint
    from specdec.declaration import Recipe
    from specdec.interfaces import Capacities, Drafter, Round, Target
    from specdec.round.arena import Arena

    from .drafter import DsparkDrafter
    from .target import DeepseekTarget


@hookimpl
def declare_speculation() -> Iterable[Recipe]:
    """The one recipe of this plugin, ``deepseek-v4.1-flash``."""
    return [RECIPE]


@hookimpl
def build_target_state(recipe: Recipe, checkpoint: Checkpoint, capacities: Capacities, device: torch.device) -> Target:
    """Target weights and state, sized from the checkpoint's own configuration."""
    from .target import DeepseekTarget

    return DeepseekTarget.build(recipe=recipe, checkpoint=checkpoint, capacities=capacities, device=device)


@hookimpl
def load_drafter(recipe: Recipe, checkpoint: Checkpoint, target: DeepseekTarget, capacities: Capacities) -> Drafter:
    """The DSpark stages and heads; they share the target's embedding and vocabulary head and live on its device."""
    from .drafter import DsparkDrafter

    return DsparkDrafter.load(recipe=recipe, checkpoint=checkpoint, target=target, capacities=capacities)


@hookimpl
def capture_round(
    recipe: Recipe, target: DeepseekTarget, drafter: DsparkDrafter | None, shape: RoundShape, arena: Arena
) -> Round | None:
    """Rounds with drafts choose inside how much of each block is verified; those without are the core's own."""
    from .rounds import build_round

    return build_round(recipe, target, drafter, shape, arena)
