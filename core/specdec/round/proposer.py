"""Draws drafts under the law that is kept for them; owned by the core, so that no drafter can keep another one."""

from __future__ import annotations

import torch
from attrs import field, frozen
from torch import Tensor

from specdec.errors import PluginError
from specdec.places import method_of
from specdec.round.contract import expect
from specdec.round.copies import Copies
from specdec.sampling.law import LawParams
from specdec.sampling.philox import DRAFT_DOMAIN
from specdec.sampling.sampler import RoundWords, Sampler


@frozen(kw_only=True, eq=False)
class ChainProposer:
    """Draws drafts and keeps the law they were drawn from. tokens: [B, K] int64; probs: [B, K, V] float32.

    copies: take the place of whatever the drafter proposes; None in rounds that take none. drafter: whose proposals these are,
    for messages. drawn: depths that were proposed so far.
    """

    params: LawParams
    sampler: Sampler
    words: RoundWords
    tokens: Tensor
    probs: Tensor
    vocab_size: int
    copies: Copies | None = None
    drafter: object = None
    drawn: list[int] = field(factory=list)

    def draw(self, depth: int, logits: Tensor) -> Tensor:
        """See ``Proposer.draw``. A row without mass (NaN logits) proposes token 0 under the point mass at 0, like a copied
        token: the emitted law stays the target's. Raises PluginError for logits of another shape or a depth that is not there."""
        self._expect(depth, logits, (self.vocab_size,))
        probs = torch.nan_to_num(self.law(logits), nan=0.0)
        drawn = self.choose(depth, logits, probs)
        # drawing fails only without mass; a stored law of zeros would let the token pass whatever the target thinks of it
        probs[:, 0] += drawn < 0
        return self._keep(depth, drawn.clamp(min=0), probs[:, : self.vocab_size])

    def law(self, logits: Tensor) -> Tensor:
        """What drafts are drawn from, [B, at least V] float32; rows without mass are NaN. logits: [B, at least V]."""
        return self.sampler.law(logits, self.params, self.vocab_size)

    def choose(self, depth: int, logits: Tensor, probs: Tensor) -> Tensor:
        """Tokens [B] int64 drawn from ``probs``, the law of ``logits`` with NaN as 0; −1 for a row without mass."""
        return self.sampler.draw(probs, self.words, DRAFT_DOMAIN, depth)

    def place(self, depth: int, tokens: Tensor) -> Tensor:
        """See ``Proposer.place``. An id that is no token has no mass: it will be rejected, and the correction is the target's.
        Raises PluginError as ``draw``."""
        self._expect(depth, tokens, ())
        # nothing can be embedded for an id that is no token
        return self._keep(depth, tokens, self._point_mass(tokens)).clamp(0, self.vocab_size - 1)

    def _keep(self, depth: int, tokens: Tensor, probs: Tensor) -> Tensor:
        """Stores proposals [B] and their law [B, V], copies first. Returns what the drafter goes on from, [B]."""
        if self.copies is not None:
            copied, given = self.copies.at(depth)
            tokens = torch.where(copied, given, tokens)
            probs = torch.where(copied.unsqueeze(1), self._point_mass(given), probs)
        self.tokens[:, depth] = tokens
        self.probs[:, depth] = probs
        return tokens if self.copies is None else tokens.clamp(0, self.vocab_size - 1)

    def _expect(self, depth: int, given: Tensor, row: tuple[int, ...]) -> None:
        """Checks one proposal and notes its depth. given: [B, *row]; no row for tokens."""
        lanes, drafts = self.tokens.shape
        if depth not in range(drafts):
            raise PluginError(
                f"{method_of(self.drafter, 'propose')} proposes depth {depth} where draft_tokens is {drafts}; depths are "
                "those of range(draft_tokens)"
            )
        expect(
            given,
            (lanes, *row),
            "B, V" if row else "B",
            of=self.drafter,
            method="propose",
            what=f"proposes depth {depth} from {'logits' if row else 'tokens'}",
            integer=not row,
            padded=bool(row),
        )
        self.drawn.append(depth)

    def _point_mass(self, tokens: Tensor) -> Tensor:
        """[B, V] float32; all zero for an id that is no token."""
        ids = torch.arange(self.vocab_size, device=tokens.device)
        return (ids == tokens.unsqueeze(1)).to(self.probs.dtype)
