"""Hooks and recipe. Nothing heavy is imported here."""

from __future__ import annotations

from specdec import hookimpl
from specdec.declaration import Recipe, SamplingDefaults, TensorGroup, TensorInventory, WidthCatalog

from .state import DRAFTS, VOCAB, WIDTH, drafter_layout, target_layout


def _matrix(name, rows, columns):
    return TensorGroup(name=name, shape=(rows, columns), dtype="float32", source="test")


RECIPE = Recipe(
    name="recurrent-toy",
    summary="a recurrent net that drafts for itself",
    checkpoint="example/recurrent-toy",
    model_types=("recurrent_toy",),
    drafter_method="recurrent",
    default_draft_tokens=2,
    max_draft_tokens=DRAFTS,
    widths=WidthCatalog(widths=range(1, DRAFTS + 2)),
    sampling=SamplingDefaults(temperature=1.0, top_k=20, top_p=0.95),
    eos_token_ids=(VOCAB - 1,),
    supports_history_drafts=False,
    tensor_parallel_sizes=(1,),
    target_layout=target_layout(),
    drafter_layout=drafter_layout(),
    target_inventory=TensorInventory(
        groups=(_matrix("embedding", VOCAB, WIDTH), _matrix("turn", WIDTH, WIDTH), _matrix("head", VOCAB, WIDTH))
    ),
    drafter_inventory=TensorInventory(groups=(_matrix("draft", WIDTH, WIDTH),)),
    sources=tuple(
        (name, "test")
        for name in (
            "default_draft_tokens",
            "max_draft_tokens",
            "sampling",
            "eos_token_ids",
            "speculative_token_capacity",
        )
    ),
)


@hookimpl
def declare_speculation():
    return [RECIPE]


@hookimpl
def build_target_state(recipe, checkpoint, capacities, device):
    from .target import RecurrentTarget

    return RecurrentTarget(checkpoint, capacities, device)


@hookimpl
def load_drafter(checkpoint, target, capacities):
    from .drafter import RecurrentDrafter

    return RecurrentDrafter(checkpoint, target, capacities)
