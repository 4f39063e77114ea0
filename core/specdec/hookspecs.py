"""The four hooks of a specdec plugin: the contract, to be read first.

A plugin is a module named by an entry point of the group ``specdec``. It implements these hooks with
``specdec.hookimpl``. Hooks run at set-up; inside a round only methods of the objects they returned run. pluggy passes
arguments by keyword and an implementation may take fewer of them. Arguments are only ever added, never renamed.

=====================  ==============================================  =====================================================
phase                  hook                                            called
=====================  ==============================================  =====================================================
discovery              :func:`declare_speculation`                     once per plugin, without torch
preparation            :func:`build_target_state`                      once per loaded recipe
preparation            :func:`load_drafter`                            once per loaded recipe, after the target
preparation            :func:`capture_round`                           once per shape of the catalog
=====================  ==============================================  =====================================================

Only the plugin that owns a recipe is called for it. Types of torch and of the runtime are imported for the type checker
alone, so reading this module loads nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from specdec import hookspec

if TYPE_CHECKING:
    import torch

    from specdec.catalog import RoundShape
    from specdec.checkpoint.reader import Checkpoint
    from specdec.declaration import DrafterRecipe, Recipe
    from specdec.interfaces import Capacities, Drafter, Round, Target

__all__ = ["build_target_state", "capture_round", "declare_speculation", "load_drafter"]


# --- discovery ----------------------------------------------------------------------------------------------------------


@hookspec
def declare_speculation() -> Iterable[Recipe | DrafterRecipe]:  # type: ignore[empty-body]
    """Says which recipes the plugin owns.

    When called
        Once, while plugins are discovered: for every command that lists or runs recipes, help included. It must not import
        torch, read files or take noticeable time.

    Arguments
        None.

    Returns
        The recipes, in the order they are to be listed: ``Recipe`` for a model, ``DrafterRecipe`` for a drafter whose target
        another plugin brings. Each name must be unique among all installed plugins: if two distributions declare the same
        name, both are refused.

    Raises
        Whatever is raised, ``SystemExit`` included, is recorded as the reason why this plugin is not loaded. Other plugins
        and the lists are not affected.

    Example::

        # specdec_example/plugin.py
        from specdec import hookimpl

        from .recipe import RECIPE


        @hookimpl
        def declare_speculation():
            return [RECIPE]
    """


# --- preparation --------------------------------------------------------------------------------------------------------


@hookspec(firstresult=True)
def build_target_state(  # type: ignore[empty-body]
    recipe: Recipe, checkpoint: Checkpoint, capacities: Capacities, device: torch.device
) -> Target:
    """Loads the target's weights and allocates its per-request state.

    When called
        Once per loaded recipe, at preparation, before :func:`load_drafter`. Also for a recipe of another plugin that drafts for
        this plugin's target: ``recipe`` is then this plugin's own, and ``capacities`` are those of the other.

    Arguments
        recipe
            the recipe being prepared, one of those the plugin declared.
        checkpoint
            the opened checkpoint folder: configuration, tensor names and specs, and ``load(name)``.
        capacities
            what preparation decided to hold: slots, pages, context, draft horizon, dtype, rows of a prompt chunk.
        device
            where weights and state live.

    Returns
        An object with the methods of ``specdec.interfaces.Target``. Its state is a
        ``StateStore`` made from its layout, at the sizes of this checkpoint; all its memory is allocated here, because a
        round may not allocate.

    Raises
        CheckpointError: if a tensor is missing or has another shape or dtype than declared.
        CapacityError: if weights or state do not fit on ``device``.
        Anything else is reported as a failure of the plugin.

    Example::

        @hookimpl
        def build_target_state(recipe, checkpoint, capacities, device):
            from .target import ExampleTarget  # torch is imported here, not at discovery

            return ExampleTarget.build(recipe=recipe, checkpoint=checkpoint, capacities=capacities, device=device)
    """


@hookspec(firstresult=True)
def load_drafter(  # type: ignore[empty-body]
    recipe: Recipe, checkpoint: Checkpoint, target: Target, capacities: Capacities
) -> Drafter:
    """Loads the drafter's weights and allocates its per-request state.

    When called
        Once per loaded recipe, at preparation, after :func:`build_target_state`; not at all if speculation is switched off.

    Arguments
        recipe
            the recipe being prepared.
        checkpoint
            the opened checkpoint folder that holds the drafter's tensors.
        target
            what :func:`build_target_state` returned. A drafter that shares the embedding or the vocabulary head takes them
            from here and lives on the target's device.
        capacities
            as for :func:`build_target_state`.

    Returns
        An object with the methods of ``specdec.interfaces.Drafter``. Its state is a
        ``StateStore`` made from its layout.

    Raises
        As :func:`build_target_state`.

    Example::

        @hookimpl
        def load_drafter(recipe, checkpoint, target, capacities):
            from .drafter import ExampleDrafter

            return ExampleDrafter.load(recipe=recipe, checkpoint=checkpoint, target=target, capacities=capacities)
    """


@hookspec(firstresult=True)
def capture_round(  # type: ignore[empty-body]
    recipe: Recipe, target: Target, drafter: Drafter | None, shape: RoundShape, arena: Any
) -> Round:
    """Builds the round of one shape: draft, verify, accept and commit as one program.

    When called
        Once per shape of the catalog, at preparation, after the drafter. The core's own implementation, which builds the
        ordinary chain round, is tried last; a plugin implements this hook only when its round differs, and may return
        ``None`` for the shapes it leaves to the core.

    Arguments
        recipe
            the recipe being prepared.
        target, drafter
            what the two hooks above returned.
        shape
            batch, draft tokens, verification width and packed rows of the round.
        arena
            scratch storage shared by rounds of the same shape. What must outlive the round is not taken from here.

    Returns
        An object with the methods of ``specdec.interfaces.Round``. Running it allocates nothing that persists, compiles
        nothing and does not synchronise with the host.

    Raises
        CapacityError: if the shape does not fit into the prepared storage.
        Anything else is reported as a failure of the plugin.

    Example::

        @hookimpl
        def capture_round(recipe, target, drafter, shape, arena):
            if shape.draft_tokens == 0:
                return None  # the core's round serves width one

            from .round import BlockRound

            return BlockRound.build(target=target, drafter=drafter, shape=shape, arena=arena)
    """
