"""Integer arithmetic of the per-layer n-gram embedding (PLE) hash.

A table row is chosen by multiplying up to ``ngram_size`` token ids with fixed odd multipliers, XOR-ing the products and
reducing the result modulo a prime, one prime per hash head. Nothing here is learned: multipliers, primes and offsets
follow from four configuration values, so a checkpoint that stores them can be checked instead of believed. Plain
integers only; importing this module is cheap and imports neither torch nor numpy.
"""

from functools import lru_cache

_MASK_64 = (1 << 64) - 1
# The increment of SplitMix64 (2^64 divided by the golden ratio); it also separates the seeds of neighbouring lags.
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
# Separates the seeds of different PLE layers; a constant of the reference implementation.
_ORDINAL_STRIDE = 10007
# Miller-Rabin with these bases decides primality exactly for every number below 3.3e24.
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)


def splitmix64(state: int) -> int:
    """Return the first SplitMix64 output for a 64-bit ``state`` (Steele, Lea and Flood, 2014)."""
    value = (state + _GOLDEN_GAMMA) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def is_prime(number: int) -> bool:
    """Tell whether ``number`` is prime; exact below 3.3e24, far above any table size."""
    if number < 2:
        return False
    for witness in _WITNESSES:
        if number % witness == 0:
            return number == witness
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for witness in _WITNESSES:
        power = pow(witness, odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True


@lru_cache(maxsize=64)
def multipliers(*, seed: int, vocab_size: int, ngram_size: int, ordinal: int) -> tuple[int, ...]:
    """Return one odd multiplier per lag 0 … ``ngram_size`` − 1 for the PLE layer number ``ordinal`` (from 0).

    Each is bounded so that a product with any token id stays below 2^63 and therefore never overflows int64.
    """
    half = max(1, ((2**63 - 1) // vocab_size) // 2)
    states = (seed + _ORDINAL_STRIDE * ordinal + _GOLDEN_GAMMA * (lag + 1) for lag in range(ngram_size))
    return tuple(2 * (splitmix64(state & _MASK_64) % half) + 1 for state in states)


@lru_cache(maxsize=64)
def primes(*, base: int, heads: int, ordinal: int) -> tuple[int, ...]:
    """Return the table size of each of ``heads`` hash heads of the PLE layer number ``ordinal``.

    They are consecutive primes, counted from the first one not below ``base``; layer 0 takes the first ``heads``, layer 1
    the next ``heads`` and so on, so no two heads of a model share a modulus.
    """
    found: list[int] = []
    candidate = base
    while len(found) < heads * (ordinal + 1):
        if is_prime(candidate):
            found.append(candidate)
        candidate += 1
    return tuple(found[heads * ordinal :])


def offsets(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the first row of each head in the concatenated table: running sums of ``sizes``, starting at 0."""
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += size
    return tuple(starts)
