import math

import pytest
import sampling_oracle as oracle
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from specdec.sampling.law import LawParams, law
from specdec.sampling.params import SamplingParams

INF, NAN = math.inf, math.nan

SETTINGS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.05, 0.5, 0.7, 1.0, 1.3, 2.0, 50.0]),
        "top_k": st.integers(0, 14),
        "top_p": st.sampled_from([0.05, 0.3, 0.5, 0.8, 0.95, 1.0]),
        "min_p": st.sampled_from([0.0, 0.02, 0.1, 0.5, 1.0]),
        "greedy": st.booleans(),
    }
)
# Eighths are exact in every dtype used, and make ties common.
LOGITS = st.lists(st.integers(-40, 40).map(lambda i: i / 8) | st.just(-INF), min_size=1, max_size=12)


def params(*requests):
    return LawParams.of([SamplingParams(**request) for request in requests])


def one(logits, **request):
    return law(torch.tensor([logits]), params(request))[0].tolist()


@given(logits=LOGITS, request=SETTINGS)
@settings(max_examples=400, deadline=None)
def test_against_a_plain_float64_program(logits, request):
    assume(max(logits) > -INF)
    expected, margin = oracle.law(logits, **request)
    # A comparison decided by the last bits may fall either way in float32; exact equality must not.
    assume(margin > 1e-6)
    got = one(logits, **request)
    assert got == pytest.approx(expected, rel=3e-6, abs=1e-30)
    for mine, wanted in zip(got, expected, strict=True):
        assert (mine == 0) == (wanted < 2.0**-126)


@given(rows=st.lists(LOGITS, min_size=2, max_size=4), requests=st.lists(SETTINGS, min_size=2, max_size=4))
@settings(max_examples=100, deadline=None)
def test_a_row_does_not_depend_on_its_batch(rows, requests):
    lanes = min(len(rows), len(requests))
    width = max(map(len, rows))
    logits = torch.tensor([row + [-INF] * (width - len(row)) for row in rows[:lanes]])
    together = law(logits, params(*requests[:lanes]))
    for lane in range(lanes):
        alone = law(logits[lane : lane + 1], params(requests[lane]))
        assert torch.equal(together[lane : lane + 1].nan_to_num(-1), alone.nan_to_num(-1))


@pytest.mark.parametrize("vocab", [5, 33, 511, 512, 4099])
def test_bits_do_not_depend_on_batch_or_position(vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(3, 6, vocab, generator=generator) * 4
    request = {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.001}
    together = law(logits, params(request, request, request))
    for lane in range(3):
        for row in range(6):
            assert torch.equal(law(logits[lane, row][None].clone(), params(request))[0], together[lane, row])


@given(logits=LOGITS, request=SETTINGS)
@settings(max_examples=200, deadline=None)
def test_rows_are_laws(logits, request):
    assume(max(logits) > -INF)
    probs = one(logits, **request)
    assert sum(probs) == pytest.approx(1, abs=1e-6)
    assert all(p >= 0 for p in probs)
    assert all(p == 0 for p, x in zip(probs, logits, strict=True) if x == -INF)
    best = max(logits)
    assert max(probs) == probs[logits.index(best)] > 0
    if not request["greedy"]:
        # Order is kept and equal logits get equal probabilities.
        pairs = sorted(zip(logits, probs, strict=True))
        assert all(a[1] <= b[1] for a, b in zip(pairs, pairs[1:], strict=False))
        assert len({p for x, p in pairs if x == best}) == 1


def test_temperature_divides():
    assert one([0.0, math.log(2.0)], temperature=0.5) == pytest.approx([1 / 5, 4 / 5])
    assert one([0.0, math.log(4.0)], temperature=2.0) == pytest.approx([1 / 3, 2 / 3])


def test_filters_act_in_order_on_the_renormalised_rest():
    logits = [math.log(x) for x in (0.4, 0.3, 0.2, 0.06, 0.04)]
    # top-p alone: 0.4 + 0.3 + 0.2 reach 0.75. After top-k = 2 the rest is 4/7, 3/7 and both are needed for 0.75.
    assert one(logits, top_p=0.75) == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0, 0])
    assert one(logits, top_k=2, top_p=0.75) == pytest.approx([4 / 7, 3 / 7, 0, 0, 0])
    # Of the rest 4/7, 3/7 the first alone reaches 0.55; of the whole it would not.
    assert one(logits, top_k=2, top_p=0.55) == pytest.approx([1, 0, 0, 0, 0])
    assert one(logits, min_p=0.6, top_p=0.55) == pytest.approx([1, 0, 0, 0, 0])
    assert one(logits, min_p=0.45) == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0, 0])


def test_ties_at_a_threshold_stay():
    assert one([2.0, 1.0, 1.0, 1.0, 0.0], top_k=2) == pytest.approx([x / (math.e + 3) for x in (math.e, 1, 1, 1)] + [0])
    assert one([0.0, 0.0, 0.0, 0.0], top_p=0.5) == pytest.approx([0.25] * 4)
    assert one([1.0, 1.0, 0.0], min_p=1.0) == pytest.approx([0.5, 0.5, 0])


def test_top_p_keeps_the_first_value_that_reaches_the_mass():
    logits = [math.log(x) for x in (0.5, 0.25, 0.125, 0.125)]
    assert one(logits, top_p=0.5) == pytest.approx([1, 0, 0, 0])
    assert one(logits, top_p=0.501) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert one(logits, top_p=1e-9) == pytest.approx([1, 0, 0, 0])


def test_filters_that_are_off_keep_even_the_smallest_entries():
    logits = [0.0, -80.0, -3.0]
    probs = one(logits)
    assert probs[1] == pytest.approx(math.exp(-80) / (1 + math.exp(-3)), rel=1e-5)
    assert one(logits, top_k=3) == probs == one(logits, top_k=0, top_p=1.0) == one(logits, top_k=1 << 40)


def test_denormals_become_zero():
    probs = one([0.0, -87.0, -90.0, -103.0])
    assert probs[1] > 0 and probs[2] == probs[3] == 0


def test_greedy_is_an_exact_point_mass_at_the_lowest_id():
    assert one([1.0, 3.0, 3.0, 2.0], greedy=True, temperature=7.0, top_k=3, top_p=0.3) == [0, 1, 0, 0]
    assert one([-INF, -5.0], greedy=True) == [0, 1]


def test_greedy_compares_in_the_logits_own_dtype():
    close = [1.0, 1.0 + 1e-12, 1.0]
    assert law(torch.tensor([close], dtype=torch.float64), params({"greedy": True}))[0].tolist() == [0, 1, 0]
    assert law(torch.tensor([close], dtype=torch.float32), params({"greedy": True}))[0].tolist() == [1, 0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_float_dtype_gives_float32(dtype):
    logits = torch.tensor([[0.5, -1.25, 3.0, 2.0]], dtype=dtype)
    probs = law(logits, params({"top_k": 3}))
    assert probs.dtype == torch.float32
    assert probs[0].tolist() == pytest.approx(oracle.law([0.5, -1.25, 3.0, 2.0], top_k=3)[0], rel=1e-6)
    if dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(probs, law(logits.float(), params({"top_k": 3})))


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("row", [[1.0, NAN, 0.0], [NAN] * 3, [INF, 1.0, 0.0], [-INF] * 3], ids=str)
def test_broken_rows_are_nan_throughout_and_alone(row, greedy):
    requests = [{"greedy": greedy, "top_k": 2, "top_p": 0.9, "min_p": 0.1}] * 2
    probs = law(torch.tensor([row, [1.0, 2.0, 3.0]]), params(*requests))
    assert probs[0].isnan().all()
    assert probs[1].sum().item() == pytest.approx(1)


def test_padding_never_gets_probability():
    logits = torch.tensor([[1.0, 2.0, 100.0, NAN], [5.0, 5.0, INF, 7.0]])
    requests = params({"top_k": 3}, {"greedy": True})
    probs = law(logits, requests, vocab_size=2)
    assert torch.equal(probs[:, 2:], torch.zeros(2, 2))
    assert torch.equal(probs[:, :2], law(logits[:, :2], requests))
    assert logits[0, 2] == 100, "inputs are not changed"


def test_each_lane_has_its_own_settings_at_every_position():
    logits = torch.randn(4, 3, 2, 16, generator=torch.Generator().manual_seed(0))
    requests = [{"top_k": 2}, {"temperature": 0.3}, {"greedy": True}, {"min_p": 0.2, "top_p": 0.9}]
    probs = law(logits, params(*requests))
    assert probs.shape == logits.shape
    for lane, request in enumerate(requests):
        for i in range(3):
            for j in range(2):
                expected, _ = oracle.law(logits[lane, i, j].tolist(), **request)
                assert probs[lane, i, j].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-30)


def test_a_real_vocabulary_sums_to_one():
    logits = torch.randn(2, 151_936, generator=torch.Generator().manual_seed(3))
    probs = law(logits, params({}, {"top_k": 20, "top_p": 0.95}))
    assert probs.double().sum(-1).tolist() == pytest.approx([1, 1], abs=1e-6)
    assert torch.allclose(probs[0].double(), logits[0].double().softmax(-1), rtol=1e-5)
    assert 1 <= (probs[1] > 0).sum().item() <= 20


def test_refusals_name_the_numbers():
    with pytest.raises(ValueError, match="int64"):
        law(torch.zeros(1, 4, dtype=torch.int64), params({}))
    with pytest.raises(ValueError, match="with 5"):
        law(torch.zeros(1, 4), params({}), vocab_size=5)
    with pytest.raises(ValueError, match="262144"):
        law(torch.zeros(1, (1 << 18) + 1), params({}))
