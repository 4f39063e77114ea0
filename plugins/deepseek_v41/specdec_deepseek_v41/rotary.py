"""Rotary position embedding of DeepSeek-V4.1: interleaved pairs on the trailing dimensions, with two tables of angles.

    (x[2i], x[2i+1]) as a complex number, times exp(j · position · f_i)

*plain*: f_i = rope_theta^(−2i/n); layers without compressed rows, and the drafter. *compressed*: base compress_rope_theta, slow
frequencies divided by rope_factor (YaRN without amplitude factor, at every length); everything in a layer with compressed rows.
Source: Su et al., "RoFormer" (arXiv:2104.09864); Peng et al., "YaRN" (arXiv:2309.00071), section 3.2; official inference code.
"""

from __future__ import annotations

import math

import torch
from attrs import frozen
from torch import Tensor

from specdec.ops.rope import rotate_pairs

from .geometry import Geometry

__all__ = ["RotaryTable", "Rotation", "compressed_frequencies", "plain_frequencies", "rotate"]

# the pairing of this model
rotate = rotate_pairs


@frozen(kw_only=True, eq=False)
class Rotation:
    """Rotations of some rows, complex [..., rotated / 2], and their inverses."""

    forward: Tensor
    inverse: Tensor


@frozen(kw_only=True, eq=False)
class RotaryTable:
    """Rotations of every position of a context, complex [positions, rotated / 2]. Computed once at preparation."""

    turns: Tensor

    @classmethod
    def build(
        cls, geometry: Geometry, *, compressed: bool, positions: int, dtype: torch.dtype, device: torch.device
    ) -> RotaryTable:
        """Angles in the accumulate dtype of ``dtype``. Allocates; set-up only."""
        precise = torch.promote_types(dtype, torch.float32)
        frequencies = (compressed_frequencies if compressed else plain_frequencies)(geometry, precise)
        angles = torch.arange(positions).to(precise)[:, None] * frequencies
        return cls(turns=torch.polar(torch.ones_like(angles), angles).to(device))

    def at(self, positions: Tensor) -> Rotation:
        """positions: [...] int64, each in [0, table length)."""
        turns = self.turns.index_select(0, positions.reshape(-1)).view(*positions.shape, -1)
        return Rotation(forward=turns, inverse=turns.conj().resolve_conj())


def plain_frequencies(geometry: Geometry, dtype: torch.dtype) -> Tensor:
    """[rotated / 2] of layers without compressed rows."""
    return _frequencies(geometry.rope_theta, geometry.qk_rope_head_dim, dtype)


def compressed_frequencies(geometry: Geometry, dtype: torch.dtype) -> Tensor:
    """[rotated / 2] of layers with compressed rows."""
    g, size = geometry, geometry.qk_rope_head_dim
    fast = _frequencies(g.compress_rope_theta, size, dtype)

    def correction(rotations: float) -> float:
        """Dimension that turns this often within the original context."""
        turned = g.original_max_position_embeddings / (2 * math.pi * rotations)
        return size * math.log(turned) / (2 * math.log(g.compress_rope_theta))

    low = max(math.floor(correction(g.beta_fast)), 0)
    high = min(math.ceil(correction(g.beta_slow)), size - 1)
    ramp = ((torch.arange(size // 2).to(dtype) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return fast * (1 - ramp) + fast / g.rope_factor * ramp


def _frequencies(theta: float, size: int, dtype: torch.dtype) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, size, 2).to(dtype) / size)
