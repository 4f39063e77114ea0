"""Values as a quantised cache or a quantised product's input holds them: quantised in blocks and widened again at once.

Blocks are consecutive values of the last axis that share one scale. Three formats, each named value format / scale format:

==========  ======  =====  ==========================================================================
function    values  block  scale s of a block whose largest magnitude is a
==========  ======  =====  ==========================================================================
fp8_ue8m0   E4M3    32     smallest power of two with a ≤ 448·s, a at least 1e-4
fp4_ue8m0   E2M1    32     smallest power of two with a ≤ 6·s, a at least 6·2^-126
fp4_e4m3    E2M1    16     a/6 rounded to E4M3, a at least 6·2^-9; at most 448
==========  ======  =====  ==========================================================================

Rounding is to the nearest, ties to the even code. Arithmetic is float32, or float64 for float64 values; only quotients by an
E4M3 scale are rounded before. Results keep the dtype of the input, and bfloat16 holds every one exactly. All are tensor
programs: no synchronisation, no data-dependent shape; they allocate their result and do not change their input.
"""

import torch
from torch import Tensor

from specdec.ops.select import uses_cuda

__all__ = [
    "E2M1_MAX",
    "E4M3_MAX",
    "fp4_e4m3",
    "fp4_ue8m0",
    "fp8_ue8m0",
    "power_of_two_scale",
    "round_e2m1",
    "round_e4m3",
]

E2M1_MAX, E4M3_MAX = 6.0, 448.0
_BLOCK, _BLOCK_E4M3 = 32, 16
_SMALLEST_FP8 = 1e-4
_SMALLEST_FP4 = E2M1_MAX * 2.0**-126
_SMALLEST_FP4_E4M3 = E2M1_MAX * 2.0**-9
# By accumulate dtype: an integer dtype of the same width, and the bits of a mantissa.
_BITS = {torch.float32: (torch.int32, 23), torch.float64: (torch.int64, 52)}
_EXPONENT = {torch.float32: 0xFF, torch.float64: 0x7FF}


def round_e2m1(values: Tensor) -> Tensor:
    """Round to the nearest E2M1 value, ties to the even code, saturating at ±6; NaN stays NaN.

    ``values``: any floating dtype and shape; the result has both. A tensor program: no synchronisation, allocates its
    result, does not change its input.
    """
    magnitude = values.abs().clamp(max=E2M1_MAX)
    # Neighbouring values lie 1/2 apart below 2, 1 apart below 4 and 2 apart above; dividing by a power of two is exact.
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0)).to(values.dtype)
    return torch.round(magnitude / step) * step * values.sign()


def round_e4m3(values: Tensor) -> Tensor:
    """Round float32 or float64 values of magnitude up to 448 to the nearest E4M3 value, ties to the even code.

    The result has the dtype and shape of ``values``.
    """
    if values.dtype == torch.float32:
        return values.to(torch.float8_e4m3fn).float()
    # The conversion goes through float32 and would round twice. Steps are 2^-9 below 2^-6, then 2^-3 of the power below.
    integer, mantissa = _BITS[values.dtype]
    power = (values.abs().clamp(min=2.0**-6).view(integer) >> mantissa << mantissa).view(values.dtype)
    step = power * 0.125
    return torch.round(values / step) * step


def power_of_two_scale(largest: Tensor, limit: float) -> Tensor:
    """Return the smallest power of two s with ``largest`` ≤ ``limit``·s, exactly; float32 or float64 as ``largest``.

    ``largest``: positive normal numbers of any shape; ``limit``: a number with a short mantissa, such as 448 or 6.
    """
    integer, mantissa = _BITS[largest.dtype]
    exponent, fraction = 0, limit
    while fraction >= 2:
        exponent, fraction = exponent + 1, fraction / 2
    # Where the mantissa of ``largest`` exceeds that of ``limit``, the addition carries into the exponent.
    carry = (1 << mantissa) - 1 - int((fraction - 1) * (1 << mantissa))
    bits = largest.view(integer) + (carry - (exponent << mantissa))
    return (bits & (_EXPONENT[largest.dtype] << mantissa)).view(largest.dtype)


def _check(values: Tensor, size: int) -> None:
    if values.shape[-1] % size:
        raise ValueError(f"block quantisation: last axis {values.shape[-1]} is not a multiple of {size}")


def _blocks(values: Tensor, size: int) -> Tensor:
    """[..., n / size, size] in the accumulate dtype."""
    return values.to(torch.promote_types(values.dtype, torch.float32)).unflatten(-1, (-1, size))


def _largest(blocks: Tensor, at_least: float) -> Tensor:
    return blocks.abs().amax(-1, keepdim=True).clamp(min=at_least)


def fp8_ue8m0(values: Tensor) -> Tensor:
    """E4M3 in blocks of 32 under power-of-two scales. ``values``: [..., n], any floating dtype; the result has both.

    Raises:
        ValueError: if n is not a multiple of 32.
    """
    _check(values, _BLOCK)
    if uses_cuda("fp8_ue8m0", values):
        from specdec.ops.cuda.block_quantisation import fp8_ue8m0 as fast

        return fast(values)
    blocks = _blocks(values, _BLOCK)
    scale = power_of_two_scale(_largest(blocks, _SMALLEST_FP8), E4M3_MAX)
    return (round_e4m3(blocks / scale) * scale).flatten(-2).to(values.dtype)


def fp4_ue8m0(values: Tensor) -> Tensor:
    """E2M1 in blocks of 32 under power-of-two scales. ``values``: [..., n], any floating dtype; the result has both.

    Raises:
        ValueError: if n is not a multiple of 32.
    """
    _check(values, _BLOCK)
    if uses_cuda("fp4_ue8m0", values):
        from specdec.ops.cuda.block_quantisation import fp4_ue8m0 as fast

        return fast(values)
    blocks = _blocks(values, _BLOCK)
    scale = power_of_two_scale(_largest(blocks, _SMALLEST_FP4), E2M1_MAX)
    return (round_e2m1(blocks / scale) * scale).flatten(-2).to(values.dtype)


def fp4_e4m3(values: Tensor) -> Tensor:
    """E2M1 in blocks of 16 under E4M3 scales. ``values``: [..., n], any floating dtype; the result has both.

    Raises:
        ValueError: if n is not a multiple of 16.
    """
    _check(values, _BLOCK_E4M3)
    if uses_cuda("fp4_e4m3", values):
        from specdec.ops.cuda.block_quantisation import fp4_e4m3 as fast

        return fast(values)
    blocks = _blocks(values, _BLOCK_E4M3)
    largest = _largest(blocks, _SMALLEST_FP4_E4M3)
    # Divided by a tensor: a number would become a product with its reciprocal on CUDA.
    scale = round_e4m3((largest / largest.new_full((), E2M1_MAX)).clamp(max=E4M3_MAX))
    return (round_e2m1(blocks / scale) * scale).flatten(-2).to(values.dtype)
