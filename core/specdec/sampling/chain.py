"""Chain rejection sampling and one-draw sampling: FlashInfer's deterministic kernels as a tensor program.

A chain of draft tokens x_0 .. x_{K-1}, drawn from draft laws p_i, is judged against target laws q_i:

    prefix      x_i is accepted while u * p_i[x_i] < q_i[x_i], that is with probability min(1, q/p)
    correction  at the first rejection the token comes from the positive residual max(q - p, 0)
    bonus       with everything accepted it comes from the target's row K

Tokens, counters and the words drawn equal those of `flashinfer.sampling.chain_speculative_sampling` (0.7.4,
deterministic, 1024 threads per row) for one-row calls, bit for bit: `_draw` adds in the kernel's order. The kernel is
compiled with denormals flushed to zero and so are differences and accept tests here. Probabilities below 2^-126 in the
inputs are the one thing that is not reproduced; `law` never produces them.

A call has one K for all lanes, as the kernel has, and so has its words: a lane with fewer drafts behaves as if every draft
from its count on were a token of probability 0 with an empty draft law. Such a draft always fails and leaves the whole target
row, which is the bonus law after `count` drafts, so the emitted law is that of the lane's own count. The kernel can be told
exactly that (one more group of columns without mass holds the token), where rows of different K would need kernels of their
own. So equal buffers give equal tokens on both, whatever the counts.

Everything is capturable: no host synchronisation, no shape that depends on data, no storage kept.

Letters: B lanes, K draft tokens, V vocabulary.
"""

import math

import torch
from attrs import evolve, field, frozen
from torch import Tensor

_WARP = 32
_THREADS = 1024  # per row and block on compute capability 8 and later
TINY = 2.0**-126
"""Smallest normal float32: what is below counts as 0."""
_BELOW_TINY = 2.0**-126 - 2.0**-149  # largest denormal


@frozen(kw_only=True, eq=False)
class ChainOutcome:
    """What one verification decided, per lane.

    With `a = accepted[b]`, lane b emits `tokens[b, : a + 1]`: the accepted drafts and one corrected or bonus token.
    """

    tokens: Tensor = field()
    """[B, K+1] int64: accepted drafts, then the corrected or bonus token, then -1."""
    accepted: Tensor = field()
    """[B] int64: length of the accepted prefix, 0 .. the lane's draft count."""
    matched: Tensor = field()
    """[B] int64: drafts that pass their own test, the first rejected one excluded; at least `accepted`. A statistic."""
    words: Tensor = field()
    """[B] int64: words of the lane's stream used: K + 1 with K accepted, K + 2 otherwise."""
    empty: Tensor = field()
    """[B] bool: a draft token in range was rejected and the residual has no mass, so that `tokens[b, a]` is -1. False
    if the deciding rows hold NaN: then -1 is a fault, not a law."""

    @classmethod
    def of_draw(cls, tokens: Tensor) -> "ChainOutcome":
        """Outcome with K = 0 of tokens [B] int64 that were drawn."""
        zero = torch.zeros_like(tokens)
        return cls(
            tokens=tokens.unsqueeze(-1),
            accepted=zero,
            matched=zero.clone(),
            words=zero + 1,
            empty=torch.zeros_like(tokens, dtype=torch.bool),
        )


def chain_verify(
    draft_tokens: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    uniforms: Tensor,
    draft_counts: Tensor | None = None,
) -> ChainOutcome:
    """Judge each lane's chain of drafts and draw the token that follows the accepted prefix.

    Word i decides draft i; after a rejection at a, words a + 1 .. K serve the `matched` statistic (the first of them is
    thrown away); word K + 1 draws the token, or word K if all K are accepted. The words are those of the call's K also in a
    lane with fewer drafts: see the module's docstring.

    Args:
        draft_tokens: [B, K] int64. An id outside 0 .. V - 1 is rejected like a token of target probability 0.
        draft_probs: [B, K, V] float32, the laws that the drafts were drawn from; a copied token has a point mass.
        target_probs: [B, K+1, V] float32; row i is the law after i accepted drafts.
        uniforms: [B, >= K+2] float32 in (0, 1]; further columns are not read.
        draft_counts: [B] int64 in 0 .. K, drafts of each lane; None means K everywhere. Columns from the count on are
            not read as drafts; row `count` of the target is the lane's bonus row.

    Returns:
        `ChainOutcome` in new storage. Inputs are not changed, K = 0 works. Does not synchronise.
        An empty residual gives -1 at `tokens[b, accepted[b]]` as in the kernel; see `resolve_empty`. A target row
        without mass (or all NaN) gives -1 too, also as bonus. A single NaN counts as probability 0 in the residual and
        as a rejection in the accept test.

    Raises:
        ValueError: if shapes or dtypes do not fit together.
    """
    lanes, drafts = draft_tokens.shape
    check_chain(draft_tokens, draft_probs, target_probs, draft_counts)
    if uniforms.dtype != torch.float32 or uniforms.shape[0] != lanes or uniforms.shape[1] < drafts + 2:
        raise ValueError(
            f"uniforms is {uniforms.dtype} {tuple(uniforms.shape)}; {drafts} draft tokens need float32 "
            f"[{lanes}, at least {drafts + 2}]"
        )
    vocab = target_probs.shape[-1]
    if drafts == 0:
        return ChainOutcome.of_draw(_draw(target_probs[:, 0], uniforms[:, 0]))

    columns = torch.arange(drafts + 1, device=draft_tokens.device)
    safe = draft_tokens.clamp(0, vocab - 1)
    in_range = safe == draft_tokens
    chosen = safe.unsqueeze(-1)
    p = draft_probs.gather(2, chosen).squeeze(-1)
    q = target_probs[:, :drafts].gather(2, chosen).squeeze(-1)
    # Row 0 holds the words of the prefix test, row 1 those of the statistic, which runs one word behind.
    windows = uniforms[:, : drafts + 1].unfold(1, drafts, 1)
    # The floor makes a denormal q fail, as it does in the kernel; a NaN fails the comparison.
    passed = ((windows * p.unsqueeze(1)).clamp_min(_BELOW_TINY) < q.unsqueeze(1)) & in_range.unsqueeze(1)
    if draft_counts is None:
        draft_counts = columns[-1:]  # [1], broadcasts over lanes
    else:
        passed = passed & (columns[:drafts] < draft_counts.unsqueeze(-1)).unsqueeze(1)
    prefix, statistic = passed.unbind(1)
    accepted = prefix.cumprod(-1).sum(-1)
    at = accepted.unsqueeze(-1)
    matched = accepted + (statistic & (columns[:drafts] > at)).sum(-1)
    rejected = accepted < draft_counts

    row = at.unsqueeze(-1).expand(lanes, 1, vocab)
    rejected_at = at.clamp_max(drafts - 1)
    residual = target_probs.gather(1, row).squeeze(1)
    proposal = draft_probs.gather(1, rejected_at.unsqueeze(-1).expand(lanes, 1, vocab)).squeeze(1)
    # With everything accepted the proposal counts as 0; a fill, because 0 * NaN would not be 0.
    residual = residual - proposal.masked_fill(~rejected.unsqueeze(-1), 0.0)
    last_word = drafts + (accepted < drafts).to(torch.int64)
    token = _draw(residual, uniforms.gather(1, last_word.unsqueeze(-1)).squeeze(-1))
    # The comparison is False for NaN, which amax keeps.
    empty = (residual.amax(-1) < TINY) & rejected & in_range.gather(1, rejected_at).squeeze(-1)

    following = torch.where(columns == at, token.unsqueeze(-1), -1)
    tokens = torch.where(columns < at, torch.constant_pad_nd(draft_tokens, (0, 1)), following)
    return ChainOutcome(tokens=tokens, accepted=accepted, matched=matched, words=last_word + 1, empty=empty)


def resolve_empty(outcome: ChainOutcome, draft_tokens: Tensor) -> ChainOutcome:
    """Put the rejected draft token where the residual is empty.

    Two normalised laws with q <= p everywhere are equal up to rounding, and equal laws accept with probability one. So
    the draft token is the right token of that position; the round just ends there without a bonus.

    Args:
        outcome: result of `chain_verify`.
        draft_tokens: [B, K] int64, those given to `chain_verify`.

    Returns:
        The outcome with other `tokens`; `accepted` and the counters stay. Every -1 with another cause (NaN, a target
        row without mass, a draft id out of range) stays -1 for the caller to report. Does not synchronise.
    """
    columns = torch.arange(outcome.tokens.shape[-1], device=draft_tokens.device)
    here = (columns == outcome.accepted.unsqueeze(-1)) & outcome.empty.unsqueeze(-1)
    return evolve(outcome, tokens=torch.where(here, torch.constant_pad_nd(draft_tokens, (0, 1)), outcome.tokens))


def sample(probs: Tensor, u: Tensor) -> Tensor:
    """One token per row: what `chain_verify` draws with K = 0.

    Args:
        probs: [..., V] float32; need not sum to one. Entries that are NaN, negative or below 2^-126 count as 0.
        u: [...] float32 in (0, 1].

    Returns:
        [...] int64 in 0 .. V - 1, or -1 for a row without mass; never a token of probability 0. New storage; does not
        synchronise.
    """
    if probs.dtype != torch.float32 or u.shape != probs.shape[:-1]:
        raise ValueError(
            f"sample needs float32 probs [..., V] and u [...], got probs {probs.dtype} {tuple(probs.shape)} "
            f"and u {tuple(u.shape)}"
        )
    return _draw(probs.reshape(-1, probs.shape[-1]), u.reshape(-1)).view(u.shape)


def _draw(weights: Tensor, u: Tensor) -> Tensor:
    """Inverse-transform draw from the positive part of each row, in the kernel's summation order.

    Args:
        weights: [R, V] float32; u: [R] float32.

    Returns:
        [R] int64, -1 for rows without mass.
    """
    rows, vocab = weights.shape
    # Layout of the kernel: token (tile i, thread t, item j) is (i * 1024 + t) * items + j. Only warps that hold
    # vocabulary are computed (the others add zeros, which is exact), rounded up to a power of two for the scan.
    items = math.gcd(4, vocab)
    tiles = -(-vocab // (_THREADS * items))
    warps = _THREADS // _WARP if tiles > 1 else 1 << (-(-vocab // (_WARP * items)) - 1).bit_length()
    length = tiles * warps * _WARP * items
    if length > vocab:
        weights = torch.constant_pad_nd(weights, (0, length - vocab))
    weights = weights.reshape(rows, tiles, warps, _WARP, items)
    positive = weights >= TINY  # False for NaN and for what the kernel flushes
    weights = torch.where(positive, weights, 0.0)

    # Three sums per thread: its items in order (for the scan), as a tree (tile totals), in order over all tiles (mass).
    item = weights.unbind(-1)
    running = [item[0]]
    for value in item[1:]:
        running.append(running[-1] + value)
    threads = [running[-1]]
    if items == 4:
        threads.append(running[1] + (item[2] + item[3]))
    if tiles > 1:
        per_tile = [values.unbind(1) for values in item]
        mass = torch.zeros_like(per_tile[0][0])
        for i in range(tiles):
            for values in per_tile:
                mass = mass + values[i]
        threads.append(mass.unsqueeze(1))
    # All kinds go through the warp tree together; the scan is of use for the first `tiles` rows only.
    lanes, warp_sums = _exclusive_scan(torch.cat(threads, 1) if len(threads) > 1 else threads[0])
    block_sums, *rest = warp_sums.unbind(-1)
    for value in rest:
        block_sums = block_sums + value
    totals = block_sums[:, tiles : 2 * tiles] if items == 4 else block_sums[:, :tiles]
    u = (u * (block_sums[:, -1] if tiles > 1 else block_sums[:, 0])).unsqueeze(-1)

    # Inclusive scan over the tile, grouped as (warp + lane) + own.
    before = lanes[:, :tiles] + _exclusive_scan(warp_sums[:, :tiles])[0].unsqueeze(-1)
    own = torch.stack(running, -1) if items > 1 else running[0].unsqueeze(-1)
    scan = before.unsqueeze(-1) + own
    # Only the first tile whose running total exceeds u is searched; later tiles are not even visited.
    if tiles > 1:
        running_totals = [torch.zeros_like(totals[:, 0])]
        for total in totals.unbind(1):
            running_totals.append(running_totals[-1] + total)
        ends = torch.stack(running_totals, 1)
        starts, totals = ends[:, :-1], ends[:, 1:]
        scan = scan + starts[:, :, None, None, None]
        visited = starts <= u
        positive = positive & visited[:, :, None, None, None]
        u = torch.where(visited, u, math.inf)
    u = torch.where(totals > u, u, math.inf)

    # Smallest valid token beyond u, else the largest valid one visited, else -1, by one maximum: hits are mirrored
    # into length + 1 .. 2 * length, where the smallest token is the largest number.
    ids = torch.arange(length, device=weights.device).view(scan.shape[1:])
    found = torch.where(scan > u[:, :, None, None, None], 2 * length - ids, ids)
    best = torch.where(positive, found, -1).flatten(1).amax(-1)
    return torch.minimum(best, 2 * length - best)


def _exclusive_scan(values: Tensor) -> tuple[Tensor, Tensor]:
    """Blelloch's exclusive scan over the last dimension, whose size is a power of two; two levels per step.

    The up-sweep is the balanced tree of neighbours that the kernel's warp reduction is as well, so its root is the
    reduction. Returns (exclusive [..., n], root [...]).
    """
    n = values.shape[-1]
    if n == 1:
        return torch.zeros_like(values), values.squeeze(-1)
    if n == 2:
        left, right = values.unbind(-1)
        return torch.stack((torch.zeros_like(left), left), -1), left + right
    a, b, c, d = values.unflatten(-1, (n // 4, 4)).unbind(-1)
    pair = a + b
    parent, root = _exclusive_scan(pair + (c + d))
    third = parent + pair
    return torch.stack((parent, parent + a, third, third + c), -1).flatten(-2), root


def check_chain(draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, draft_counts: Tensor | None) -> None:
    """Raises ValueError if shapes or dtypes of a verification do not fit together; see `chain_verify`."""
    lanes, drafts = draft_tokens.shape
    vocab = target_probs.shape[-1]
    wanted: dict[str, tuple[Tensor, tuple[int, ...], torch.dtype]] = {
        "draft_probs": (draft_probs, (lanes, drafts, vocab), torch.float32),
        "target_probs": (target_probs, (lanes, drafts + 1, vocab), torch.float32),
    }
    if draft_counts is not None:
        wanted["draft_counts"] = (draft_counts, (lanes,), torch.int64)
    for name, (tensor, shape, dtype) in wanted.items():
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}; draft_tokens {tuple(draft_tokens.shape)} and "
                f"vocabulary {vocab} need {dtype} {shape}"
            )
    if draft_tokens.dtype != torch.int64:
        raise ValueError(f"draft_tokens is {draft_tokens.dtype}; it must be torch.int64")
