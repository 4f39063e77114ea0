"""Writing a checkpoint directory: configuration, safetensors (sharded if asked for), tokenizer."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from specdec.errors import CheckpointError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def write_checkpoint(
    directory: str | Path,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    tokenizer_path: str | Path | None = None,
    max_shard_bytes: int | None = None,
) -> Path:
    """Write ``tensors`` and ``config`` so that :meth:`Checkpoint.open` reads them back, and return the directory.

    ``config`` goes to ``config.json`` as it is. ``tokenizer_path`` is copied to ``tokenizer.json``. Without
    ``max_shard_bytes`` there is one ``model.safetensors``; with it, shards of at most that many payload bytes (a larger
    tensor has a shard of its own) and an index. Tensors are stored in the order of the mapping's names sorted, so equal
    contents give equal files. Creates the directory; replaces weight files of an earlier write there. Does not
    change the tensors.

    Raises:
        CheckpointError: if there are no tensors, or a file cannot be written.
    """
    directory = Path(directory)
    if not tensors:
        raise CheckpointError(f"{directory}: a checkpoint needs at least one tensor, got none")
    if max_shard_bytes is not None and max_shard_bytes < 1:
        raise CheckpointError(
            f"{directory}: max_shard_bytes is {max_shard_bytes}, must be at least 1, or None for one file"
        )
    shards = _shards(tensors, max_shard_bytes)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # A stale single file would win over a new index when the directory is opened.
        for stale in [directory / _SINGLE, directory / _INDEX, *directory.glob("model-*-of-*.safetensors")]:
            stale.unlink(missing_ok=True)
        (directory / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
        files = (
            [_SINGLE]
            if max_shard_bytes is None
            else [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
        )
        for file, names in zip(files, shards, strict=True):
            # Tensors that share storage (tied or sliced) must be separate in the file.
            separate = {name: tensors[name].detach().cpu().contiguous().clone() for name in names}
            save_file(separate, directory / file, metadata={"format": "pt"})
        if max_shard_bytes is not None:
            weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
            total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (directory / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        if tokenizer_path is not None and Path(tokenizer_path) != directory / "tokenizer.json":
            shutil.copyfile(tokenizer_path, directory / "tokenizer.json")
    except OSError as error:
        raise CheckpointError(f"{error.filename or directory}: cannot be written: {error.strerror or error}") from error
    except SafetensorError as error:
        raise CheckpointError(f"{directory}: the weights cannot be written: {error}") from error
    return directory


def _shards(tensors: Mapping[str, torch.Tensor], max_shard_bytes: int | None) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name in sorted(tensors):
        size = tensors[name].numel() * tensors[name].element_size()
        if max_shard_bytes is not None and shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards
