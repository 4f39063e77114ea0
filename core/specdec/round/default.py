"""The core's own implementation of ``capture_round``: the ordinary chain round. A plugin's implementation goes first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec import hookimpl

if TYPE_CHECKING:
    from specdec.catalog import RoundShape
    from specdec.declaration import Recipe
    from specdec.interfaces import Drafter, Round, Target
    from specdec.round.arena import Arena


@hookimpl(trylast=True)
def capture_round(recipe: Recipe, target: Target, drafter: Drafter | None, shape: RoundShape, arena: Arena) -> Round:
    """Builds the chain round of ``shape`` on ``arena``; nothing runs yet."""
    from specdec.round.transaction import ChainRound

    return ChainRound(
        target=target,
        drafter=drafter,
        shape=shape,
        arena=arena,
        max_draft_tokens=recipe.max_draft_tokens,
        history_drafts=recipe.supports_history_drafts,
    )
