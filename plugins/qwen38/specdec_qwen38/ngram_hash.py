"""Integer arithmetic of the per-layer n-gram embedding (PLE) hash.

A table row is chosen by multiplying up to ``ngram_size`` token ids with fixed odd multipliers, XOR-ing the products and
reducing the result modulo a prime, one prime per hash head. Nothing here is learned: multipliers, primes and offsets
follow from four configuration values, so a checkpoint that stores them can be checked instead of believed. Plain
integers only; importing this module is cheap and imports neither torch nor numpy.
"""

from functools import lru_cache

from specdec.hash_tables import is_prime, offsets, primes

__all__ = ["is_prime", "multipliers", "offsets", "primes", "splitmix64"]

_MASK_64 = (1 << 64) - 1
# The increment of SplitMix64 (2^64 divided by the golden ratio); it also separates the seeds of neighbouring lags.
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
# Separates the seeds of different PLE layers; a constant of the reference implementation.
_ORDINAL_STRIDE = 10007


def splitmix64(state: int) -> int:
    """Return the first SplitMix64 output for a 64-bit ``state`` (Steele, Lea and Flood, 2014)."""
    value = (state + _GOLDEN_GAMMA) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


@lru_cache(maxsize=64)
def multipliers(*, seed: int, vocab_size: int, ngram_size: int, ordinal: int) -> tuple[int, ...]:
    """Return one odd multiplier per lag 0 … ``ngram_size`` − 1 for the PLE layer number ``ordinal`` (from 0).

    Each is bounded so that a product with any token id stays below 2^63 and therefore never overflows int64.
    """
    half = max(1, ((2**63 - 1) // vocab_size) // 2)
    states = (seed + _ORDINAL_STRIDE * ordinal + _GOLDEN_GAMMA * (lag + 1) for lag in range(ngram_size))
    return tuple(2 * (splitmix64(state & _MASK_64) % half) + 1 for state in states)
