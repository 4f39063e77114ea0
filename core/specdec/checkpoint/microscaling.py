"""Weights of eight or four bits whose blocks share a power of two as scale (UE8M0: a byte b stands for 2^(b - 127)).

A stored matrix ``W [..., out, in]`` consists of values and scales, float8_e8m0fnu or the same bytes as uint8:

* E4M3 values, float8_e4m3fn ``[..., out, in]``, with one scale for 32 columns of each row ``[..., out, in/32]``, or for 32
  columns of 32 rows ``[out/32, in/32]``, the last block of an axis being what is left;
* E2M1 values, two a byte as int8 or uint8 ``[..., out, in/2]``, the even column in the low nibble, with one scale for 32
  columns of each row ``[..., out, in/32]``.

A value times its scale is exact in float32 and in bfloat16.
"""

import torch

from specdec.checkpoint.nvfp4 import pack_e2m1, unpack_e2m1
from specdec.checkpoint.storages import BLOCK_MX as BLOCK
from specdec.ops.block_quantisation import E2M1_MAX, E4M3_MAX, power_of_two_scale, round_e2m1

__all__ = ["dequantise_fp4", "dequantise_fp8", "quantise_fp4", "quantise_fp8"]

_SMALLEST = torch.finfo(torch.float32).tiny


def _powers(scale: torch.Tensor) -> torch.Tensor:
    return scale.view(torch.float8_e8m0fnu).float()


def dequantise_fp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the stored matrices as float32 ``[..., out, in]``. Allocates its result, does not change its inputs.

    Raises:
        ValueError: if ``scale`` has neither of the two shapes that belong to ``weight``.
    """
    blocks = -(-weight.shape[-1] // BLOCK)
    if scale.shape == (*weight.shape[:-1], blocks):
        rows = _powers(scale)
    elif weight.ndim == 2 and scale.shape == (-(-weight.shape[0] // BLOCK), blocks):
        rows = _powers(scale).repeat_interleave(BLOCK, dim=0)[: weight.shape[0]]
    else:
        raise ValueError(f"dequantise_fp8: weight {list(weight.shape)} and scale {list(scale.shape)} do not fit")
    return weight.float() * rows.repeat_interleave(BLOCK, dim=-1)[..., : weight.shape[-1]]


def dequantise_fp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the stored matrices as float32 ``[..., out, in]``. A tensor program: no synchronisation, no data-dependent shape,
    allocates its result, does not change its inputs.

    Raises:
        ValueError: if ``scale`` is not one for each 32 values of a row.
    """
    if scale.shape != (*packed.shape[:-1], packed.shape[-1] * 2 // BLOCK) or packed.shape[-1] * 2 % BLOCK:
        raise ValueError(f"dequantise_fp4: packed {list(packed.shape)} and scale {list(scale.shape)} do not fit")
    values = unpack_e2m1(packed.view(torch.uint8)).unflatten(-1, (-1, BLOCK))
    return (values * _powers(scale).unsqueeze(-1)).flatten(-2)


def _block_scales(weight: torch.Tensor, rows: int, limit: float) -> torch.Tensor:
    """float32 ``[..., out/rows, in/32]``: the smallest powers of two under which every value fits; 1 for a block of zeros."""
    out, columns = weight.shape[-2:]
    padding = (0, -columns % BLOCK, 0, -out % rows)
    blocks = torch.nn.functional.pad(weight.abs(), padding).unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, rows))
    largest = blocks.amax(dim=(-3, -1))
    return torch.where(largest > 0, power_of_two_scale(largest.clamp(min=limit * _SMALLEST), limit), 1.0)


def _checked(weight: torch.Tensor, function: str) -> torch.Tensor:
    if weight.ndim < 2 or not bool(torch.isfinite(weight).all()):
        raise ValueError(f"{function}: weight {list(weight.shape)} needs [..., out, in] of finite values")
    return weight.float()


def quantise_fp8(weight: torch.Tensor, *, rows: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``weight [..., out, in]`` to E4M3; returns values and scales as :func:`dequantise_fp8` takes them.

    ``rows``: rows that share a scale, 32 for one matrix or 1. Runs when a checkpoint is made: it synchronises, allocates its
    results and does not change its input. Quantising the dequantised result again reproduces it.

    Raises:
        ValueError: if the weight holds NaN or infinity, or has not two axes (at least two for ``rows`` 1).
    """
    weight = _checked(weight, "quantise_fp8")
    if rows != 1 and weight.ndim != 2:
        raise ValueError(f"quantise_fp8: weight {list(weight.shape)}, blocks of {rows} rows need one matrix")
    scale = _block_scales(weight, rows, E4M3_MAX)
    spread = scale.repeat_interleave(rows, dim=-2)[..., : weight.shape[-2], :]
    spread = spread.repeat_interleave(BLOCK, dim=-1)[..., : weight.shape[-1]]
    return (weight / spread).to(torch.float8_e4m3fn), scale.to(torch.float8_e8m0fnu)


def quantise_fp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``weight [..., out, in]`` to E2M1; returns int8 codes and scales as :func:`dequantise_fp4` takes them.

    As :func:`quantise_fp8`. Zeros are stored with code 0, never as negative zero.

    Raises:
        ValueError: if the weight holds NaN or infinity, or its last axis is not a multiple of 32.
    """
    weight = _checked(weight, "quantise_fp4")
    if weight.shape[-1] % BLOCK:
        raise ValueError(f"quantise_fp4: last axis {weight.shape[-1]} is not a multiple of {BLOCK}")
    scale = _block_scales(weight, 1, E2M1_MAX)
    values = round_e2m1(weight / scale.repeat_interleave(BLOCK, dim=-1))
    return pack_e2m1(values).view(torch.int8), scale.to(torch.float8_e8m0fnu)
