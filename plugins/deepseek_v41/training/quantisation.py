"""Stored values of the parameters: straight-through in training, exact in evaluation and export."""

from collections.abc import Callable
from functools import partial

import torch

from plugins.deepseek_v41.training.parameters import COMPRESSED_IDS, FLOAT32, in_drafter
from plugins.deepseek_v41.training.rounding import fp4_weight, fp8_weight

_FP8 = (
    *(f"attn.{name}.weight" for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "indexer.wq_b")),
    *(f"shared_experts.{name}.weight" for name in ("w1", "w2", "w3")),
    "engram.wkv.weight",
    "main_proj.weight",
)


def stored_form(name: str) -> str:
    """``fp4`` (stacks of experts), ``fp8``, ``fp8_rows`` (a scale for each row), ``float32``, ``int32`` or ``bfloat16``."""
    if ".experts." in name:
        return "fp4"
    if name.endswith("engram.embed.weight"):
        return "fp8_rows"
    if name.endswith(_FP8):
        return "fp8"
    if name == COMPRESSED_IDS:
        return "int32"
    return "float32" if name.endswith(FLOAT32) else "bfloat16"


_ROUNDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fp4": fp4_weight,
    "fp8": fp8_weight,
    "fp8_rows": partial(fp8_weight, tile_rows=1),
}


def is_quantised(name: str) -> bool:
    return stored_form(name) in _ROUNDED


class _Stored(torch.autograd.Function):
    """Rounds equally shaped weights in one batch; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx, form: str, *weights: torch.Tensor):
        # Fresh tensors, not views of the batch: compiled blocks tell the two apart.
        return tuple(torch._foreach_add(_ROUNDED[form](torch.stack(weights)).unbind(0), 0.0))

    @staticmethod
    def backward(ctx, *gradients):
        return None, *gradients


def straight_through(parameters, part: str) -> dict[str, torch.Tensor]:
    """Stored values with identity gradients of one part's quantised weights: ``target``, ``mtp``, or ``indexer`` (of the
    target)."""
    groups: dict[tuple, list[str]] = {}
    for name, value in parameters.items():
        wanted = ".indexer." in name if part == "indexer" else in_drafter(name, parameters) == (part == "mtp")
        if is_quantised(name) and wanted:
            groups.setdefault((stored_form(name), tuple(value.shape)), []).append(name)
    stored = {}
    for (form, _), names in groups.items():
        stored |= zip(names, _Stored.apply(form, *(parameters[n] for n in names)), strict=True)
    return stored


def unquantised(parameters) -> dict[str, torch.Tensor]:
    """The same entries unchanged, as the same kind of tensor (compiled blocks tell a parameter from its view)."""
    return {n: p.view_as(p) for n, p in parameters.items() if is_quantised(n)}


@torch.no_grad()
def checkpoint_values(parameters, *, experts: bool = True) -> dict[str, torch.Tensor]:
    """Every parameter as the checkpoint holds it, float32; without ``experts`` the quantised ones as BF16."""
    found = {}
    for name, value in parameters.items():
        form, value = stored_form(name), value.detach().float()
        if form in _ROUNDED and experts:
            found[name] = _ROUNDED[form](value)
        elif form in ("float32", "int32"):
            found[name] = value
        else:
            found[name] = value.bfloat16().float()
    return found
