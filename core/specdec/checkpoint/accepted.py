"""Which checkpoint a recipe takes: the embedded one's folder, and what ``config.json`` must say. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from specdec.checkpoint.reader import Checkpoint
from specdec.declaration import Recipe
from specdec.errors import CheckpointError

__all__ = ["check_model_type", "check_settings", "context_limit", "embedded_checkpoint", "text_config"]


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


def embedded_checkpoint(recipe: Recipe) -> Path:
    """Folder of the small checkpoint that the plugin ships.

    Raises CheckpointError if the recipe has none or it is not installed.
    """
    if recipe.embedded_checkpoint is None:
        raise CheckpointError(f"recipe {recipe.name!r} ships no checkpoint; name one with --checkpoint DIR")
    package, _, folder = recipe.embedded_checkpoint.partition(":")
    path = Path(str(resources.files(package))) / folder
    if not (path / "config.json").is_file():
        raise CheckpointError(
            f"{path}: the small checkpoint of recipe {recipe.name!r} is not there; reinstall the plugin or name a folder with "
            "--checkpoint DIR"
        )
    return path


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
