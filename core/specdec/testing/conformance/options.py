"""Sampling options on every verification row: penalties, bias, minimum length, log-probabilities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.round.completion import Finish
from specdec.testing.conformance.base import Conformance, next_tokens
from specdec.testing.conformance.bench import Bench
from specdec.testing.conformance.near_ties import PlainText

#: Strong enough to change the text at every position.
PENALTIES: dict[str, Any] = {"presence_penalty": 0.7, "frequency_penalty": 0.9, "repetition_penalty": 1.3}


def penalised(logits: Tensor, prompt: Sequence[int], output: Sequence[int], bias: dict[int, float]) -> Tensor:
    """Logits [V] under ``PENALTIES``: divide or multiply what occurred, subtract per occurrence and once, add the
    bias."""
    changed = logits.to(torch.float64).clone()
    for token in {*prompt, *output}:
        factor = float(torch.tensor(PENALTIES["repetition_penalty"], dtype=torch.float32))
        changed[token] = changed[token] / factor if changed[token] > 0 else changed[token] * factor
    for token, count in Counter(output).items():
        changed[token] -= PENALTIES["frequency_penalty"] * count + PENALTIES["presence_penalty"]
    for token, amount in bias.items():
        changed[token] += amount
    return changed


class OptionsConformance(Conformance):
    """Options act on rows, counts grow by emitted tokens."""

    def _penalised_output(self, reference: Bench, prompt: list[int], length: int, bias: dict[int, float]) -> PlainText:
        """Greedy output under ``PENALTIES``, one prompt pass for every token."""
        output: list[int] = []
        rows: list[Tensor] = []
        while len(output) < length:
            reference.admit(0, [*prompt, *output], greedy=True)
            logits = reference.target.first_logits(reference.where(0))[0].cpu()
            rows.append(penalised(logits, prompt, output, bias))
            output.append(int(rows[-1].argmax()))
        return PlainText(tuple(output), torch.stack(rows))

    def test_penalties_count_every_emitted_token_once(self, bench: Bench, reference: Bench) -> None:
        """Fault classes: per-round instead of per-token bookkeeping; shallow copy of mutable state (rejected drafts
        counted, accepted ones twice). Outputs equal a token-by-token oracle for all accepted counts and widths."""
        prompts, deepest, length = self.prompts(bench)[:3], bench.recipe.max_draft_tokens, 24
        bias = {3: 1.5, 5: -2.0}
        slots = [0, 1, 2]
        outputs = [self._penalised_output(reference, prompt, length, bias) for prompt in prompts]
        for first in range(deepest + 1):
            for slot in slots:
                options = {**PENALTIES, "logit_bias": tuple(bias.items()), "greedy": True}
                bench.admit(slot, prompts[slot], budget=length, **options)
            driver = self.driver(bench, drafter=self.scripted(bench), extended=True)
            driver.start(slots)
            turn = first
            while running := driver.running(slots):
                drafts = 0 if turn % 4 == 3 else deepest
                counts = {s: (s + turn) % (drafts + 1) for s in running}
                script = {
                    s: next_tokens(outputs[s], len(driver.tokens(s)), drafts, bench.vocab, counts[s]) for s in running
                }
                driver.drafter.write(script)  # type: ignore[union-attr]
                for done in driver.round(running, drafts):
                    if not done.finish and self.on_text(driver, done.slot, outputs[done.slot]):
                        assert done.accepted == counts[done.slot]
                turn += 1
            self.check_text(driver, slots, outputs)

    def test_minimum_length_counts_tokens(self, bench: Bench, plain: list[PlainText], drafts: int) -> None:
        """Fault class: per-round instead of per-token bookkeeping. The stop id is impossible in exactly the first
        ``minimum`` tokens, wherever rounds end."""
        prompts = self.prompts(bench)
        slots = [0, 1, 2, 3]
        for minimum in (1, drafts, drafts + 3):
            for slot in slots:
                # greedy would stop at once: the stop id is the first token
                bench.admit(
                    slot,
                    prompts[slot],
                    budget=self.budget,
                    stops=(plain[slot][0],),
                    min_new_tokens=minimum,
                    greedy=True,
                    logit_bias=((plain[slot][0], 100.0),),
                )
            driver = self.driver(bench, extended=True)
            driver.start(slots)
            while running := driver.running(slots):
                driver.round(running, drafts)
            for slot in slots:
                output = driver.tokens(slot)
                assert len(output) == minimum + 1, f"the stop id came after {len(output) - 1} tokens, not {minimum}"
                assert output.count(plain[slot][0]) == 1
                assert driver.completions[slot][-1].finish is Finish.STOP

    def test_logprobs_are_those_of_the_deciding_rows(
        self, bench: Bench, reference: Bench, plain: list[PlainText]
    ) -> None:
        """Fault class: logprobs not read from verify rows. Every emitted token, accepted, corrected or bonus, has the
        log-probability that a prompt pass gives it, and so have the greatest."""
        prompts, deepest = self.prompts(bench), bench.recipe.max_draft_tokens
        slack = max(self.near_tie, 1e-5)
        slots = self.admit_all(bench)
        driver = self.driver(bench, drafter=self.scripted(bench), extended=True)
        driver.start(slots)
        for width in (deepest, 0, deepest):
            before = {slot: driver.tokens(slot) for slot in slots}
            script = {s: next_tokens(plain[s], len(before[s]), width, bench.vocab, min(s + 1, width)) for s in slots}
            driver.drafter.write(script)  # type: ignore[union-attr]
            rounds = driver.round(slots, width)
            frames = bench.arena.read_logprobs((driver.number - 1) % 2, slots)
            for slot, done, columns in zip(slots, rounds, frames, strict=True):
                for index, token in enumerate(done.tokens):
                    reference.admit(0, [*prompts[slot], *before[slot], *done.tokens[:index]], greedy=True)
                    logits = reference.target.first_logits(reference.where(0))[0]
                    expected = logits.double().log_softmax(-1).cpu()
                    chosen, greatest = columns[index]
                    assert abs(chosen - float(expected[token])) < slack
                    values, ids = expected.sort(descending=True, stable=True)
                    if not self.near_tie:
                        assert [pair[0] for pair in greatest[:3]] == ids[:3].tolist()
                    for (one, value), best in zip(greatest[:3], values[:3].tolist()):
                        # who is third may be a near tie
                        assert abs(value - best) < slack and abs(value - float(expected[one])) < slack
