"""Integer arithmetic of the Engram hash: multipliers, table sizes and row ids. Plain integers; imports no torch and no numpy.

An Engram layer looks up one table row for each n-gram size 2 … ``max_ngram`` and hash head. The compressed ids of the last
tokens are multiplied by fixed odd multipliers, the products XOR-ed, and the result is reduced modulo a prime, one prime for
each row of the lookup. Nothing here is learned: everything follows from the configuration.

The multipliers are defined as draws of NumPy's ``default_rng``, whose bit generator is PCG64 seeded through ``SeedSequence``;
:func:`bounded_draws` is that stream in plain integers, so that the numbers do not depend on a library being installed.
"""

from collections.abc import Sequence
from functools import lru_cache

from specdec.hash_tables import offsets

_MASK_32, _MASK_64, _MASK_128 = (1 << 32) - 1, (1 << 64) - 1, (1 << 128) - 1
# Separates the seeds of different layers; a constant of the reference implementation.
_SEED_STRIDE = 10007
# SeedSequence (O'Neill's seed_seq alternative) with its pool of four words.
_POOL, _SHIFT = 4, 16
_HASH_A, _STEP_A, _HASH_B, _STEP_B = 0x43B0D7E5, 0x931E8875, 0x8B51F9DD, 0x58F38DED
_MIX_LEFT, _MIX_RIGHT = 0xCA01F9DD, 0x4973F715
_PCG_MULTIPLIER = (2549297995355413924 << 64) | 4865540595714422341


class _Hash:
    """The running hash of SeedSequence: every use advances its constant."""

    def __init__(self, constant: int, step: int) -> None:
        self._constant, self._step = constant, step

    def __call__(self, value: int) -> int:
        value ^= self._constant
        self._constant = self._constant * self._step & _MASK_32
        value = value * self._constant & _MASK_32
        return value ^ value >> _SHIFT


def _seed_words(seed: int) -> list[int]:
    """The four 64-bit words that SeedSequence gives PCG64 for a seed below 2^128."""
    entropy = [seed >> 32 * word & _MASK_32 for word in range(_POOL)]
    hashed = _Hash(_HASH_A, _STEP_A)
    pool = [hashed(word) for word in entropy]
    for source in range(_POOL):
        for target in range(_POOL):
            if source != target:
                mixed = (_MIX_LEFT * pool[target] - _MIX_RIGHT * hashed(pool[source])) & _MASK_32
                pool[target] = mixed ^ mixed >> _SHIFT
    hashed = _Hash(_HASH_B, _STEP_B)
    halves = [hashed(pool[word % _POOL]) for word in range(2 * _POOL)]
    return [low | high << 32 for low, high in zip(halves[::2], halves[1::2], strict=True)]


def bounded_draws(seed: int, bound: int, count: int) -> tuple[int, ...]:
    """Return what ``numpy.random.default_rng(seed).integers(0, bound, size=count, dtype=int64)`` returns.

    Raises:
        ValueError: if ``bound`` is below 2^32 + 1 or above 2^63: NumPy draws narrow ranges in another way.
    """
    if not 1 << 32 < bound <= 1 << 63:
        raise ValueError(f"bounded_draws: bound {bound}, allowed: above 2^32 and at most 2^63")
    words = _seed_words(seed)
    increment = ((words[2] << 64 | words[3]) << 1 | 1) & _MASK_128
    state = (increment + (words[0] << 64 | words[1])) * _PCG_MULTIPLIER + increment & _MASK_128
    # Lemire's method: the high half of a 128-bit product, low halves below the threshold drawn again.
    threshold = (1 << 64) % bound
    drawn: list[int] = []
    while len(drawn) < count:
        state = state * _PCG_MULTIPLIER + increment & _MASK_128
        folded, turn = (state >> 64) ^ (state & _MASK_64), state >> 122
        product = ((folded >> turn | folded << (-turn & 63)) & _MASK_64) * bound
        if product & _MASK_64 >= threshold:
            drawn.append(product >> 64)
    return tuple(drawn)


@lru_cache(maxsize=64)
def multipliers(*, layer: int, compressed_vocab: int, max_ngram: int) -> tuple[int, ...]:
    """Return one odd multiplier per lag 0 … ``max_ngram`` − 1 for decoder layer ``layer``.

    Each is bounded so that a product with any compressed id stays below 2^63.
    """
    half = max(1, ((2**63 - 1) // compressed_vocab) // 2)
    return tuple(2 * draw + 1 for draw in bounded_draws(_SEED_STRIDE * layer, half, max_ngram))


def row_ids(window: Sequence[int], factors: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the table rows of one position.

    ``window``: compressed ids, newest first, as many as ``factors`` (:func:`multipliers`); ``sizes``: rows of each
    table, for an equal number of heads of each n-gram size from 2 on.
    """
    heads, starts = len(sizes) // (len(factors) - 1), offsets(sizes)
    mixed, rows = window[0] * factors[0], []
    for lag in range(1, len(factors)):
        mixed ^= window[lag] * factors[lag]
        rows += [mixed % sizes[head] + starts[head] for head in range((lag - 1) * heads, lag * heads)]
    return tuple(rows)
