"""Faults of copied drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mutants import mutant, override
from torch import Tensor

from specdec.round.copies import Copies
from specdec.round.proposer import ChainProposer
from specdec.testing.conformance import Bench


@mutant("test_drafts_behind_copies_continue_from_them")
def drafter_goes_on_from_what_it_drew(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    def make(keep: Any) -> Any:
        def kept(self: ChainProposer, depth: int, tokens: Tensor, probs: Tensor) -> Tensor:
            keep(self, depth, tokens, probs)
            return tokens.clamp(0, self.vocab_size - 1)

        return kept

    override(patch, ChainProposer, "_keep", make)


@mutant("test_copied_drafts_keep_the_law")
def copies_are_judged_by_the_drafters_law(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    def make(keep: Any) -> Any:
        def kept(self: ChainProposer, depth: int, tokens: Tensor, probs: Tensor) -> Tensor:
            following: Tensor = keep(self, depth, tokens, probs)
            self.probs[:, depth] = probs
            return following

        return kept

    override(patch, ChainProposer, "_keep", make)


@mutant("test_lanes_without_copies_draw_as_always")
def copies_of_the_next_lane(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    override(patch, Copies, "at", lambda at: lambda self, depth: tuple(part.roll(1) for part in at(self, depth)))


@mutant("test_greedy_with_copies_equals_plain_decoding")
def copies_begin_one_draft_late(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """Draft k is copy k + 1: right copies are rejected, and text stays what it was."""

    def make(at: Any) -> Any:
        return lambda self, depth: (at(self, depth)[0], self.tokens.roll(-1, 1)[:, depth])

    override(patch, Copies, "at", make)


@mutant("test_ceilings_and_budgets_count_copies")
def source_bits_ignore_the_ceiling(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    override(patch, Copies, "sources", lambda _: lambda self, offered: torch.bitwise_left_shift(1, self.counts) - 1)
