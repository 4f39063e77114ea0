import numpy as np
import pytest
import sampling_oracle as oracle
import torch

from specdec.sampling.chain import chain_verify, resolve_empty, sample
from specdec.sampling.philox import philox_words, uniforms

F32 = np.float32


def verify(target, draft, tokens, u, counts=None):
    """`chain_verify` on one row of NumPy arrays: (tokens, matched, accepted, words)."""
    drafts, vocab = len(tokens), target.shape[1]
    outcome = chain_verify(
        torch.tensor(tokens, dtype=torch.int64).view(1, drafts),
        torch.from_numpy(np.asarray(draft, F32).reshape(1, drafts, vocab)),
        torch.from_numpy(np.asarray(target, F32)).unsqueeze(0),
        torch.from_numpy(np.asarray(u, F32)).unsqueeze(0),
        counts,
    )
    return unpack(outcome)[0]


def unpack(outcome):
    return [
        (tokens, matched, accepted, words)
        for tokens, matched, accepted, words in zip(
            outcome.tokens.tolist(),
            outcome.matched.tolist(),
            outcome.accepted.tolist(),
            outcome.words.tolist(),
            strict=True,
        )
    ]


def philox_u(seed, offset, count):
    return uniforms(philox_words(torch.tensor([seed]), torch.tensor([offset]), count))[0].numpy()


def random_laws(rng, rows, vocab, cut=False):
    laws = rng.random((rows, vocab)).astype(F32) ** 6
    if cut and vocab > 20:
        for row in laws:
            row[np.argsort(row)[:-20]] = 0
    return laws / laws.sum(-1, keepdims=True, dtype=F32)


# Published worked examples: two drafts, vocabulary of four.
DRAFT = np.array([[0.1, 0.2, 0.3, 0.4], [0.2, 0.3, 0.4, 0.1]], F32)
TARGET = np.array([[0, 0.1, 0.6, 0.3], [1, 0, 0, 0], [0.7, 0.1, 0.1, 0.1]], F32)


def test_worked_example_rejected_at_one():
    assert verify(TARGET, DRAFT, [2, 1], philox_u(42, 0, 4)) == ([2, 0, -1], 1, 1, 4)


def test_worked_example_all_accepted():
    target = TARGET.copy()
    target[1] = [0.1, 0.6, 0.2, 0.1]
    assert verify(target, DRAFT, [2, 1], philox_u(42, 0, 4)) == ([2, 1, 0], 2, 2, 3)


@pytest.mark.parametrize(
    ("offset", "expected"),
    [
        (0, ([1, -1, -1], 1, 0, 4)),  # the second draft would have passed: matched exceeds accepted
        (1, ([3, -1, -1], 0, 0, 4)),
        (2, ([2, 0, -1], 1, 1, 4)),
        (3, ([1, -1, -1], 0, 0, 4)),
    ],
)
def test_worked_examples_with_point_mass_drafts(offset, expected):
    target = np.full((3, 4), 0.25, F32)
    draft = np.eye(4, dtype=F32)[[2, 1]]
    assert verify(target, draft, [2, 1], philox_u(42, offset, 4)) == expected


# Results of FlashInfer 0.7.4 on an H200.
@pytest.mark.parametrize(
    ("vocab", "first", "second"),
    [
        (5, ([3, -1, -1], 0, 0, 4), ([1, -1, -1], 1, 1, 4)),
        (6, ([3, -1, -1], 0, 0, 4), ([2, -1, -1], 1, 1, 4)),
        (4097, ([1015, -1, -1], 0, 0, 4), ([1365, -1, -1], 1, 1, 4)),
        (8192, ([2730, 4096, 5375], 2, 2, 3), ([2730, -1, -1], 1, 1, 4)),
        (151936, ([37593, -1, -1], 0, 0, 4), ([50645, -1, -1], 1, 1, 4)),
    ],
)
def test_device_vectors(vocab, first, second):
    hashed = (np.arange(vocab, dtype=np.uint64) * 2654435761) % 2**32
    a = ((hashed // 65536).astype(F32) + F32(1)) / F32(2**30)
    target, draft, tokens = np.stack([a, a * F32(0.5), a]), np.stack([a[::-1], a]), [vocab // 3, vocab // 2]
    assert verify(target, draft, tokens, philox_u(1, 5, 4)) == first
    assert verify(target, draft, tokens, philox_u(2, 5, 4)) == second


VOCABULARIES = [5, 6, 7, 8, 31, 64, 100, 127, 128, 130, 384, 512, 1000, 1025, 2048, 2050, 4096, 4097, 4100, 8200, 10000]


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("cut", [False, True])
def test_random_chains_against_the_kernel_followed_lane_by_lane(vocab, cut):
    rng = np.random.default_rng(vocab + cut)
    for drafts in range(8):
        draft = random_laws(rng, drafts, vocab, cut)
        target = random_laws(rng, drafts + 1, vocab, cut)
        if drafts % 2:  # laws close to each other accept often
            target[:drafts] = draft * (1 + F32(0.2) * rng.random(draft.shape, F32))
        tokens = [int(rng.choice(np.flatnonzero(row))) for row in draft]
        u = oracle.draws(int(rng.integers(2**63)), int(rng.integers(2**60)), drafts + 2)
        assert verify(target, draft, tokens, u) == oracle.chain(target, draft, tokens, u)


@pytest.mark.parametrize("vocab", [7, 130, 512, 4100, 9001])
def test_draws_at_partial_sums_need_the_kernel_order(vocab):
    """Uniforms placed on the rounding edges of the running sum: only the right order of additions gives these tokens."""
    rng = np.random.default_rng(vocab)
    weights = random_laws(rng, 1, vocab)[0]
    edges = (np.cumsum(weights, dtype=np.float64) / weights.sum(dtype=np.float64)).astype(F32)
    picks = rng.choice(edges[edges > 0], 120)
    u = np.clip(np.concatenate([picks, np.nextafter(picks, F32(0)), np.nextafter(picks, F32(2))]), F32(2**-33), F32(1))
    expected = [oracle.draw(weights, x) for x in u]
    assert sample(torch.from_numpy(np.tile(weights, (len(u), 1))), torch.from_numpy(u)).tolist() == expected
    if vocab > 7:
        plain = np.cumsum(weights, dtype=F32)
        naive = [int(np.flatnonzero(plain > F32(x * plain[-1]))[0]) if (plain > x * plain[-1]).any() else -1 for x in u]
        assert naive != expected, "the case must tell orders of summation apart"


def ragged(rng, lanes, drafts, vocab):
    draft = np.stack([random_laws(rng, drafts, vocab) for _ in range(lanes)])
    target = np.stack([random_laws(rng, drafts + 1, vocab) for _ in range(lanes)])
    target[::2, :drafts] = draft[::2] * F32(1.05)
    tokens = np.array([[rng.choice(vocab, p=row / row.sum(dtype=np.float64)) for row in lane] for lane in draft])
    u = rng.random((lanes, drafts + 2)).astype(F32)
    counts = np.arange(lanes) % (drafts + 1)
    return [torch.from_numpy(x) for x in (tokens, draft, target, u, counts)]


def with_dummy_columns(tokens, draft, target, count):
    """One row as the kernel is told of `count` drafts among K: four columns without mass, whose first id stands for the rest."""
    drafts, vocab = draft.shape
    target, draft = (np.concatenate([rows, np.zeros((len(rows), 4), F32)], 1) for rows in (target, draft))
    draft[count:] = 0
    return target, draft, [*tokens[:count], *[vocab] * (drafts - count)]


@pytest.mark.parametrize(("drafts", "vocab"), [(1, 9), (3, 100), (5, 512), (7, 4100)])
def test_draft_counts_equal_kernel_rows_with_dummy_drafts(drafts, vocab):
    rng = np.random.default_rng(drafts)
    tokens, draft, target, u, counts = ragged(rng, 2 * drafts + 3, drafts, vocab)
    # What lies beyond a lane's count is rubbish that must not matter.
    for lane, count in enumerate(counts.tolist()):
        tokens[lane, count:] = torch.tensor([-1, vocab + 5, 2])[lane % 3]
        draft[lane, count:] = float("nan") if lane % 2 else 7.0
        target[lane, count + 1 :] = float("nan")
    together = unpack(chain_verify(tokens, draft, target, u, counts))
    for lane, count in enumerate(counts.tolist()):
        row = with_dummy_columns(tokens[lane].tolist(), draft[lane].numpy(), target[lane].numpy(), count)
        assert together[lane] == oracle.chain(*row, u[lane].numpy())
        assert together[lane][2] <= together[lane][1] <= count
        assert together[lane][3] == drafts + 1 + (together[lane][2] < drafts)


@pytest.mark.parametrize(("drafts", "vocab"), [(3, 100), (7, 4100)])
def test_draft_counts_keep_the_law_of_a_row_of_their_own(drafts, vocab):
    """A lane with fewer drafts accepts what a row of its own count accepts, and draws the next token from the same weights; only
    the word of that draw is another."""
    tokens, draft, target, u, counts = ragged(np.random.default_rng(drafts), 2 * drafts + 3, drafts, vocab)
    together = unpack(chain_verify(tokens, draft, target, u, counts))
    for lane, count in enumerate(counts.tolist()):
        own_u = u[lane].numpy().copy()
        alone = oracle.chain(target[lane].numpy(), draft[lane].numpy(), tokens[lane, :count].tolist(), own_u)
        own_u[alone[3] - 1] = own_u[together[lane][3] - 1]
        moved = oracle.chain(target[lane].numpy(), draft[lane].numpy(), tokens[lane, :count].tolist(), own_u)
        assert together[lane][:3] == (moved[0] + [-1] * (drafts - count), *moved[1:3])
        assert together[lane][1:3] == alone[1:3]


def test_full_draft_counts_equal_none():
    tokens, draft, target, u, _ = ragged(np.random.default_rng(5), 6, 4, 64)
    full = torch.full((6,), 4)
    assert unpack(chain_verify(tokens, draft, target, u, full)) == unpack(chain_verify(tokens, draft, target, u))


@pytest.mark.parametrize("vocab", [7, 512, 4100])
def test_a_lane_does_not_depend_on_its_batch(vocab):
    tokens, draft, target, u, counts = ragged(np.random.default_rng(vocab), 5, 3, vocab)
    together = unpack(chain_verify(tokens, draft, target, u, counts))
    order = torch.tensor([3, 0, 4, 2, 1])
    shuffled = unpack(chain_verify(tokens[order], draft[order], target[order], u[order], counts[order]))
    assert [together[i] for i in order.tolist()] == shuffled
    for lane in range(5):
        rows = slice(lane, lane + 1)
        assert unpack(chain_verify(tokens[rows], draft[rows], target[rows], u[rows], counts[rows])) == [together[lane]]


def test_further_uniforms_are_not_read():
    tokens, draft, target, u, _ = ragged(np.random.default_rng(8), 3, 2, 16)
    wide = torch.cat((u, torch.full((3, 5), float("nan"))), 1)
    assert unpack(chain_verify(tokens, draft, target, wide)) == unpack(chain_verify(tokens, draft, target, u))


@pytest.mark.parametrize("vocab", [4, 5, 6, 300])
def test_no_drafts_is_sample(vocab):
    rng = np.random.default_rng(vocab)
    target, u = torch.from_numpy(random_laws(rng, 50, vocab)).unsqueeze(1), torch.from_numpy(rng.random((50, 2), F32))
    outcome = chain_verify(torch.empty(50, 0, dtype=torch.int64), torch.empty(50, 0, vocab), target, u)
    assert torch.equal(outcome.tokens[:, 0], sample(target[:, 0], u[:, 0]))
    assert outcome.tokens.tolist() == [
        [oracle.draw(row, x)] for row, x in zip(target[:, 0].numpy(), u[:, 0], strict=True)
    ]
    assert outcome.accepted.eq(0).all() and outcome.matched.eq(0).all() and outcome.words.eq(1).all()
    assert not outcome.empty.any()


def test_sample_takes_any_leading_shape():
    probs, u = torch.rand(2, 3, 8), torch.rand(2, 3)
    got = sample(probs, u)
    assert got.shape == (2, 3) and got.dtype == torch.int64
    assert torch.equal(got[1], sample(probs[1], u[1]))
    assert sample(probs[0, 0], u[0, 0]).shape == ()


def test_u_of_one_takes_the_last_token_with_mass_and_still_accepts():
    weights = torch.tensor([[0.2, 0.5, 0.3, 0.0, 0.0]])
    assert sample(weights, torch.ones(1)).tolist() == [2]
    assert sample(weights, torch.full((1,), 2.0**-33)).tolist() == [0]
    # u = 1 accepts exactly when p < q.
    draft, target = np.array([[0.5, 0.5, 0, 0]], F32), np.array([[0.25, 0.75, 0, 0], [0, 0, 0.5, 0.5]], F32)
    assert verify(target, draft, [1], [1, 1, 1]) == ([1, 3], 1, 1, 2)
    assert verify(target, draft, [0], [1, 1, 1]) == ([1, -1], 0, 0, 3)


@pytest.mark.parametrize("vocab", [5, 64, 515, 4100])
def test_tokens_without_mass_are_never_emitted(vocab):
    rng = np.random.default_rng(vocab)
    weights = random_laws(rng, 200, vocab)
    weights[rng.random(weights.shape) < 0.9] = 0
    weights[:, vocab // 2] += F32(1e-20)
    u = rng.random(200).astype(F32)
    u[::5], u[1::5] = F32(1), F32(2**-33)
    got = sample(torch.from_numpy(weights), torch.from_numpy(u)).numpy()
    assert (weights[np.arange(200), got] > 0).all()


def test_rows_without_mass_give_minus_one():
    rows = torch.zeros(4, 6)
    rows[1] = float("nan")
    rows[2] = -1.0
    rows[3] = 2.0**-127  # flushed like in a kernel built with fast math
    assert sample(rows, torch.full((4,), 0.5)).tolist() == [-1] * 4


def test_nan_entries_count_as_nothing():
    row = torch.tensor([[float("nan"), 0.0, 1.0, float("nan")]])
    assert sample(row, torch.tensor([0.7])).tolist() == [2]


def test_empty_residual_stays_minus_one_until_resolved():
    law = np.array([0.25, 0.25, 0.5, 0], F32)
    half = np.stack([law * F32(0.5), law])
    tokens = torch.tensor([[2]])
    args = (torch.from_numpy(law)[None, None], torch.from_numpy(half)[None], torch.tensor([[0.9, 0.9, 0.9]]))
    outcome = chain_verify(tokens, *args)
    assert unpack(outcome) == [([-1, -1], 0, 0, 3)]
    assert outcome.empty.tolist() == [True]
    resolved = resolve_empty(outcome, tokens)
    assert unpack(resolved) == [([2, -1], 0, 0, 3)]
    assert outcome.tokens.tolist() == [[-1, -1]], "the outcome given is not changed"


def test_only_empty_residuals_are_resolved():
    law, nan = torch.tensor([0.25, 0.25, 0.5, 0]), torch.full((4,), float("nan"))
    zero = torch.zeros(4)
    # lanes: empty, NaN target row, id out of range (high, low), bonus row without mass, count 0 with a massless row
    target = torch.stack([torch.stack(pair) for pair in [
        (law / 2, law), (nan, law), (law / 2, law), (law / 2, law), (law, zero), (zero, law),
    ]])  # fmt: skip
    draft = law.expand(6, 1, 4)
    tokens = torch.tensor([[2], [2], [4], [-1], [2], [2]])
    u = torch.tensor([[0.9, 0.5, 0.5]]).expand(6, 3)
    counts = torch.tensor([1, 1, 1, 1, 1, 0])
    outcome = chain_verify(tokens, draft, target, u, counts)
    assert outcome.accepted.tolist() == [0, 0, 0, 0, 1, 0]
    assert outcome.words.tolist() == [3, 3, 3, 3, 2, 3]
    assert outcome.empty.tolist() == [True, False, False, False, False, False]
    assert resolve_empty(outcome, tokens).tokens.tolist() == [[2, -1], [-1, -1], [-1, -1], [-1, -1], [2, -1], [-1, -1]]


def test_resolving_leaves_ordinary_outcomes_alone():
    tokens, draft, target, u, counts = ragged(np.random.default_rng(1), 9, 4, 32)
    outcome = chain_verify(tokens, draft, target, u, counts)
    assert torch.equal(resolve_empty(outcome, tokens).tokens, outcome.tokens)


@pytest.mark.parametrize("bad", [-1, 5, 2**40, -(2**40)])
def test_ids_out_of_range_are_rejected_without_reading_out_of_bounds(bad):
    draft, target = np.full((2, 5), 0.2, F32), np.array([[0.6, 0.1, 0.1, 0.1, 0.1]] * 3, F32)
    u = [F32(2**-33)] * 4
    assert verify(target, draft, [bad, 1], u) == oracle.chain(target, draft, [bad, 1], u) == ([0, -1, -1], 1, 0, 4)


def test_denormal_probabilities_count_as_zero():
    denormal = 2.0**-127
    draft, target = np.array([[1, 0, 0, 0]], F32), np.array([[denormal, 1, 0, 0], [1, 0, 0, 0]], F32)
    assert verify(target, draft, [0], [F32(2**-33)] * 3) == ([1, -1], 0, 0, 3)
    target = np.array([[1, denormal, 0, 0]], F32)
    assert sample(torch.from_numpy(target), torch.ones(1)).tolist() == [0]


def test_inputs_are_not_changed():
    given = ragged(np.random.default_rng(2), 4, 3, 40)
    kept = [t.clone() for t in given]
    chain_verify(*given)
    assert all(torch.equal(a, b) for a, b in zip(given, kept, strict=True))


def test_wrong_shapes_and_dtypes_are_named():
    tokens, draft, target, u, counts = ragged(np.random.default_rng(3), 2, 3, 8)
    for name, args in {
        "draft_probs": (tokens, draft[:, :2], target, u, counts),
        "target_probs": (tokens, draft, target[:, :3], u, counts),
        "draft_tokens": (tokens.int(), draft, target, u, counts),
        "uniforms": (tokens, draft, target, u[:, :4], counts),
        "draft_counts": (tokens, draft, target, u, counts[:1]),
    }.items():
        with pytest.raises(ValueError, match=name):
            chain_verify(*args)
    with pytest.raises(ValueError, match="target_probs"):
        chain_verify(tokens, draft, target.double(), u)
    with pytest.raises(ValueError, match="sample needs"):
        sample(target.double(), u[:, :4])
