"""Faults of the target: recurrent state, windows, rings, pages, boundaries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from mutants import mutant, override
from torch import Tensor

from specdec.testing.conformance import Bench
from specdec_qwen38.sparse_attention import SparseAttention
from specdec_qwen38.target import QwenTarget


@mutant("test_state_after_every_accepted_count")
def recurrent_state_is_not_rolled_back(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """Every verified row goes into the live matrix, whatever was accepted."""

    def make(replayed: Any) -> Any:
        def broken(self: QwenTarget, slots: Tensor, taken: Tensor) -> Tensor:
            return replayed(self, slots, torch.where(taken > 0, self.width, taken))

        return broken

    override(patch, QwenTarget, "_replayed", make)


@mutant("test_state_after_every_accepted_count")
def recurrent_state_is_one_row_behind(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """The last consumed row is left out of the replay."""

    def make(replayed: Any) -> Any:
        return lambda self, slots, taken: replayed(self, slots, (taken - 1).clamp(min=0))

    override(patch, QwenTarget, "_replayed", make)


@mutant("test_state_after_every_accepted_count")
def convolution_window_is_not_shifted(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    store = bench.target.store
    store._windows = [field for field in store._windows if field.name != "delta_conv"]


@mutant("test_state_of_plain_rounds")
def token_history_is_frozen(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    store = bench.target.store
    store._windows = [field for field in store._windows if field.name != "ngram_tokens"]


@mutant("test_width_sequences_equal_plain_decoding")
def windows_shift_by_the_width(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """Convolution windows follow the verified rows, not the emitted ones."""
    store, width = bench.target.store, {}
    verify, rows = bench.target.verify, store._window_rows
    bench.target.verify = lambda tokens, lanes: (width.update(w=tokens.shape[1]), verify(tokens, lanes))[1]
    store._window_rows = lambda field, slots, taken: rows(field, slots, torch.where(taken > 0, width["w"], taken))


@mutant("test_prefixes_around_groups_and_pages")
def ring_tags_are_stale(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """A verification writes selector keys without their position tags."""
    verify, tags = bench.target.verify, bench.target.store["raw_tags"]

    def broken(tokens: Tensor, lanes: Any) -> Tensor:
        kept = tags.clone()
        logits = verify(tokens, lanes)
        tags.copy_(kept)
        return logits

    bench.target.verify = broken


@mutant("test_live_and_dead_lanes_at_every_position")
def rejected_write_leaks_into_another_slots_page(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    verify, store = bench.target.verify, bench.target.store

    def broken(tokens: Tensor, lanes: Any) -> Tensor:
        logits = verify(tokens, lanes)
        if store.slots > 1:
            foreign = store.page_table[(int(lanes.slots[0]) + 1) % store.slots, 0]
            store["kv"][:, foreign, 0] += 1
        return logits

    bench.target.verify = broken


@mutant("test_perfect_drafts_are_all_accepted")
def verification_overwrites_a_committed_entry(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    verify, store = bench.target.verify, bench.target.store

    def broken(tokens: Tensor, lanes: Any) -> Tensor:
        logits = verify(tokens, lanes)
        if tokens.shape[1] > 1:
            entry = store.entries(lanes.slots, (lanes.consumed - 1).unsqueeze(1))
            store.paged("kv", 0)[entry] *= 1.001
        return logits

    bench.target.verify = broken


@mutant("test_greedy_equals_plain_decoding")
def a_field_is_never_committed(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """The round itself refuses: a field that nobody commits is a declaration error."""
    if bench.capacities.slots > 1:
        bench.target.store.commit_records = lambda *names: None


@mutant("test_perfect_drafts_are_all_accepted")
def rows_see_later_candidates(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """The tokens after the last complete group are those of the last candidate, for every row."""

    def make(attend: Any) -> Any:
        def broken(self: Any, q: Tensor, chosen: Any, plan: Any, layer: int) -> Tensor:
            last = plan.positions[:, -1:].expand_as(plan.positions)
            return attend(self, q, chosen, evolve(plan, positions=last), layer)

        return broken

    override(patch, SparseAttention, "_attend_gathered", make)


@mutant("test_wrong_drafts_are_never_accepted")
def verification_rows_are_shifted(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """Row j judges draft j + 1, so that the first draft goes unverified."""
    verify = bench.target.verify
    bench.target.verify = lambda tokens, lanes: (lambda rows: torch.cat([rows[:, 1:], rows[:, -1:]], 1))(
        verify(tokens, lanes)
    )


@mutant("test_state_at_a_crossed_page_boundary")
def boundary_state_is_that_of_the_round(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """A checkpoint takes everything the round consumed, not what lies before the boundary."""
    snapshot = bench.target.snapshot
    bench.target.snapshot = lambda slots, taken=None: snapshot(
        slots, None if taken is None else torch.full_like(taken, bench.target.width)
    )


@mutant("test_state_at_a_crossed_page_boundary")
def restored_draft_group_is_empty(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """A restore that invalidates the whole ring: right for a target at a page boundary, wrong for its drafter."""
    restore, store = bench.drafter.restore, bench.drafter.store

    def broken(slot: int, state: Any, consumed: int) -> None:
        restore(slot, state, consumed)
        store["raw_tags"][:, slot] = -1

    bench.drafter.restore = broken
