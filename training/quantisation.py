"""Stored (NVFP4) values of expert stacks: straight-through in training, exact in evaluation and export.

A stack is ``...experts.gate_up_proj [E, 2I, H]`` (gate rows, then up rows) or ``...experts.down_proj [E, H, I]``.
"""

import torch

from training.storage import nvfp4

E4M3_MAX = 448.0
E2M1_MAX = 6.0


def is_expert(name: str) -> bool:
    return ".mlp.experts." in name


def matrices(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Expert stack as one matrix per projection: ``[E, 2, I, H]`` for gate_up_proj, ``[E, 1, H, I]`` for down_proj."""
    parts = 2 if name.endswith("gate_up_proj") else 1
    return weight.unflatten(1, (parts, -1))


@torch.no_grad()
def global_scales(split: torch.Tensor, joined: bool) -> torch.Tensor:
    """``weight_scale_2 [E, parts]`` of stacked matrices; ``joined``: one value for gate and up of an expert."""
    largest = split.abs().amax((-2, -1))
    if joined:
        largest = largest.amax(-1, keepdim=True).expand_as(largest)
    return (largest / (E2M1_MAX * E4M3_MAX)).clamp_min(1e-30)


@torch.no_grad()
def nvfp4_values(name: str, weight: torch.Tensor, joined: bool = False) -> torch.Tensor:
    """What NVFP4 storage keeps of an expert stack (equal to dequantise(quantise(·)), without synchronisation)."""
    split = matrices(name, weight)
    return nvfp4.quantise_activation(split, global_scales(split, joined).unsqueeze(-1)).reshape(weight.shape)


@torch.no_grad()
def expert_tensors(name: str, weight: torch.Tensor, joined: bool = False):
    """Yields (expert, projection, packed, block scales, global scale) of a stack, as a checkpoint stores them."""
    names = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
    split = matrices(name, weight.detach().float().cpu())
    packed, block, outer = nvfp4.quantise(split, global_scales(split, joined).contiguous())
    for e in range(weight.shape[0]):
        for j, projection in enumerate(names):
            yield e, projection, packed[e, j].clone(), block[e, j].clone(), outer[e, j].clone()


def straight_through_experts(parameters, names, joined: bool = False) -> dict[str, torch.Tensor]:
    """Stored values with identity gradients of the stacks ``names``; equal endings are quantised in one batch."""
    stored = {}
    for ending in ("gate_up_proj", "down_proj"):
        chosen = [n for n in names if n.endswith(ending)]
        whole = torch.cat([parameters[n].detach() for n in chosen])
        values = nvfp4_values(ending, whole, joined).split(parameters[chosen[0]].shape[0])
        for name, value in zip(chosen, values):
            stored[name] = parameters[name] + (value - parameters[name].detach())
    return stored
