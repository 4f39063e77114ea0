"""Stored (quantised) values of the parameters: straight-through in training, exact in evaluation and export."""

import torch
from parameters import MTP, TEXT
from storage import nvfp4

E4M3_MAX = 448.0
E2M1_MAX = 6.0


def matrices(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Expert stack as one matrix per projection: ``[E, 2, I, H]`` for gate_up_proj, ``[E, 1, H, I]`` for down_proj."""
    parts = 2 if name.endswith("gate_up_proj") else 1
    return weight.unflatten(1, (parts, -1))


@torch.no_grad()
def nvfp4_values(name: str, weight: torch.Tensor) -> torch.Tensor:
    """What NVFP4 storage keeps of an expert stack (equal to dequantise(quantise(·)), without synchronisation)."""
    split = matrices(name, weight)
    scale_2 = split.abs().amax((-2, -1)) / (E2M1_MAX * E4M3_MAX)
    return nvfp4.quantise_activation(split, scale_2.clamp_min(1e-30).unsqueeze(-1)).reshape(weight.shape)


@torch.no_grad()
def table_codes(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 E4M3 codes of the n-gram table and their BF16 scale ``[1]``."""
    scale = (table.abs().amax() / E4M3_MAX).bfloat16().reshape(1)
    return (table / scale.float()).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


@torch.no_grad()
def table_values(table: torch.Tensor) -> torch.Tensor:
    codes, scale = table_codes(table)
    return (codes.float() * scale.float()).bfloat16().float()


def is_expert(name: str) -> bool:
    return ".mlp.experts." in name


def straight_through(parameters, part: str) -> dict[str, torch.Tensor]:
    """Stored values with identity gradients of one part's experts (and of the target's table).

    ``part``: ``target`` or ``mtp``.  Expert stacks of equal shape are quantised in one batch.
    """
    prefix = TEXT if part == "target" else MTP
    stored = {}
    for ending in ("gate_up_proj", "down_proj"):
        names = [n for n in parameters if n.startswith(prefix) and is_expert(n) and n.endswith(ending)]
        whole = torch.cat([parameters[n].detach() for n in names])
        values = nvfp4_values(ending, whole).split(parameters[names[0]].shape[0])
        for name, value in zip(names, values):
            stored[name] = parameters[name] + (value - parameters[name].detach())
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
