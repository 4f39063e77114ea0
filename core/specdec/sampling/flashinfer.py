"""FlashInfer's kernels as the sampler of a CUDA device.

Draws and verifications are one-row calls of ``chain_speculative_sampling``: row 0 of a call reads subsequence 0 of its stream, so
that a request's words are the same in every lane. The rows of a batch run on streams that fork from the caller's and join it
again, in a captured graph as parallel branches; one row is one thread block, so together they cost about one call.

A call has one K. Lanes with fewer drafts are told to it exactly: see ``specdec.sampling.chain``.

FlashInfer is imported by the first sampler that is made. It compiles its sampling module once for a machine and device, into
``.cache/flashinfer`` below the home folder or below ``FLASHINFER_WORKSPACE_BASE``.

Letters: B lanes, K draft tokens, V vocabulary, R rows of a law.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib import metadata
from types import ModuleType

import torch
from packaging.version import Version
from torch import Tensor

from specdec.errors import DeviceError
from specdec.sampling.chain import TINY, ChainOutcome, check_chain
from specdec.sampling.law import LawParams, law, unpadded
from specdec.sampling.philox import TARGET_DOMAIN
from specdec.sampling.sampler import RoundWords

__all__ = ["DUMMY_COLUMNS", "VERSION_FLOOR", "FlashInferSampler", "flashinfer_sampling"]

VERSION_FLOOR = "0.7.4"
"""First release whose kernels are those that ``specdec.sampling.chain`` reproduces."""
DUMMY_COLUMNS = 4
"""Columns without mass behind the vocabulary: a whole group of the kernel's loads, which leaves its layout as it is."""
# From here on thresholds are found by radix selection. For smaller vocabularies FlashInfer searches them with dozens of block
# reductions one after another, slower than the plain operations.
_RADIX_VOCABULARY = 2048
# Result of `_known_chain` on an H200 with FlashInfer 0.7.4.
_KNOWN = [2730, 4096, 5375, 2, 2]
# More streams than this would not run side by side, and torch has 32 to give away.
_STREAMS = 16


def flashinfer_sampling() -> ModuleType:
    """The module ``flashinfer.sampling``.

    Raises DeviceError, with what to install, if FlashInfer is missing, older than ``VERSION_FLOOR`` or cannot be imported.
    """
    cure = f"install it with: pip install 'specdec-core[cuda]' (flashinfer-python {VERSION_FLOOR} or later)"
    try:
        found = metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError as error:
        raise DeviceError(f"FlashInfer is not installed, and its kernels sample on a GPU; {cure}") from error
    if Version(found) < Version(VERSION_FLOOR):
        raise DeviceError(f"FlashInfer {found} is too old: its chain kernel has other draws and seeds; {cure}")
    try:
        return importlib.import_module("flashinfer.sampling")
    except Exception as error:  # whatever its own dependencies raise
        raise DeviceError(
            f"FlashInfer {found} cannot be imported: {type(error).__name__}: {error}; complete its installation, or {cure}"
        ) from error


class FlashInferSampler:
    """See ``Sampler``. Rows of one call after another share nothing, so a lane's results do not depend on its neighbours."""

    name = "flashinfer"
    note: str | None = None

    def __init__(self, device: torch.device) -> None:
        """device: a CUDA device. Imports FlashInfer, builds its kernels where that has not happened yet, and tries them on a
        chain with a known result. Synchronises.

        Raises DeviceError if FlashInfer is missing, too old, cannot be built, or gives another result.
        """
        self.device = device
        self._kernels = flashinfer_sampling()
        self._streams: list[torch.cuda.Stream] = []
        # a row without drafts has no counts to add, so all such rows share these; they stay 0
        self._nothing = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._no_tokens = torch.empty((1, 0), dtype=torch.int32, device=self.device)
        try:
            found = self._known_chain()
        except Exception as error:
            reason = str(error).strip().splitlines()
            raise DeviceError(
                f"FlashInfer's sampling kernels cannot be built or run on {self.device}: {type(error).__name__}: "
                f"{reason[0] if reason else 'no message'}; it needs nvcc and ninja, and FLASHINFER_WORKSPACE_BASE to name a "
                "folder that can be written"
            ) from error
        if found != _KNOWN:
            raise DeviceError(
                f"FlashInfer's chain kernel gives {found} on {self.device} where {_KNOWN} is known; "
                "see 'specdec qualify', and sample with the reference until then"
            )

    # --- law -------------------------------------------------------------------------------------------------------------------

    def law(self, logits: Tensor, params: LawParams, vocab_size: int | None = None) -> Tensor:
        """See ``specdec.sampling.law.law``, which does it for float64 logits and for vocabularies below 2048 ids. Thresholds and
        sums of wider ones are FlashInfer's deterministic ones: the same ids are kept, except where a sum is within rounding of
        the threshold, and probabilities are equal up to rounding. No row depends on another one."""
        kept = unpadded(logits, vocab_size)
        if logits.dtype == torch.float64 or kept < _RADIX_VOCABULARY:
            return law(logits, params, vocab_size)
        lanes, vocab = logits.shape[0], logits.shape[-1]
        rows = logits.reshape(lanes, -1, vocab)[..., :kept].to(torch.float32)
        per_lane = rows.shape[1]
        temperature, min_p, greedy = (t.view(lanes, 1, 1) for t in (params.temperature, params.min_p, params.greedy))

        # The greatest entry becomes 1, and 2 in greedy lanes, whose floor nothing else then reaches.
        greatest, best = rows.max(-1, keepdim=True)
        chosen = greedy.to(torch.float32).expand_as(best)
        e = (rows - greatest).div_(temperature).exp_().scatter_add_(-1, best, chosen)
        e = torch.where(e >= torch.where(greedy, 2.0, min_p), e, 0.0)
        # Off is a k of the whole vocabulary, and a mass that is never reached.
        top_k = torch.where(params.top_k == 0, kept, params.top_k.clamp_max(kept))
        top_p = torch.where(params.top_p < 1, params.top_p, 2.0)
        probs = self._kernels.top_k_renorm_probs(
            e.view(-1, kept), _by_row(top_k.to(torch.int32), per_lane), is_deterministic=True
        )
        probs = self._kernels.top_p_renorm_probs(probs, _by_row(top_p, per_lane), is_deterministic=True)
        # The kernels make zeros of a row without a law. Infinity or NaN minus itself is NaN, everything else 0.
        probs = probs.view(rows.shape).add_(greatest - greatest)
        return (probs if kept == vocab else torch.constant_pad_nd(probs, (0, vocab - kept))).view(logits.shape)

    # --- draws and chains ------------------------------------------------------------------------------------------------------

    def draw(self, probs: Tensor, words: RoundWords, domain: int, index: int) -> Tensor:
        """See ``Sampler.draw``: the bonus row of a chain without drafts."""
        if probs.dtype != torch.float32 or probs.dim() != 2:
            raise ValueError(f"draw needs float32 probs [B, V], got {probs.dtype} {tuple(probs.shape)}")
        rows = probs.contiguous().unsqueeze(1).unsqueeze(1)
        no_draft = rows.new_empty((1, 0, probs.shape[-1]))
        seed, offset = words.seed, words.numbers[domain, :, index]

        def row(lane: int) -> Tensor:
            tokens, _, _ = self._kernels.chain_speculative_sampling(
                no_draft,
                self._no_tokens,
                rows[lane],
                self._nothing,
                self._nothing,
                deterministic=True,
                seed=seed[lane : lane + 1],
                offset=offset[lane : lane + 1],
            )
            return tokens

        return self._lanes(probs.shape[0], row).view(-1).to(torch.int64)

    def verify(
        self,
        draft_tokens: Tensor,
        draft_probs: Tensor,
        target_probs: Tensor,
        words: RoundWords,
        draft_counts: Tensor | None = None,
    ) -> ChainOutcome:
        """See ``Sampler.verify``."""
        check_chain(draft_tokens, draft_probs, target_probs, draft_counts)
        lanes, drafts = draft_tokens.shape
        vocab = target_probs.shape[-1]
        if drafts == 0:
            return ChainOutcome.of_draw(self.draw(target_probs[:, 0], words, TARGET_DOMAIN, 0))
        counts = torch.full_like(draft_tokens[:, 0], drafts) if draft_counts is None else draft_counts
        in_range = draft_tokens.clamp(0, vocab - 1) == draft_tokens
        counted = torch.arange(drafts, device=draft_tokens.device) < counts.unsqueeze(-1)
        # ids that must fail become the first dummy column; drafts beyond the count leave the whole target row
        tokens = torch.where(in_range & counted, draft_tokens, vocab).to(torch.int32)
        p = _widened(torch.where(counted.unsqueeze(-1), draft_probs, 0.0))
        q = _widened(target_probs)
        counters = torch.zeros((2, lanes), dtype=torch.int32, device=draft_tokens.device)
        seed, offset = words.seed, words.first[TARGET_DOMAIN]

        def row(lane: int) -> Tensor:
            one = slice(lane, lane + 1)
            found, _, _ = self._kernels.chain_speculative_sampling(
                p[one],
                tokens[one],
                q[one],
                counters[0, one],
                counters[1, one],
                deterministic=True,
                seed=seed[one],
                offset=offset[one],
            )
            return found

        emitted = self._lanes(lanes, row).to(torch.int64)
        matched, accepted = counters.to(torch.int64).unbind()
        at = accepted.clamp_max(drafts - 1).unsqueeze(-1)
        deciding = at.unsqueeze(-1).expand(lanes, 1, vocab)
        residual = target_probs.gather(1, deciding) - draft_probs.gather(1, deciding)
        # The comparison is False for NaN, which amax keeps.
        empty = (residual.amax(-1).squeeze(-1) < TINY) & (accepted < counts) & in_range.gather(1, at).squeeze(-1)
        used = drafts + 1 + (accepted < drafts).to(torch.int64)
        return ChainOutcome(tokens=emitted, accepted=accepted, matched=matched, words=used, empty=empty)

    def _lanes(self, lanes: int, row: Callable[[int], Tensor]) -> Tensor:
        """Rows [1, ...] of all lanes [B, ...], made on forked streams that have joined the current one."""
        if lanes == 1:
            return row(0)
        main = torch.cuda.current_stream(self.device)
        while len(self._streams) < min(lanes, _STREAMS) - 1:
            self._streams.append(torch.cuda.Stream(self.device))
        side = self._streams[: lanes - 1]
        for stream in side:
            stream.wait_stream(main)
        rows = []
        for lane in range(lanes):
            with torch.cuda.stream([main, *side][lane % (len(side) + 1)]):
                rows.append(row(lane))
        # what side streams allocated is written again only after a later fork, which waits for the reader on this stream
        for stream in side:
            main.wait_stream(stream)
        return torch.cat(rows)

    def _known_chain(self) -> list[int]:
        """Tokens, matched and accepted count of two drafts over 8192 ids."""
        vocab = 8192
        hashed = (torch.arange(vocab, device=self.device) * 2654435761) % (1 << 32)
        a = ((hashed >> 16).to(torch.float32) + 1) / 2.0**30
        draft, target = torch.stack((a.flip(0), a)).unsqueeze(0), torch.stack((a, a * 0.5, a)).unsqueeze(0)
        tokens = torch.tensor([[vocab // 3, vocab // 2]], dtype=torch.int32, device=self.device)
        counters = torch.zeros((2, 1), dtype=torch.int32, device=self.device)
        seed = torch.ones(1, dtype=torch.int64, device=self.device)
        found, _, _ = self._kernels.chain_speculative_sampling(
            draft, tokens, target, counters[0], counters[1], deterministic=True, seed=seed, offset=seed + 4
        )
        return [*found[0].tolist(), *counters[:, 0].tolist()]


def _by_row(values: Tensor, per_lane: int) -> Tensor:
    """[R] from one value for each lane, [B]."""
    return values.unsqueeze(-1).expand(-1, per_lane).reshape(-1)


def _widened(probs: Tensor) -> Tensor:
    """[..., V + DUMMY_COLUMNS], the new columns without mass."""
    return torch.constant_pad_nd(probs, (0, DUMMY_COLUMNS))
