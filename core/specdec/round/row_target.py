"""A target whose prompts, decoding and verification are one function of rows.

A prompt chunk commits as it goes; a verification writes candidates only, and ``commit`` selects among them. ``RowTarget``
keeps that account for any model that has candidate columns for what a consumed row leaves behind: the feedback, and the
vocabulary head's input where that is another vector. It knows grouped contexts (``specdec.ops.grouped_rows``). The model supplies
the function of rows; one whose recurrent state is not kept in columns extends ``commit`` and ``snapshot``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.declaration import StateLayout
from specdec.interfaces import Capacities
from specdec.ops.grouped_rows import open_group_state
from specdec.state.requests import Lanes
from specdec.state.store import StateStore


class RowTarget(ABC):
    """State and accounts of a target; the methods below the line are the core's ``Target`` protocol.

    vocab_size: V. head: vocabulary projection [V, H], in the dtype of the logits. tokens: positions that a call may attend
    to, whole pages. width: rows of the last verification.
    """

    vocab_size: int
    head: Tensor
    #: Column field of the feedback.
    feedback_field = "feedback"
    #: Column field of the head's input; a model whose feedback is that vector says so.
    sampling_field = "sampling_vector"

    def __init__(
        self,
        layout: StateLayout,
        capacities: Capacities,
        device: torch.device,
        *,
        group_tokens: int | None = None,
    ) -> None:
        """Allocates the state. group_tokens: tokens of a key group whose raw rows wait in a ring; None for a context without."""
        self.store = StateStore(
            layout, slots=capacities.slots, pages=capacities.pages, context=capacities.context, device=device
        )
        # every position a round may touch: the context plus the widest round that starts at its last token
        self.tokens = -(-(capacities.context + self.store.horizon) // layout.page_tokens) * layout.page_tokens
        self.width = 1
        self._group_tokens = group_tokens
        self._steps = torch.arange(max(self.store.horizon, capacities.prefill_rows), device=device)
        # head inputs [T, H] of the last prompt chunk, in storage of their own: the feedback rows are the drafter's to read
        self._chunk: Tensor | None = None

    @abstractmethod
    def run_rows(self, tokens: Tensor, slots: Tensor, positions: Tensor, *, prompt: bool) -> tuple[Tensor, Tensor]:
        """Runs B·T rows. tokens, positions: [B, T]; slots: [B]; prompt: write committed state instead of candidates (B = 1).

        Returns feedback rows [B·T, D] and inputs of the head [B·T, H], which may be one tensor.
        """

    def _keep_last(self, slots: Tensor, feedback: Tensor, vectors: Tensor) -> None:
        """Writes candidate columns. feedback: [B, T, D]; vectors: [B, T, H]."""
        self.store.write_columns(self.feedback_field, 0, slots, feedback)
        if self.sampling_field != self.feedback_field:
            self.store.write_columns(self.sampling_field, 0, slots, vectors)

    def _logits(self, vectors: Tensor) -> Tensor:
        """vectors: [..., H] → [..., V] in the dtype of the head."""
        return F.linear(vectors.to(self.head.dtype), self.head)

    # --- Target protocol -------------------------------------------------------------------------------------------

    def prefill(self, tokens: Tensor, slot: Tensor, start: int | Tensor) -> Tensor:
        """See ``Target.prefill``. Raises ValueError for a chunk of more rows than were prepared."""
        rows = tokens.shape[0]
        if rows > self._steps.shape[0]:
            raise ValueError(f"a prompt chunk of {rows} rows; {self._steps.shape[0]} were prepared")
        positions = (self._steps[:rows] + start).unsqueeze(0)
        feedback, vectors = self.run_rows(tokens.unsqueeze(0), slot, positions, prompt=True)
        self._keep_last(slot, feedback[-1:].unsqueeze(0), vectors[-1:].unsqueeze(0))
        self.store.selected.index_fill_(0, slot, 0)
        self._chunk = vectors.clone() if vectors is feedback else vectors
        return feedback

    def prefill_logits(self, rows: int, first: int = 0) -> Tensor:
        """See ``Target.prefill_logits``."""
        if self._chunk is None:
            raise RuntimeError("the rows of the last prompt chunk are gone; score a chunk right after its prefill")
        kept = self._chunk.shape[0]
        if rows < 1 or first < 0 or first + rows > kept:
            raise ValueError(
                f"rows {first} to {first + rows - 1} of a prompt chunk of {kept}; rows 0 to {kept - 1} are there"
            )
        return self._logits(self._chunk[first : first + rows])

    def first_logits(self, slots: Tensor) -> Tensor:
        """See ``Target.first_logits``."""
        column = self.store.column_index(slots, self.sampling_field)
        return self._logits(self.store.read_column(self.sampling_field, 0, column))

    def verify(self, tokens: Tensor, lanes: Lanes) -> Tensor:
        """See ``Target.verify``."""
        batch, width = tokens.shape
        self.width, self._chunk = width, None
        positions = lanes.consumed.unsqueeze(1) + self._steps[:width]
        feedback, vectors = self.run_rows(tokens, lanes.slots, positions, prompt=False)
        self._keep_last(lanes.slots, feedback.view(batch, width, -1), vectors.view(batch, width, -1))
        return self._logits(vectors).view(batch, width, -1)

    def commit(self, lanes: Lanes, taken: Tensor) -> None:
        """See ``Target.commit``."""
        self.store.commit(lanes.slots, taken)

    def snapshot(self, slots: Tensor, taken: Tensor | None = None) -> dict[str, Tensor]:
        """See ``Target.snapshot``."""
        return self.store.state_after(slots, torch.zeros_like(slots) if taken is None else taken)

    def restore(self, slot: Tensor, state: Mapping[str, Tensor], consumed: Tensor) -> None:
        """See ``Target.restore``."""
        self._chunk = None
        if self._group_tokens is not None:
            state = {**state, **open_group_state(state, consumed, self._group_tokens)}
        self.store.restore(slot, state)

    def feedback(self, slots: Tensor) -> Tensor:
        """See ``Target.feedback``."""
        name = self.feedback_field
        return self.store.read_column(name, 0, self.store.column_index(slots, name))

    def feedback_rows(self, slots: Tensor, rows: int) -> Tensor:
        """See ``Target.feedback_rows``."""
        return self.store[self.feedback_field][0][:, :rows].index_select(0, slots)

    def faults(self, slots: Tensor) -> Tensor:
        """See ``Target.faults``."""
        return self.store.faults.index_select(0, slots)
