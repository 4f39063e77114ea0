"""Lossless coding of E4M3 block scales as the checkpoint stores them (``nvfp4_csf``).

A scale matrix ``[R, Cs]`` (R a multiple of 16, Cs even) becomes slabs of 16 rows: 16 base bytes, then for each row Cs/2
bytes of two 4-bit offsets, the even column low; a scale's byte is base + offset.  Bytes outside their row's window of 16
values are exceptions: ``byte << 24 | row · Cs + column``, uint32, sorted by position.
"""

import torch


def encode(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``scale`` float8_e4m3fn ``[R, Cs]`` → (fixed uint8 ``[R/16, 16·(1 + Cs/2)]``, exceptions uint32 ``[n]``)."""
    rows, columns = scale.shape
    if rows % 16 or columns % 2:
        raise ValueError(f"encode: scale {[rows, columns]}, rows must be a multiple of 16 and columns even")
    values = scale.view(torch.uint8).long()
    histogram = torch.zeros(rows, 256, dtype=torch.long).scatter_add(1, values, torch.ones_like(values))
    # The lowest start (0…240) whose window of 16 values covers most of the row.
    covered = histogram.unfold(1, 16, 1).sum(-1)
    base = covered.argmax(1, keepdim=True)
    offset = values - base
    outside = (offset < 0) | (offset > 15)
    offset = offset.masked_fill(outside, 0)
    nibbles = (offset[:, 0::2] | (offset[:, 1::2] << 4)).to(torch.uint8).unflatten(0, (-1, 16)).flatten(1)
    fixed = torch.cat([base.to(torch.uint8).view(-1, 16), nibbles], 1).contiguous()
    position = outside.flatten().nonzero().squeeze(-1)
    words = position | (values.flatten()[position] << 24)
    return fixed, words.to(torch.uint32)
