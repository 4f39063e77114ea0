"""Rotary position embedding in two pairings.

``apply_rope``: half-split (dimension j with j + rotated/2), on the first rotated dimensions. ``rotate_pairs``: adjacent
dimensions as complex numbers, on the last ones.

Source of the formula: Su et al., "RoFormer" (arXiv:2104.09864). Text positions only: the three axes of a multi-axis rope
carry the same position, so the interleaving of axes has no effect.
"""

from __future__ import annotations

import torch
from attrs import field, frozen
from torch import Tensor

from specdec.ops.select import uses_cuda


@frozen(kw_only=True, eq=False)
class RopeTable:
    """Cosines and sines of every position of a context, computed once at preparation.

    cos, sin: [positions, rotated] in the activation dtype; both halves hold the same angles and the first half of ``sin``
    carries the sign of the rotation, so that ``apply_rope`` is two products and a sum.
    """

    cos: Tensor = field()
    sin: Tensor = field()

    @classmethod
    def build(
        cls, *, positions: int, rotated: int, theta: float, dtype: torch.dtype, device: torch.device
    ) -> RopeTable:
        """Angles in float32 (float64 for float64 activations), rounded to ``dtype`` afterwards. Allocates; set-up only."""
        precise = torch.promote_types(dtype, torch.float32)
        exponents = torch.arange(0, rotated, 2, dtype=torch.int64).to(precise) / rotated
        frequencies = 1.0 / (theta**exponents)
        angles = torch.arange(positions, dtype=torch.int64).to(precise)[:, None] * frequencies[None, :]
        cos, sin = angles.cos(), angles.sin()
        return cls(
            cos=torch.cat([cos, cos], dim=-1).to(device=device, dtype=dtype),
            sin=torch.cat([-sin, sin], dim=-1).to(device=device, dtype=dtype),
        )

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the table. positions: [...] int64, each in [0, table length). Returns two [..., rotated] tensors."""
        flat = positions.reshape(-1)
        shape = (*positions.shape, self.cos.shape[-1])
        return self.cos.index_select(0, flat).view(shape), self.sin.index_select(0, flat).view(shape)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first ``cos.shape[-1]`` dimensions of x; the rest passes through. Does not change x.

    x: [..., n]; cos, sin: broadcastable to [..., rotated], from ``RopeTable.at``.
    """
    if uses_cuda("apply_rope", x, cos, sin):
        from specdec.ops.cuda.rope import apply_rope as fast

        return fast(x, cos, sin)
    rotated = cos.shape[-1]
    head, tail = x[..., :rotated], x[..., rotated:]
    # sin carries the sign: dimension j receives -x[j + half] and j + half receives +x[j]
    turned = head * cos + torch.roll(head, rotated // 2, dims=-1) * sin
    return torch.cat([turned, tail], dim=-1)


def rotate_pairs(x: Tensor, turns: Tensor) -> Tensor:
    """Rotates the trailing dimensions of x in place and returns it: x is a projection's result, which nobody else reads.

    x: [..., n] with adjacent elements in the last axis; turns: complex, broadcastable to [..., rotated / 2]. Arithmetic in the
    accumulate dtype, rounded once.
    """
    if turns.dtype is torch.complex64 and uses_cuda("rotate_pairs", x):
        from specdec.ops.cuda.rope import rotate_pairs as fast

        return fast(x, turns)
    tail = x[..., x.shape[-1] - 2 * turns.shape[-1] :]
    wide = tail.to(turns.real.dtype)  # tail itself unless x is half precision
    pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2))).mul_(turns)
    if wide.dtype != x.dtype:
        tail.copy_(torch.view_as_real(pairs).flatten(-2))
    return x
