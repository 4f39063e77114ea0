"""Whether a sampler does on this device what the reference does on a CPU: words, draw counts, order of additions, lanes, tokens.

Expected words and summation results are constants: cuRAND's own words, and what FlashInfer 0.7.4 gave on an H200. The rest is
compared with ``ReferenceSampler`` on a CPU, on identical buffers. Fixed seeds; a few seconds on a GPU.

Letters: B lanes, K draft tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from attrs import frozen
from torch import Tensor

from specdec.sampling.chain import ChainOutcome, sample
from specdec.sampling.law import LawParams
from specdec.sampling.params import SamplingParams
from specdec.sampling.philox import DRAFT_DOMAIN, TARGET_DOMAIN
from specdec.sampling.sampler import ReferenceSampler, RoundWords, Sampler

__all__ = ["VOCABULARIES", "Check", "qualify"]

VOCABULARIES = (5, 6, 100, 512, 4097, 8192, 151_936)
"""Sizes that random buffers have: every width of the kernel's loads, one tile and many, and a real vocabulary."""

# Seed, first word number, and float32 bits of five uniforms of subsequence 0, from the cuRAND headers.
_CURAND = (
    (42, 0, (0x3F1CEAF0, 0x3EEFEA92, 0x3D95FA85, 0x3EAE8568, 0x3F7CDB21)),
    (42, 3, (0x3EAE8568, 0x3F7CDB21, 0x3EA774DA, 0x3F038F5A, 0x3EE89C0E)),
    (0x123456789ABCDEF0, 0, (0x3D12C9B4, 0x3EF07098, 0x3F49FB81, 0x3E2CEF93, 0x3E627666)),
    (0, (1 << 40) + 3, (0x3BC8E99C, 0x3E965A90, 0x3F60E640, 0x3F2BCF0E, 0x3D4BDD5A)),
)
# Vocabulary, then tokens, matched and accepted of FlashInfer 0.7.4 for seeds 1 and 2; see `_summation`.
_SUMMATION = (
    (5, ([3, -1, -1], 0, 0), ([1, -1, -1], 1, 1)),
    (6, ([3, -1, -1], 0, 0), ([2, -1, -1], 1, 1)),
    (4097, ([1015, -1, -1], 0, 0), ([1365, -1, -1], 1, 1)),
    (8192, ([2730, 4096, 5375], 2, 2), ([2730, -1, -1], 1, 1)),
    (151_936, ([37593, -1, -1], 0, 0), ([50645, -1, -1], 1, 1)),
)
# Vocabulary, seed, and the token that the kernel's order of additions draws from `_hashed` with word 5. A running sum over the
# ids draws another one, in single and in double precision.
_ORDERED = ((4097, 1917, 2058), (151_936, 165, 144_885), (151_936, 214, 141_433))
_FIELDS = ("tokens", "accepted", "matched", "words", "empty")
# Laws differ by the rounding of exponentials and sums: probabilities summed over a row may be this far apart.
_LAW_DISTANCE = 1e-5
_LANES = 6


@frozen(kw_only=True)
class Check:
    """One part of a qualification. failures: what differed, one line each; empty if nothing did."""

    name: str
    cases: int
    failures: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether every case agreed."""
        return not self.failures


def qualify(sampler: Sampler, device: torch.device, vocabularies: Sequence[int] = VOCABULARIES) -> Iterator[Check]:
    """Runs every check of ``sampler`` on ``device``, yielding each as it ends. Synchronises. vocabularies: of random buffers."""
    with torch.inference_mode():
        for name, cases in (
            ("words of the random stream", _words(sampler, device)),
            ("words drawn by a verification", _draw_counts(sampler, device)),
            ("order of additions", _summation(sampler, device, max(vocabularies))),
            ("draws equal the CPU's", _draws(sampler, device, vocabularies)),
            ("verifications equal the CPU's", _verifications(sampler, device, vocabularies)),
            ("lanes do not depend on others", _lanes(sampler, device, vocabularies)),
            ("laws equal the CPU's", _laws(sampler, device, vocabularies)),
        ):
            found = list(cases)
            yield Check(name=name, cases=len(found), failures=tuple(line for line in found if line is not None))


def _words(sampler: Sampler, device: torch.device) -> Iterator[str | None]:
    """A copied draft is accepted if u < q: with q the expected uniform it must fail, with the next greater float it must pass."""
    drafts, vocab = 5, 8
    tokens = torch.full((1, drafts), 3)
    draft = torch.zeros(1, drafts, vocab)
    draft[..., 3] = 1.0
    for seed, first, bits in _CURAND:
        u = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
        for passing in range(drafts + 1):
            target = torch.full((1, drafts + 1, vocab), 0.5)
            target[0, :drafts, 3] = u
            target[0, :passing, 3] = torch.nextafter(u, torch.full_like(u, 2.0))[:passing]
            words = _round(seed, first, drafts)
            outcome = _verify(sampler, device, tokens, draft, target, words)
            found = int(outcome.accepted)
            yield _differs(f"seed {seed}, word {first}: accepted", found, passing)


def _draw_counts(sampler: Sampler, device: torch.device) -> Iterator[str | None]:
    """Which word draws the token after drafts that surely pass or fail: K with all accepted, K + 1 otherwise. The token tells the
    word, for it is drawn from four thousand equal ones."""
    vocab = 4096
    for drafts in range(1, 8):
        tokens = torch.full((1, drafts), 17)
        draft = torch.zeros(1, drafts, vocab)
        draft[..., 17] = 1.0
        words = _round(900 + drafts, 40 * drafts, drafts)
        u = words.uniforms(TARGET_DOMAIN)[0]
        for passing in range(drafts + 1):
            target = torch.full((1, drafts + 1, vocab), 1 / vocab)
            target[0, :passing, 17] = 2.0
            target[0, passing:, 17] = 0.0
            outcome = _verify(sampler, device, tokens, draft, target, words)
            by_word = [int(sample(target[:, passing], u[number : number + 1])) for number in range(drafts + 2)]
            last = int(outcome.tokens[0, int(outcome.accepted)])
            found = by_word.index(last) if last in by_word else None
            wanted = drafts + (passing < drafts)
            yield _differs(f"{drafts} drafts, {passing} accepted: last word", found, wanted)


def _summation(sampler: Sampler, device: torch.device, largest: int) -> Iterator[str | None]:
    """Chains with known results, and draws whose uniform lies at the edge of a partial sum."""
    for vocab, *expected in _SUMMATION:
        if vocab > largest:
            continue
        a = _hashed(vocab)
        draft, target = torch.stack((a.flip(0), a)).unsqueeze(0), torch.stack((a, a * 0.5, a)).unsqueeze(0)
        tokens = torch.tensor([[vocab // 3, vocab // 2]])
        for seed, wanted in zip((1, 2), expected, strict=True):
            outcome = _verify(sampler, device, tokens, draft, target, _round(seed, 5, 2))
            # the rejected draft of an empty residual stands in these results
            shown = outcome.tokens[0].masked_fill(
                (torch.arange(3) == outcome.accepted) & outcome.empty, int(tokens[0, 1])
            )
            found = (shown.tolist(), int(outcome.matched), int(outcome.accepted))
            yield _differs(f"vocabulary {vocab}, seed {seed}", found, _resolved(wanted, tokens))
    for vocab, seed, token in _ORDERED:
        if vocab <= largest:
            words = _moved(_round(seed, 5, 0), device)
            drawn = int(sampler.draw(_hashed(vocab).unsqueeze(0).to(device), words, TARGET_DOMAIN, 0))
            yield _differs(f"vocabulary {vocab}, seed {seed}: draw", drawn, token)


def _hashed(vocab: int) -> Tensor:
    """[V] float32 weights that rise and fall without a pattern; multiples of 2^-30."""
    return ((((torch.arange(vocab) * 2654435761) % (1 << 32)) >> 16).to(torch.float32) + 1) / 2.0**30


def _resolved(wanted: tuple[list[int], int, int], tokens: Tensor) -> tuple[list[int], int, int]:
    """Known results with the rejected draft where the kernel leaves −1 at the end of the accepted prefix."""
    shown, matched, accepted = wanted
    if shown[accepted] < 0:
        shown = [*shown[:accepted], int(tokens[0, accepted]), *shown[accepted + 1 :]]
    return shown, matched, accepted


def _draws(sampler: Sampler, device: torch.device, vocabularies: Sequence[int]) -> Iterator[str | None]:
    reference = ReferenceSampler()
    for vocab in vocabularies:
        probs, words = _rows(vocab, _LANES, 1)[:, 0], _rounds(_LANES, vocab)
        probs[-1] = 0.0
        for index in range(3):
            found = sampler.draw(probs.to(device), _moved(words, device), DRAFT_DOMAIN, index)
            wanted = reference.draw(probs, words, DRAFT_DOMAIN, index)
            yield _differs(f"vocabulary {vocab}, word {index}", found.tolist(), wanted.tolist())


def _verifications(sampler: Sampler, device: torch.device, vocabularies: Sequence[int]) -> Iterator[str | None]:
    """Every number of drafts, each lane with its own count, ids out of range, rows without a law and laws that are equal."""
    reference = ReferenceSampler()
    for vocab in vocabularies:
        for drafts in range(8):
            tokens, draft, target, words, counts = _chain(vocab, drafts)
            for given in (None, counts):
                found = _verify(sampler, device, tokens, draft, target, words, given)
                wanted = reference.verify(tokens, draft, target, words, given)
                name = f"vocabulary {vocab}, {drafts} drafts, {'own counts' if given is not None else 'all'}"
                yield _unequal(name, found, wanted)


def _lanes(sampler: Sampler, device: torch.device, vocabularies: Sequence[int]) -> Iterator[str | None]:
    """A batch, the same lanes in another order, and each lane alone."""
    for vocab in vocabularies:
        chain = _chain(vocab, 4)
        together = _verify(sampler, device, *chain)
        for order in ([3, 0, 5, 4, 2, 1], *([lane] for lane in range(_LANES))):
            rows = torch.tensor(order)
            tokens, draft, target, words, counts = chain
            some = RoundWords(seed=words.seed[rows], first=words.first[:, rows], count=words.count)
            found = _verify(sampler, device, tokens[rows], draft[rows], target[rows], some, counts[rows])
            wanted = ChainOutcome(**{name: getattr(together, name)[rows] for name in _FIELDS})
            yield _unequal(f"vocabulary {vocab}, lanes {order}", found, wanted)


def _laws(sampler: Sampler, device: torch.device, vocabularies: Sequence[int]) -> Iterator[str | None]:
    """Distance of each row, exact points for greedy lanes, NaN where there is no law, nothing for padding ids."""
    requests = [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_k=20, top_p=0.95),
        SamplingParams(temperature=1.3, top_p=0.6),
        SamplingParams(min_p=0.05, top_k=3),
        SamplingParams(greedy=True),
        SamplingParams(greedy=True),
    ]
    params, on_device = LawParams.of(requests), LawParams.of(requests, device)
    for vocab in vocabularies:
        logits = torch.randn(_LANES, 2, vocab, generator=_generator(vocab)) * 3
        logits[4:, 0, : vocab // 2] = 9.0
        logits[:, 1, 0] = torch.tensor([torch.nan, 0, torch.inf, 0, torch.nan, 0])
        kept = vocab - vocab // 5
        for dtype in (torch.float32, torch.bfloat16):
            given = logits.to(dtype)
            found = sampler.law(given.to(device), on_device, kept).cpu()
            wanted = ReferenceSampler().law(given, params, kept)
            faulty = wanted[..., 0].isnan()
            distance = float((found - wanted).abs().sum(-1).nan_to_num().amax())
            problems = [
                f"distance {distance:.1e}" if distance > _LAW_DISTANCE else "",
                "" if bool((found[..., :kept].isnan() == faulty.unsqueeze(-1)).all()) else "NaN elsewhere",
                "" if bool((found[..., kept:] == 0).all()) else "mass on padding",
                "" if torch.equal(found[4:].nan_to_num(), wanted[4:].nan_to_num()) else "greedy rows are no points",
                "denormals" if bool(((found > 0) & (found < 2.0**-126)).any()) else "",
            ]
            shown = ", ".join(filter(None, problems))
            yield f"vocabulary {vocab}, {dtype}: {shown}" if shown else None


def _verify(
    sampler: Sampler,
    device: torch.device,
    tokens: Tensor,
    draft: Tensor,
    target: Tensor,
    words: RoundWords,
    counts: Tensor | None = None,
) -> ChainOutcome:
    """The sampler's outcome for buffers on the CPU, on the CPU."""
    given = None if counts is None else counts.to(device)
    found = sampler.verify(tokens.to(device), draft.to(device), target.to(device), _moved(words, device), given)
    return ChainOutcome(**{name: getattr(found, name).cpu() for name in _FIELDS})


def _moved(words: RoundWords, device: torch.device) -> RoundWords:
    return RoundWords(seed=words.seed.to(device), first=words.first.to(device), count=words.count)


def _round(seed: int, first: int, drafts: int) -> RoundWords:
    """Words of one lane that begin at any number, in both domains."""
    return RoundWords(seed=torch.tensor([seed]), first=torch.tensor([[first], [first]]), count=drafts + 2)


def _rounds(lanes: int, number: int) -> RoundWords:
    return RoundWords.of(torch.arange(lanes) * 7919 + number, torch.arange(lanes) * 131 + number, 7)


def _generator(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def _rows(vocab: int, lanes: int, rows: int, salt: int = 0) -> Tensor:
    """Laws [lanes, rows, vocab] with heavy and light entries, in every second lane the twenty greatest only; no denormals."""
    laws = torch.rand(lanes, rows, vocab, generator=_generator(vocab + 1000 * rows + salt)) ** 6
    if vocab > 20:
        least = laws.topk(20, -1).values[..., -1:]
        laws[::2] = torch.where(laws >= least, laws, 0.0)[::2]
    laws = torch.where(laws > 1e-25, laws, 0.0)
    return laws / laws.sum(-1, keepdim=True)


def _chain(vocab: int, drafts: int) -> tuple[Tensor, Tensor, Tensor, RoundWords, Tensor]:
    """Buffers of a verification: tokens, draft laws, target laws, words, counts."""
    draft, target = _rows(vocab, _LANES, drafts, 1), _rows(vocab, _LANES, drafts + 1, 2)
    words = _rounds(_LANES, vocab + drafts)
    # laws near each other accept often; a lane whose laws are equal but for rounding may reject with nothing left
    target[::2, :drafts] = draft[::2] * 0.97 + target[::2, :drafts] * 0.03
    target[1, :drafts] = draft[1] * 0.75
    tokens = torch.stack(
        [sample(draft[:, depth], words.uniforms(DRAFT_DOMAIN)[:, depth]) for depth in range(drafts)]
        or [torch.zeros(_LANES, dtype=torch.int64)],
        1,
    )[:, :drafts]
    counts = torch.arange(_LANES).flip(0) % (drafts + 1)
    if drafts > 2:
        tokens[2, 1], tokens[3, 0] = vocab + 3, -1
        target[4, 1] = torch.nan
    return tokens, draft, target, words, counts


def _differs(name: str, found: object, wanted: object) -> str | None:
    return None if found == wanted else f"{name}: {found}, expected {wanted}"


def _unequal(name: str, found: ChainOutcome, wanted: ChainOutcome) -> str | None:
    parts = [
        f"{part} {getattr(found, part).tolist()}, expected {getattr(wanted, part).tolist()}"
        for part in _FIELDS
        if not torch.equal(getattr(found, part), getattr(wanted, part))
    ]
    return f"{name}: {'; '.join(parts)}" if parts else None
