"""Llama checkpoints in GGUF, read through the ``gguf`` package: settings, tensors as float32 values, tokenizer.

The file's own names and conventions end here. Tensors have the names and the order of rows of the safetensors release, so the
target cannot tell which form it was given: GGUF stores query and key rows for adjacent-pair rope, the release and
``specdec.ops.rope.apply_rope`` for half-split rope.

Layout of the file: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from specdec.checkpoint.header import StoredTensor
from specdec.checkpoint.reader import Checkpoint
from specdec.checkpoint.tokenizer import Tokenizer
from specdec.errors import CheckpointError

from .geometry import Geometry
from .gguf_tokenizer import build_tokenizer
from .inventory import EMBEDDING, FINAL_NORM, HEAD

if TYPE_CHECKING:
    import torch

ARCHITECTURE = "llama"
_SINGLE = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": HEAD}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Settings that count the heads of projections whose rows are in another order.
_HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
# Setting of config.json → key of the metadata, behind the architecture's name.
_SETTINGS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
    "head_dim": "rope.dimension_count",
}


def open_llama(path: Path) -> Checkpoint:
    """Opens a GGUF file, or a folder of safetensors; see ``Recipe.opener``. Reads metadata only.

    Raises CheckpointError if it is neither, or no Llama.
    """
    if path.is_dir():
        return Checkpoint.open(path)
    try:
        found = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    contents = _read(path, found.st_size, found.st_mtime_ns)
    stored = {
        name: StoredTensor(name=name, dtype="float32", shape=shape, bytes=4 * prod(shape), path=path)
        for name, shape in contents.shapes.items()
    }
    return GgufCheckpoint(directory=path, config=_settings(path, contents), stored=stored, contents=contents)


@frozen(kw_only=True, eq=False)
class _Contents:
    """What was read of a file. values: metadata by key. shapes: by the names used here. tensors: the reader's records."""

    values: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    tensors: Mapping[str, Any]


@frozen(kw_only=True, eq=False, repr=False)
class GgufCheckpoint(Checkpoint):
    """An open GGUF file. Dtypes and bytes of its tensors are those of the float32 values that ``load`` returns."""

    _contents: _Contents = field(alias="contents")

    def load(self, name: str, *, mapped: bool = False) -> torch.Tensor:
        """A tensor's values, float32 on the CPU, always a fresh copy: blocks are decoded, so there is nothing to map.

        Raises CheckpointError if there is no such tensor or its blocks are of a type that is not known.
        """
        import torch
        from gguf.quants import dequantize

        found = self.stored(name)
        record = self._contents.tensors[found.name]
        try:
            values = dequantize(record.data, record.tensor_type)
        except NotImplementedError as error:
            raise CheckpointError(f"{self.directory}: tensor {record.name}: {error}") from error
        # values that are stored as floats come as a view of the file
        tensor = torch.from_numpy(values if values.flags.writeable else values.copy()).view(found.shape)
        heads = _HEADS.get(found.name.split(".")[-2])
        # a file may leave heads out that follow from others
        return tensor if heads is None else _half_split(tensor, getattr(Geometry.from_config(self.config), heads))

    def tokenizer(self) -> Tokenizer:
        """See ``Checkpoint.tokenizer``: made from the vocabulary and merges of the metadata."""
        return Tokenizer(build_tokenizer(self.directory, self._contents.values))

    def generation_config(self) -> dict[str, Any]:
        """See ``Checkpoint.generation_config``: the metadata names the token that ends a response and no sampling."""
        return {"eos_token_id": self.config["eos_token_id"]}

    def tokenizer_config(self) -> dict[str, Any]:
        """See ``Checkpoint.tokenizer_config``: chat template and special tokens of the metadata."""
        values, tokens = self._contents.values, self._contents.values.get("tokenizer.ggml.tokens", ())
        found = {"chat_template": values.get("tokenizer.chat_template")}
        for name in ("bos", "eos"):
            number = values.get(f"tokenizer.ggml.{name}_token_id")
            found[f"{name}_token"] = tokens[number] if number is not None and number < len(tokens) else None
        return {name: value for name, value in found.items() if value is not None}


@lru_cache(maxsize=1)
def _read(path: Path, size: int, changed: int) -> _Contents:
    """Parses a file. Vocabularies take a second or two, and a command opens its checkpoint more than once."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except Exception as error:  # whatever the package meets in a damaged file
        raise CheckpointError(f"{path}: not a readable GGUF file: {error}") from error
    values = {name: item.contents() for name, item in reader.fields.items()}
    architecture = values.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise CheckpointError(f"{path}: general.architecture is {architecture!r}, allowed: {ARCHITECTURE!r}")
    tensors = {_name(path, record.name): record for record in reader.tensors}
    # the file lists the fastest axis first
    shapes = {name: tuple(int(extent) for extent in reversed(record.shape)) for name, record in tensors.items()}
    return _Contents(values=values, shapes=shapes, tensors=tensors)


def _name(path: Path, stored: str) -> str:
    layer = _LAYER_NAME.fullmatch(stored)
    if layer is not None and layer[2] in _LAYER:
        return f"model.layers.{layer[1]}.{_LAYER[layer[2]]}.weight"
    if stored not in _SINGLE:
        raise CheckpointError(f"{path}: tensor {stored} has no place in a plain Llama; this reader knows no other")
    return _SINGLE[stored]


def _settings(path: Path, contents: _Contents) -> dict[str, Any]:
    """The metadata in the form of a ``config.json``."""
    values = contents.values
    scaling = values.get(f"{ARCHITECTURE}.rope.scaling.type", "none")
    if scaling != "none":
        raise CheckpointError(f"{path}: {ARCHITECTURE}.rope.scaling.type is {scaling!r}, allowed: 'none'")
    settings: dict[str, Any] = {"model_type": "llama", "hidden_act": "silu"}
    for setting, key in _SETTINGS.items():
        settings[setting] = values.get(f"{ARCHITECTURE}.{key}")
    settings["vocab_size"] = contents.shapes[EMBEDDING][0] if EMBEDDING in contents.shapes else None
    settings["tie_word_embeddings"] = HEAD not in contents.shapes
    for name in ("bos", "eos"):
        settings[f"{name}_token_id"] = values.get(f"tokenizer.ggml.{name}_token_id")
    return settings


def _half_split(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from adjacent pairs to two halves. weight: [heads · dim, n]."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape)
