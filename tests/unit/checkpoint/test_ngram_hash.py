"""Multipliers, primes and offsets of the n-gram hash, and the table rows that follow from them."""

import math

import pytest

from specdec_qwen38 import ngram_hash
from specdec_qwen38.geometry import REAL, TINY

REAL_PRIMES = [3, 23, 33, 47, 59, 63, 69, 77, 81, 93, 107, 147, 153, 159, 161, 171]


def table_rows(geometry, tokens):
    """Rows of the last token, from the definition: window from the start or the last EOS, product, xor, modulus."""
    history = list(tokens[:-1])
    window, open_ = [tokens[-1]], True
    for lag in range(1, geometry.ngram_size):
        previous = history[-lag] if lag <= len(history) else geometry.eos_token_id
        open_ = open_ and previous != geometry.eos_token_id
        window.append(previous if open_ else geometry.eos_token_id)
    rows = []
    for head in range(geometry.ngram_heads):
        order, mixed = 2 + head // geometry.heads_per_ngram, 0
        for lag in range(order):
            mixed ^= window[lag] * geometry.ple_multipliers()[lag]
        rows.append(mixed % geometry.ple_primes()[head] + geometry.ple_offsets()[head])
    return rows


def test_constants_of_the_real_model():
    assert REAL.ple_multipliers() == (23703573157769, 20109073645365, 8052911324071)
    assert [prime - 20_000_000 for prime in REAL.ple_primes()] == REAL_PRIMES
    assert REAL.ple_offsets()[:3] == (0, 20_000_003, 40_000_026)
    assert sum(REAL.ple_primes()) == 320_001_446


def test_constants_of_the_tiny_model():
    assert TINY.ple_multipliers() == (4295158889763781, 17440218147737327, 1270917961434445)
    assert TINY.ple_primes() == (1009, 1013, 1019, 1021)
    assert TINY.ple_offsets() == (0, 1009, 2022, 3041)


def test_rows_of_the_real_model():
    assert table_rows(REAL, [1000]) == [
        1876085, 31308566, 59776718, 71834192, 97499724, 100188615, 134972424, 142751402,
        178377549, 180579936, 219367837, 221375066, 245391246, 270637420, 285992863, 304819575,
    ]  # fmt: skip
    rows = table_rows(REAL, [1000, 2000, 3000])
    assert (rows[0], rows[1], rows[-1]) == (17238551, 37786998, 302034413)
    rows = table_rows(REAL, [1000, 248044, 2000])
    assert (rows[0], rows[1], rows[-1]) == (10043113, 32614787, 318741251)


def test_rows_of_the_tiny_model():
    assert table_rows(TINY, [1]) == [723, 1307, 3040, 3331]
    assert table_rows(TINY, [1, 2]) == [752, 1322, 2491, 3947]
    assert table_rows(TINY, [1, 2, 3]) == [71, 1735, 2684, 3891]


def test_products_fit_int64():
    for geometry in (REAL, TINY):
        assert max(geometry.ple_multipliers()) * (geometry.vocab_size - 1) < 2**63
        assert all(multiplier % 2 == 1 for multiplier in geometry.ple_multipliers())


def test_a_second_layer_takes_other_multipliers_and_the_next_primes():
    naive = [n for n in range(1000, 1200) if all(n % d for d in range(2, math.isqrt(n) + 1))]
    assert TINY.ple_primes(0) + TINY.ple_primes(1) == tuple(naive[:8])
    assert set(TINY.ple_multipliers(0)).isdisjoint(TINY.ple_multipliers(1))


def test_splitmix64_known_values():
    # The first output of the public reference generator for seeds 0 and 1234567.
    assert ngram_hash.splitmix64(0) == 0xE220A8397B1DCDAF
    assert ngram_hash.splitmix64(1234567) == 6457827717110365317


@pytest.mark.parametrize("composite", [0, 1, 561, 3215031751, 3825123056546413051, 20_000_001, 41 * 43])
def test_composites_and_pseudoprimes_are_not_prime(composite):
    assert not ngram_hash.is_prime(composite)


def test_small_numbers_agree_with_trial_division():
    for number in range(2, 3000):
        assert ngram_hash.is_prime(number) == all(number % d for d in range(2, math.isqrt(number) + 1))


def test_multipliers_equal_the_stored_constants_of_another_implementation():
    configuration = pytest.importorskip("transformers.models.qwen4_exp.configuration_qwen4_exp")
    modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    text = configuration.Qwen4ExpTextConfig(**TINY.to_config())
    model = modeling.Qwen4ExpTextModel(text)
    embedding = model.layers[1].ple.ple_embedding
    assert tuple(embedding.layer_multipliers.tolist()) == TINY.ple_multipliers()
    assert tuple(embedding.ngram_heads_vocab_sizes.tolist()) == TINY.ple_primes()
    assert tuple(embedding.ngram_heads_offsets.tolist()) == TINY.ple_offsets()
