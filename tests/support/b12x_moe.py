"""b12x's pure-torch mixture-of-experts references, without the GPU compilers their module imports, and data in its layout."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor


def _source(root: Path, file: str) -> ast.Module:
    return ast.parse((root / file).read_text(encoding="utf-8"))


def _execute(tree: ast.Module, space: dict) -> None:
    exec(compile(ast.fix_missing_locations(tree), "<b12x>", "exec"), space)


def load_references() -> dict:
    """Functions of ``b12x.moe._shared.kernels.reference`` by name; skips the test if b12x is not installed.

    Imports of b12x modules are dropped and the few pure-torch names behind them supplied.
    """
    spec = importlib.util.find_spec("b12x")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("b12x is not installed")
    root = Path(spec.submodule_search_locations[0])
    # dataclasses look their module up by this name
    space: dict = {"__name__": __name__, "torch": torch}
    _execute(_source(root, "moe/_shared/kernels/activations.py"), space)
    intrinsics = _source(root, "_lib/intrinsics.py")
    wanted = ("_fp4_quantize_values", "fp4_quantize_values_torch")
    intrinsics.body = [node for node in intrinsics.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    assert len(intrinsics.body) == len(wanted)
    _execute(intrinsics, space)
    reference = _source(root, "moe/_shared/kernels/reference.py")
    reference.body = [
        node
        for node in reference.body
        if not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("b12x"))
    ]
    _execute(reference, space)
    return space


def swizzle(scale: Tensor) -> Tensor:
    """Row-major block scales [..., R, C] in the tiled order the references read: tiles of 128 rows by 4 scales, padded."""
    rows, columns = scale.shape[-2:]
    tall, wide = -(-rows // 128) * 128, -(-columns // 4) * 4
    padded = torch.zeros(*scale.shape[:-2], tall, wide, dtype=torch.uint8)
    padded[..., :rows, :columns] = scale.view(torch.uint8)
    tiled = padded.view(*scale.shape[:-2], tall // 128, 4, 32, wide // 4, 4).movedim(-2, -4)
    tiled = tiled.movedim(-2, -3)
    return tiled.reshape(*scale.shape[:-2], tall, wide).view(torch.float8_e4m3fn)


def packed_experts(seed: int, *, count: int, hidden: int, inner: int) -> dict[str, dict[str, Tensor]]:
    """Random codes and block scales by projection; second scales are powers of two, so that dequantised values are exact in
    float32. gate and up share theirs, as the references know one factor for both."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    experts = {}
    for name, (rows, columns) in shapes.items():
        exponents = torch.randint(-7, -4, (count,), generator=generator)
        experts[name] = {
            "weight": torch.randint(0, 256, (count, rows, columns // 2), generator=generator, dtype=torch.uint8),
            "weight_scale": (torch.rand(count, rows, columns // 16, generator=generator) * 3).to(torch.float8_e4m3fn),
            "weight_scale_2": torch.exp2(exponents.float()),
        }
    experts["up_proj"]["weight_scale_2"] = experts["gate_proj"]["weight_scale_2"]
    return experts


def input_scales(seed: int, *, count: int) -> dict[str, Tensor]:
    """Activation scales [E] by projection; those of gate and up are the same."""
    generator = torch.Generator().manual_seed(seed)
    scale = {
        name: 0.002 * (1 + torch.rand(count, generator=generator)) for name in ("gate_proj", "up_proj", "down_proj")
    }
    return {**scale, "up_proj": scale["gate_proj"]}


def block_tensors(experts, scales=None, *, prefix: str = "experts.") -> dict[str, Tensor]:
    """Checkpoint tensors of the routed experts, one by one, as published."""
    tensors = {}
    for name, parts in experts.items():
        parts = dict(parts, **({} if scales is None else {"input_scale": scales[name]}))
        for part, stacked_part in parts.items():
            for expert, value in enumerate(stacked_part):
                tensors[f"{prefix}{expert}.{name}.{part}"] = value
    return tensors


def stacked(experts) -> dict[str, Tensor]:
    """Weights in the references' layout: up rows before gate rows, tiled block scales."""
    gate, up, down = (experts[name] for name in ("gate_proj", "up_proj", "down_proj"))
    return {
        "w1_fp4": torch.cat([up["weight"], gate["weight"]], dim=1),
        "w1_blockscale": swizzle(torch.cat([up["weight_scale"], gate["weight_scale"]], dim=1)),
        "w1_alphas": up["weight_scale_2"],
        "w2_fp4": down["weight"],
        "w2_blockscale": swizzle(down["weight_scale"]),
        "w2_alphas": down["weight_scale_2"],
    }


def quantised_arguments(experts, scales) -> dict[str, Tensor]:
    """``stacked`` and the activation scales of a W4A4 reference, folded into its factors as it expects."""
    layout = stacked(experts)
    return {
        **layout,
        "w1_alphas": layout["w1_alphas"] * scales["gate_proj"],
        "w2_alphas": layout["w2_alphas"] * scales["down_proj"],
        "a1_gscale": scales["gate_proj"].reciprocal(),
        "a2_gscale": scales["down_proj"].reciprocal(),
    }
