"""Whether what a plugin's methods return in a round has the shape and dtype that the round goes on with.

Shapes are static, so these checks run while a program is traced or runs eagerly and cost nothing in a captured one. Without them
an author would read of a broadcast deep in the core, or of nothing: what was never proposed is stale memory.

Letters: B lanes, K draft tokens, W = K + 1, V vocabulary, P packed rows, T rows of a prompt chunk, D width of the feedback.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.errors import PluginError
from specdec.places import method_of

__all__ = ["described", "expect", "expect_every_depth"]


def described(value: object) -> str:
    """Shape and dtype of a tensor, for a message; the type of anything else."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def expect(
    value: object,
    shape: Sequence[int | None],
    letters: str,
    *,
    of: Any,
    method: str,
    what: str = "returns",
    integer: bool = False,
    padded: bool = False,
) -> None:
    """Checks a tensor that ``of.method`` gave.

    shape: sizes, None for any; letters: how the contract writes it. what: what the method did with the value. integer: int64,
    else any floating dtype. padded: whether the last dimension may be larger. Raises PluginError with method, place and shapes.
    """
    if isinstance(value, Tensor) and (value.dtype == torch.int64 if integer else value.is_floating_point()):
        found = value.shape
        if len(found) == len(shape):
            last = len(shape) - 1
            if all(
                wanted is None or size == wanted or (padded and place == last and size > wanted)
                for place, (size, wanted) in enumerate(zip(found, shape, strict=True))
            ):
                return
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    kind = "int64" if integer else "of a floating dtype"
    raise PluginError(f"{method_of(of, method)} {what} {described(value)}; expected [{letters}] = [{sizes}] {kind}")


def expect_every_depth(drawn: Sequence[int], drafts: int, *, of: Any) -> None:
    """Checks that a drafter proposed every depth of a round once, whatever the order. Raises PluginError."""
    if sorted(drawn) != list(range(drafts)):
        shown = f"depths {', '.join(map(str, drawn))}" if drawn else "nothing"
        raise PluginError(
            f"{method_of(of, 'propose')} proposed {shown} where draft_tokens is {drafts}; call proposer.draw(depth, logits) or "
            "proposer.place(depth, tokens) once for every depth in range(draft_tokens)"
        )
