"""Faults of penalties, minimum length and log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mutants import mutant, override
from torch import Tensor

from specdec.state import options as option_table
from specdec.state.options import OptionTable
from specdec.testing.conformance import Bench


@mutant("test_penalties_count_every_emitted_token_once")
def accepted_tokens_are_counted_twice(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    def make(commit: Any) -> Any:
        def broken(self: OptionTable, slots: Tensor, tokens: Tensor, emitted: Tensor) -> None:
            commit(self, slots, tokens, emitted)
            commit(self, slots, tokens, (emitted - 1).clamp(min=0))

        return broken

    override(patch, OptionTable, "commit", make)


@mutant("test_penalties_count_every_emitted_token_once")
def rejected_drafts_are_counted(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Tensor] = {}

    def make_counts(before: Any) -> Any:
        def kept(counts: Tensor, drafts: Tensor) -> Tensor:
            seen["drafts"] = drafts
            return before(counts, drafts)

        return kept

    def make_commit(commit: Any) -> Any:
        def broken(self: OptionTable, slots: Tensor, tokens: Tensor, emitted: Tensor) -> None:
            commit(self, slots, tokens, emitted)
            if seen["drafts"].shape[1]:
                commit(self, slots, seen["drafts"][:, -1:], torch.ones_like(emitted) * (emitted > 0))

        return broken

    override(patch, option_table, "counts_before", make_counts)
    override(patch, OptionTable, "commit", make_commit)


@mutant("test_penalties_count_every_emitted_token_once")
def drafts_before_a_row_are_not_counted(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    override(
        patch,
        option_table,
        "counts_before",
        lambda before: lambda counts, drafts: counts.unsqueeze(1).repeat(1, drafts.shape[1] + 1, 1),
    )


@mutant("test_minimum_length_counts_tokens")
def the_minimum_counts_rounds(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """The ban of stop ids is decided once per round, by its first row."""
    from specdec.state import requests

    name = "forbid_stops"

    def make(forbid: Any) -> Any:
        def broken(logits: Tensor, *, stops: Tensor, emitted: Tensor, minimum: Tensor) -> Tensor:
            early = (emitted < minimum).to(emitted.dtype)
            return forbid(logits, stops=stops, emitted=emitted, minimum=emitted + early * (logits.shape[1] + 1))

        return broken

    override(patch, requests if hasattr(requests, name) else option_table, name, make)


@mutant("test_logprobs_are_those_of_the_deciding_rows")
def logprobs_come_from_the_last_row(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    write = bench.arena.logprobs.write
    bench.arena.logprobs.write = lambda rows, logits, tokens: write(rows, logits[:, -1:].expand_as(logits), tokens)
