"""Stored (quantised) values of the parameters: straight-through in training, exact in evaluation and export."""

import torch

from plugins.qwen38.training.parameters import MTP, TEXT
from training.quantisation import E4M3_MAX, is_expert, nvfp4_values, straight_through_experts


@torch.no_grad()
def table_codes(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 E4M3 codes of the n-gram table and their BF16 scale ``[1]``."""
    scale = (table.abs().amax() / E4M3_MAX).bfloat16().reshape(1)
    return (table / scale.float()).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


@torch.no_grad()
def table_values(table: torch.Tensor) -> torch.Tensor:
    codes, scale = table_codes(table)
    return (codes.float() * scale.float()).bfloat16().float()


def straight_through(parameters, part: str) -> dict[str, torch.Tensor]:
    """Stored values with identity gradients of one part's experts (and of the target's table).

    ``part``: ``target`` or ``mtp``.  Expert stacks of equal shape are quantised in one batch.
    """
    prefix = TEXT if part == "target" else MTP
    stored = straight_through_experts(parameters, [n for n in parameters if n.startswith(prefix) and is_expert(n)])
    if part == "target":
        for name in parameters:
            if name.endswith("ngram_embedding.weight"):
                stored[name] = parameters[name] + (table_values(parameters[name]) - parameters[name].detach())
    return stored


def unquantised(parameters) -> dict[str, torch.Tensor]:
    """The same entries unchanged, as the same kind of tensor (compiled blocks tell a parameter from its view)."""
    return {n: p.view_as(p) for n, p in parameters.items() if is_expert(n) or n.endswith("ngram_embedding.weight")}


@torch.no_grad()
def checkpoint_values(parameters, *, experts: bool = True) -> dict[str, torch.Tensor]:
    """Every parameter as the checkpoint holds it, float32: BF16 rounding, NVFP4 experts, FP8 table."""
    found = {}
    for name, value in parameters.items():
        if experts and is_expert(name):
            found[name] = nvfp4_values(name, value.detach())
        elif experts and name.endswith("ngram_embedding.weight"):
            found[name] = table_values(value.detach())
        else:
            found[name] = value.detach().bfloat16().float()
    return found
