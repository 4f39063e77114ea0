"""Prompts worth comparing: random ids whose greedy continuation does not repeat itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from specdec.testing.conformance.bench import Bench

#: Different tokens that a continuation needs. Trained models answer many random prompts with one token or a short cycle, and
#: drafts shifted by the length of a cycle would pass for right ones.
VARIETY = 12
#: Prompts of one length that are tried; then the best of them has to do, and the suite says if it does not.
TRIES = 24


def lively_prompts(bench: Bench, lengths: Sequence[int], continuation: int) -> list[list[int]]:
    """One prompt of each length; no two continuations are the same. A function of checkpoint, lengths and vocabulary.

    bench: its slot 0 is overwritten. continuation: tokens that each prompt is continued by, at most.
    """
    generator = torch.Generator().manual_seed(3)

    def draw(length: int) -> list[int]:
        return torch.randint(0, bench.vocab, (length,), generator=generator).tolist()

    chosen: list[list[int]] = []
    taken: set[tuple[int, ...]] = set()
    for prompt in [draw(length) for length in lengths]:
        best, output = prompt, _continued(bench, prompt, continuation)
        for _ in range(TRIES - 1):
            if output not in taken and len(set(output)) >= VARIETY:
                break
            prompt = draw(len(prompt))
            other = _continued(bench, prompt, continuation)
            if output in taken or (other not in taken and len(set(other)) > len(set(output))):
                best, output = prompt, other
        chosen.append(best)
        taken.add(output)
    return chosen


def _continued(bench: Bench, prompt: Sequence[int], limit: int) -> tuple[int, ...]:
    """Greedy continuation up to ``VARIETY`` different tokens, by prompt passes: what is under test has no say in it."""
    return tuple(_until_lively(_greedy(bench, prompt, limit)))


def _until_lively(tokens: Iterator[int]) -> Iterator[int]:
    seen = set()
    for token in tokens:
        yield token
        seen.add(token)
        if len(seen) >= VARIETY:
            return


def _greedy(bench: Bench, prompt: Sequence[int], limit: int) -> Iterator[int]:
    where = torch.tensor([0], device=bench.arena.device)
    bench.admit(0, prompt, greedy=True)
    for consumed in range(len(prompt), len(prompt) + limit):
        token = int(bench.target.first_logits(where)[0].argmax())
        yield token
        bench.consume(where, [token], consumed)
