"""CSF: a lossless coding of the E4M3 block scales of an NVFP4 matrix, about half their size.

The bytes of a row of scales lie close together, so a row is stored as one base and four-bit offsets; the few bytes further away
are listed beside. A scale matrix ``[R, C]`` (R a multiple of 16, C even, R·C at most 2²⁴) becomes

* ``fixed`` uint8 ``[R/16, 16·(1 + C/2)]``: for each slab of 16 rows their 16 bases (0 to 240), then for each of these rows C/2
  bytes of offsets, the even column in the low nibble; a scale's byte is base + offset;
* ``exceptions`` uint32 ``[n]``: bytes outside their row's window, ``byte << 24 | row · C + column``, by increasing position.

Codec name in published files: ``byte-window4-fixed-stream-u24-exceptions/1``. A weight's streams are stored beside it as
``X.weight_scale.nvfp4_csf_fixed`` and ``X.weight_scale.nvfp4_csf_exceptions``.
"""

import torch

from specdec.checkpoint.storages import coded_scale_shape

__all__ = ["decode", "encode"]

_SLAB = 16
_WINDOW = 16
_LARGEST_BASE = 256 - _WINDOW
_POSITIONS = 1 << 24


def decode(fixed: torch.Tensor, exceptions: torch.Tensor) -> torch.Tensor:
    """Return the scales float8_e4m3fn ``[R, C]`` that the streams hold, bit for bit.

    Reads values: for preparation, not for a round. Allocates its result, does not change its inputs.

    Raises:
        ValueError: if a stream has the wrong dtype or shape, a base is above 240, or the exceptions lie outside the matrix or are
            not in increasing order of position.
    """
    if fixed.dtype != torch.uint8 or exceptions.dtype != torch.uint32:
        raise ValueError(f"CSF streams are {fixed.dtype} and {exceptions.dtype}, needs uint8 and uint32")
    slabs, width = fixed.shape if fixed.ndim == 2 else (0, 0)
    rows, columns = _SLAB * slabs, 2 * (width // _SLAB - 1)
    if coded_scale_shape(rows, columns) != (slabs, width) or exceptions.ndim != 1:
        raise ValueError(
            f"CSF streams have shapes {list(fixed.shape)} and {list(exceptions.shape)}, needs [R/16, 16·(1 + C/2)] and [n] "
            f"with R·C at most {_POSITIONS}"
        )
    bases = fixed[:, :_SLAB].reshape(rows, 1)
    highest = int(bases.max())
    if highest > _LARGEST_BASE:
        raise ValueError(f"CSF base {highest} is above {_LARGEST_BASE}")
    pairs = fixed[:, _SLAB:].reshape(rows, columns // 2)
    values = torch.stack((pairs & 15, pairs >> 4), dim=-1).reshape(rows, columns) + bases
    words = exceptions.view(torch.int32).long() & 0xFFFFFFFF  # torch has few operations for uint32
    positions = words & (_POSITIONS - 1)
    if bool((positions[1:] <= positions[:-1]).any()):
        raise ValueError("CSF exceptions are not in increasing order of position")
    if positions.numel() and int(positions[-1]) >= rows * columns:
        raise ValueError(f"CSF exception at position {int(positions[-1])} of {rows * columns} scales")
    values.view(-1)[positions] = (words >> 24).to(torch.uint8)
    return values.view(torch.float8_e4m3fn)


def encode(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(fixed, exceptions)`` for ``scale`` float8_e4m3fn ``[R, C]``, as :func:`decode` takes them.

    A row's base is the lowest start of a window of 16 bytes that covers most of the row, so equal scales give equal streams; a
    byte outside has offset 0 and an exception. Runs when a checkpoint is made: it reads values and allocates its results, and
    does not change its input.

    Raises:
        ValueError: if the dtype is another one or the coding has no form for the size.
    """
    if scale.dtype != torch.float8_e4m3fn or scale.ndim != 2:
        raise ValueError(f"CSF codes float8_e4m3fn [R, C], got {scale.dtype} {list(scale.shape)}")
    rows, columns = scale.shape
    shape = coded_scale_shape(rows, columns)
    if shape is None:
        raise ValueError(
            f"CSF codes scales [R, C] with R a multiple of {_SLAB}, C even and R·C at most {_POSITIONS}, "
            f"got [{rows}, {columns}]"
        )
    values = scale.contiguous().view(torch.uint8).long()
    histogram = torch.zeros(rows, 256, dtype=torch.long, device=scale.device)
    histogram.scatter_add_(1, values, torch.ones_like(values))
    # the first of equal maxima is the lowest start
    bases = histogram.unfold(1, _WINDOW, 1).sum(-1).argmax(1, keepdim=True)
    offsets = values - bases
    outside = (offsets < 0) | (offsets >= _WINDOW)
    offsets = offsets.masked_fill(outside, 0)
    pairs = (offsets[:, 0::2] | (offsets[:, 1::2] << 4)).to(torch.uint8)
    fixed = torch.cat([bases.to(torch.uint8).view(-1, _SLAB), pairs.view(shape[0], -1)], dim=1).contiguous()
    positions = outside.flatten().nonzero().squeeze(-1)
    words = positions | (values.flatten()[positions] << 24)
    # the bits of the word, through a signed type of its width
    signed = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return fixed, signed.to(torch.int32).view(torch.uint32)
