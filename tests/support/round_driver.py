"""Runs single rounds of any shape over a prepared model and keeps every completion."""

from __future__ import annotations

from qwen_models import Prepared

from specdec.catalog import RoundShape
from specdec.round.completion import Completion, Finish
from specdec.round.transaction import ChainRound, FirstToken


class Driver:
    """Runs rounds of changing shape over one prepared model and collects completions per slot."""

    def __init__(
        self,
        model: Prepared,
        *,
        drafts: bool = True,
        drafter=None,
        kind: type[ChainRound] = ChainRound,
        draft_rows: int | None = None,
    ) -> None:
        """kind: class of rounds with drafts. draft_rows: their target rows beside one per lane; None for one for each draft."""
        self.model = model
        self.kind = kind
        self.draft_rows = draft_rows
        self.drafter = drafter or (model.drafter if drafts else None)
        self.number = 0
        self.completions: dict[int, list[Completion]] = {}
        self._rounds: dict[tuple[int, int], ChainRound] = {}

    def _read(self, slots: list[int]) -> list[Completion]:
        records = self.model.arena.read_frame(self.number % 2, slots)
        parsed = [Completion.parse(record) for record in records]
        for completion in parsed:
            assert completion.round == self.number
            self.completions.setdefault(completion.slot, []).append(completion)
        self.number += 1
        return parsed

    def start(self, slots: list[int], *, extended: bool = False, masked: bool = False) -> list[Completion]:
        first = FirstToken(target=self.model.target, drafter=self.drafter, arena=self.model.arena, batch=len(slots))
        first.submit(slots, self.number, extended=extended, masked=masked)
        return self._read(slots)

    def round(
        self,
        slots: list[int],
        drafts: int,
        *,
        lanes: list[int] | None = None,
        extended: bool = False,
        masked: bool = False,
    ) -> list[Completion]:
        """lanes: the lane order, spare slots included; default is the slots alone."""
        order = lanes if lanes is not None else slots
        key = (len(order), drafts)
        if key not in self._rounds:
            rows = 0 if self.draft_rows is None or not drafts else len(order) + self.draft_rows
            shape = RoundShape(batch=len(order), draft_tokens=drafts, verify_width=drafts + 1, packed_rows=rows)
            self._rounds[key] = (self.kind if drafts else ChainRound)(
                target=self.model.target,
                drafter=self.drafter,
                shape=shape,
                arena=self.model.arena,
                max_draft_tokens=7,
            )
        self._rounds[key].submit(order, [drafts] * len(order), self.number, extended=extended, masked=masked)
        return self._read(slots)

    def tokens(self, slot: int) -> list[int]:
        return [token for completion in self.completions[slot] for token in completion.tokens]

    def running(self, slots: list[int]) -> list[int]:
        return [slot for slot in slots if self.completions[slot][-1].finish is Finish.NONE]
