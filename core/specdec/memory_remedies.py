"""Options that make a plan fit: for each one by itself, the greatest value with which it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from attrs import evolve

from specdec.declaration import Recipe
from specdec.preparation import PreparationConfig

__all__ = ["remedies"]

Fits = Callable[[PreparationConfig], bool]


def remedies(
    recipe: Recipe, config: PreparationConfig, fits: Fits, *, least_snapshot: int
) -> tuple[tuple[str, int], ...]:
    """Names of options with the greatest value below the present one that fits, options that cannot cure it left out.

    least_snapshot: bytes of one prefix checkpoint; a smaller budget for them is none.
    """
    page = recipe.target_layout.page_tokens
    reach = -(-(config.context + recipe.max_draft_tokens + 1) // page)
    lanes = 1 << (config.concurrency - 1).bit_length()
    depths = [width - 1 for width in config.speculative_widths[:-1]]
    candidates: dict[str, Sequence[int]] = {
        "context": range(2, config.context),
        "concurrency": [1 << bit for bit in range((config.concurrency - 1).bit_length())],
        "mtp_draft_tokens": depths,
        "snapshot_bytes": range(least_snapshot, config.snapshot_bytes),
        "headroom_bytes": range(config.headroom_bytes),
        # with fewer pages than one request needs at full context, none could use it
        "pages": range(reach, config.pages or lanes * reach),
        "prefill_tokens": [1 << bit for bit in range(max(config.prefill_tokens).bit_length() - 1)],
    }
    found = []
    for name, values in candidates.items():
        best = _greatest(values, partial(_fits_with, config, name, fits))
        if best is None and name == "snapshot_bytes":
            best = _greatest([0][: config.snapshot_bytes], partial(_fits_with, config, name, fits))
        if best is not None:
            found.append((name, best))
    return tuple(found)


def changed(config: PreparationConfig, name: str, value: int) -> PreparationConfig:
    """The configuration with another value of an option, the options that follow from it adapted."""
    if name == "mtp_draft_tokens":
        widths = tuple(width for width in config.speculative_widths if width <= value + 1)
        fixed = None if config.fixed_width is None else min(config.fixed_width, widths[-1])
        return evolve(config, speculative_widths=widths, fixed_width=fixed)
    if name == "prefill_tokens":
        return evolve(config, prefill_tokens=(value,))
    changes: dict[str, Any] = {name: value}
    return evolve(config, **changes)


def _fits_with(config: PreparationConfig, name: str, fits: Fits, value: int) -> bool:
    return fits(changed(config, name, value))


def _greatest(values: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The greatest of increasing values that fits, where all below it do as well; None if not even the first fits."""
    if not values or not fits(values[0]):
        return None
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if fits(values[middle]):
            low = middle
        else:
            high = middle - 1
    return values[low]
