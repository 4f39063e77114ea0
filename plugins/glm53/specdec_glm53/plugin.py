"""The plugin's hooks. Nothing heavy is imported here: torch comes with ``.target`` and ``.drafter``, inside the hooks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from specdec import hookimpl

from .recipe import RECIPE

if TYPE_CHECKING:
    import torch

    from specdec.checkpoint.reader import Checkpoint
    from specdec.declaration import Recipe
    from specdec.interfaces import Capacities, Drafter, Target

    from .target import GlmTarget


@hookimpl
def declare_speculation() -> Iterable[Recipe]:
    """The one recipe of this plugin, ``glm-5.3-flash``."""
    return [RECIPE]


@hookimpl
def build_target_state(recipe: Recipe, checkpoint: Checkpoint, capacities: Capacities, device: torch.device) -> Target:
    """Target weights and state, sized from the checkpoint's own configuration."""
    from .target import GlmTarget

    return GlmTarget.build(recipe=recipe, checkpoint=checkpoint, capacities=capacities, device=device)


@hookimpl
def load_drafter(recipe: Recipe, checkpoint: Checkpoint, target: GlmTarget, capacities: Capacities) -> Drafter:
    """The MTP layer; it shares the target's embedding and vocabulary head and lives on its device."""
    from .drafter import MtpDrafter

    return MtpDrafter.load(recipe=recipe, checkpoint=checkpoint, target=target, capacities=capacities)
