"""Single modules of transformers' GLM-5.3 class with visible weights, and those weights under their checkpoint names."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig

from specdec.checkpoint.reader import Checkpoint
from specdec.checkpoint.weights import Weights
from specdec.checkpoint.writer import write_checkpoint
from specdec_glm53.geometry import TINY, Geometry


def hf_config(geometry: Geometry = TINY) -> Glm5NextTextConfig:
    """Configuration of transformers' text class for a geometry; eager attention, experts one by one."""
    config = Glm5NextTextConfig(**geometry.to_config())
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return config


def randomise(module: nn.Module, seed: int) -> nn.Module:
    """Weights that leave no term without effect, in place: the defaults (unit scales, zero biases) hide faults."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in [*module.named_parameters(), *module.named_buffers()]:
        drawn = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        last = name.rpartition(".")[2]
        if last == "dt_bias":
            drawn = drawn - 2
        elif last == "A_log":
            drawn = 0.3 * drawn
        elif last == "base":
            drawn = 0.5 * drawn
        elif last == "scale":
            drawn = 0.75 + 0.1 * drawn
        elif last == "e_score_correction_bias":
            drawn = 0.1 * drawn
        elif value.ndim == 1:
            drawn = 1 + 0.1 * drawn
        else:
            drawn = drawn / value.shape[-1] ** 0.5
        value.data.copy_(drawn)
    return module.eval()


def stored(module: nn.Module) -> dict[str, Tensor]:
    """State of a module under the names that a checkpoint has below the module's own, float32."""
    tensors = {}
    for name, value in module.state_dict().items():
        name = name.removeprefix("forget_gate.")
        if name == "conv1d.weight":
            for part, rows in zip("qkv", value.chunk(3), strict=True):
                tensors[f"{part}_conv1d.weight"] = rows
        elif name == "experts.gate_up_proj":
            for expert, rows in enumerate(value):
                gate, up = rows.chunk(2)
                tensors[f"experts.{expert}.gate_proj.weight"], tensors[f"experts.{expert}.up_proj.weight"] = gate, up
        elif name == "experts.down_proj":
            tensors |= {f"experts.{expert}.down_proj.weight": rows for expert, rows in enumerate(value)}
        else:
            tensors[name] = value
    return {name: value.float().contiguous().clone() for name, value in tensors.items()}


def load_stored(directory: Path, tensors: dict[str, Tensor], dtype: torch.dtype, load, geometry: Geometry = TINY):
    """Writes the tensors as a checkpoint and returns ``load(weights)`` with a reader of the given activation dtype."""
    write_checkpoint(directory, tensors, {"model_type": "glm5_next", "text_config": geometry.to_config()})
    with Checkpoint.open(directory) as checkpoint:
        return load(Weights(checkpoint, prefix="", dtype=dtype, device=torch.device("cpu")))
