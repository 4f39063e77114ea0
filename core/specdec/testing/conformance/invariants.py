"""What must hold after every round, whatever the model: accounting of records, and that nobody else's state moved.

Letters: N consumed, t emitted, a accepted, K drafts of the round, W = K + 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attrs import define, field
from torch import Tensor

from specdec.declaration import StateKind
from specdec.round.completion import METADATA_FIELDS, Completion, Field, Finish
from specdec.state.requests import BUDGET, CONSUMED, EPOCH, FINISH, GENERATED, NO_STOP, PENDING, REQUEST
from specdec.state.store import StateStore
from specdec.testing.conformance.bench import Bench


@define(kw_only=True, eq=False)
class Account:
    """What the host knows about one request: facts of its admission and everything it emitted so far."""

    request: int
    epoch: int
    prompt: int
    budget: int
    stops: frozenset[int]
    tokens: list[int] = field(factory=list)
    emitted_before: int = 0
    finish: Finish = Finish.NONE

    @classmethod
    def of(cls, bench: Bench, slot: int) -> Account:
        """Read from the request table right after admission."""
        row = bench.arena.requests.integers[slot].tolist()
        stops = frozenset(bench.arena.requests.stops[slot].tolist()) - {NO_STOP}
        before = row[GENERATED]
        return cls(
            request=row[REQUEST],
            epoch=row[EPOCH],
            prompt=row[CONSUMED] - max(before - 1, 0),
            budget=row[BUDGET],
            stops=stops,
            emitted_before=before,
        )

    @property
    def generated(self) -> int:
        """Σ emitted."""
        return self.emitted_before + len(self.tokens)

    @property
    def consumed(self) -> int:
        """N: the prompt and everything emitted but the pending token."""
        return self.prompt + max(self.generated - 1, 0)


def parse(record: Sequence[int], number: int) -> Completion:
    """The record of round ``number``. Raises AssertionError if the frame holds another round's, or none."""
    assert record[Field.ROUND] == number, f"the frame of round {number} holds a record of round {record[Field.ROUND]}"
    return Completion.parse(list(record))


def check_record(
    account: Account,
    record: Sequence[int],
    *,
    number: int,
    slot: int,
    drafts: int,
    ceiling: int,
    draft_lag: int | None,
    copied: int = 0,
) -> Completion:
    """Accounting of one live lane; adds the emitted tokens to ``account``.

    record: as read from the frame. ceiling: most drafts the host allowed. draft_lag: draft history has max(N −
    draft_lag, 0) rows; None for a round without a drafter. copied: drafts that the host brought. A fault is reported, not judged.
    Raises AssertionError.
    """
    assert len(record) > METADATA_FIELDS + drafts, "a record has sixteen fields and room for the widest emission"
    done = parse(record, number)
    assert (done.request, done.epoch) == (account.request, account.epoch), "a record names its request and epoch"
    assert (done.slot, done.verify_width) == (slot, drafts + 1)
    padded = list(record[METADATA_FIELDS:])
    assert padded[done.emitted :] == [-1] * (len(padded) - done.emitted), (
        f"only −1 follows {done.emitted} tokens: {padded}"
    )
    assert all(token >= 0 for token in done.tokens), f"emitted {done.tokens}"

    assert done.offered >= done.verified >= done.accepted >= done.emitted - 1, f"{done}"
    remaining = account.budget - account.generated
    assert done.offered <= max(min(ceiling, drafts, remaining - 1), 0), f"offered more than could be used: {done}"
    assert done.copy_sources == 2 ** min(copied, done.offered) - 1, f"{copied} drafts were copied: {done}"
    assert done.emitted <= remaining, f"budget {account.budget} exceeded: {done}"
    if done.finish is not Finish.FAULT:
        assert done.emitted >= 1, f"a running request makes progress: {done}"
        assert done.faults == 0

    account.tokens += done.tokens
    account.finish = done.finish
    assert done.generated == account.generated, "generated is the sum of what was emitted"
    assert done.consumed == account.consumed, "consumed = prompt + generated − 1: the last token is pending"
    if account.generated:
        last = account.tokens[-1] if account.tokens else done.pending
        assert done.pending == last, f"pending is the last emitted token: {done}"
    if draft_lag is not None and done.finish is not Finish.FAULT:
        assert done.draft_rows == max(done.consumed - draft_lag, 0), (
            f"draft history does not follow consumed tokens: the drafter's field rows is {done.draft_rows} at {done.consumed} "
            f"consumed tokens and should be {max(done.consumed - draft_lag, 0)}; set it in prefill and commit: {done}"
        )
    _check_end(account, done)
    return done


def _check_end(account: Account, done: Completion) -> None:
    stopped = [token in account.stops for token in done.tokens]
    assert not any(stopped[:-1]), f"tokens after a stop id: {done}"
    if done.finish is Finish.FAULT:
        return
    expected = Finish.NONE
    if account.generated == account.budget:
        expected = Finish.LENGTH
    if stopped and stopped[-1]:
        expected = Finish.STOP
    assert done.finish is expected, f"finish should be {expected.name}: {done}"


def check_dead_record(account: Account | None, record: Sequence[int], *, number: int) -> Completion:
    """A lane that did nothing still says who it is about, and that it emitted nothing. Raises AssertionError."""
    done = parse(record, number)
    assert (done.emitted, done.offered, done.verified, done.accepted) == (0, 0, 0, 0), f"a dead lane worked: {done}"
    assert set(record[METADATA_FIELDS:]) == {-1}
    assert done.finish is not Finish.NONE
    if account is not None:
        assert (done.request, done.epoch) == (account.request, account.epoch)
        assert (done.consumed, done.generated) == (account.consumed, account.generated), (
            "counters of a finished request moved"
        )
        assert done.finish is account.finish
    return done


def check_table(bench: Bench, slot: int, done: Completion) -> None:
    """The request table says what the record says. Raises AssertionError."""
    row = bench.arena.requests.integers[slot].tolist()
    found = (row[CONSUMED], row[GENERATED], row[FINISH], row[REQUEST], row[EPOCH])
    assert found == (done.consumed, done.generated, int(done.finish), done.request, done.epoch)
    if done.generated:
        assert row[PENDING] == done.pending


# --- everybody else ----------------------------------------------------------------------------------------------------


#: Integers by size, so that NaN equals itself.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _moved(before: Tensor, after: Tensor, dimensions: int = 0) -> Tensor:
    """Which parts differ in any bit, by the leading ``dimensions``."""
    bits = _BITS[before.element_size()]
    changed = before.contiguous().view(bits) != after.contiguous().view(bits)
    return changed.unsqueeze(-1).flatten(dimensions).any(-1)


class Surroundings:
    """State of a bench before a round, to be compared with the state after it outside of what the round may touch.

    A round may write to its live lanes' slots and to the spare slot, to the trash page, and to the live lanes' own
    pages at positions from the first uncommitted row on as far as the round reaches.
    """

    def __init__(self, bench: Bench, live: Sequence[int], lanes: Sequence[int], *, drafts: int, number: int) -> None:
        self.bench = bench
        self.live = list(live)
        self.lanes = list(lanes)
        self.drafts = drafts
        self.frame = number % 2
        self.consumed = {slot: int(bench.arena.requests.integers[slot, CONSUMED]) for slot in live}
        self.stores = [
            ({name: tensor.clone() for name, tensor in store.tensors.items()}, _slot_rows(store, store.slots))
            for store in bench.stores
        ]
        self.table = self._request_rows()
        self.frames = bench.arena.frames.clone()
        self._changed: list[tuple[Tensor, str]] = []

    def _request_rows(self) -> dict[str, Tensor]:
        requests = self.bench.arena.requests
        options = {} if requests.options is None else _slot_rows(requests.options, requests.slots)
        return {**_slot_rows(requests, requests.slots), **{f"options.{name}": rows for name, rows in options.items()}}

    def check(self) -> None:
        """Compares byte for byte. Raises AssertionError naming owner, field and slots or pages."""
        bench = self.bench
        for store, (fields, per_slot), lag in zip(bench.stores, self.stores, (0, bench.drafter.lag), strict=True):
            owner = store.layout.owner
            others = bench.where(*(slot for slot in range(store.slots) if slot not in self.live))
            for name, declared in store.fields.items():
                before, after = fields[name], store.tensors[name]
                if declared.kind is StateKind.PAGED:
                    touched = self._touched(store, declared.extent, lag).to(before.device)
                    moved = _moved(before, after, 3) & ~touched
                    message = f"{owner} {name}: a page entry outside the round's reach was written"
                    self._changed.append((moved.any(), message))
                else:
                    message = f"{owner} {name}: state of another slot changed (live: {self.live})"
                    self._expect(before.index_select(1, others), after.index_select(1, others), message)
            self._check_rows(owner, per_slot, _slot_rows(store, store.slots), others)
        everyone = [slot for slot in range(bench.spare + 1) if slot not in self.live]
        self._check_rows("request table", self.table, self._request_rows(), bench.where(*everyone))
        written = {self.frame * (bench.spare + 1) + slot for slot in (*self.lanes, bench.spare)}
        rest = bench.where(*(row for row in range(self.frames.shape[0]) if row not in written))
        self._expect(
            self.frames[rest], bench.arena.frames[rest], "a record outside the round's lanes and frame changed"
        )
        if self._changed:
            # read at once: on a GPU every reading waits for the device
            changed = torch.stack([flag for flag, _ in self._changed]).tolist()
            wrong = [message for flag, (_, message) in zip(changed, self._changed, strict=True) if flag]
            assert not wrong, wrong[0]

    def _check_rows(self, owner: str, before: Mapping[str, Tensor], after: Mapping[str, Tensor], slots: Tensor) -> None:
        for name, tensor in before.items():
            message = f"{owner} {name}: row of another slot changed (live: {self.live})"
            self._expect(tensor[slots], after[name][slots], message)

    def _expect(self, before: Tensor, after: Tensor, message: str) -> None:
        if before.numel():
            self._changed.append((_moved(before, after), message))

    def _touched(self, store: StateStore, extent: int, lag: int) -> Tensor:
        """[pages + 1, entries] bool: entries this round may write. The trash page is one of them."""
        page = store.layout.page_tokens
        touched = torch.zeros(store.pages + 1, page // extent, dtype=torch.bool)
        touched[0] = True
        for slot in self.live:
            table = store.page_table[slot].tolist()
            first = max(self.consumed[slot] - lag, 0)
            for position in range(first, first + self.drafts + 1 + lag):
                if position // page < len(table):
                    touched[table[position // page], position % page // extent] = True
        return touched


def _slot_rows(holder: object, slots: int) -> dict[str, Tensor]:
    """Copies of tensors whose first dimension is slots, by attribute name: page table, selection, faults, request
    rows."""
    return {
        name: value.clone()
        for name, value in vars(holder).items()
        if isinstance(value, Tensor) and value.dim() and value.shape[0] == slots + 1
    }


__all__ = ["Account", "Surroundings", "check_dead_record", "check_record", "check_table", "parse"]
