"""Runs single rounds of any shape over a bench, checks what must hold after each, and keeps every completion."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specdec.interfaces import Drafter, Round
from specdec.round.completion import Completion, Finish
from specdec.round.graphs import Variant
from specdec.testing.conformance.bench import Bench
from specdec.testing.conformance.invariants import Account, Surroundings, check_dead_record, check_record, check_table


class Driver:
    """One run over a bench: number of the next round, completions and accounts by slot.

    drafter: what rounds draft with; the bench's own unless given, None for plain decoding. draft_lag: rows of draft
    history that are missing at N consumed tokens. between: called with this driver before every round but the first
    (poisoning). extended: rounds that honour penalties, bias, minimum length and log-probabilities. draft_rows: target rows of
    a round beside one per lane; None for one for each draft. eager: never captured, for tests that look into rounds from Python.
    """

    def __init__(
        self,
        bench: Bench,
        *,
        drafter: Drafter | str | None = "own",
        draft_lag: int = 1,
        between: Callable[[Driver], Any] | None = None,
        extended: bool = False,
        draft_rows: int | None = None,
        eager: bool = False,
    ) -> None:
        self.bench = bench
        self.eager = eager
        self.drafter: Drafter | None = bench.drafter if isinstance(drafter, str) else drafter
        self.draft_lag = draft_lag if self.drafter is not None else None
        self.between = between
        self.extended = extended
        self.draft_rows = draft_rows
        self.number = 0
        self.completions: dict[int, list[Completion]] = {}
        self.accounts: dict[int, Account] = {}
        self._rounds: dict[tuple[int, int, bool], Round] = {}

    def open(self, slots: Sequence[int]) -> None:
        """Takes notice of requests that were admitted."""
        for slot in slots:
            self.accounts[slot] = Account.of(self.bench, slot)
            self.completions[slot] = []

    def start(self, slots: Sequence[int]) -> list[Completion]:
        """Samples the first token of freshly admitted slots."""
        self.open(slots)
        variant = Variant(extended=self.extended)
        first = self.bench.first_token(len(slots), self.drafter, variant=variant, eager=self.eager)
        around = Surroundings(self.bench, slots, slots, drafts=0, number=self.number)
        first.submit(list(slots), self.number, extended=self.extended)
        return self._settle(slots, slots, around, drafts=0, ceilings=dict.fromkeys(slots, 0))

    def captured(self, lanes: int, drafts: int, *, boundary: bool = False) -> Round:
        """The round of this shape, built on first use. boundary: the one that ``round`` runs with the same argument."""
        key = (lanes, drafts, boundary)
        if key not in self._rounds:
            rows = 0 if self.draft_rows is None or not drafts else min(lanes + self.draft_rows, lanes * (drafts + 1))
            variant = Variant(boundary=boundary, extended=self.extended)
            self._rounds[key] = self.bench.capture(drafts, lanes, self.drafter, rows, variant=variant, eager=self.eager)
        return self._rounds[key]

    def round(
        self,
        slots: Sequence[int],
        drafts: int,
        *,
        lanes: Sequence[int] | None = None,
        ceilings: Mapping[int, int] | None = None,
        boundary: bool = False,
        copies: Mapping[int, Sequence[int]] | None = None,
    ) -> list[Completion]:
        """One round with ``drafts`` drafts; returns the records of ``slots`` in their order.

        lanes: the lane order, spare and finished slots included; the slots alone unless given. ceilings: most drafts
        by slot. boundary, copies by slot: see ``Round.submit``.
        """
        order = list(slots if lanes is None else lanes)
        limits = {slot: drafts if ceilings is None else ceilings.get(slot, drafts) for slot in order}
        if self.between is not None:
            self.between(self)
        live = self.running(slots)
        # first, since capture runs dead lanes
        captured = self.captured(len(order), drafts, boundary=boundary)
        around = Surroundings(self.bench, live, order, drafts=drafts, number=self.number)
        captured.submit(
            order,
            [limits[slot] for slot in order],
            self.number,
            boundary=boundary,
            extended=self.extended,
            copies=None if copies is None else [copies.get(slot, ()) for slot in order],
        )
        return self._settle(slots, live, around, drafts=drafts, ceilings=limits, copies=copies)

    def _settle(
        self,
        slots: Sequence[int],
        live: Sequence[int],
        around: Surroundings,
        *,
        drafts: int,
        ceilings: Mapping[int, int],
        copies: Mapping[int, Sequence[int]] | None = None,
    ) -> list[Completion]:
        number, first = self.number, not drafts and all(not self.completions[slot] for slot in live)
        self.number += 1
        found = []
        for slot, record in zip(slots, self.bench.arena.read_frame(number % 2, list(slots)), strict=True):
            if slot in live:
                done = check_record(
                    self.accounts[slot],
                    record,
                    number=number,
                    slot=slot,
                    drafts=drafts,
                    ceiling=ceilings[slot],
                    draft_lag=self.draft_lag,
                    copied=len((copies or {}).get(slot, ())),
                )
                if first:
                    assert (done.offered, done.accepted) == (0, 0)
            else:
                done = check_dead_record(self.accounts.get(slot), record, number=number)
            check_table(self.bench, slot, done)
            self.completions[slot].append(done)
            found.append(done)
        around.check()
        return found

    def tokens(self, slot: int) -> list[int]:
        """Everything a slot's request has emitted through this driver."""
        return list(self.accounts[slot].tokens)

    def running(self, slots: Sequence[int]) -> list[int]:
        """Those of the slots whose requests have not ended."""
        return [slot for slot in slots if self.accounts[slot].finish is Finish.NONE]

    def consumed(self, slot: int) -> int:
        """N of a slot's request."""
        return self.accounts[slot].consumed
