"""Gumbel noise by token: the argmax of logits / temperature + noise is a draw from their softmax, without any sum.

Every (round, depth, token id) has a word of its own in a domain of its own, so a draw depends on nothing but the seed and the
committed position: not on the lane, the batch, or how many ids a shard holds.
"""

import torch
from torch import Tensor

from specdec.sampling.philox import DOMAIN_SPAN, philox_words, uniforms

NOISE_DOMAIN = 2
"""Domain of draft noise; target and draft words have domains 0 and 1."""
TOKEN_SPAN = 1 << 18
"""Words of one depth: more ids are no vocabulary here."""


def draft_noise(seed: Tensor, consumed: Tensor, *, drafts: int, vocab_size: int, max_draft_tokens: int) -> Tensor:
    """Standard Gumbel noise of a round's drafts.

    Args:
        seed, consumed: [B] int64; see `round_offsets`.
        drafts: depths K.
        vocab_size: ids V, at most 2^18.
        max_draft_tokens: the recipe's maximum (K_max), the same in every round of a request.

    Returns:
        [B, K, V] float32, new storage: minus infinity with probability 2^-25, never plus infinity. Does not synchronise.
    """
    depth = torch.arange(drafts, device=seed.device)
    first = (consumed * (max_draft_tokens + 2)).unsqueeze(1) + depth
    offset = first * TOKEN_SPAN + NOISE_DOMAIN * DOMAIN_SPAN
    u = uniforms(philox_words(seed.unsqueeze(1).expand_as(offset), offset, vocab_size))
    # log1p keeps the small exponentials apart, which are the ones that win; -log(u) would round them to multiples of 2^-24
    return torch.log1p(u.neg_()).neg_().log_().neg_()
