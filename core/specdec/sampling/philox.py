"""Philox4x32-10 random words as a tensor program, and the words a decoding round owns.

The stream is the one of cuRAND's ``curandStatePhilox4_32_10_t``, which FlashInfer's samplers read: word n of stream
(seed, subsequence) is component n mod 4 (in the order x, y, z, w) of the block with 64-bit number n div 4. A word
depends on nothing but (seed, subsequence, n): not on the lane, the batch or the device.

All functions are capturable: no host synchronisation, no constant copied from the host, no storage kept.

Sources: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011) and Random123 for the block function;
cuRAND's device headers for the word order and the mapping to uniforms.
"""

import torch
from torch import Tensor

TARGET_DOMAIN = 0
"""Domain of target verification: accept tests, corrections, bonus tokens, plain decoding."""
DRAFT_DOMAIN = 1
"""Domain of draft sampling."""
DOMAIN_SPAN = 1 << 60
"""Words per domain: domain d owns words [d * 2^60, (d + 1) * 2^60) of the request's stream."""

_MASK = 0xFFFFFFFF
# Round multipliers and key increments (Weyl constants) of Philox4x32, from Random123's philox.h.
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def _pair(first: int, second: int, device: torch.device) -> Tensor:
    """[first, second] int64. `arange` fills on the device; `torch.tensor` would copy from the host in every call."""
    return torch.arange(first, second + (1 if second > first else -1), second - first, device=device)


def philox_block(counter_xz: Tensor, counter_yw: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """The raw block function: ten rounds over counters (x, y, z, w) with keys (k0, k1).

    x, z and y, w travel as pairs because a round multiplies x and z and mixes the products into the other two:
    one operation of the pair replaces two.

    Args:
        counter_xz: words x and z, [..., 2] int64 in 0 .. 2^32 - 1.
        counter_yw: words y and w, same shape and range.
        key: words k0 and k1, broadcastable to the counters, int64 in 0 .. 2^32 - 1.

    Returns:
        Result words (x, z) and (y, w), each [..., 2] int64 in 0 .. 2^32 - 1. Inputs are not changed.
    """
    device = key.device
    multipliers = _pair(_M0, _M1, device)
    increments = torch.arange(_ROUNDS, device=device).unsqueeze(-1) * _pair(_W0, _W1, device)
    # [rounds, ..., 2]: every round's key at once, since k0 and k1 only grow by their increment.
    round_keys = (key + increments.view(_ROUNDS, *(1,) * (key.dim() - 1), 2)) & _MASK
    even, odd = counter_xz, counter_yw
    for round_key in round_keys.unbind(0):
        # int64 products wrap modulo 2^64: their bit pattern is the unsigned product.
        products = (even * multipliers).flip(-1)
        # The upper halves need a mask because >> copies the sign; `odd` may carry rubbish above bit 31, gone as well.
        even = ((products >> 32) ^ odd ^ round_key) & _MASK
        odd = products
    return even, odd & _MASK


def philox_words(seed: Tensor, offset: Tensor, count: int, subsequence: int | Tensor = 0) -> Tensor:
    """Words offset .. offset + count - 1 of each stream.

    Args:
        seed: [...] int64, read as a 64-bit pattern (a negative value stands for seed + 2^64).
        offset: [...] int64 of the same shape, number of the first word, read as a 64-bit pattern.
        count: words per stream, at least 0.
        subsequence: stream number within the seed: an int in 0 .. 2^64 - 1 or an int64 tensor of the same shape.

    Returns:
        [..., count] int64 in 0 .. 2^32 - 1, new storage. Allocates transients only; does not synchronise.
    """
    device = seed.device
    # A first word at component 3 of its block reaches farthest.
    blocks = (count + 6) // 4
    # >> copies the sign of offsets from 2^63 on; the mask of 62 bits makes the shift a logical one.
    number = ((offset >> 2) & ((1 << 62) - 1)).unsqueeze(-1) + torch.arange(blocks, device=device)
    x, y = number & _MASK, number >> 32
    if isinstance(subsequence, Tensor):
        z = (subsequence & _MASK).unsqueeze(-1).expand_as(x)
        w = ((subsequence >> 32) & _MASK).unsqueeze(-1).expand_as(x)
    else:
        z = torch.full_like(x, subsequence & _MASK)
        w = torch.full_like(x, subsequence >> 32)
    key = (seed.unsqueeze(-1) >> _pair(0, 32, device)) & _MASK
    even, odd = philox_block(torch.stack((x, z), -1), torch.stack((y, w), -1), key.unsqueeze(-2))
    words = torch.stack((even, odd), -1).flatten(-3)  # x, y, z, w of the first block, then of the second, ...
    index = (offset & 3).unsqueeze(-1) + torch.arange(count, device=device)
    return words.gather(-1, index)


def uniforms(words: Tensor) -> Tensor:
    """cuRAND's mapping of words to uniforms: f32(word) * 2^-32 + 2^-33.

    The conversion rounds to nearest even, the product is exact and the sum rounds once more, so the result is the same
    with and without fused multiply-add. Range 2^-33 .. 1.0: never 0, and exactly 1.0 for words >= 2^32 - 128
    (probability 2^-25).

    Args:
        words: [...] int64 in 0 .. 2^32 - 1.

    Returns:
        [...] float32, new storage. Does not synchronise.
    """
    return words.to(torch.float32).mul(2.0**-32).add(2.0**-33)


def round_offsets(consumed: Tensor, max_draft_tokens: int) -> Tensor:
    """First word of a round in each domain: consumed * (max_draft_tokens + 2) + domain * 2^60.

    A round at N consumed tokens owns max_draft_tokens + 2 words per domain, the most a verification can draw (one per
    draft, one thrown away after a rejection, one for the correction), and commits at least one token. So the ranges of
    two positions never overlap, and the words depend on the committed position only, not on the rounds that led to it.

    Args:
        consumed: [B] int64 tokens consumed by the target so far, below 2^60 / (max_draft_tokens + 2).
        max_draft_tokens: the recipe's maximum (K_max), the same in every round of a request.

    Returns:
        [2, B] int64: row TARGET_DOMAIN, row DRAFT_DOMAIN.
    """
    # Both domains in one operation; the rows follow TARGET_DOMAIN = 0 and DRAFT_DOMAIN = 1.
    domains = _pair(TARGET_DOMAIN * DOMAIN_SPAN, DRAFT_DOMAIN * DOMAIN_SPAN, consumed.device)
    return domains.unsqueeze(-1) + consumed * (max_draft_tokens + 2)
