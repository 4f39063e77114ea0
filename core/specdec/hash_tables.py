"""Sizes of hashed tables: one table of a prime number of rows for each hash head, one below another.

Plain integers. Declaration layer: the standard library only.
"""

from collections.abc import Sequence
from functools import lru_cache

__all__ = ["is_prime", "offsets", "primes"]

# Miller-Rabin with these bases decides primality exactly for every number below 3.3e24.
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)


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
def primes(*, base: int, heads: int, ordinal: int) -> tuple[int, ...]:
    """Return the table size of each of ``heads`` hash heads of the hashed layer number ``ordinal`` (from 0).

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


def offsets(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the first row of each head in the concatenated table: running sums of ``sizes``, starting at 0."""
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += size
    return tuple(starts)
