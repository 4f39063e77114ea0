"""Rounds of DeepSeek-V4.1-Flash: drafted rounds allocate their target rows, width one is the core's round."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.catalog import RoundShape
from specdec.declaration import Recipe
from specdec.round.allocated import AllocatedRound
from specdec.round.arena import Arena

if TYPE_CHECKING:
    from .drafter import DsparkDrafter
    from .target import DeepseekTarget


def build_round(
    recipe: Recipe, target: DeepseekTarget, drafter: DsparkDrafter | None, shape: RoundShape, arena: Arena
) -> AllocatedRound | None:
    """The round of one shape; None for shapes without drafts.

    Raises CheckpointError if the checkpoint's calibration file for the block's length is not usable.
    """
    if drafter is None or shape.draft_tokens == 0:
        return None
    return AllocatedRound(
        target=target,
        drafter=drafter,
        shape=shape,
        arena=arena,
        max_draft_tokens=recipe.max_draft_tokens,
        temperatures=drafter.temperatures(shape.draft_tokens),
    )
