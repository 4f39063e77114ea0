"""Proposers of block drafters: the request's temperature, no filters, and the law that was drawn from kept as always.

Any law may propose, for verification is exact under each; filters would cost time at every depth. One lane draws from the whole
vocabulary by Gumbel noise, a word for every token. Several lanes keep the most probable tokens, renormalised, and draw among them
with one word, so that a batch needs no noise of the vocabulary's size. The two draw different tokens from one seed.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from specdec.ops.norms import accumulate_dtype
from specdec.round.proposer import ChainProposer

#: Tokens that a bounded law keeps.
BOUND = 64
_GREATEST_DENORMAL = 2.0**-126 - 2.0**-149


def _rows(logits: Tensor, vocab_size: int) -> Tensor:
    """Logits of real ids, [B, V] in the accumulate dtype."""
    return logits[:, :vocab_size].to(accumulate_dtype(logits.dtype))


@frozen(kw_only=True, eq=False)
class GumbelProposer(ChainProposer):
    """Draws from the full softmax. noise: [B, K, V] float32, see ``draft_noise``; ``words`` is not read."""

    noise: Tensor

    def law(self, logits: Tensor) -> Tensor:
        """Softmax of logits over temperature, [B, V] float32; the point mass at the greatest logit for greedy lanes, the lowest
        id among equals. A row without a finite greatest logit is NaN."""
        rows = self._shifted(logits)
        e = rows.exp().to(torch.float32)
        probs = torch.threshold(e / e.sum(-1, keepdim=True), _GREATEST_DENORMAL, 0.0)
        greatest = torch.zeros_like(probs).scatter_(1, rows.argmax(-1, keepdim=True), 1.0)
        return torch.where(self.params.greedy.unsqueeze(1) & ~probs.isnan(), greatest, probs)

    def choose(self, depth: int, logits: Tensor, probs: Tensor) -> Tensor:
        """The token of greatest logit over temperature plus noise."""
        noise = self.noise[:, depth].masked_fill(self.params.greedy.unsqueeze(1), 0.0)
        drawn = (self._shifted(logits) + noise).argmax(-1)
        return torch.where(probs.amax(-1) > 0, drawn, -1)

    def _shifted(self, logits: Tensor) -> Tensor:
        """(logit − greatest) / temperature, [B, V] float64 for float64 logits, else float32."""
        rows = _rows(logits, self.vocab_size)
        return (rows - rows.amax(-1, keepdim=True)) / self.params.temperature.unsqueeze(1)


@frozen(kw_only=True, eq=False)
class BoundedProposer(ChainProposer):
    """Draws from the ``bound`` most probable tokens, the lowest ids among equals, with the word of the depth."""

    bound: int = BOUND

    def law(self, logits: Tensor) -> Tensor:
        """Softmax over the tokens that are kept, 0 elsewhere, [B, V] float32; greedy lanes and rows without a finite greatest
        logit as for ``GumbelProposer``."""
        rows = _rows(logits, self.vocab_size)
        descending, order = rows.sort(dim=-1, descending=True, stable=True)
        best, ids = descending[:, : self.bound], order[:, : self.bound]
        # the greatest by itself: where NaN sorts to differs, and it must not look healthy
        greatest = rows.amax(-1, keepdim=True)
        e = ((best - greatest) / self.params.temperature.unsqueeze(1)).exp().to(torch.float32)
        # 0 · NaN is NaN, and so is 0 · inf
        first = e[:, :1] * torch.zeros_like(e)
        first[:, 0] += 1.0
        e = torch.where(self.params.greedy.unsqueeze(1), first, e)
        probs = torch.threshold(e / e.sum(-1, keepdim=True), _GREATEST_DENORMAL, 0.0)
        return torch.zeros_like(rows, dtype=torch.float32).scatter_(1, ids, probs)
