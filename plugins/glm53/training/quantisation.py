"""Stored (quantised) values of the parameters: straight-through in training, exact in evaluation and export.

Gate and up projection of a target expert share one global scale, as readers of the coded block scales ask.
"""

import torch

from plugins.glm53.training.parameters import FLOAT32
from training.quantisation import is_expert, nvfp4_values, straight_through_experts


def of_drafter(name: str, parameters) -> bool:
    """Whether a parameter belongs to the MTP layer: the only one with ``enorm``."""
    layer = ".".join(name.split(".")[:4])
    return f"{layer}.enorm.weight" in parameters


def joined(name: str, parameters) -> bool:
    """Whether the matrices of a stack share their global scales (the target's do)."""
    return not of_drafter(name, parameters)


def straight_through(parameters, part: str) -> dict[str, torch.Tensor]:
    """Stored values with identity gradients of one part's experts (``target`` or ``mtp``)."""
    drafter = part == "mtp"
    names = [n for n in parameters if is_expert(n) and of_drafter(n, parameters) == drafter]
    return straight_through_experts(parameters, names, joined=not drafter)


def unquantised(parameters) -> dict[str, torch.Tensor]:
    """The same entries unchanged, as the same kind of tensor (compiled blocks tell a parameter from its view)."""
    return {n: p.view_as(p) for n, p in parameters.items() if is_expert(n)}


@torch.no_grad()
def checkpoint_values(parameters, *, experts: bool = True) -> dict[str, torch.Tensor]:
    """Every parameter as the checkpoint holds it, float32: NVFP4 experts, some tensors float32, the rest BF16."""
    found = {}
    for name, value in parameters.items():
        if experts and is_expert(name):
            found[name] = nvfp4_values(name, value.detach(), joined(name, parameters))
        elif name.endswith(FLOAT32):
            found[name] = value.detach().float()
        else:
            found[name] = value.detach().bfloat16().float()
    return found
