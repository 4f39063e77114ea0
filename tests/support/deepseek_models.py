"""DeepSeek-V4.1 checkpoints of the tiny geometry: the golden weights, random ones, and random ones as the release stores them.

The golden weights are a function of each tensor's name alone, so two implementations compare without sharing a file. The values
in tests/oracle were computed from them in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

from specdec.checkpoint.microscaling import quantise_fp4, quantise_fp8
from specdec.checkpoint.writer import write_checkpoint
from specdec.declaration import TensorSpec
from specdec_deepseek_v41.geometry import TINY, Geometry
from specdec_deepseek_v41.inventory import COMPRESSED_IDS, PLAIN, PUBLISHED, dspark_inventory, target_inventory

#: Inputs of the golden run.
GOLDEN_PROMPT = tuple((37 * index + 11) % 512 for index in range(41))


def plain_specs(geometry: Geometry = TINY) -> Iterator[TensorSpec]:
    """Every tensor of target and drafter, unquantised, without the compressed ids."""
    yield from target_inventory(geometry, PLAIN).expand()
    yield from dspark_inventory(geometry, PLAIN).expand()


def tiny_compressed_ids(geometry: Geometry = TINY) -> torch.Tensor:
    """[vocab_size] int32: the map of the tiny model, which has no tokenizer."""
    ids = torch.arange(geometry.vocab_size, dtype=torch.int64)
    return ((7 * ids + 3) % geometry.engram_compressed_vocab_size).int()


def golden_spread(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Centre and half width of the uniform distribution that the golden values of a tensor have."""
    if name.endswith(("norm.weight", "engram.q_weight", "engram.k_weight")):
        return 1.0, 0.2
    if "hc_" in name and name.endswith("_scale"):
        return 1.0, 0.2
    if ("hc_" in name and name.endswith("_base")) or name.endswith("attn_sink"):
        return 0.0, 0.5
    if name.endswith("ffn.gate.bias"):
        return 0.0, 0.1
    if name == "embed.weight" or name.endswith(("engram.embed.weight", "markov_head.embed.weight")):
        return 0.0, math.sqrt(3)
    return 0.0, math.sqrt(3 / shape[-1])


def golden_tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """float64 ``shape``: SplitMix64 of the element's place, seeded by FNV-1a of the name."""
    seed = 0xCBF29CE484222325
    for byte in name.encode():
        seed = (seed ^ byte) * 0x100000001B3 % 2**64
    place = np.arange(1, math.prod(shape) + 1, dtype=np.uint64)
    value = np.uint64(seed) + place * np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
    uniform = (value >> np.uint64(11)).astype(np.float64) * 2.0**-53
    base, half_width = golden_spread(name, shape)
    return torch.from_numpy(base + half_width * (2 * uniform - 1)).reshape(shape)


def golden_tensors(geometry: Geometry = TINY) -> dict[str, torch.Tensor]:
    """float64 golden weights under their checkpoint names, and the compressed ids (int32)."""
    tensors = {spec.name: golden_tensor(spec.name, spec.shape) for spec in plain_specs(geometry)}
    return {**tensors, COMPRESSED_IDS: tiny_compressed_ids(geometry)}


def random_weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A float32 tensor with the spread its name asks for; none has a value that would hide a term."""
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    centre, half_width = golden_spread(name, shape)
    return (centre + drawn * half_width / math.sqrt(3)).float()


def random_tensors(seed: int, geometry: Geometry = TINY) -> dict[str, torch.Tensor]:
    """float32 random weights under their checkpoint names, and the compressed ids (int32)."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {spec.name: random_weight(spec.name, spec.shape, generator) for spec in plain_specs(geometry)}
    return {**tensors, COMPRESSED_IDS: tiny_compressed_ids(geometry)}


def as_published(tensors: dict[str, torch.Tensor], geometry: Geometry = TINY) -> dict[str, torch.Tensor]:
    """The same weights as the release stores them: FP8 and FP4 with scales, BF16, FP32. Router biases of images are absent."""
    stored = {COMPRESSED_IDS: tensors[COMPRESSED_IDS]}
    shapes = {
        spec.name: spec for part in (target_inventory, dspark_inventory) for spec in part(geometry, PUBLISHED).expand()
    }
    for name, spec in shapes.items():
        if name.endswith((".scale", ".bias_vl")):
            continue
        if spec.dtype in ("int8", "float8_e4m3fn"):
            rows = 1 if "engram.embed" in name else 32
            quantised = quantise_fp4(tensors[name]) if spec.dtype == "int8" else quantise_fp8(tensors[name], rows=rows)
            stored[name], stored[name.removesuffix("weight") + "scale"] = quantised
        else:
            stored[name] = tensors[name].to(getattr(torch, spec.dtype))
    return stored


def config(geometry: Geometry = TINY) -> dict:
    """The ``config.json`` of a checkpoint."""
    return {"model_type": "deepseek_v41", "text_config": geometry.to_config()}


def write_golden_checkpoint(directory: Path, dtype: torch.dtype = torch.float64) -> Path:
    """The golden weights of the tiny geometry, rounded to ``dtype``."""
    return write_checkpoint(directory, _rounded(golden_tensors(), dtype), config())


def write_random_checkpoint(
    directory: Path, seed: int, geometry: Geometry = TINY, dtype: torch.dtype = torch.float32
) -> Path:
    """The weights of ``random_tensors(seed)``, rounded to ``dtype``."""
    return write_checkpoint(directory, _rounded(random_tensors(seed, geometry), dtype), config(geometry))


def write_published_checkpoint(directory: Path, seed: int, geometry: Geometry = TINY) -> Path:
    """The weights of ``random_tensors(seed)`` in the storage of the release."""
    return write_checkpoint(directory, as_published(random_tensors(seed, geometry), geometry), config(geometry))


def _rounded(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}


def group_sizes(specs: Iterable[TensorSpec]) -> tuple[int, int]:
    """Number of tensors and of their elements."""
    counted = [spec.numel for spec in specs]
    return len(counted), sum(counted)
