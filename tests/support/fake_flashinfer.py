"""``flashinfer.sampling`` on the CPU: the literal oracle of the chain kernel and plain renormalisation, as strict as the kernels.

Arguments that the real functions would refuse, copy or read out of bounds are assertion errors here.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import sampling_oracle as oracle
import torch
from torch import Tensor

from specdec.sampling.flashinfer import FlashInferSampler


def chain_speculative_sampling(
    draft_probs: Tensor,
    draft_token_ids: Tensor,
    target_probs: Tensor,
    accepted: Tensor,
    emitted: Tensor,
    deterministic: bool = False,
    *,
    seed: Tensor,
    offset: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """One row only: its stream is subsequence 0."""
    batch, drafts, vocab = draft_probs.shape
    assert batch == 1 and deterministic
    assert draft_token_ids.shape == (1, drafts) and target_probs.shape == (1, drafts + 1, vocab)
    assert accepted.shape == emitted.shape == (1,) and accepted.dtype == emitted.dtype == torch.int32
    assert draft_token_ids.dtype == torch.int32 and draft_probs.dtype == target_probs.dtype == torch.float32
    assert seed.shape == offset.shape == (1,) and seed.dtype == offset.dtype == torch.int64
    for tensor in (draft_probs, draft_token_ids, target_probs, seed, offset):
        assert tensor.is_contiguous()
    ids = draft_token_ids[0].tolist()
    assert all(0 <= token < vocab for token in ids)
    u = oracle.draws(int(seed) % 2**64, int(offset) % 2**64, drafts + 2)
    target = target_probs[0].numpy()
    with np.errstate(invalid="ignore"):
        tokens, matched, prefix, _ = oracle.chain(target, draft_probs[0].numpy(), ids, u)
    accepted += matched
    emitted += prefix
    return torch.tensor([tokens], dtype=torch.int32), accepted, emitted


def top_k_renorm_probs(probs: Tensor, top_k: Tensor, is_deterministic: bool = False) -> Tensor:
    """Entries from the k-th greatest on, divided by their sum."""
    rows, vocab = probs.shape
    assert is_deterministic and probs.is_contiguous() and top_k.dtype == torch.int32 and top_k.shape == (rows,)
    assert bool((top_k > 0).all())
    kth = probs.sort(-1, descending=True).values.gather(1, top_k.clamp(max=vocab).long().unsqueeze(1) - 1)
    return _normalised(torch.where(probs >= kth, probs, 0.0))


def top_p_renorm_probs(probs: Tensor, top_p: Tensor, is_deterministic: bool = False) -> Tensor:
    """Entries from the one on at which the descending sum reaches its share, divided by their sum."""
    rows, vocab = probs.shape
    assert is_deterministic and probs.is_contiguous() and top_p.dtype == torch.float32 and top_p.shape == (rows,)
    descending = probs.double().sort(-1, descending=True).values
    sums = descending.cumsum(-1)
    reached = (sums < top_p.double().unsqueeze(1) * sums[:, -1:]).sum(-1, keepdim=True).clamp(max=vocab - 1)
    return _normalised(torch.where(probs >= descending.gather(1, reached), probs, 0.0))


def _normalised(probs: Tensor) -> Tensor:
    sums = probs.double().sum(-1, keepdim=True)
    return torch.threshold((probs / sums.clamp(min=1e-8)).float(), 2.0**-126, 0.0)


def module() -> ModuleType:
    """The functions above as a module."""
    found = ModuleType("flashinfer.sampling")
    for function in (chain_speculative_sampling, top_k_renorm_probs, top_p_renorm_probs):
        setattr(found, function.__name__, function)
    return found


class OneStream(FlashInferSampler):
    """Rows one after another, where there are no streams."""

    def _lanes(self, lanes, row):
        return torch.cat([row(lane) for lane in range(lanes)])


def fake_sampler(patch: pytest.MonkeyPatch, kernels: ModuleType | None = None) -> FlashInferSampler:
    """The sampler on the CPU over the fake kernels, or others."""
    found = module() if kernels is None else kernels
    patch.setattr("specdec.sampling.flashinfer.flashinfer_sampling", lambda: found)
    return OneStream(torch.device("cpu"))
