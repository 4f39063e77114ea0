"""Prompts worth comparing: random ids whose greedy continuation does not repeat itself, and holds no near tie if it can be
helped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

import torch

from specdec.testing.conformance.bench import Bench

#: Different tokens that a continuation needs. Trained models answer many random prompts with one token or a short cycle, and
#: drafts shifted by the length of a cycle would pass for right ones.
VARIETY = 12
#: Prompts of one length that are tried; then the best of them has to do, and the suite says if it does not.
TRIES = 24


def lively_prompts(
    bench: Bench, lengths: Sequence[int], continuation: int, *, near_tie: float = 0.0
) -> list[list[int]]:
    """One prompt of each length; no two continuations are the same. A function of the arguments, checkpoint and precision.

    bench: its slot 0 is overwritten. continuation: tokens that each prompt is continued by, at most. near_tie: logits that differ
    by less end what can be compared; of the prompts that are lively the one with the latest such end is taken.
    """
    generator = torch.Generator().manual_seed(3)

    def draw(length: int) -> list[int]:
        return torch.randint(0, bench.vocab, (length,), generator=generator).tolist()

    chosen: list[list[int]] = []
    taken: set[tuple[int, ...]] = set()
    for prompt in [draw(length) for length in lengths]:
        best, output = prompt, _continued(bench, prompt, continuation, near_tie)
        for _ in range(TRIES - 1):
            if output not in taken and _worth(output, near_tie) >= (VARIETY, continuation if near_tie else 0):
                break
            prompt = draw(len(prompt))
            other = _continued(bench, prompt, continuation, near_tie)
            if output in taken or (other not in taken and _worth(other, near_tie) > _worth(output, near_tie)):
                best, output = prompt, other
        chosen.append(best)
        taken.add(output)
    return chosen


def _worth(output: tuple[int, ...], near_tie: float) -> tuple[int, int]:
    return min(len(set(output)), VARIETY), len(output) if near_tie else 0


def _continued(bench: Bench, prompt: Sequence[int], limit: int, near_tie: float) -> tuple[int, ...]:
    """Greedy continuation up to ``VARIETY`` different tokens, or up to the first near tie where there are any, by prompt passes:
    what is under test has no say in it."""
    steps = _greedy(bench, prompt, limit)
    if near_tie:
        return tuple(token for token, _ in takewhile(lambda step: step[1] >= near_tie, steps))
    return tuple(_until_lively(token for token, _ in steps))


def _until_lively(tokens: Iterator[int]) -> Iterator[int]:
    seen = set()
    for token in tokens:
        yield token
        seen.add(token)
        if len(seen) >= VARIETY:
            return


def _greedy(bench: Bench, prompt: Sequence[int], limit: int) -> Iterator[tuple[int, float]]:
    """Tokens, and by how much each was better than the second best."""
    where = bench.where(0)
    bench.admit(0, prompt, greedy=True)
    for consumed in range(len(prompt), len(prompt) + limit):
        logits = bench.target.first_logits(where)[0].double()
        token, best = int(logits.argmax()), logits.topk(2).values
        yield token, float(best[0] - best[1])
        bench.consume(where, [token], consumed)
