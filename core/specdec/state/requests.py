"""Request table: what the device knows about each request. One row per slot, plus the neutral spare row of dead lanes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import field, frozen
from torch import Tensor

from specdec.round.completion import Finish
from specdec.sampling.law import LawParams
from specdec.sampling.params import SamplingParams
from specdec.sampling.penalties import forbid_stops
from specdec.state.options import OptionTable
from specdec.state.upload import upload

# integer columns; FINISH is a code of ``completion.Finish``: NONE while the request runs, CANCELLED in a slot without one
CONSUMED, PENDING, GENERATED, BUDGET, FINISH, REQUEST, EPOCH, SEED, TOP_K, GREEDY, MIN_NEW = range(11)
INTEGER_COLUMNS = 11
# float columns
TEMPERATURE, TOP_P, MIN_P = range(3)
FLOAT_COLUMNS = 3
# pads a request's stop ids; no token id, and not the −1 that pads emitted tokens
NO_STOP = -2


@frozen(kw_only=True, eq=False)
class Lanes:
    """The lanes of one round after dead ones were redirected to the spare slot.

    slots: [B] int64, the spare slot for dead lanes; live: [B] bool; consumed, pending: [B] int64 (1 and 0 in dead lanes);
    integers: [B, 11] int64, the rows of those slots in the request table; floats: [B, 3] float32, the same of its numbers.
    requested, resident: slots and integer rows before the redirection, which name the request a record is about.
    """

    requested: Tensor
    resident: Tensor
    slots: Tensor
    live: Tensor
    integers: Tensor
    floats: Tensor
    consumed: Tensor = field(init=False)
    pending: Tensor = field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "consumed", self.integers[:, CONSUMED])
        object.__setattr__(self, "pending", self.integers[:, PENDING])

    @property
    def count(self) -> int:
        """B, dead lanes included."""
        return self.slots.shape[0]

    @property
    def law(self) -> LawParams:
        """Sampling parameters of every lane."""
        return LawParams(
            temperature=self.floats[:, TEMPERATURE],
            top_p=self.floats[:, TOP_P],
            min_p=self.floats[:, MIN_P],
            top_k=self.integers[:, TOP_K],
            greedy=self.integers[:, GREEDY] > 0,
        )


class RequestTable:
    """Device rows of R requests. Host methods run between rounds; ``lanes``, ``shaped`` and ``advance`` inside one.

    options: tables of penalties and biases over ``vocab_size`` ids; None if rounds never apply them.
    """

    def __init__(
        self, *, slots: int, stop_ids: int, device: torch.device, extended: bool = False, vocab_size: int = 0
    ) -> None:
        self.options = OptionTable(slots=slots, vocab_size=vocab_size, device=device) if extended else None
        self.slots = slots
        self.spare = slots
        self.device = device
        self.integers = torch.zeros(slots + 1, INTEGER_COLUMNS, dtype=torch.int64, device=device)
        self.floats = torch.ones(slots + 1, FLOAT_COLUMNS, dtype=torch.float32, device=device)
        self.stops = torch.full((slots + 1, stop_ids), NO_STOP, dtype=torch.int64, device=device)
        # neutral row: one consumed token, so that position N − 1 exists; finished, so that nothing advances
        self.integers[:, CONSUMED] = 1
        self.integers[:, FINISH] = int(Finish.CANCELLED)

    def admit(
        self,
        slot: int,
        *,
        request: int,
        epoch: int,
        consumed: int,
        budget: int,
        sampling: SamplingParams,
        stop_ids: tuple[int, ...],
        prompt: Sequence[int] = (),
        output: Sequence[int] = (),
        min_new_tokens: int = 0,
    ) -> None:
        """Writes a request's row once its prompt is consumed; its first token is still to be sampled.

        prompt: counted here, once, for the repetition penalty. output: tokens of this request that were emitted before, when it
        is resumed: all but the last are consumed with the prompt, the last one is pending, and no first token is sampled. The
        round at N consumed tokens is then the one that would have followed without the interruption, words included.

        Raises ValueError for options that need tables which were not allocated.
        """
        if self.options is not None:
            self.options.admit(slot, sampling, prompt, output)
        elif sampling.shapes_logits or min_new_tokens:
            raise ValueError("penalties, logit bias and minimum tokens need a table with extended=True")
        row = [0] * INTEGER_COLUMNS
        row[GENERATED], row[MIN_NEW] = len(output), min_new_tokens
        if output:
            row[PENDING] = output[-1]
        row[CONSUMED], row[BUDGET], row[REQUEST], row[EPOCH] = consumed, budget, request, epoch
        row[SEED], row[TOP_K], row[GREEDY] = sampling.seed, sampling.top_k, int(sampling.greedy)
        self.integers[slot] = upload(row, torch.int64, self.device)
        floats = [sampling.temperature, sampling.top_p, sampling.min_p]
        self.floats[slot] = upload(floats, torch.float32, self.device)
        padded = list(stop_ids) + [NO_STOP] * (self.stops.shape[1] - len(stop_ids))
        self.stops[slot] = upload(padded, torch.int64, self.device)

    def retire(self, slot: int) -> None:
        """Makes a slot neutral again."""
        self.integers[slot] = self.integers[self.spare]
        self.stops[slot] = NO_STOP
        if self.options is not None:
            self.options.retire(slot)

    def lanes(self, slots: Tensor) -> Lanes:
        """Rows of a round's lanes; terminal requests become dead lanes. slots: [B] int64. Does not change the table."""
        resident = self.integers.index_select(0, slots)
        live = resident[:, FINISH] == int(Finish.NONE)
        effective = torch.where(live, slots, self.spare)
        return Lanes(
            requested=slots,
            resident=resident,
            slots=effective,
            live=live,
            integers=torch.where(live.unsqueeze(1), resident, self.integers[self.spare]),
            floats=self.floats.index_select(0, effective),
        )

    def shaped(self, lanes: Lanes, logits: Tensor, drafts: Tensor) -> Tensor:
        """Logits [B, W, V] after penalties, bias and the minimum length, each row at its own prefix; see ``penalties``.

        drafts: [B, W − 1] int64, the verified drafts. Lanes that use no such option keep the values of their logits. Needs the
        option tables. Changes nothing.
        """
        assert self.options is not None
        return forbid_stops(
            self.options.penalise(lanes.slots, logits, drafts),
            stops=self.stops.index_select(0, lanes.slots),
            emitted=lanes.integers[:, GENERATED],
            minimum=lanes.integers[:, MIN_NEW],
        )

    def advance(self, lanes: Lanes, *, consumed: Tensor, emitted: Tensor, last: Tensor, finish: Tensor) -> Tensor:
        """Commits a round: counters once, last emitted token pending. All [B]. Returns the new integer rows [B, 11].

        ``consumed`` is the number of inputs consumed (0 when a request samples its first token from its prompt).
        Dead lanes must come with consumed = emitted = 0; they rewrite the spare row with itself.
        """
        rows = lanes.integers.clone()
        rows[:, CONSUMED] += consumed
        rows[:, PENDING] = torch.where(emitted > 0, last, rows[:, PENDING])
        rows[:, GENERATED] += emitted
        rows[:, FINISH] = torch.where(lanes.live, finish, rows[:, FINISH])
        self.integers.index_copy_(0, lanes.slots, rows)
        return rows
