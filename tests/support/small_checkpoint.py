"""A checkpoint folder that ``specdec run`` accepts: random weights of the tiny geometry and a real byte-level tokenizer."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from qwen_models import write_random_checkpoint
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from specdec_qwen38.geometry import TINY, Geometry

#: Id of the end-of-text token, as in the tiny geometry.
END_OF_TEXT = 500


def byte_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of exactly 512 ids that can write any text.

    Ids below 500 are bytes and merges learnt from a module of the standard library, 500 is ``<|endoftext|>``, the rest are
    special tokens without text.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=END_OF_TEXT, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([Path(argparse.__file__).read_text(encoding="utf-8")], trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", *(f"<|reserved_{number}|>" for number in range(11))])
    assert tokenizer.get_vocab_size() == TINY.vocab_size
    assert tokenizer.token_to_id("<|endoftext|>") == END_OF_TEXT == TINY.eos_token_id
    return tokenizer


def write_small_checkpoint(
    directory: Path, *, seed: int = 5, geometry: Geometry = TINY, generation: Mapping[str, Any] | None = None
) -> Path:
    """Writes weights, configuration and tokenizer, and ``generation_config.json`` if ``generation`` is given."""
    write_random_checkpoint(directory, seed, geometry)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(dict(generation)), encoding="utf-8")
    return directory


def altered_checkpoint(
    source: Path,
    directory: Path,
    *,
    config: Mapping[str, Any] | None = None,
    tensors: Callable[[dict[str, torch.Tensor]], None] | None = None,
    files: Mapping[str, str | bytes | None] | None = None,
) -> Path:
    """Copies a checkpoint with changes.

    config: keys to set in the outer part of ``config.json``. tensors: changes the weights in place. files: contents by file
    name, None deletes the file.
    """
    shutil.copytree(source, directory)
    if config is not None:
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **config}), encoding="utf-8")
    if tensors is not None:
        loaded = load_file(source / "model.safetensors")
        tensors(loaded)
        save_file(loaded, directory / "model.safetensors", metadata={"format": "pt"})
    for name, content in (files or {}).items():
        if content is None:
            (directory / name).unlink()
        else:
            (directory / name).write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    return directory


def reshaped(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], None]:
    """A change of one tensor, for ``altered_checkpoint``."""

    def alter(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = change(tensors[name]).contiguous()

    return alter
