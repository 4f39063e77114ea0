"""Who samples in a round: the words a round owns, and the law, draws and verification of one device.

``ReferenceSampler`` is plain torch and runs anywhere; ``specdec.sampling.flashinfer`` has the one for CUDA devices. Both use the
same words in the same way, so that equal probabilities give equal tokens on either.
"""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import torch
from attrs import field, frozen
from torch import Tensor

from specdec.errors import SpecdecError, UsageError
from specdec.preparation import SAMPLERS
from specdec.sampling.chain import ChainOutcome, chain_verify, sample
from specdec.sampling.law import LawParams, law
from specdec.sampling.philox import TARGET_DOMAIN, philox_words, round_offsets, uniforms

__all__ = ["ReferenceSampler", "RoundWords", "Sampler", "sampler_for"]


@frozen(kw_only=True, eq=False)
class RoundWords:
    """The random words of one round: K_max + 2 of every lane in each domain. What a sampler does not need is not computed."""

    seed: Tensor = field()
    """[B] int64, each request's seed."""
    first: Tensor = field()
    """[2, B] int64, number of the round's first word; rows are TARGET_DOMAIN and DRAFT_DOMAIN."""
    count: int = field()
    """Words per lane and domain, K_max + 2."""

    @classmethod
    def of(cls, seed: Tensor, consumed: Tensor, max_draft_tokens: int) -> RoundWords:
        """Words of the round at ``consumed`` tokens.

        Args:
            seed, consumed: [B] int64; see ``round_offsets``.
            max_draft_tokens: the recipe's maximum (K_max), the same in every round of a request.
        """
        return cls(seed=seed, first=round_offsets(consumed, max_draft_tokens), count=max_draft_tokens + 2)

    def uniforms(self, domain: int) -> Tensor:
        """[B, K_max + 2] float32 in (0, 1], the words of a domain as uniforms. Evaluates Philox once for both domains."""
        return self._uniforms[domain]

    @cached_property
    def numbers(self) -> Tensor:
        """[2, B, K_max + 2] int64, number of every word in the request's stream."""
        return self.first.unsqueeze(-1) + torch.arange(self.count, device=self.first.device)

    @cached_property
    def _uniforms(self) -> Tensor:
        return uniforms(philox_words(self.seed.expand_as(self.first), self.first, self.count))


class Sampler(Protocol):
    """Sampling on one device. Every method can be captured in a CUDA graph: no host synchronisation, no generator, results in new
    storage, inputs unchanged."""

    @property
    def name(self) -> str:
        """One of ``SAMPLERS``."""
        ...

    @property
    def note(self) -> str | None:
        """What a user should know about the choice of this sampler, one line; None if there is nothing."""
        ...

    def law(self, logits: Tensor, params: LawParams, vocab_size: int | None = None) -> Tensor:
        """See ``specdec.sampling.law.law``."""
        ...

    def draw(self, probs: Tensor, words: RoundWords, domain: int, index: int) -> Tensor:
        """One token per lane with word ``index`` of a domain: [B] int64, −1 for a row without mass. probs: [B, V] float32; see
        ``specdec.sampling.chain.sample``."""
        ...

    def verify(
        self,
        draft_tokens: Tensor,
        draft_probs: Tensor,
        target_probs: Tensor,
        words: RoundWords,
        draft_counts: Tensor | None = None,
    ) -> ChainOutcome:
        """See ``specdec.sampling.chain.chain_verify``; its uniforms are those of the target domain."""
        ...


@frozen(kw_only=True)
class ReferenceSampler:
    """Plain torch operations, the definition of what every sampler does."""

    name: str = "reference"
    note: str | None = None

    def law(self, logits: Tensor, params: LawParams, vocab_size: int | None = None) -> Tensor:
        """See ``Sampler.law``."""
        return law(logits, params, vocab_size)

    def draw(self, probs: Tensor, words: RoundWords, domain: int, index: int) -> Tensor:
        """See ``Sampler.draw``."""
        return sample(probs, words.uniforms(domain)[:, index])

    def verify(
        self,
        draft_tokens: Tensor,
        draft_probs: Tensor,
        target_probs: Tensor,
        words: RoundWords,
        draft_counts: Tensor | None = None,
    ) -> ChainOutcome:
        """See ``Sampler.verify``."""
        return chain_verify(draft_tokens, draft_probs, target_probs, words.uniforms(TARGET_DOMAIN), draft_counts)


def sampler_for(device: torch.device, requested: str = "auto") -> Sampler:
    """The sampler of a device. ``auto`` takes FlashInfer on CUDA devices where it works, and the reference elsewhere; on a CUDA
    device the reference's ``note`` then says what was missing.

    Builds FlashInfer's kernels on the first use of a machine (minutes) and tries them. For preparation, not for rounds.

    Raises:
        UsageError: for an unknown name, or FlashInfer on another device.
        SpecdecError: if FlashInfer was asked for and is missing, too old or does not work.
    """
    if requested not in SAMPLERS:
        raise UsageError(f"sampler is {requested!r}; allowed: {', '.join(SAMPLERS)}")
    if requested == "flashinfer" and device.type != "cuda":
        raise UsageError(f"sampler 'flashinfer' needs a CUDA device, this is {device}; take 'auto' or 'reference'")
    if requested == "reference" or device.type != "cuda":
        return ReferenceSampler()
    from specdec.sampling.flashinfer import FlashInferSampler

    try:
        return FlashInferSampler(device)
    except SpecdecError as error:
        if requested == "flashinfer":
            raise
        return ReferenceSampler(note=f"sampling runs as plain torch operations on {device}: {error}")
