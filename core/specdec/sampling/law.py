"""The sampling law: logits to probabilities, one row per position, each lane with its own settings.

Filters in this order, each on the renormalised rest of the one before, ties at a threshold kept (as FlashInfer's
`top_k_renorm_probs` and `top_p_renorm_probs` keep them):

    temperature  e = exp((logit - max) / temperature), so that the greatest entry is 1
    min-p        e >= min_p
    top-k        e >= the k-th greatest e
    top-p        e >= the value at which the descending cumulative mass reaches top_p times the mass left

The same function serves the drafter and the target, so that the retained draft law is the law that was drawn from.

Masses are summed in fixed point (2^-44 of the greatest entry, in int64). Integer sums do not depend on the order of
addition, so a row's law depends neither on the other rows of the batch nor on threads, and differs between devices by
the rounding of exp and of the division only. A truncated term is off by less than 2^-44, so the mass of 2^18 entries is
right to 2^-26 of itself: below the resolution of float32.
"""

from collections.abc import Sequence

import torch
from attrs import field, frozen
from torch import Tensor

from specdec.ops.select import uses_cuda
from specdec.sampling.params import SamplingParams

# 2^18 entries of at most 2^44 each sum to at most 2^62, which fits int64.
_ONE = 2.0**44
_VOCABULARY_LIMIT = 1 << 18
# Rows that one program of the kernel sorts at once.
_KERNEL_VOCABULARY = 2048
_GREATEST_DENORMAL = 2.0**-126 - 2.0**-149


@frozen(kw_only=True, eq=False)
class LawParams:
    """Sampling settings per lane, as the tensors a round reads. Values are not checked: `SamplingParams` did."""

    temperature: Tensor = field()
    """[B] float32, > 0."""
    top_k: Tensor = field()
    """[B] int64; 0 is off, and so is anything from the vocabulary size on."""
    top_p: Tensor = field()
    """[B] float32; from 1 on it is off."""
    min_p: Tensor = field()
    """[B] float32, at most 1; 0 is off."""
    greedy: Tensor = field()
    """[B] bool: the point mass at the greatest logit."""

    @classmethod
    def of(cls, requests: Sequence[SamplingParams], device: torch.device | str = "cpu") -> "LawParams":
        """Tensors of several requests, lane b from requests[b]. Copies from the host: for preparation, not for rounds."""
        return cls(
            temperature=torch.tensor([r.temperature for r in requests], dtype=torch.float32, device=device),
            top_k=torch.tensor([r.top_k for r in requests], dtype=torch.int64, device=device),
            top_p=torch.tensor([r.top_p for r in requests], dtype=torch.float32, device=device),
            min_p=torch.tensor([r.min_p for r in requests], dtype=torch.float32, device=device),
            greedy=torch.tensor([r.greedy for r in requests], dtype=torch.bool, device=device),
        )


def law(logits: Tensor, params: LawParams, vocab_size: int | None = None) -> Tensor:
    """Probabilities that a lane's settings make of its logits.

    Args:
        logits: [B, ..., V] of any floating dtype; -inf forbids a token. Comparisons and the argmax happen in float64 for
            float64 logits, else in float32, to which the 16-bit formats convert exactly.
        params: settings of the B lanes.
        vocab_size: ids from here on are padding and get probability 0 whatever their logits; None means V. At most 2^18
            ids are not padding.

    Returns:
        [B, ..., V] float32 in new storage: rows sum to 1 up to rounding, no entry is a denormal, and a greedy row is
        exactly 1 at the greatest logit (the lowest id among equals). A row with a NaN or +inf logit, or with nothing
        allowed, is NaN throughout, greedy or not. Inputs are not changed. Capturable: no synchronisation, one sort.

    Raises:
        ValueError: if the logits are not floating point or more than 2^18 ids remain.
    """
    lanes, vocab = logits.shape[0], logits.shape[-1]
    kept_ids = unpadded(logits, vocab_size)
    if vocab <= _KERNEL_VOCABULARY and uses_cuda("law", logits):
        from specdec.ops.cuda.law import law_rows

        settings = (params.temperature, params.top_k, params.top_p, params.min_p, params.greedy)
        return law_rows(logits.reshape(lanes, -1, vocab), *settings, kept_ids).view(logits.shape)
    if logits.dtype != torch.float64:
        logits = logits.to(torch.float32)
    rows = logits.reshape(lanes, -1, vocab)[..., :kept_ids]
    temperature, top_k, top_p, min_p, greedy = (
        t.view(lanes, 1, 1) for t in (params.temperature, params.top_k, params.top_p, params.min_p, params.greedy)
    )
    end = kept_ids - 1

    # Everything below happens in descending order, where each filter keeps a prefix: `last` is its last position.
    # A stable sort puts the lowest id first among equals.
    descending, order = rows.sort(dim=-1, descending=True, stable=True)
    # not the first of the sorted ones: a NaN with its sign bit set sorts last on some devices, and must not look healthy
    greatest = rows.amax(-1, keepdim=True)
    e = ((descending - greatest) / temperature).exp().to(torch.float32)
    fixed = e * _ONE
    mass = fixed.to(torch.int64).cumsum(-1)

    # top_k = 0 becomes position `end` by the remainder of -1.
    kth = (top_k.clamp_max(kept_ids) - 1).remainder(kept_ids).expand(-1, e.shape[1], 1)
    floor = torch.maximum(e.gather(-1, kth), min_p)
    # Counting what is below, not what is kept, leaves an index in range in rows of NaN.
    last = end - (e < floor).sum(-1, keepdim=True)

    # Twice the mass is never reached: with top_p = 1 even entries too small for the fixed point stay.
    share = torch.where(top_p < 1, top_p, 2.0)
    goal = mass.gather(-1, last).to(torch.float64) * share
    reached = torch.minimum((mass < goal).sum(-1, keepdim=True), last)
    last = end - (e < e.gather(-1, reached)).sum(-1, keepdim=True)

    last = last.masked_fill(greedy, 0)
    # The greatest entry is 1, or NaN in a row that must not look healthy.
    total = mass.gather(-1, last).to(torch.float32) * e[..., :1]
    dropped = torch.arange(kept_ids, device=e.device) > last
    # Chain verification treats denormals as 0, so that kernels which flush them agree; here they never arise.
    probs = torch.threshold_(fixed.masked_fill_(dropped, 0.0).div_(total), _GREATEST_DENORMAL, 0.0)
    result = probs.new_zeros((*rows.shape[:-1], vocab))
    return result.scatter_(-1, order, probs).view(logits.shape)


def unpadded(logits: Tensor, vocab_size: int | None) -> int:
    """How many ids of the logits are not padding. Raises ValueError as `law` does."""
    vocab = logits.shape[-1]
    kept = vocab if vocab_size is None else vocab_size
    if not logits.dtype.is_floating_point or not 0 < kept <= min(vocab, _VOCABULARY_LIMIT):
        raise ValueError(
            f"law needs floating-point logits with 1 to {min(vocab, _VOCABULARY_LIMIT)} ids that are not padding, "
            f"got {logits.dtype} {tuple(logits.shape)} with {kept}"
        )
    return kept
