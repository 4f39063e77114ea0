"""The emitted law equals the target law at every kind of position, and a wrong draft law is found out."""

import math

import pytest
import torch

from specdec.sampling.chain import chain_verify, resolve_empty, sample
from specdec.sampling.law import LawParams, law
from specdec.sampling.params import SamplingParams
from specdec.sampling.philox import DRAFT_DOMAIN, TARGET_DOMAIN
from specdec.sampling.sampler import RoundWords

LANES, VOCAB, DRAFTS = 40_000, 8, 3


def chi_square(tokens, expected):
    """(statistic, critical value at 1e-5); cells of probability 0 must be empty. Wilson and Hilferty's approximation."""
    counts = torch.bincount(tokens, minlength=VOCAB).double()
    support = expected > 0
    assert counts[~support].sum() == 0
    wanted = expected.double()[support] * len(tokens)
    freedom = int(support.sum()) - 1
    if freedom == 0:
        return 0.0, 1.0  # one possible token; the empty cells above said everything
    spread = 2 / (9 * freedom)
    return (
        ((counts[support] - wanted) ** 2 / wanted).sum().item(),
        freedom * (1 - spread + 4.265 * math.sqrt(spread)) ** 3,
    )


def lane_uniforms(consumed=0):
    words = RoundWords.of(torch.arange(LANES), torch.full((LANES,), consumed), DRAFTS)
    return words.uniforms(TARGET_DOMAIN), words.uniforms(DRAFT_DOMAIN)


def laws(temperature, **filters):
    # Flat enough that every kind of position occurs at every temperature.
    generator = torch.Generator().manual_seed(11)
    request = LawParams.of([SamplingParams(temperature=temperature, **filters)])
    draft = law(torch.randn(1, DRAFTS, VOCAB, generator=generator) * 0.8, request)
    target = law(torch.randn(1, DRAFTS + 1, VOCAB, generator=generator) * 0.8, request)
    return draft, target


def emitted(draft, claimed, target, tokens, counts=None):
    target_u, _ = lane_uniforms()
    outcome = chain_verify(
        tokens, claimed.expand(LANES, -1, -1), target.expand(LANES, -1, -1).contiguous(), target_u, counts
    )
    return resolve_empty(outcome, tokens)


def drawn(draft):
    _, draft_u = lane_uniforms()
    return sample(draft.expand(LANES, -1, -1).contiguous(), draft_u[:, :DRAFTS].contiguous())


def check_positions(outcome, target):
    total = 0
    for position in range(DRAFTS + 1):
        tokens = outcome.tokens[outcome.accepted >= position, position]
        statistic, critical = chi_square(tokens, target[0, position])
        assert statistic < critical, f"position {position}"
        total += len(tokens)
    return total


@pytest.mark.parametrize(
    ("temperature", "filters"),
    [(0.5, {}), (1.0, {}), (2.0, {}), (1.0, {"min_p": 0.2}), (1.0, {"top_k": 5, "top_p": 0.9})],
    ids=str,
)
def test_accepted_corrected_and_bonus_tokens_follow_the_target(temperature, filters):
    draft, target = laws(temperature, **filters)
    tokens = drawn(draft)
    for position in range(DRAFTS):
        statistic, critical = chi_square(tokens[:, position], draft[0, position])
        assert statistic < critical, "the drafts follow their own law"
    outcome = emitted(draft, draft, target, tokens)
    assert check_positions(outcome, target) >= 40_000
    shares = [(outcome.accepted == a).float().mean().item() for a in range(DRAFTS + 1)]
    assert min(shares) > 0.001, "every kind of position occurs"


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_a_wrong_draft_law_is_found_out(temperature):
    """Negative control: the law handed to verification is not the law that was drawn from."""
    draft, target = laws(temperature)
    wrong = law(torch.zeros(1, DRAFTS, VOCAB), LawParams.of([SamplingParams()]))
    outcome = emitted(draft, wrong, target, drawn(draft))
    statistic, critical = chi_square(outcome.tokens[:, 0], target[0, 0])
    assert statistic > 5 * critical


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_point_mass_drafts_follow_the_target(temperature):
    _, target = laws(temperature)
    tokens = target[:, :DRAFTS].argmax(-1).expand(LANES, -1).contiguous()
    claimed = torch.nn.functional.one_hot(tokens[:1], VOCAB).float()
    assert check_positions(emitted(claimed, claimed, target, tokens), target) >= 40_000


def test_an_argmax_draft_that_claims_the_soft_law_is_found_out():
    draft, target = laws(1.0)
    tokens = draft.argmax(-1).expand(LANES, -1).contiguous()
    statistic, critical = chi_square(emitted(draft, draft, target, tokens).tokens[:, 0], target[0, 0])
    assert statistic > 5 * critical


def test_lanes_with_their_own_counts_follow_the_target():
    draft, target = laws(1.0)
    counts = torch.arange(LANES) % (DRAFTS + 1)
    outcome = emitted(draft, draft, target, drawn(draft), counts)
    assert check_positions(outcome, target) >= 40_000


def test_plain_sampling_follows_the_law_and_positions_are_independent():
    _, target = laws(1.0)
    rows = target[0, :1].expand(LANES, -1).contiguous()
    first = sample(rows, lane_uniforms(0)[0][:, 0].contiguous())
    second = sample(rows, lane_uniforms(1)[0][:, 0].contiguous())
    for tokens in (first, second):
        statistic, critical = chi_square(tokens, rows[0])
        assert statistic < critical
    same = (first == second).float().mean().item()
    assert same == pytest.approx((rows[0] ** 2).sum().item(), abs=0.012)
