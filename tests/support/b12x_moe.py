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
