"""Emitted tokens follow the target's own law: chi-square over whole rounds of a random model, and controls that must fail.

The law of the first three emitted tokens after a prompt is enumerated from logits of ordinary prompt passes with a softmax and
filters written here. Many requests that differ in their seed then go through the real rounds, where the first token comes from
the prompt and the others are accepted drafts, corrections and bonus tokens. Requests are independent, so their three tokens
together are one draw of a law over V³ outcomes, and nothing about accept or correct has to be told apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from qwen_models import Prepared, prepare, write_random_checkpoint
from round_driver import Driver
from scipy.stats import chi2
from torch import Tensor

from specdec.interfaces import Proposer
from specdec.sampling.params import SamplingParams
from specdec.state.requests import Lanes
from specdec_qwen38.geometry import TINY

VOCAB = 16
SLOTS = 128
DEPTH = 3
REQUESTS = 105 * SLOTS  # three tokens each: 40,320
FEWER_REQUESTS = 40 * SLOTS
#: A true law fails once in a thousand seeds, and the seeds are fixed.
SIGNIFICANCE = 1e-3
PROMPT = [3, 9, 1, 14, 6, 6, 2]
UNFILTERED: dict[str, Any] = {}
FILTERED: dict[str, Any] = {"temperature": 1.3, "min_p": 0.02, "top_k": 11, "top_p": 0.9}

GEOMETRY = evolve(
    TINY,
    vocab_size=VOCAB,
    eos_token_id=VOCAB - 1,
    num_hidden_layers=2,
    layer_types=("linear_attention", "full_attention"),
    ple_layer_ids=(1,),
    num_experts=4,
    num_experts_per_tok=2,
)


# --- the oracle ------------------------------------------------------------------------------------------------------


def plain_law(logits: np.ndarray, *, temperature: float = 1.0, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0):
    """Softmax, then min-p, top-k and top-p, each on the renormalised rest. logits: [V]. Returns float64 [V]."""
    scaled = logits.astype(np.float64) / temperature
    law = np.exp(scaled - scaled.max())
    law /= law.sum()
    law = np.where(law >= min_p * law.max(), law, 0)
    law /= law.sum()
    if top_k:
        law = np.where(law >= np.sort(law)[-top_k], law, 0)
        law /= law.sum()
    order = np.argsort(-law, kind="stable")
    reached = np.searchsorted(np.cumsum(law[order]), top_p - 1e-12)
    law = np.where(law >= law[order[min(reached, VOCAB - 1)]], law, 0)
    return law / law.sum()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    torch.set_num_threads(1)
    directory = write_random_checkpoint(tmp_path_factory.mktemp("law"), 8, GEOMETRY)
    return prepare(directory, slots=SLOTS, context=32)


@pytest.fixture(scope="module")
def logits(model: Prepared) -> dict[tuple[int, ...], np.ndarray]:
    """Logits [V] after the prompt and every continuation of up to two tokens, each from its own prompt pass."""
    found = {}
    continuations = [(), *((a,) for a in range(VOCAB)), *((a, b) for a in range(VOCAB) for b in range(VOCAB))]
    with torch.inference_mode():
        for continuation in continuations:
            model.admit(0, [*PROMPT, *continuation])
            found[continuation] = model.target.first_logits(torch.tensor([0]))[0].numpy().copy()
    return found


def joint_law(logits: dict[tuple[int, ...], np.ndarray], options: dict[str, Any]) -> np.ndarray:
    """Probability of every outcome of three tokens, [V³]."""
    laws = {prefix: plain_law(row, **options) for prefix, row in logits.items()}
    joint = np.empty((VOCAB,) * DEPTH)
    for a in range(VOCAB):
        for b in range(VOCAB):
            joint[a, b] = laws[()][a] * laws[(a,)][b] * laws[(a, b)]
    return joint.reshape(-1)


def fit(outcomes: np.ndarray, joint: np.ndarray) -> float:
    """p-value of Pearson's chi-square. Outcomes expected fewer than ten times are put together with their likes.

    outcomes: [N] indices into joint. An outcome that the law forbids gives 0.
    """
    expected = joint * len(outcomes)
    observed = np.bincount(outcomes, minlength=len(joint))
    if observed[expected == 0].any():
        return 0.0
    order = np.argsort(-expected, kind="stable")
    order = order[expected[order] > 0]
    cells: list[list[float]] = [[0.0, 0.0]]
    for index in order:
        if cells[-1][0] >= 10:
            cells.append([0.0, 0.0])
        cells[-1][0] += expected[index]
        cells[-1][1] += observed[index]
    if cells[-1][0] < 10 and len(cells) > 1:
        last = cells.pop()
        cells[-1] = [cells[-1][0] + last[0], cells[-1][1] + last[1]]
    wanted, seen = np.array(cells).T
    assert len(cells) > 20, "the law is too narrow to test"
    return float(chi2.sf(((seen - wanted) ** 2 / wanted).sum(), len(cells) - 1))


# --- the rounds --------------------------------------------------------------------------------------------------------


@frozen(kw_only=True, eq=False)
class Sampled:
    """outcomes: [N] index of each request's first three tokens; accepted: accepted drafts of every round of a request."""

    outcomes: np.ndarray
    accepted: list[int]


def sample_requests(
    model: Prepared, drafts: int, options: dict[str, Any], *, requests: int = REQUESTS, drafter: Any = None
) -> Sampled:
    """Runs requests with seeds 0, 1, 2 … through rounds with ``drafts`` drafts until each has three tokens.

    The prompt is consumed once per slot; later requests start from a copy of that state.
    """
    slots = list(range(SLOTS))
    stores = [model.target.store, model.drafter.store]
    outcomes, accepted = [], []
    with torch.inference_mode():
        for slot in slots:
            model.admit(slot, PROMPT)
        buffers = [t for s in stores for t in (*s.tensors.values(), s.selected, s.faults)]
        kept = [buffer.clone() for buffer in buffers]
        driver = Driver(model, drafter=drafter)
        for first in range(0, requests, SLOTS):
            for buffer, copy in zip(buffers, kept, strict=True):
                buffer.copy_(copy)
            for slot in slots:
                model.arena.requests.admit(
                    slot,
                    request=first + slot,
                    epoch=1,
                    consumed=len(PROMPT),
                    # large enough that no draft is withheld before the third token
                    budget=16,
                    sampling=SamplingParams(seed=first + slot, **options),
                    stop_ids=(),
                )
            driver.completions.clear()
            driver.start(slots)
            while short := [slot for slot in slots if len(driver.tokens(slot)) < DEPTH]:
                # idle lanes up to a power of two, so that a few round objects serve all
                idle = (1 << (len(short) - 1).bit_length()) - len(short)
                completions = driver.round(short, drafts, lanes=[*short, *[SLOTS] * idle])
                accepted += [completion.accepted for completion in completions]
            tokens = np.array([driver.tokens(slot)[:DEPTH] for slot in slots])
            outcomes.append(tokens @ (VOCAB ** np.arange(DEPTH)[::-1]))
    return Sampled(outcomes=np.concatenate(outcomes), accepted=accepted)


@pytest.mark.parametrize(
    ("drafts", "options"),
    [(1, UNFILTERED), (3, UNFILTERED), (2, FILTERED)],
    ids=["one draft", "three drafts", "two drafts, filtered"],
)
def test_emitted_tokens_follow_the_target_law(
    model: Prepared, logits: dict[tuple[int, ...], np.ndarray], drafts: int, options: dict[str, Any]
) -> None:
    sampled = sample_requests(model, drafts, options)
    assert len(sampled.outcomes) * DEPTH >= 40_000
    # corrections at every depth and bonus tokens took part
    assert set(sampled.accepted) == set(range(drafts + 1))
    assert fit(sampled.outcomes, joint_law(logits, options)) > SIGNIFICANCE


class _Altered:
    """The real drafter with a proposer that the test changed."""

    def __init__(self, model: Prepared, change: Callable[[Proposer], Proposer]) -> None:
        self.inner, self.change = model.drafter, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, lanes: Lanes, draft_tokens: int, proposer: Proposer) -> None:
        self.inner.propose(lanes, draft_tokens, self.change(proposer))


@frozen(kw_only=True, eq=False)
class _Flattened:
    """Draws as always, but keeps the square root of the law it drew from: not the law any more."""

    inner: Any

    def draw(self, depth: int, logits: Tensor) -> Tensor:
        token = self.inner.draw(depth, logits)
        root = self.inner.probs[:, depth].sqrt()
        self.inner.probs[:, depth] = root / root.sum(-1, keepdim=True)
        return token


@frozen(kw_only=True, eq=False)
class _Blind:
    """Draws from logits that are not a distribution."""

    inner: Any

    def draw(self, depth: int, logits: Tensor) -> Tensor:
        return self.inner.draw(depth, torch.full_like(logits, torch.nan))


def test_wrong_draft_law_fails(model: Prepared, logits: dict[tuple[int, ...], np.ndarray]) -> None:
    """The control: with a stored law that is not the one drawn from, the same test rejects by a wide margin."""
    drafter = _Altered(model, lambda inner: _Flattened(inner=inner))
    sampled = sample_requests(model, 3, UNFILTERED, drafter=drafter)
    assert fit(sampled.outcomes, joint_law(logits, UNFILTERED)) < SIGNIFICANCE**2


def test_wrong_filters_fail(model: Prepared, logits: dict[tuple[int, ...], np.ndarray]) -> None:
    """The control of the filters: tokens that one of them forbids, or a temperature that was not asked for, are noticed."""
    sampled = sample_requests(model, 2, FILTERED, requests=FEWER_REQUESTS)
    assert fit(sampled.outcomes, joint_law(logits, FILTERED)) > SIGNIFICANCE
    for change in ({"temperature": 1.2}, {"top_k": 10}, {"top_p": 0.85}, {"top_p": 1.0, "top_k": 12}):
        assert fit(sampled.outcomes, joint_law(logits, {**FILTERED, **change})) < SIGNIFICANCE**2


def test_drafter_without_a_law_changes_nothing(model: Prepared, logits: dict[tuple[int, ...], np.ndarray]) -> None:
    """A drafter whose logits are NaN costs acceptance; the emitted tokens still follow the target."""
    drafter = _Altered(model, lambda inner: _Blind(inner=inner))
    sampled = sample_requests(model, 3, UNFILTERED, requests=FEWER_REQUESTS, drafter=drafter)
    assert fit(sampled.outcomes, joint_law(logits, UNFILTERED)) > SIGNIFICANCE
