"""Why a state differs from that of a prompt pass, where the difference shows it: shifted by one, not committed, not restored.

Asked only when a comparison has failed. The reference bench makes the state that each usual mistake would have left; the one that
equals what was found is named, with the method to look at. What fits none stays unexplained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from attrs import frozen
from torch import Tensor

from specdec.declaration import StateField, StateKind
from specdec.places import method_of
from specdec.state.requests import PENDING
from specdec.state.store import StateStore
from specdec.testing.conformance.bench import Bench
from specdec.testing.conformance.precision import Precision
from specdec.testing.conformance.states import committed, open_positions

#: Mistakes of draft history: what is shifted, by how many positions.
_SHIFTS = (("feedback", 1), ("feedback", -1), ("token", 1), ("token", -1))
_SIDE = {1: "later", -1: "earlier"}


def shift_of(found: Tensor, rows: Tensor, place: int, close: Callable[[Tensor, Tensor], bool]) -> int | None:
    """By how many rows ``found`` [n, D] is later than ``rows[place : place + n]`` where it should be; None if it is no other part
    of ``rows`` [T, D]. A single row must differ from its neighbours to count."""
    count = found.shape[0]
    matches = [start - place for start in range(rows.shape[0] - count + 1) if close(found, rows[start : start + count])]
    return min(matches, key=abs) if matches and 0 not in matches else None


def prompt_feedback(reference: Bench, sequence: Sequence[int]) -> Tensor:
    """Feedback [T, D] of every token of a sequence, from one prompt pass in slot 0, whose state is overwritten."""
    reference.reset(0)
    tokens = reference.where(*sequence)
    return reference.target.prefill(tokens, reference.where(0), 0).clone()


def undeclared(bench: Bench) -> str:
    """A hint at tensors that target and drafter keep per slot outside their stores, where no round commits them, or nothing."""
    found = []
    for owner in (bench.target, bench.drafter):
        for name, value in getattr(owner, "__dict__", {}).items():
            if isinstance(value, Tensor) and value.dim() and value.shape[0] == bench.capacities.slots + 1:
                found.append(f"{type(owner).__name__}.{name} {list(value.shape)}")
    if not found:
        return ""
    return (
        f"; kept per slot outside the state store: {', '.join(found)}: what must outlast a round is declared as a StateField, or "
        "no round commits, restores or forgets it"
    )


@frozen(kw_only=True, eq=False)
class Explainer:
    """Explains the state of one slot of ``bench`` that consumed ``sequence``. owner: "target" or "drafter"; lag: rows of draft
    history that are missing at N consumed tokens. found, expected: as ``committed`` gives them."""

    bench: Bench
    reference: Bench
    owner: str
    slot: int
    sequence: Sequence[int]
    lag: int
    ignore: Sequence[str]
    found: Mapping[str, Tensor]
    expected: Mapping[str, Tensor]
    precision: Precision

    def __call__(self, name: str) -> str:
        """A sentence about the field that differs, beginning with "; ", or nothing."""
        field = self._store(self.bench).fields[name]
        for ask in (
            self._unwritten,
            self._shifted,
            self._miscounted,
            self._column,
            self._window,
            self._stale,
            self._prompt,
        ):
            said = ask(field)
            if said:
                return f"; {said}"
        return undeclared(self.bench)

    # --- what may be wrong ---------------------------------------------------------------------------------------------

    def _unwritten(self, field: StateField) -> str | None:
        """Where nothing was written, a slot has its initial value, or the poison of a test."""
        found = self.found[field.name]
        poisoned = found.isnan().all() if found.is_floating_point() else (found == -1).all()
        if not bool(poisoned | (found == field.fill).all()):
            return None
        return (
            f"nothing was written to {field.name}: {self._method('prefill')} does not set it, or, where a snapshot was restored, "
            f"{self._method('restore')} does not"
        )

    def _shifted(self, field: StateField) -> str | None:
        """Rows of history that equal those of a drafter whose feedback or token is one later or earlier."""
        if self.owner != "drafter" or self._by_position(field, self.found[field.name]) is None:
            return None
        positions, found = self._rows(field, self.found)
        _, expected = self._rows(field, self.expected)
        wrong = [row for row in range(len(positions)) if not self._close(found[:, row], expected[:, row])]
        fitting: list[tuple[list[int], str, int]] = []
        for what, by in _SHIFTS:
            made = self._history(what, by)
            if made is None:
                continue
            _, other = self._rows(field, made)
            # where the shift leaves the sequence nobody knows what a row would be
            first, end = (by, len(self.sequence)) if what == "feedback" else (by + self.lag, len(self.sequence) + 1)
            known = [row for row in wrong if 0 <= positions[row] + first < end]
            if known and all(self._close(found[:, row], other[:, row]) for row in known):
                fitting.append(([positions[row] for row in known], what, by))
        most = max((len(rows) for rows, _, _ in fitting), default=0)
        best = [one for one in fitting if len(one[0]) == most]
        if not best:
            return None
        # few rows may fit two shifts, where a text repeats a token
        shifts = " or ".join(f"the {what} one {_SIDE[by]} ({self._made(what, by)})" for _, what, by in best)
        return self._shift_said(best[0][0], shifts, feedback=any(what == "feedback" for _, what, _ in best))

    def _made(self, what: str, by: int) -> str:
        """What a row was made with, and what it should be made with."""
        letter, right = ("h", 0) if what == "feedback" else ("x", self.lag)
        used, wanted = (
            f"{letter}[i{f'{index:+}'.replace('-', '−') if index else ''}]" for index in (right + by, right)
        )
        return f"{used} instead of {wanted}"

    def _shift_said(self, positions: list[int], shifts: str, *, feedback: bool) -> str:
        shown = ", ".join(map(str, positions[:6])) + (" …" if len(positions) > 6 else "")
        rows = (
            f"row {shown} of draft history is that"
            if len(positions) == 1
            else f"rows {shown} of draft history are those"
        )
        source = f", or {method_of(self.bench.target, 'feedback_rows')}, what it reads" if feedback else ""
        token = "emitted token j" if self.lag else "input j"
        last = f"row N−1 of a round is written by {self._method('propose')}, and " if self.lag else ""
        return (
            f"{rows} of {shifts}; look at {self._method('absorb')}, which writes rows N+j from h[N+j] and {token}{source}; "
            f"{last}rows of prompts, which these are compared with, are written by {self._method('prefill')}"
        )

    def _miscounted(self, field: StateField) -> str | None:
        found, expected = self.found[field.name], self.expected[field.name]
        if field.kind is not StateKind.ROW or found.is_floating_point() or found.numel() != 1:
            return None
        by = int(found) - int(expected)
        # without anything committed it would be further behind
        if abs(by) != 1:
            return None
        before = ", or was not committed in the last round" if by < 0 else ""
        return f"it counts one too {'many' if by > 0 else 'few'}{before}: look at {self._method('commit')}"

    def _column(self, field: StateField) -> str | None:
        """The right value is in another candidate column than the selected one."""
        if field.kind is not StateKind.COLUMNS:
            return None
        store = self._store(self.bench)
        selected = int(store.selected[self.slot])
        columns, expected = store.tensors[field.name][:, self.slot], self.expected[field.name][:, 0]
        right = [column for column in range(field.extent) if self._close(columns[:, column], expected)]
        if not right or selected in right:
            return None
        side = "later" if selected > right[0] else "earlier"
        return (
            f"column {selected} is selected and the right value is in column {right[0]}, so it is that of the input "
            f"{abs(selected - right[0])} {side}: {self._method('commit')} must call store.commit(lanes.slots, taken), which "
            "selects column taken − 1"
        )

    def _window(self, field: StateField) -> str | None:
        """Committed rows that moved on too far."""
        if field.kind is not StateKind.WINDOW:
            return None
        found, expected = self.found[field.name], self.expected[field.name]
        for by in range(1, field.extent):
            if self._close(found[:, :, :-by], expected[:, :, by:]):
                return (
                    f"its rows are those {by} later: {self._method('commit')} shifts it by more than what was consumed"
                )
        return None

    def _stale(self, field: StateField) -> str | None:
        """The state of fewer tokens: a commit left the field as it was."""
        if field.kind in (StateKind.PAGED, StateKind.RING):
            return None
        found, length = self.found[field.name], len(self.sequence)
        for fewer in range(1, length):
            self.reference.admit(0, self.sequence[: length - fewer], greedy=True)
            store = self._store(self.reference)
            earlier = committed(store, 0, self._count(length - fewer), self.ignore)[field.name]
            if self._close(found, earlier):
                return (
                    f"it is that of {fewer} token{'s' if fewer > 1 else ''} earlier: {field.name} was not committed in the last "
                    f"round; {self._method('commit')} must {_CURES[field.kind].format(name=field.name)}"
                )
        return None

    def _prompt(self, field: StateField) -> str | None:
        """The reference never set the field."""
        expected = self.expected[field.name]
        if field.kind is StateKind.PAGED or not bool((expected == field.fill).all()):
            return None
        return f"a prompt pass leaves it at its initial value {field.fill:g}: {self._method('prefill')} does not set {field.name}"

    # --- how it is found ------------------------------------------------------------------------------------------------

    def _store(self, bench: Bench) -> StateStore:
        return (bench.drafter if self.owner == "drafter" else bench.target).store

    def _method(self, name: str) -> str:
        return method_of(self.bench.drafter if self.owner == "drafter" else self.bench.target, name)

    def _count(self, consumed: int) -> int:
        return max(consumed - self.lag, 0) if self.owner == "drafter" else consumed

    def _close(self, found: Tensor, wanted: Tensor) -> bool:
        if found.shape != wanted.shape or not found.numel():
            return False
        if found.is_floating_point():
            return self.precision.differences(found, wanted) is None
        return torch.equal(found, wanted)

    def _by_position(self, field: StateField, value: Tensor) -> list[int] | None:
        """Positions of a field's rows in ``committed``; None where rows are not told apart by position."""
        count = self._count(len(self.sequence))
        if field.kind is StateKind.PAGED and field.extent == 1:
            return list(range(count))
        if field.kind is StateKind.RING:
            return list(open_positions(self._store(self.bench).layout, count))
        if field.kind is StateKind.WINDOW:
            return list(range(count - field.extent, count))
        return None

    def _rows(self, field: StateField, state: Mapping[str, Tensor]) -> tuple[list[int], Tensor]:
        """Positions, and rows [1, n, *shape] of the first layer, whose rows depend on their own inputs alone."""
        value = state[field.name]
        positions = self._by_position(field, value)
        assert positions is not None
        rows = value[:1, 0] if field.kind is StateKind.WINDOW else value[:1]
        kept = [row for row, position in enumerate(positions) if position >= 0]
        return [positions[row] for row in kept], rows[:, kept]

    def _history(self, what: str, by: int) -> dict[str, Tensor] | None:
        """Draft state of the reference if every row were made with a shifted feedback or token."""
        reference, length = self.reference, len(self.sequence)
        count = self._count(length)
        if count < 1:
            return None
        feedback = prompt_feedback(reference, self.sequence)
        row = torch.arange(count, device=feedback.device)
        tokens = reference.where(*self.sequence, int(self.bench.arena.requests.integers[self.slot, PENDING]))
        h = feedback[(row + (by if what == "feedback" else 0)).clamp(0, length - 1)]
        x = tokens[(row + self.lag + (by if what == "token" else 0)).clamp(0, length)]
        reference.drafter.prefill(h, x, reference.where(0), 0)
        return committed(reference.drafter.store, 0, count, self.ignore)


#: What a commit must do, by kind.
_CURES = {
    StateKind.ROW: "set it with store.write_row('{name}', lanes.slots, values)",
    StateKind.COLUMNS: "call store.commit(lanes.slots, taken)",
    StateKind.WINDOW: "call store.commit(lanes.slots, taken)",
}
