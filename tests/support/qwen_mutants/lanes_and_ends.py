"""Faults of lanes, counters, records and ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from mutants import mutant, override
from torch import Tensor

from specdec.round import transaction
from specdec.round.completion import Finish
from specdec.sampling.sampler import ReferenceSampler
from specdec.state.requests import BUDGET, FINISH, GENERATED, NO_STOP, REQUEST, RequestTable
from specdec.testing.conformance import Bench


@mutant("test_live_and_dead_lanes_at_every_position")
def padded_lanes_write_slot_zero(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    bench.arena.requests.spare = 0


@mutant("test_finished_requests_do_nothing")
def finished_lanes_keep_running(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    def make(lanes: Any) -> Any:
        def broken(self: RequestTable, slots: Tensor) -> Any:
            ended = self.integers[:, FINISH].clone()
            self.integers[:, FINISH] = torch.where(self.integers[:, REQUEST] > 0, 0, ended)
            found = lanes(self, slots)
            self.integers[:, FINISH] = ended
            return found

        return broken

    override(patch, RequestTable, "lanes", make)


@mutant("test_right_and_wrong_rounds_alternate")
def counters_advance_twice(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """Rounds that accept something are committed once by the verifier and once by the table."""

    def make(advance: Any) -> Any:
        def broken(self: RequestTable, lanes: Any, *, consumed: Tensor, emitted: Tensor, **rest: Any) -> Tensor:
            twice = consumed * (1 + (emitted > 1).to(consumed.dtype))
            return advance(self, lanes, consumed=twice, emitted=emitted, **rest)

        return broken

    override(patch, RequestTable, "advance", make)


@mutant("test_perfect_drafts_are_all_accepted")
def pending_is_the_first_emitted(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Tensor] = {}

    def make_complete(complete: Any) -> Any:
        def broken(self: Any, lanes: Any, *, tokens: Tensor, **rest: Any) -> None:
            seen["first"] = tokens[:, 0]
            complete(self, lanes, tokens=tokens, **rest)

        return broken

    def make_advance(advance: Any) -> Any:
        return lambda self, lanes, *, last, **rest: advance(self, lanes, last=seen["first"], **rest)

    override(patch, transaction._Settlement, "complete", make_complete)
    override(patch, RequestTable, "advance", make_advance)


@mutant("test_stop_id_at_every_offset")
def stop_ids_are_not_clipped(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    def make(clip: Any) -> Any:
        def broken(self: Any, lanes: Any, *args: Any) -> Any:
            stops = self.arena.requests.stops
            kept = stops.clone()
            stops.fill_(NO_STOP)
            found = clip(self, lanes, *args)
            stops.copy_(kept)
            return found

        return broken

    override(patch, transaction._Settlement, "clip", make)


@mutant("test_stop_id_at_every_offset")
def only_the_last_token_is_checked_for_stops(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    def make(clip: Any) -> Any:
        def broken(self: Any, lanes: Any, tokens: Tensor, accepted: Tensor) -> Any:
            stops = self.arena.requests.stops
            kept = stops.clone()
            stops.fill_(NO_STOP)
            emitted, finish = clip(self, lanes, tokens, accepted)
            stops.copy_(kept)
            last = tokens.gather(1, (emitted - 1).clamp(min=0).unsqueeze(1))
            stopping = (last == stops.index_select(0, lanes.slots)).any(1) & (emitted > 0)
            return emitted, torch.where(stopping, int(Finish.STOP), finish)

        return broken

    override(patch, transaction._Settlement, "clip", make)


@mutant("test_budget_at_every_offset")
def the_budget_is_not_clipped(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """A request ends in the round that passes its budget, with everything that the round accepted."""

    def make(clip: Any) -> Any:
        def broken(self: Any, lanes: Any, tokens: Tensor, accepted: Tensor) -> Any:
            integers = lanes.integers.clone()
            remaining = integers[:, BUDGET] - integers[:, GENERATED]
            integers[:, BUDGET] += 100
            emitted, finish = clip(self, evolve(lanes, integers=integers), tokens, accepted)
            return emitted, torch.where((emitted >= remaining) & (finish == 0), int(Finish.LENGTH), finish)

        return broken

    override(patch, transaction._Settlement, "clip", make)
    # what may be offered goes by the budget too, and would hide the missing clip
    override(
        patch,
        ReferenceSampler,
        "verify",
        lambda verify: (
            lambda self, tokens, q, p, words, offered=None: verify(
                self, tokens, q, p, words, torch.full_like(offered, tokens.shape[1])
            )
        ),
    )


@mutant("test_state_of_plain_rounds")
def the_pending_token_counts_as_offered(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    override(
        patch,
        transaction._Settlement,
        "complete",
        lambda complete: (
            lambda self, lanes, *, offered, **rest: complete(
                self, lanes, offered=offered + int(self.staging.batch > 1), **rest
            )
        ),
    )


@mutant("test_two_rounds_in_flight")
def frames_do_not_alternate(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    def make(write: Any) -> Any:
        def broken(self: Any, *args: Any) -> None:
            write(self, *args)
            if self.batch > 1:
                self.frame.zero_()

        return broken

    override(patch, transaction.Staging, "write", make)


@mutant("test_live_and_dead_lanes_at_every_position")
def records_go_by_lane(bench: Bench, patch: pytest.MonkeyPatch) -> None:
    """The row of the batch is taken for the slot."""
    override(
        patch,
        transaction._Settlement,
        "complete",
        lambda complete: (
            lambda self, lanes, **rest: complete(self, evolve(lanes, requested=torch.arange(lanes.count)), **rest)
        ),
    )
