"""NVFP4: four-bit weights and activations with one FP8 scale per 16 values and one FP32 scale per matrix.

A stored matrix ``W [out, in]`` consists of

* ``packed`` uint8 ``[out, in/2]``: two E2M1 codes a byte, the even column in the low nibble;
* ``scale`` float8_e4m3fn ``[out, in/16]``: row-major block scales, not swizzled;
* ``scale_2`` float32 scalar, a multiplier: ``W[r, c] = e2m1 · scale[r, c // 16] · scale_2``.

A leading ``...`` in the shapes below stands for any batch dimensions (experts); ``scale_2`` then has exactly those.
E2M1 codes hold the sign in bit 3 and the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 in bits 0-2. Rounding is to the nearest,
ties to the even code. Where kernels differ in their order of evaluation (it shows at ties only) this module divides by the
effective scale directly, as the pure-torch reference of b12x 1.5.1 does with ``direct_division``.
"""

from functools import lru_cache

import torch

from specdec.checkpoint.storages import BLOCK_NVFP4 as BLOCK
from specdec.ops.block_quantisation import E2M1_MAX, E4M3_MAX, round_e2m1

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Keeps the quotient of an all-zero block at 0 instead of NaN; far below any representable block scale.
_SMALLEST_DIVISOR = 1e-30
# The reciprocal of a smaller scale would overflow float32.
_SMALLEST_SCALE_2 = torch.finfo(torch.float32).tiny


@lru_cache(maxsize=8)
def _pair_values(device: torch.device) -> torch.Tensor:
    """[256, 2] float32: the two values of every packed byte. Made once per device."""
    values = [*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)]
    return torch.tensor([[values[byte & 15], values[byte >> 4]] for byte in range(256)], device=device)


# On the CPU it exists from the start, so that a guarded round allocates nothing; on a GPU the warm-up before capture makes it.
_pair_values(torch.device("cpu"))


@lru_cache(maxsize=8)
def _codes_by_doubled_magnitude(device: torch.device) -> torch.Tensor:
    """[13] uint8: the code whose magnitude is half the index (0 for an index that is no magnitude)."""
    codes = {int(2 * magnitude): code for code, magnitude in enumerate(_MAGNITUDES)}
    return torch.tensor([codes.get(index, 0) for index in range(13)], dtype=torch.uint8, device=device)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Return the values of packed codes, uint8 ``[..., n/2]`` → float32 ``[..., n]``. A tensor program."""
    return _pair_values(packed.device)[packed.int()].flatten(-2)


def pack_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Return the codes of E2M1 values ``[..., n]``, two a byte, uint8 ``[..., n/2]``. Zero has code 0, whatever its sign."""
    codes = _codes_by_doubled_magnitude(values.device)[(values.abs() * 2).int()]
    codes = codes | ((values < 0).to(torch.uint8) << 3)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _divide(numerator: torch.Tensor, divisor: float) -> torch.Tensor:
    # A Python scalar divisor becomes a multiplication by its reciprocal on CUDA and a division on the CPU; a tensor
    # divisor is a division on both, so results agree bit for bit.
    return numerator / numerator.new_full((), divisor)


def _quantise_blocks(values: torch.Tensor, scale_2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``values [..., n, 16]`` float32 under ``scale_2`` (broadcastable to ``[..., n]``).

    Returns E2M1 values float32 ``[..., n, 16]`` and block scales float8_e4m3fn ``[..., n]``.
    """
    inverse = scale_2.reciprocal()
    wanted = _divide(values.abs().amax(dim=-1) * inverse, E2M1_MAX).clamp(max=E4M3_MAX)
    scale = wanted.to(torch.float8_e4m3fn)
    effective = (scale.float() / inverse).clamp(min=_SMALLEST_DIVISOR)
    return round_e2m1(values / effective.unsqueeze(-1)), scale


def quantise_activation(a: torch.Tensor, input_scale: torch.Tensor) -> torch.Tensor:
    """Quantise activations to NVFP4 and back, as a W4A4 matrix product sees them.

    ``a [..., in]`` in any floating dtype is cut into blocks of 16 along its last axis; ``input_scale`` float32 is the
    positive global scale, a scalar or broadcastable to ``a.shape[:-1]``. Returns ``q · block_scale · input_scale`` float32
    ``[..., in]``; a block of zeros gives zeros. A tensor program: no synchronisation, no data-dependent shape, allocates
    its result, does not change its inputs.

    Raises:
        ValueError: if the last axis is not a multiple of 16.
    """
    if a.shape[-1] % BLOCK:
        raise ValueError(f"quantise_activation: last axis {a.shape[-1]} is not a multiple of {BLOCK}")
    blocks = a.float().unflatten(-1, (-1, BLOCK))
    scale_2 = input_scale.float().unsqueeze(-1)
    values, scale = _quantise_blocks(blocks, scale_2)
    # The product of an E2M1 and an E4M3 value is exact in float32: the only rounding is that of the last factor.
    return (values * scale.float().unsqueeze(-1) * scale_2.unsqueeze(-1)).flatten(-2)


def dequantise(packed: torch.Tensor, scale: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    """Return the stored matrices as float32 ``[..., out, in]``.

    ``packed`` uint8 ``[..., out, in/2]``, ``scale`` float8_e4m3fn ``[..., out, in/16]``, ``scale_2`` float32 ``[...]``
    (or one element for all). The product with ``scale_2`` comes last, hence one rounding per value. Allocates its result,
    does not change its inputs.

    Raises:
        ValueError: if the shapes or dtypes do not belong together.
    """
    if packed.dtype != torch.uint8 or scale.dtype != torch.float8_e4m3fn:
        raise ValueError(f"dequantise: packed {packed.dtype} and scale {scale.dtype}, needs uint8 and float8_e4m3fn")
    if scale.shape[:-1] != packed.shape[:-1] or scale.shape[-1] * BLOCK != packed.shape[-1] * 2:
        raise ValueError(
            f"dequantise: packed {list(packed.shape)} needs one scale per {BLOCK} values, got scale {list(scale.shape)}"
        )
    if scale_2.numel() != 1 and scale_2.shape != packed.shape[:-2]:
        raise ValueError(
            f"dequantise: scale_2 {list(scale_2.shape)} is neither a scalar nor {list(packed.shape[:-2])}, one per matrix"
        )
    values = unpack_e2m1(packed).unflatten(-1, (-1, BLOCK))
    outer = scale_2.float().reshape(()) if scale_2.numel() == 1 else scale_2.float()[..., None, None, None]
    return (values * scale.float().unsqueeze(-1) * outer).flatten(-2)


def quantise(
    weight: torch.Tensor, scale_2: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise ``weight [..., out, in]``; returns ``(packed, scale, scale_2)`` as :func:`dequantise` takes them.

    ``scale_2`` float32 ``[...]`` defaults to ``amax / (6 · 448)`` of each matrix (1 for a matrix of zeros), which puts the
    largest block scale at the top of E4M3. Zeros are stored with code 0, never as negative zero. Quantising the
    dequantised result with the same ``scale_2`` reproduces it exactly for every block whose stored scale is at least
    3 · 2^-9; below that E4M3's steps are so coarse that a block's largest value need not be stored as 6 (with the default
    ``scale_2`` such blocks are smaller than 1.1e-5 of the matrix's largest value). Runs when a checkpoint is made: it
    synchronises, allocates its results and does not change its input.

    Raises:
        ValueError: if the last axis is not a multiple of 16, the weight holds NaN or infinity, or ``scale_2`` has the wrong
            shape or is not a positive normal number.
    """
    if weight.ndim < 2 or weight.shape[-1] % BLOCK:
        raise ValueError(f"quantise: weight {list(weight.shape)} needs [..., out, in] with in a multiple of {BLOCK}")
    weight = weight.float()
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("quantise: weight holds NaN or infinity")
    if scale_2 is None:
        largest = weight.abs().amax(dim=(-2, -1))
        default = _divide(largest, E2M1_MAX * E4M3_MAX).clamp(min=_SMALLEST_SCALE_2)
        scale_2 = torch.where(largest > 0, default, 1.0).float()
    scale_2 = scale_2.float()
    if scale_2.shape != weight.shape[:-2]:
        raise ValueError(
            f"quantise: scale_2 {list(scale_2.shape)}, needs {list(weight.shape[:-2])}, one for each matrix of weight"
        )
    if not bool(((scale_2 >= _SMALLEST_SCALE_2) & (scale_2 < torch.inf)).all()):
        raise ValueError(
            f"quantise: scale_2 must be finite and at least {_SMALLEST_SCALE_2:.3g}, float32's smallest normal"
        )
    values, scale = _quantise_blocks(weight.unflatten(-1, (-1, BLOCK)), scale_2[..., None, None])
    # A block whose scale rounds to zero represents zeros whatever its codes; store the plain zero code.
    values = torch.where(scale.float().unsqueeze(-1) == 0, 0.0, values).flatten(-2)
    return pack_e2m1(values), scale, scale_2
