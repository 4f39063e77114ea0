"""Draws drafts under the law that is kept for them; owned by the core, so that no drafter can keep another one."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from specdec.sampling.chain import sample
from specdec.sampling.law import LawParams, law


@frozen(kw_only=True, eq=False)
class ChainProposer:
    """Draws drafts and keeps the law they were drawn from. tokens: [B, K] int64; probs: [B, K, V] float32."""

    params: LawParams
    uniforms: Tensor
    tokens: Tensor
    probs: Tensor
    vocab_size: int

    def draw(self, depth: int, logits: Tensor) -> Tensor:
        """See ``Proposer.draw``. A row without mass (NaN logits) proposes token 0 under the point mass at 0, like a copied
        token: the emitted law stays the target's."""
        probs = torch.nan_to_num(self.law(logits), nan=0.0)
        drawn = self.choose(depth, logits, probs)
        # drawing fails only without mass; a stored law of zeros would let the token pass whatever the target thinks of it
        probs[:, 0] += drawn < 0
        token = drawn.clamp(min=0)
        self.probs[:, depth] = probs[:, : self.vocab_size]
        self.tokens[:, depth] = token
        return token

    def law(self, logits: Tensor) -> Tensor:
        """What drafts are drawn from, [B, at least V] float32; rows without mass are NaN. logits: [B, at least V]."""
        return law(logits, self.params, self.vocab_size)

    def choose(self, depth: int, logits: Tensor, probs: Tensor) -> Tensor:
        """Tokens [B] int64 drawn from ``probs``, the law of ``logits`` with NaN as 0; −1 for a row without mass."""
        return sample(probs, self.uniforms[:, depth])

    def place(self, depth: int, tokens: Tensor) -> None:
        """See ``Proposer.place``. An id that is no token has no mass: it will be rejected, and the correction is the target's."""
        safe = tokens.clamp(0, self.vocab_size - 1)
        self.probs[:, depth] = 0.0
        self.probs[:, depth].scatter_(1, safe.unsqueeze(1), (safe == tokens).to(self.probs.dtype).unsqueeze(1))
        self.tokens[:, depth] = tokens
