"""Slow, literal references for the sampling tests. NumPy and Python integers only; shares nothing with the code under test.

Random words and uniforms are computed in exact integers; the chain kernel is followed lane by lane, as FlashInfer's
source and CUB's block primitives order their additions; the law is a float64 program over sorted lists.
"""

import math

import numpy as np

F32 = np.float32
THREADS = 1024


def philox_block(counter, key):
    """Ten Philox4x32 rounds on four counter words and two key words (Python integers)."""
    x, y, z, w = counter
    k0, k1 = key
    for _ in range(10):
        first, second = 0xD2511F53 * x, 0xCD9E8D57 * z
        x, y, z, w = (second >> 32) ^ y ^ k0, second % 2**32, (first >> 32) ^ w ^ k1, first % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return x, y, z, w


def word(seed, n, subsequence=0):
    """Word n of stream (seed, subsequence); all three unsigned."""
    counter = (n // 4) % 2**32, (n // 4) // 2**32, subsequence % 2**32, subsequence // 2**32
    return philox_block(counter, (seed % 2**32, seed // 2**32))[n % 4]


def _round24(n):
    """An integer to 24 significant bits, ties to even."""
    shift = max(n.bit_length() - 24, 0)
    kept, rest = n >> shift, n & ((1 << shift) - 1)
    half = 1 << shift >> 1
    if shift and (rest > half or (rest == half and kept & 1)):
        kept += 1
    return kept << shift


def uniform(word_):
    """cuRAND's mapping, exact until the last rounding: (2 * f32(word) + 1) * 2^-33."""
    return F32(math.ldexp(_round24(2 * _round24(word_) + 1), -33))


def draws(seed, offset, count, subsequence=0):
    return np.array([uniform(word(seed, offset + i, subsequence)) for i in range(count)], F32)


def _warp_reduce(lanes):
    lanes = lanes.copy()
    for o in (1, 2, 4, 8, 16):
        step = lanes.copy()
        for lane in range(32 - o):
            step[:, lane] = lanes[:, lane] + lanes[:, lane + o]
        lanes = step
    return lanes[:, 0]


def _block_reduce(threads):
    total = None
    for value in _warp_reduce(threads.reshape(-1, 32)):
        total = value if total is None else F32(total + value)
    return total


def _warp_exclusive(lanes):
    """Blelloch scan of [warps, 32]; returns (exclusive, totals)."""
    lanes = lanes.copy()
    for o in (1, 2, 4, 8, 16):
        before = lanes.copy()
        for lane in range(2 * o - 1, 32, 2 * o):
            lanes[:, lane] = before[:, lane] + before[:, lane - o]
    totals = lanes[:, 31].copy()
    lanes[:, 31] = 0
    for o in (16, 8, 4, 2, 1):
        before = lanes.copy()
        for lane in range(2 * o - 1, 32, 2 * o):
            lanes[:, lane] = before[:, lane - o] + before[:, lane]
            lanes[:, lane - o] = before[:, lane]
    return lanes, totals


def draw(weights, u):
    """Token that the kernel draws from non-negative float32 weights [V] with a uniform; -1 without mass."""
    vocab = len(weights)
    items = math.gcd(4, vocab)
    tiles = -(-vocab // (THREADS * items))
    grid = np.zeros(tiles * THREADS * items, F32)
    grid[:vocab] = weights
    grid = grid.reshape(tiles, THREADS, items)

    mass = np.zeros(THREADS, F32)
    for tile in grid:
        for j in range(items):
            mass = mass + tile[:, j]
    threshold = F32(F32(u) * _block_reduce(mass))

    aggregate, last = F32(0), -1
    for i, tile in enumerate(grid):
        if items == 4:
            total = _block_reduce((tile[:, 0] + tile[:, 1]) + (tile[:, 2] + tile[:, 3]))
        else:
            total = _block_reduce(tile[:, 0] + tile[:, 1] if items == 2 else tile[:, 0])
        base = i * THREADS * items
        picked = -1
        if F32(aggregate + total) > threshold:
            own = [tile[:, 0]]
            for j in range(1, items):
                own.append(own[-1] + tile[:, j])
            lanes, warp_totals = _warp_exclusive(own[-1].reshape(32, 32))
            warps, _ = _warp_exclusive(warp_totals.reshape(1, 32))
            prefix = (warps.reshape(32, 1) + lanes).reshape(THREADS)
            scan = np.stack([prefix + o for o in own], 1)
            hits = np.flatnonzero(((scan + aggregate > threshold) & (tile > 0)).reshape(-1))
            picked = base + int(hits[0]) if len(hits) else -1
        valid = np.flatnonzero(tile.reshape(-1) > 0)
        last = base + int(valid[-1]) if len(valid) else last
        aggregate = F32(aggregate + total)
        if picked >= 0:
            return picked
        if aggregate > threshold:
            break
    return last


def chain(target, draft, tokens, u):
    """One row of the chain kernel: (tokens [K+1], matched, accepted, words used). `u` are the row's uniforms."""
    count = len(tokens)
    u = iter(u)
    used = 0

    def test(i):
        nonlocal used
        used += 1
        value = F32(next(u))
        return 0 <= tokens[i] < target.shape[1] and F32(value * draft[i][tokens[i]]) < target[i][tokens[i]]

    accepted = 0
    while accepted < count and test(accepted):
        accepted += 1
    matched = accepted
    for i in range(accepted, count):
        passed = test(i)
        matched += bool(passed and i != accepted)
    residual = target[accepted]
    if accepted < count:
        residual = np.fmax(target[accepted] - draft[accepted], F32(0))
    used += 1
    out = [int(t) for t in tokens[:accepted]] + [draw(np.nan_to_num(residual), next(u))]
    return out + [-1] * (count - accepted), matched, accepted, used


def law(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, greedy=False):
    """Probabilities in float64 and the narrowest relative distance of any comparison, to tell rounding cases apart."""
    n = len(logits)
    if greedy:
        best = max(range(n), key=lambda i: (logits[i], -i))
        return [float(i == best) for i in range(n)], math.inf
    top = max(logits)
    e = [math.exp((x - top) / temperature) if x > -math.inf else 0.0 for x in logits]
    margin = math.inf
    if min_p > 0:
        margin = min(abs(x - min_p) / min_p for x in e)
        e = [x if x >= min_p else 0.0 for x in e]
    if 0 < top_k < n:
        threshold = sorted(e, reverse=True)[top_k - 1]
        e = [x if x >= threshold else 0.0 for x in e]
    if top_p < 1:
        goal = top_p * math.fsum(e)
        mass, threshold = 0.0, None
        for x in sorted(e, reverse=True):
            mass += x
            margin = min(margin, abs(mass - goal) / goal)
            if threshold is None and mass >= goal:
                threshold = x
        e = [x if x >= threshold else 0.0 for x in e]
    total = math.fsum(e)
    return [x / total for x in e], margin
