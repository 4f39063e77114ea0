import numpy as np
import pytest
import sampling_oracle as oracle
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.sampling.philox import (
    DOMAIN_SPAN,
    DRAFT_DOMAIN,
    TARGET_DOMAIN,
    philox_block,
    philox_words,
    round_offsets,
    uniforms,
)
from specdec.sampling.sampler import RoundWords


def as_int64(pattern: int) -> int:
    return pattern - 2**64 if pattern >= 2**63 else pattern


def tensor64(*patterns: int) -> torch.Tensor:
    return torch.tensor([as_int64(p) for p in patterns], dtype=torch.int64)


# Random123's kat_vectors for philox4x32, ten rounds.
KNOWN_ANSWERS = [
    ((0,) * 4, (0,) * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]

# Words and float32 patterns printed by a program built from cuRAND's header.
CURAND = [
    (42, 0, 0, "9ceaf053 77f5493b 12bf50ad 5742b3d7 fcdb2127", "3f1ceaf0 3eefea92 3d95fa85 3eae8568 3f7cdb21"),
    (42, 0, 3, "5742b3d7 fcdb2127 53ba6cfd 838f5a6e 744e06fb", "3eae8568 3f7cdb21 3ea774da 3f038f5a 3ee89c0e"),
    (42, 1, 0, "02933769 2051e913 3b68b038 b62c409c 20ff9139", "3c24cdda 3e0147a4 3e6da2c1 3f362c41 3e03fe45"),
    (42, 31, 0, "4429196d c9b8a7bf a0ab64ba c5cb22a1 94720136", "3e885233 3f49b8a8 3f20ab65 3f45cb23 3f147201"),
    (
        0x123456789ABCDEF0,
        0,
        0,
        "092c9b44 78384bc0 c9fb80be 2b3be4dd 389d999a",
        "3d12c9b4 3ef07098 3f49fb81 3e2cef93 3e627666",
    ),
    (
        0x123456789ABCDEF0,
        2**32 + 1,
        5,
        "87918899 e021558b 80a71cb8 8fd3078b 8fc1a66b",
        "3f079189 3f602156 3f00a71d 3f0fd308 3f0fc1a6",
    ),
    (
        2**64 - 1,
        127,
        2**34 - 1,  # the second word's block number needs a carry into the upper counter word
        "42272259 8f53795c 0a62951f 9bc55e1a 2e6acb76",
        "3e844e45 3f0f5379 3d262952 3f1bc55e 3e39ab2e",
    ),
    (
        0,
        0,
        2**40 + 3,
        "0191d339 4b2d4840 e0e63fe7 abcf0e46 0cbdd59e",
        "3bc8e99c 3e965a90 3f60e640 3f2bcf0e 3d4bdd5a",
    ),
]


def words_of(text: str) -> list[int]:
    return [int(part, 16) for part in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_block_known_answers(counter, key, expected):
    x, y, z, w = counter
    even, odd = philox_block(torch.tensor([x, z]), torch.tensor([y, w]), torch.tensor(key))
    assert torch.stack((even, odd), -1).flatten().tolist() == words_of(expected)


@pytest.mark.parametrize(("seed", "subsequence", "offset", "words", "bits"), CURAND)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_curand_words_and_uniforms(seed, subsequence, offset, words, bits, as_tensor):
    got = philox_words(
        tensor64(seed), tensor64(offset), 5, subsequence=tensor64(subsequence) if as_tensor else subsequence
    )
    assert got.tolist() == [words_of(words)]
    assert uniforms(got)[0].numpy().view(np.uint32).tolist() == words_of(bits)


PATTERNS = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1])


@given(seed=PATTERNS, offset=PATTERNS, subsequence=PATTERNS, count=st.integers(0, 19))
@settings(max_examples=150, deadline=None)
def test_words_against_integers(seed, offset, subsequence, count):
    got = philox_words(tensor64(seed), tensor64(offset), count, subsequence=subsequence)
    assert got.shape == (1, count)
    assert got[0].tolist() == [oracle.word(seed, offset + i, subsequence) for i in range(count)]


@pytest.mark.parametrize("start", range(4))
@pytest.mark.parametrize("distance", [1, 2, 3, 4, 5, 8])
def test_carry_into_the_upper_counter_word(start, distance):
    offset = 2**34 - distance
    got = philox_words(tensor64(7), tensor64(offset + start), 9)
    assert got[0].tolist() == [oracle.word(7, offset + start + i) for i in range(9)]


def test_batch_shapes_and_subsequences_per_row():
    seeds, offsets, subs = torch.arange(6).view(2, 3), torch.arange(6).view(2, 3) * 5, torch.arange(6).view(2, 3) << 31
    got = philox_words(seeds, offsets, 4, subsequence=subs)
    assert got.shape == (2, 3, 4)
    for i in range(6):
        assert got.view(6, 4)[i].tolist() == [oracle.word(i, i * 5 + j, i << 31) for j in range(4)]
    assert philox_words(torch.tensor(5), torch.tensor(3), 2).tolist() == [oracle.word(5, 3), oracle.word(5, 4)]


def test_uniform_mapping_at_its_edges():
    edges = [0, 1, 2**24 - 1, 2**24, 2**24 + 1, 2**31 + 64, 2**32 - 129, 2**32 - 128, 2**32 - 1]
    got = uniforms(torch.tensor(edges))
    assert got.dtype == torch.float32
    assert got.tolist() == [float(oracle.uniform(x)) for x in edges]
    assert got[0] == 2.0**-33
    assert got[-2:].tolist() == [1.0, 1.0]
    assert got[-3].item() == 1 - 2.0**-24


@given(words=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
@settings(max_examples=100, deadline=None)
def test_uniform_mapping_everywhere(words):
    assert uniforms(torch.tensor(words)).tolist() == [float(oracle.uniform(x)) for x in words]


@pytest.mark.parametrize("most", [0, 1, 5, 7])
def test_uniforms_of_a_round_follow_the_offset_law(most):
    seeds, consumed = [3, 2**63 - 1, 3], [0, 123_456, 1]
    words = RoundWords.of(torch.tensor(seeds), torch.tensor(consumed), most)
    target_u, draft_u = words.uniforms(TARGET_DOMAIN), words.uniforms(DRAFT_DOMAIN)
    assert target_u.shape == draft_u.shape == (3, most + 2)
    for lane, (seed, n) in enumerate(zip(seeds, consumed, strict=True)):
        assert target_u[lane].tolist() == oracle.draws(seed, n * (most + 2), most + 2).tolist()
        assert draft_u[lane].tolist() == oracle.draws(seed, n * (most + 2) + 2**60, most + 2).tolist()


@given(
    positions=st.lists(st.integers(0, 2**50), min_size=2, max_size=12, unique=True),
    most=st.integers(0, 7),
)
@settings(max_examples=100, deadline=None)
def test_word_ranges_of_positions_and_domains_never_overlap(positions, most):
    first = round_offsets(torch.tensor(positions), most)
    ranges = sorted((start, start + most + 2) for start in first.flatten().tolist())
    assert all(end <= start for (_, end), (start, _) in zip(ranges, ranges[1:], strict=False))
    for domain in (TARGET_DOMAIN, DRAFT_DOMAIN):
        assert all(domain * DOMAIN_SPAN <= s < (domain + 1) * DOMAIN_SPAN for s in first[domain].tolist())


def test_neighbouring_rounds_tile_the_stream():
    first = round_offsets(torch.arange(50), 5)
    assert (first[:, 1:] - first[:, :-1]).eq(7).all()


def test_words_do_not_depend_on_the_batch():
    seeds, offsets = torch.arange(100, 110), torch.arange(10) * 977
    together = philox_words(seeds, offsets, 9)
    for i in (9, 0, 4):
        assert torch.equal(philox_words(seeds[i : i + 1], offsets[i : i + 1], 9)[0], together[i])
