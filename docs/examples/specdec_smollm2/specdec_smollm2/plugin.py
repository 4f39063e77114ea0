"""The plugin's hooks. Torch comes with ``.target``, inside the hooks that need it."""

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


@hookimpl
def declare_speculation() -> Iterable[Recipe]:
    """The one recipe of this plugin, ``smollm2-135m``."""
    return [RECIPE]


@hookimpl
def build_target_state(checkpoint: Checkpoint, capacities: Capacities, device: torch.device) -> Target:
    """Target weights and state, sized from the checkpoint's own configuration."""
    from .target import LlamaTarget

    return LlamaTarget(checkpoint, capacities, device)


@hookimpl
def load_drafter(recipe: Recipe, target: Target, capacities: Capacities) -> Drafter:
    """Prompt lookup, as it is: it needs nothing of the target but its tokens."""
    from specdec_ngram.drafter import NgramDrafter

    return NgramDrafter.build(recipe=recipe, target=target, capacities=capacities)
