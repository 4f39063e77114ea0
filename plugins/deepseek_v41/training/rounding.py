"""Rounding to the stored formats: caches and inputs with the identity as gradient, weights as codes and as values.

Scales are powers of two (an E4M3 number for :func:`fp4_16`); ties round to even.
"""

from collections.abc import Callable

import torch
from training.storage import block_quantisation as blocks

_BLOCK = 32
_SMALLEST_WEIGHT = 2.0**-60


def wide(x: torch.Tensor) -> torch.Tensor:
    """float32, or float64 where the input has it."""
    return x if x.dtype == torch.float64 else x.float()


def _through(x: torch.Tensor, rounded: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """``rounded(x)`` with the gradient of ``x``; same dtype."""
    if not torch.is_grad_enabled() or not x.requires_grad:
        return rounded(x)
    value = wide(x)
    return (value + (rounded(value.detach()) - value).detach()).to(x.dtype)


def fp8_32(x: torch.Tensor) -> torch.Tensor:
    """E4M3 with a scale per 32 values: inputs of quantised weights, window rows."""
    return _through(x, blocks.fp8_ue8m0)


def fp4_32(x: torch.Tensor) -> torch.Tensor:
    """E2M1 with a scale per 32 values: index keys and queries."""
    return _through(x, blocks.fp4_ue8m0)


def fp4_16(x: torch.Tensor) -> torch.Tensor:
    """E2M1 with an E4M3 scale per 16 values: compressed rows."""
    return _through(x, blocks.fp4_e4m3)


def _scaled(weight: torch.Tensor, limit: float, tile_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``weight / scale``, the scales of tiles of ``tile_rows`` × 32 values, and the scales repeated to the weight's shape."""
    tiles = weight.unflatten(-1, (-1, _BLOCK)).unflatten(-3, (-1, tile_rows))
    scale = blocks.power_of_two_scale(tiles.abs().amax((-3, -1)).clamp_min(_SMALLEST_WEIGHT), limit)
    spread = scale.repeat_interleave(tile_rows, -2).repeat_interleave(_BLOCK, -1)
    return weight / spread, scale, spread


def fp8_codes(weight: torch.Tensor, tile_rows: int = _BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight [..., R, C]`` float32 → E4M3 codes of that shape, and scales ``[..., R / tile_rows, C / 32]`` float32."""
    scaled, scale, _ = _scaled(weight, blocks.E4M3_MAX, tile_rows)
    return scaled.to(torch.float8_e4m3fn), scale


def fp8_weight(weight: torch.Tensor, tile_rows: int = _BLOCK) -> torch.Tensor:
    """What FP8 storage keeps of ``weight [..., R, C]`` float32."""
    scaled, _, spread = _scaled(weight, blocks.E4M3_MAX, tile_rows)
    return blocks.round_e4m3(scaled) * spread


def fp4_codes(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight [..., R, C]`` float32 → packed uint8 ``[..., R, C/2]`` and scales ``[..., R, C/32]`` float32.

    Two codes a byte, the even column in the low nibble; a code has the sign in bit 3.
    """
    scaled, scale, _ = _scaled(weight, blocks.E2M1_MAX, 1)
    values = blocks.round_e2m1(scaled)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=weight.device)
    codes = (torch.searchsorted(grid, values.abs()) + 8 * (values < 0)).to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scale


def fp4_weight(weight: torch.Tensor) -> torch.Tensor:
    """What FP4 storage keeps of ``weight [..., R, C]`` float32."""
    scaled, _, spread = _scaled(weight, blocks.E2M1_MAX, 1)
    return blocks.round_e2m1(scaled) * spread
