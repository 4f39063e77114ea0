"""The sampling law of small vocabularies, one program for each row; see ``specdec.sampling.law``.

The reference sorts, and so does this: masses are the same fixed-point sums, so that exponentials apart every row is the
reference's, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# 2^44, the fixed point of masses.
_ONE = tl.constexpr(17592186044416.0)
_TINY = tl.constexpr(2.0**-126)


def law_rows(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, greedy: Tensor, kept: int
) -> Tensor:
    """See ``specdec.sampling.law.law``. logits: [B, W, V] with V at most a few thousand; parameters: [B]; kept: ids that are not
    padding. Returns [B, W, V] float32."""
    lanes, width, vocab = logits.shape
    out = torch.empty((lanes, width, vocab), dtype=torch.float32, device=logits.device)
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    block = max(triton.next_power_of_2(vocab), 32)
    if lanes * width:
        _law_rows[(lanes * width,)](
            logits,
            out,
            temperature,
            top_k,
            top_p,
            min_p,
            greedy.view(torch.uint8),
            logits.stride(0),
            logits.stride(1),
            temperature.stride(0),
            top_k.stride(0),
            top_p.stride(0),
            min_p.stride(0),
            greedy.stride(0),
            width,
            vocab,
            kept,
            BLOCK=block,
            num_warps=min(max(block // 128, 1), 16),
            enable_fp_fusion=False,
        )
    return out


@triton.jit
def _law_rows(
    logits,
    out,
    temperature,
    top_k,
    top_p,
    min_p,
    greedy,
    lane_step,
    row_step,
    temperature_step,
    top_k_step,
    top_p_step,
    min_p_step,
    greedy_step,
    width,
    vocab,
    kept,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    lane, row = program // width, program % width
    heat = tl.load(temperature + lane * temperature_step)
    k = tl.load(top_k + lane * top_k_step)
    share = tl.load(top_p + lane * top_p_step)
    floor = tl.load(min_p + lane * min_p_step)
    pointed = tl.load(greedy + lane * greedy_step) != 0
    ids = tl.arange(0, BLOCK)
    real = ids < kept
    x = tl.load(logits + lane * lane_step + row * row_step + ids, mask=real, other=float("-inf")).to(tl.float32)

    # a row with NaN or plus infinity, or with nothing else than minus infinity, is no law
    broken = tl.sum((x != x).to(tl.int32), 0) > 0
    x = tl.where(x != x, float("-inf"), x)
    greatest = tl.max(x, 0)
    broken = broken | (greatest == float("inf")) | (greatest == float("-inf"))
    e = tl.exp(tl.div_rn(x - tl.where(broken, 0.0, greatest), heat))
    e = tl.where(real & (broken == 0), e, 0.0)

    descending = tl.sort(e, descending=True)
    k = tl.where((k < 1) | (k > kept), kept, k)
    kth = tl.sum(tl.where(ids == k - 1, descending, 0.0), 0)
    floor = tl.where(kth > floor, kth, floor)
    mass = tl.cumsum(tl.where(descending >= floor, (descending * _ONE).to(tl.int64), 0), 0)
    last = tl.sum(((descending >= floor) & (ids < kept)).to(tl.int32), 0) - 1
    # twice the mass is never reached: off keeps even entries too small for the fixed point
    share = tl.where(share < 1.0, share, 2.0)
    goal = tl.max(mass, 0).to(tl.float64) * share.to(tl.float64)
    reached = tl.sum((mass.to(tl.float64) < goal).to(tl.int32), 0)
    reached = tl.where(reached < last, reached, last)
    least = tl.sum(tl.where(ids == reached, descending, 0.0), 0)

    keeps = real & (e >= least)
    fixed = tl.where(keeps, e * _ONE, 0.0)
    total = tl.sum(fixed.to(tl.int64), 0).to(tl.float32)
    probs = tl.div_rn(fixed, tl.where(broken, 1.0, total))
    probs = tl.where(probs < _TINY, 0.0, probs)
    lowest = tl.min(tl.where(real & (x == greatest), ids, BLOCK), 0)
    probs = tl.where(pointed, (ids == lowest).to(tl.float32), probs)
    probs = tl.where(broken & real, float("nan"), probs)
    tl.store(out + program * vocab + ids, probs, mask=ids < vocab)
