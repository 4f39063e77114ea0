"""Prompt scoring: the rows of a prompt chunk give the logits that decoding and verification give at the same positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from specdec.testing.conformance.base import Conformance
from specdec.testing.conformance.bench import Bench, altered_verification, replaced
from specdec.testing.conformance.history import CHUNKINGS
from specdec.testing.conformance.precision import Precision


@contextmanager
def scored_prompts(bench: Bench, precision: Precision) -> Iterator[list[Tensor]]:
    """Inside the block every prompt chunk leaves its logits [T, V] in the list, in order.

    They are read twice: before the drafter absorbs the chunk, and after it did and the feedback rows that it was given became
    NaN. Raises AssertionError if the two differ, or if a row read alone differs by more than ``precision`` allows.
    """
    found: list[Tensor] = []
    prefill, absorb = bench.target.prefill, bench.drafter.prefill

    def scoring(tokens: Tensor, slot: Tensor, start: int) -> Tensor:
        rows = prefill(tokens, slot, start)
        found.append(bench.target.prefill_logits(len(tokens)).clone())
        return rows

    def overwriting(feedback: Tensor, *rest: Any, **named: Any) -> None:
        absorb(feedback, *rest, **named)
        feedback.fill_(torch.nan)
        again = bench.target.prefill_logits(len(found[-1]))
        assert torch.equal(again, found[-1]), "the chunk's logits changed when the drafter absorbed it"
        for row in range(len(again)):
            one = bench.target.prefill_logits(1, row)
            wrong = precision.differences(one, again[row : row + 1])
            assert wrong is None, f"row {row} read alone: {wrong}"

    with replaced(bench.target, "prefill", scoring), replaced(bench.drafter, "prefill", overwriting):
        yield found


class PromptScoreConformance(Conformance):
    """Log-probabilities of prompt tokens are the target's own, however the prompt is cut."""

    def _same_scores(self, ours: Tensor, theirs: Tensor) -> None:
        """Log-softmaxes of logits [T, V] agree."""
        ours, theirs = ours.double().log_softmax(-1), theirs.double().log_softmax(-1)
        self.check_values(ours, theirs, "scores")

    def _scores(self, bench: Bench, prompt: Sequence[int], chunks: Sequence[int]) -> Tensor:
        """Logits [T, V] after every prompt token."""
        with scored_prompts(bench, self.allowed()) as found:
            bench.admit(1, prompt, chunks=chunks, greedy=True)
        return torch.cat(found)

    def test_prompt_scores_do_not_depend_on_chunking(self, bench: Bench, reference: Bench, chunking: str) -> None:
        """Fault class: buffer reused before its last reader (hidden states of a prompt overwritten by the drafter before
        they are scored). Every row equals the logits of a prompt that ends there, whatever the drafter does to its
        feedback rows."""
        for length in (37, 65):
            prompt = self.text(bench, length)
            wanted = []
            for end in range(1, length + 1):
                # one growing prompt, a token a call; what it saved is read as the first token of a request would read it
                if end == 1:
                    reference.admit(0, prompt[:1], greedy=True)
                else:
                    reference.consume(reference.where(0), prompt[end - 1 : end], end - 1)
                wanted.append(reference.target.first_logits(reference.where(0)).clone())
            self._same_scores(self._scores(bench, prompt, CHUNKINGS[chunking](length)), torch.cat(wanted))

    def test_prompt_scores_are_those_of_verification(self, bench: Bench, any_drafts: int) -> None:
        """Fault class: buffer reused before its last reader, or a prompt row that belongs to another token. The rows that
        verify the prompt's own tokens, and those of plain decoding at width one, have the same log-softmax."""
        prompt = self.text(bench, 42)
        scores = self._scores(bench, prompt, [20])
        script = self.scripted(bench)
        driver = self.driver(bench, drafter=script, eager=True)
        rows: list[Tensor] = []

        def recording(logits: Tensor) -> Tensor:
            rows.append(logits[0].clone())
            return logits

        with altered_verification(bench.target, recording):
            for place in range(1, len(prompt) - any_drafts, any_drafts + 1):
                bench.admit(1, prompt[:place], output=prompt[place : place + 1], greedy=True)
                driver.open([1])
                script.write({1: prompt[place + 1 : place + 1 + any_drafts]})
                driver.round([1], any_drafts)
        found = torch.cat(rows)
        assert len(found) > len(prompt) - any_drafts - 3
        self._same_scores(scores[1 : 1 + len(found)], found)
