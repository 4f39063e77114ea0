"""Device functions: values in the four-bit and eight-bit block formats, decoded and quantised in registers.

The formats are those of ``specdec.checkpoint.nvfp4``, ``specdec.checkpoint.microscaling`` and
``specdec.ops.block_quantisation``; every value is the same, bit for bit. Quotients are IEEE divisions (``tl.div_rn``): the
``/`` of Triton is approximate. Rounding adds and subtracts 1.5 · 2^23, which rounds to the nearest, ties to even.
"""

import triton
import triton.language as tl

# How weights are stored.
PLAIN, NVFP4, MXFP4 = 0, 1, 2
# How a product's input is quantised: not at all, in NVFP4 under a given scale, in E4M3 under powers of two.
QUANTISE_NONE, QUANTISE_NVFP4, QUANTISE_FP8 = 0, 1, 2

_NVFP4 = tl.constexpr(NVFP4)
_PLAIN = tl.constexpr(PLAIN)
_QUANTISE_NVFP4 = tl.constexpr(QUANTISE_NVFP4)
_ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def e2m1(code):
    """Value of a four-bit code, int32 to float32."""
    magnitude = code & 7
    exponent, mantissa = magnitude >> 1, magnitude & 1
    normal = (((exponent + 126) << 23) | (mantissa << 22)).to(tl.float32, bitcast=True)
    value = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.5, normal)
    return tl.where((code & 8) != 0, -value, value)


@triton.jit
def e4m3(byte):
    """Value of an E4M3 byte, int32 to float32."""
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    normal = (((exponent + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    value = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)
    value = tl.where((byte & 127) == 127, float("nan"), value)
    return tl.where((byte & 128) != 0, -value, value)


@triton.jit
def e8m0(byte):
    """Value of a power-of-two byte, int32 to float32."""
    bits = tl.where(byte == 0, 1 << 22, byte << 23)
    return tl.where(byte == 255, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def weight_pairs(weight, scale, rows, pairs, width, seen, outer, FORMAT: tl.constexpr):
    """Columns 2·pair and 2·pair + 1 of the rows of a stored matrix, both float32 in the shape that rows and pairs broadcast to.

    rows: int64 row numbers over all matrices; width: columns in values; outer: the per-matrix scale, where there is one.
    """
    if FORMAT == _PLAIN:
        at = weight + rows * width + 2 * pairs
        low = tl.load(at, mask=seen, other=0).to(tl.float32)
        high = tl.load(at + 1, mask=seen & (2 * pairs + 1 < width), other=0).to(tl.float32)
    else:
        byte = tl.load(weight + rows * (width // 2) + pairs, mask=seen, other=0).to(tl.int32)
        if FORMAT == _NVFP4:
            factor = e4m3(tl.load(scale + rows * (width // 16) + pairs // 8, mask=seen, other=0).to(tl.int32))
            # the product of the first two is exact; the only rounding is that of the per-matrix scale
            low = e2m1(byte & 15) * factor * outer
            high = e2m1(byte >> 4) * factor * outer
        else:
            factor = e8m0(tl.load(scale + rows * (width // 32) + pairs // 16, mask=seen, other=0).to(tl.int32))
            low = e2m1(byte & 15) * factor
            high = e2m1(byte >> 4) * factor
    return low, high


@triton.jit
def _round(values):
    return (values + _ROUNDER) - _ROUNDER


@triton.jit
def round_e2m1(values):
    """See ``specdec.ops.block_quantisation.round_e2m1``."""
    magnitude = tl.abs(values)
    magnitude = tl.where(magnitude > 6.0, 6.0, magnitude)
    inverse = tl.where(magnitude < 2.0, 2.0, tl.where(magnitude < 4.0, 1.0, 0.5))
    step = tl.where(magnitude < 2.0, 0.5, tl.where(magnitude < 4.0, 1.0, 2.0))
    rounded = _round(magnitude * inverse) * step
    return tl.where(values < 0, -rounded, rounded)


@triton.jit
def round_e4m3(values):
    """See ``specdec.ops.block_quantisation.round_e4m3``."""
    magnitude = tl.abs(values)
    exponent = tl.where(magnitude < 0.015625, 0.015625, magnitude).to(tl.int32, bitcast=True) >> 23
    step = ((exponent - 3) << 23).to(tl.float32, bitcast=True)
    inverse = ((257 - exponent) << 23).to(tl.float32, bitcast=True)
    return _round(values * inverse) * step


@triton.jit
def quantise(values, largest, outer, MODE: tl.constexpr):
    """Values as a quantised product sees them. largest: greatest magnitude of each value's block, broadcastable to values; outer:
    the global scale of NVFP4. NaN stays NaN."""
    if MODE == _QUANTISE_NVFP4:
        inverse = tl.div_rn(1.0, outer)
        wanted = tl.div_rn(largest * inverse, 6.0)
        scale = round_e4m3(tl.where(wanted > 448.0, 448.0, wanted))
        effective = tl.div_rn(scale, inverse)
        effective = tl.where(effective < 1e-30, 1e-30, effective)
        found = round_e2m1(tl.div_rn(values, effective)) * scale * outer
    else:
        # smallest power of two under which the block fits in 448 = 1.75 · 2^8
        bits = tl.where(largest < 1e-4, 1e-4, largest).to(tl.int32, bitcast=True) + (0x1FFFFF - (8 << 23))
        exponent = bits >> 23
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        found = round_e4m3(values * inverse) * scale
    return tl.where(values != values, values, found)


@triton.jit
def quantise_row(values, outer, MODE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """SIZE consecutive values in blocks of BLOCK."""
    blocks = tl.reshape(values, (SIZE // BLOCK, BLOCK))
    largest = tl.max(tl.abs(blocks), axis=1, keep_dims=True)
    return tl.reshape(quantise(blocks, largest, outer, MODE), (SIZE,))


@triton.jit
def quantise_pairs(even, odd, outer, MODE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """As ``quantise_row`` for 2·SIZE values given as the even and the odd ones."""
    first = tl.reshape(even, (SIZE // (BLOCK // 2), BLOCK // 2))
    second = tl.reshape(odd, (SIZE // (BLOCK // 2), BLOCK // 2))
    largest = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), axis=1, keep_dims=True)
    return (
        tl.reshape(quantise(first, largest, outer, MODE), (SIZE,)),
        tl.reshape(quantise(second, largest, outer, MODE), (SIZE,)),
    )
