"""A checkpoint's headers against what a recipe declares, part by part. Reads no payload and imports no torch."""

import itertools
from collections.abc import Iterable
from pathlib import Path

from attrs import frozen

from specdec.checkpoint.reader import Checkpoint, Validation
from specdec.declaration import Recipe, TensorInventory
from specdec.errors import CheckpointError
from specdec.named_functions import call_named, named_function


@frozen(kw_only=True)
class Part:
    """Result for one part of the model: ``name`` is ``target`` or ``drafter``."""

    name: str
    validation: Validation


@frozen(kw_only=True)
class Inspection:
    """Result for a whole checkpoint.

    ``other_count`` and ``other_bytes`` sum up tensors that lie outside both parts, such as a vision tower's: they are
    reported, never a fault.
    """

    directory: Path
    recipe: str
    parts: tuple[Part, ...]
    other_count: int
    other_bytes: int

    @property
    def ok(self) -> bool:
        """True if every part is exactly as declared."""
        return all(part.validation.ok for part in self.parts)


def inspect_checkpoint(checkpoint: Checkpoint, recipe: Recipe) -> Inspection:
    """Compare an open checkpoint with the target and drafter inventories of ``recipe``, at the sizes of its configuration.

    Names are the recipe's canonical ones, and a float weight may be stored in every format that loading reads. A tensor
    belongs to a part whose names share its beginning: to one that declares it, otherwise to the one with the longest such
    beginning (and is then unexpected there). A tensor whose beginning no part shares belongs to none.

    Raises:
        CheckpointError: if the configuration is refused, or two stored names have the same canonical one.
    """
    if recipe.canonical_name is not None:
        checkpoint = checkpoint.renamed(named_function(recipe.canonical_name))
    inventories = _inventories(checkpoint, recipe)
    roots = sorted(
        ((root, part) for part, inventory in inventories.items() for root in _roots(inventory)), key=_longest
    )
    members: dict[str, list[str]] = {part: [] for part in inventories}
    other: list[str] = []
    for name in checkpoint.names:
        near = [part for root, part in roots if name.startswith(root)]
        # Looking every name up in every inventory would double the time; most names can only belong to one part.
        rivals = (part for part in near if inventories[part].lookup(name)) if len(set(near)) > 1 else iter(near)
        part = next(rivals, near[0] if near else None)
        (members[part] if part else other).append(name)
    return Inspection(
        directory=checkpoint.directory,
        recipe=recipe.name,
        parts=tuple(
            Part(name=part, validation=checkpoint.validate(inventory, members[part], any_storage=True))
            for part, inventory in inventories.items()
        ),
        other_count=len(other),
        other_bytes=sum(checkpoint.stored(name).bytes for name in other),
    )


def recipe_for(checkpoint: Checkpoint, recipes: Iterable[Recipe]) -> Recipe:
    """Return the recipe that accepts the checkpoint's ``model_type`` (the outer one, or that of ``text_config``). Recipes that
    draft for another's target have no checkpoints of their own.

    Raises:
        CheckpointError: if none or several do; the line names the types and the option that chooses.
    """
    recipes = tuple(recipe for recipe in recipes if recipe.target_recipe is None)
    text = checkpoint.config.get("text_config")
    types = [checkpoint.config.get("model_type"), text.get("model_type") if isinstance(text, dict) else None]
    found = [recipe for recipe in recipes if any(kind in recipe.model_types for kind in types)]
    if len(found) == 1:
        return found[0]
    path = checkpoint.directory / "config.json"
    if found:
        names = ", ".join(recipe.name for recipe in found)
        raise CheckpointError(
            f"{path}: model_type {types[0]!r} is accepted by several recipes ({names}); choose with --recipe"
        )
    accepted = ", ".join(f"{recipe.name} accepts {'/'.join(recipe.model_types)}" for recipe in recipes) or "no recipes"
    raise CheckpointError(f"{path}: no recipe accepts model_type {types[0]!r} ({accepted}); choose with --recipe")


def _inventories(checkpoint: Checkpoint, recipe: Recipe) -> dict[str, TensorInventory]:
    if recipe.inventories is None:
        return {"target": recipe.target_inventory, "drafter": recipe.drafter_inventory}
    target, drafter = call_named(recipe, "inventories", checkpoint.config, checkpoint, returns=tuple)
    return {"target": target, "drafter": drafter}


def _roots(inventory: TensorInventory) -> list[str]:
    """The longest beginning, in whole components, that the inventory's names share; one for each first component."""
    by_first: dict[str, list[list[str]]] = {}
    for group in inventory.groups:
        components = group.name.partition("{")[0].split(".")[:-1]
        by_first.setdefault(group.name.partition(".")[0], []).append(components)
    roots = []
    for names in by_first.values():
        shared = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*names))
        roots.append("".join(f"{column[0]}." for column in shared))
    return [root for root in roots if root]


def _longest(root: tuple[str, str]) -> int:
    return -len(root[0])
