"""Kernels around the device functions of ``specdec.ops.cuda.block_formats``. Imports triton, so tests import it late."""

import triton
import triton.language as tl

from specdec.ops.cuda import block_formats
from specdec.ops.cuda.block_formats import QUANTISE_FP8, QUANTISE_NVFP4

__all__ = ["QUANTISE_FP8", "QUANTISE_NVFP4", "decode", "quantise"]


@triton.jit
def quantise(x, out, scale, MODE: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr):
    """Rows of 64 values, one a program; PAIRS: as even and odd ones."""
    if PAIRS:
        at = tl.program_id(0) * 64 + 2 * tl.arange(0, 32)
        even = tl.load(x + at)
        odd = tl.load(x + at + 1)
        even, odd = block_formats.quantise_pairs(even, odd, tl.load(scale), MODE, 32, BLOCK)
        tl.store(out + at, even)
        tl.store(out + at + 1, odd)
    else:
        at = tl.program_id(0) * 64 + tl.arange(0, 64)
        tl.store(out + at, block_formats.quantise_row(tl.load(x + at), tl.load(scale), MODE, 64, BLOCK))


@triton.jit
def decode(codes, fours, eights, powers):
    """Values of 256 bytes in the three formats."""
    at = tl.arange(0, 256)
    code = tl.load(codes + at).to(tl.int32)
    tl.store(fours + at, block_formats.e2m1(code & 15))
    tl.store(eights + at, block_formats.e4m3(code))
    tl.store(powers + at, block_formats.e8m0(code))
