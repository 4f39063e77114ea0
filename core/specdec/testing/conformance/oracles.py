"""What the suite expects, computed without the code under test: Philox words in plain Python, softmax laws,
chi-square.

Sources: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011) for Philox4x32-10; cuRAND's device
headers for the word order and the mapping to uniforms; Leviathan et al. (2023) for the rule of chain verification.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
#: Words of one domain: domain d owns words d · 2^60 … (d + 1) · 2^60 − 1 of a request's stream.
DOMAIN_SPAN = 1 << 60
TARGET, DRAFT = 0, 1


def philox_block(seed: int, number: int) -> list[int]:
    """The four 32-bit words of block ``number`` of a seed's stream, subsequence 0."""
    x, y, z, w = number & _MASK, (number >> 32) & _MASK, 0, 0
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        a, b = x * 0xD2511F53, z * 0xCD9E8D57
        x, y, z, w = (b >> 32) ^ y ^ k0, b & _MASK, (a >> 32) ^ w ^ k1, a & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return [x, y, z, w]


def uniform(seed: int, consumed: int, index: int, *, max_draft_tokens: int, domain: int = TARGET) -> float:
    """Uniform number ``index`` of the round that starts with ``consumed`` tokens: a function of position, not of
    history."""
    word = domain * DOMAIN_SPAN + consumed * (max_draft_tokens + 2) + index
    return philox_block(seed, word // 4)[word % 4] * 2.0**-32 + 2.0**-33


def softmax(logits: Tensor, *, temperature: float = 1.0, top_k: int = 0) -> Tensor:
    """float64 law [..., V] of logits [..., V] under a temperature and a top-k filter that keeps ties."""
    scaled = logits.to(torch.float64) / temperature
    if top_k:
        floor = scaled.topk(top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < floor, -torch.inf)
    return scaled.softmax(-1)


def drawn_by(weights: Tensor, u: float, token: int, slack: float = 1e-5) -> bool:
    """Whether inverse-transform sampling from weights [V] (not normalised) with the number ``u`` may give ``token``.

    slack: how far float32 sums may move a boundary, as a share of the mass.
    """
    running = (weights / weights.sum()).cumsum(-1)
    low = float(running[token - 1]) if token else 0.0
    return bool(weights[token] > 0) and low - slack <= u <= float(running[token]) + slack


def chi_square(outcomes: Sequence[int], law: Tensor) -> float:
    """p-value of Pearson's test that ``outcomes`` (indices) are independent draws from ``law`` [n].

    Outcomes expected fewer than ten times are put together with their likes. An outcome that the law forbids gives 0.

    Raises ValueError if fewer than four classes remain: such a law tests nothing.
    """
    expected = (law.to(torch.float64).reshape(-1) / law.sum()) * len(outcomes)
    observed = torch.bincount(torch.tensor(list(outcomes), dtype=torch.int64), minlength=expected.numel()).to(
        torch.float64
    )
    if bool((observed[expected == 0] > 0).any()):
        return 0.0
    cells: list[list[float]] = [[0.0, 0.0]]
    for index in expected.argsort(descending=True).tolist():
        if expected[index] == 0:
            break
        if cells[-1][0] >= 10:
            cells.append([0.0, 0.0])
        cells[-1][0] += float(expected[index])
        cells[-1][1] += float(observed[index])
    if cells[-1][0] < 10 and len(cells) > 1:
        wanted, seen = cells.pop()
        cells[-1] = [cells[-1][0] + wanted, cells[-1][1] + seen]
    if len(cells) < 4:
        raise ValueError(f"{len(cells)} classes are too few for a test of the law")
    statistic = sum((seen - wanted) ** 2 / wanted for wanted, seen in cells)
    # the upper tail of chi-square with d degrees of freedom is the regularised upper gamma function at (d/2, x/2)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def joint_law(laws: Mapping[tuple[int, ...], Tensor], depth: int) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of ``depth`` tokens. laws: [V] by prefix, for every prefix shorter than
    ``depth``."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(depth):
        found = {
            (*prefix, token): mass * float(laws[prefix][token])
            for prefix, mass in found.items()
            for token in laws[prefix].nonzero().flatten().tolist()
        }
    return found
