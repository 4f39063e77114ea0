"""Penalties, logit bias and the minimum length, on the logits of every row of a verification.

A round verifies rows 0 .. K. Row j decides the token after the pending token and the drafts d_0 .. d_{j-1}, so its penalties
count what plain decoding would have counted there: everything emitted so far, the pending token included, and those j drafts,
each once. Whether they are accepted does not matter: row j has a say only if they are. Committed counts grow by emitted tokens
alone, so that a rejected draft leaves no trace.

With l a token's logit, c how often the output holds it and s whether prompt or output hold it at all, in this order:

    repetition  s:  l / r  if l > 0, else l * r        CTRL (Keskar et al., arXiv 1909.05858, section 4.1) divides by r; that
                                                       would raise negative logits, which are multiplied here as everywhere
    frequency   l - f * c                              OpenAI API reference, "frequency and presence penalties"
    presence    l - p * (c > 0)                        the same
    bias        l + b                                  OpenAI API reference, `logit_bias`
    minimum     l = -inf for the request's stop ids    while fewer than the minimum number of tokens have been emitted

The sampling law follows (temperature and filters, or the argmax). Everything is a tensor program: capturable, elementwise but
for two scatters of integers, so a row's result does not depend on other rows. A NaN logit stays NaN, stop ids included.

Letters: B lanes, K draft tokens, W = K + 1 rows, V vocabulary, S stop ids.
"""

import torch
from torch import Tensor


def counts_before(counts: Tensor, drafts: Tensor) -> Tensor:
    """How often the output holds each token, as each row of a verification sees it.

    Args:
        counts: [B, V] int32, of the committed output.
        drafts: [B, K] int64; ids outside the vocabulary are never accepted and count nowhere.

    Returns:
        [B, K+1, V] int32, new storage. Does not synchronise.
    """
    vocab, rows = counts.shape[1], drafts.shape[1] + 1
    found = counts.unsqueeze(1).repeat(1, rows, 1)
    if rows == 1:
        return found
    row = torch.arange(rows, device=drafts.device)
    inside = (drafts >= 0) & (drafts < vocab)
    once = ((row.unsqueeze(1) > row[:-1]) & inside.unsqueeze(1)).to(counts.dtype)
    index = drafts.clamp(0, vocab - 1).unsqueeze(1).expand(-1, rows, -1)
    return found.scatter_add_(2, index, once)


def penalise(
    logits: Tensor,
    *,
    prompt: Tensor,
    counts: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    bias: Tensor,
) -> Tensor:
    """Penalties and bias.

    Args:
        logits: [B, W, V], any floating dtype.
        prompt: [B, V] bool, tokens that the prompt holds.
        counts: [B, W, V] int32, see `counts_before`.
        presence, frequency, repetition: [B] float32; 0, 0 and 1 change no logit.
        bias: [B, V] float32.

    Returns:
        [B, W, V] in float64 for float64 logits, else float32; new storage. Does not synchronise.
    """
    dtype = logits.dtype if logits.dtype == torch.float64 else torch.float32
    logits = logits.to(dtype)
    presence, frequency, repetition = (t.to(dtype).view(-1, 1, 1) for t in (presence, frequency, repetition))
    emitted = counts > 0
    factor = torch.where(prompt.unsqueeze(1) | emitted, repetition, 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - (frequency * counts + presence * emitted) + bias.unsqueeze(1)


def forbid_stops(logits: Tensor, *, stops: Tensor, emitted: Tensor, minimum: Tensor) -> Tensor:
    """Forbids stop ids in rows before which fewer than ``minimum`` tokens were emitted.

    Args:
        logits: [B, W, V], any floating dtype.
        stops: [B, S] int64; ids outside the vocabulary (padding) forbid nothing.
        emitted: [B] int64, tokens emitted before row 0; row j has j more.
        minimum: [B] int64.

    Returns:
        [B, W, V], new storage. Does not synchronise.
    """
    lanes, rows, vocab = logits.shape
    inside = (stops >= 0) & (stops < vocab)
    named = torch.zeros(lanes, vocab, dtype=torch.int32, device=logits.device)
    named.scatter_add_(1, stops.clamp(0, vocab - 1), inside.to(torch.int32))
    early = emitted.unsqueeze(1) + torch.arange(rows, device=logits.device) < minimum.unsqueeze(1)
    banned = (named > 0).unsqueeze(1) & early.unsqueeze(2)
    # added, not written over: a NaN must stay visible
    return logits + torch.where(banned, -torch.inf, 0.0)
