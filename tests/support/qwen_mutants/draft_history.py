"""Faults of feedback and draft history."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mutants import mutant, override
from torch import Tensor

from specdec.sampling.sampler import ReferenceSampler
from specdec.state.store import StateStore
from specdec.testing.conformance import Bench
from specdec_qwen38.drafter import MtpDrafter


@mutant("test_feedback_is_the_row_of_the_last_consumed_token")
def feedback_is_one_row_early(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    store = bench.target.store
    extent = store.fields["feedback"].extent

    def broken(slots: Tensor) -> Tensor:
        column = (store.selected.index_select(0, slots) - 1).clamp(min=0)
        return store["feedback"][0].flatten(0, 1).index_select(0, slots * extent + column)

    bench.target.feedback = broken


@mutant("test_feedback_is_the_row_of_the_last_consumed_token")
def feedback_is_the_row_of_the_accepted_count(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """The column of input a, although a clip made the last consumed input an earlier one."""
    accepted: dict[str, Tensor] = {}
    commit, store = bench.target.commit, bench.target.store

    def make(verify: Any) -> Any:
        def broken(*args: Any) -> Any:
            outcome = verify(*args)
            accepted["a"] = outcome.accepted
            return outcome

        return broken

    override(patch, ReferenceSampler, "verify", make)

    def broken(lanes: Any, taken: Tensor) -> None:
        commit(lanes, taken)
        if "a" in accepted and accepted["a"].shape == taken.shape:
            store.selected[lanes.slots] = torch.where(lanes.live, accepted["a"], store.selected[lanes.slots])

    bench.target.commit = broken


@mutant("test_the_first_draft_reads_the_saved_feedback")
def drafts_ignore_the_feedback(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    def make(step: Any) -> Any:
        return lambda self, residual, tokens, plan: step(self, torch.ones_like(residual), tokens, plan)

    override(patch, MtpDrafter, "step", make)


@mutant("test_later_drafts_read_the_drafters_own_output")
def every_draft_step_reads_the_targets_feedback(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    def make(step: Any) -> Any:
        def broken(self: MtpDrafter, residual: Tensor, tokens: Tensor, plan: Any) -> Any:
            return self.target.feedback(plan.slots), step(self, residual, tokens, plan)[1]

        return broken

    override(patch, MtpDrafter, "step", make)


def _without_absorbing(patch: pytest.MonkeyPatch, method: str, when: Any) -> None:
    """``method`` of the drafter keeps its counters and writes no row if ``when(arguments)``."""

    def make(call: Any) -> Any:
        def broken(self: MtpDrafter, *args: Any) -> Any:
            if not when(*args):
                return call(self, *args)
            self.absorb_rows = lambda *rows: None
            try:
                return call(self, *args)
            finally:
                del self.absorb_rows

        return broken

    override(patch, MtpDrafter, method, make)


@mutant("test_proposals_depend_on_committed_tokens_only")
def history_keeps_the_drafters_own_states(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """Accepted proposals stay in the draft cache as they were proposed."""
    _without_absorbing(patch, "absorb", lambda *args: True)


@mutant("test_history_grows_in_rounds_without_drafts")
def nothing_is_absorbed_without_drafts(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    _without_absorbing(patch, "propose", lambda lanes, draft_tokens, proposer: draft_tokens == 0)


@mutant("test_prompt_chunkings_leave_the_same_state")
def chunk_boundary_is_conditioned_on_the_future(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """The row before a chunk is read after the chunk has overwritten it."""
    prefill = bench.drafter.prefill

    def broken(feedback: Tensor, tokens: Tensor, slot: Tensor, start: int) -> None:
        if start:
            feedback = torch.cat([bench.target.feedback(slot), feedback[1:]])
        prefill(feedback, tokens, slot, start)

    bench.drafter.prefill = broken


@mutant("test_right_and_wrong_rounds_alternate")
def draft_rows_follow_the_width(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """Draft history counts a row for every verified input."""
    absorb, commit, width = bench.drafter.absorb, bench.drafter.commit, {}
    bench.drafter.absorb = lambda lanes, tokens, emitted: (
        width.update(w=tokens.shape[1]),
        absorb(lanes, tokens, emitted),
    )
    bench.drafter.commit = lambda lanes, emitted: commit(lanes, torch.where(lanes.live, width["w"], emitted))


@mutant("test_a_slot_forgets_its_earlier_owner")
def draft_state_crosses_requests(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    def make(reset: Any) -> Any:
        def broken(self: StateStore, slot: int) -> None:
            kept = {name: tensor[:, slot].clone() for name, tensor in self.tensors.items() if name == "raw_tags"}
            rows = self.layout.owner == "drafter"
            reset(self, slot)
            if rows:
                for name, value in kept.items():
                    self.tensors[name][:, slot] = value
                self.selected[slot] = 1

        return broken

    override(patch, StateStore, "reset", make)
