"""Random GLM-5.3 models of the tiny geometry: an oracle from transformers, the same weights as a checkpoint, prepared objects.

No weight keeps a value that would hide a term: norms are away from one, and no bias, scale or position bias is zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import torch
from prepared import Prepared

from specdec.checkpoint.reader import Checkpoint
from specdec.checkpoint.writer import write_checkpoint
from specdec.interfaces import Capacities
from specdec.round.arena import Arena
from specdec_glm53.drafter import MtpDrafter
from specdec_glm53.geometry import TINY, Geometry
from specdec_glm53.inventory import mtp_inventory, target_inventory
from specdec_glm53.target import GlmTarget

PREFIX = "model.language_model."


def random_weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A float32 tensor with the spread its name asks for."""
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    if name.endswith("dt_bias"):
        drawn = drawn - 2
    elif name.endswith(("A_log", "ape")):
        drawn = 0.3 * drawn
    elif name.endswith("_base"):
        drawn = 0.5 * drawn
    elif name.endswith("_scale"):
        drawn = 0.5 + 0.5 * torch.rand(shape, generator=generator, dtype=torch.float64)
    elif name.endswith("bias"):
        drawn = 0.1 * drawn
    elif len(shape) == 1:
        drawn = 1 + 0.1 * drawn
    elif "embed_tokens" not in name:
        drawn = drawn / math.prod(shape[1:]) ** 0.5
    return drawn.to(torch.float32)


def _drawn(specs: Iterable, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {spec.name: random_weight(spec.name, spec.shape, generator) for spec in specs}


def target_tensors(seed: int, geometry: Geometry = TINY) -> dict[str, torch.Tensor]:
    """Float32 weights of the target under their checkpoint names, experts unquantised."""
    return _drawn(target_inventory(geometry, experts="bfloat16").expand(), seed)


def mtp_tensors(seed: int, geometry: Geometry = TINY) -> dict[str, torch.Tensor]:
    """Float32 weights of the drafter under their checkpoint names, experts unquantised."""
    return _drawn(mtp_inventory(geometry, experts="bfloat16").expand(), seed + 1000)


def load_state(module: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Gives a module of transformers' class the tensors whose checkpoint names, without prefix, these are. Strict."""
    state = {}
    for name, value in module.state_dict().items():
        stored = name.replace("forget_gate.", "").replace("attn_hc.", "hc_attn_").replace("ffn_hc.", "hc_ffn_")
        base, _, last = stored.rpartition(".")
        if stored in tensors:
            state[name] = tensors.pop(stored)
        elif stored.endswith("conv1d.weight"):
            base = base.removesuffix("conv1d")
            state[name] = torch.cat([tensors.pop(f"{base}{part}_conv1d.weight") for part in "qkv"])
        elif last in ("gate_up_proj", "down_proj"):
            parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
            experts = [
                torch.cat([tensors.pop(f"{base}.{expert}.{part}.weight") for part in parts])
                for expert in range(len(value))
            ]
            state[name] = torch.stack(experts)
        else:
            raise AssertionError(f"no weight for {name}")
    assert not tensors, f"weights without a home: {sorted(tensors)}"
    module.load_state_dict(state)


def hf_text_model(seed: int, geometry: Geometry = TINY) -> tuple[torch.nn.Module, torch.Tensor]:
    """The transformers text class with the weights of ``target_tensors``, and the vocabulary head [V, H]; float32."""
    from glm_modules import hf_config
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextModel

    model = Glm5NextTextModel(hf_config(geometry))
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in target_tensors(seed, geometry).items()}
    head = tensors.pop("lm_head.weight")
    load_state(model, tensors)
    return model.eval(), head


def write_random_checkpoint(directory: Path, seed: int, geometry: Geometry = TINY) -> Path:
    """Float32 checkpoint of ``target_tensors(seed)`` and ``mtp_tensors(seed)``."""
    tensors = {**target_tensors(seed, geometry), **mtp_tensors(seed, geometry)}
    return write_checkpoint(directory, tensors, {"model_type": "glm5_next", "text_config": geometry.to_config()})


def prepare(
    directory: Path,
    *,
    dtype: str = "float32",
    slots: int = 4,
    context: int = 192,
    ring_extent: int | None = None,
    device: str = "cpu",
) -> Prepared:
    """Loads target and drafter for ``slots`` requests with private pages for a full context each."""
    reach = -(-(context + 8) // 64)
    capacities = Capacities(
        slots=slots, context=context, pages=slots * reach, max_draft_tokens=7, dtype=dtype, prefill_rows=context
    )
    where = torch.device(device)
    with Checkpoint.open(directory) as checkpoint:
        target = GlmTarget(checkpoint, Geometry.from_config(checkpoint.config), capacities, where, ring_extent)
        drafter = MtpDrafter(checkpoint, target, capacities, ring_extent)
    arena = Arena(
        slots=slots, max_draft_tokens=7, stop_ids=4, device=where, extended=True, vocab_size=target.vocab_size
    )
    return Prepared(target=target, drafter=drafter, arena=arena, capacities=capacities)
