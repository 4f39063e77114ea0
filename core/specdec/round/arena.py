"""What the core allocates for rounds: request table, completion frames, staging and scratch that outlives an operator."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.round.completion import METADATA_FIELDS
from specdec.round.forecasts import ForecastFrames
from specdec.sampling.logprobs import LogprobColumn, LogprobFrames
from specdec.sampling.masks import MaskFrames
from specdec.state.requests import Lanes, RequestTable


class Arena:
    """Buffers shared by all round shapes of one loaded model. Allocation happens at preparation only.

    frames: [2 · (R + 1), 16 + W_max] int64, see ``completion``. extended: also hold what penalties, logit bias, minimum length
    and log-probabilities need, over ``vocab_size`` ids; ``logprobs`` is None without. confidence_width: forecasts per lane that
    rounds publish; ``forecasts`` is None for 0. grammar: also hold masks over ``vocab_size`` ids for every row of a verification;
    ``masks`` is None without. ``scratch`` returns a view of storage that rounds of the same model reuse: whatever must survive
    the round belongs to a state store, a frame or the request table.
    """

    def __init__(
        self,
        *,
        slots: int,
        max_draft_tokens: int,
        stop_ids: int,
        device: torch.device,
        extended: bool = False,
        vocab_size: int = 0,
        confidence_width: int = 0,
        grammar: bool = False,
    ) -> None:
        if (extended or grammar) and vocab_size < 1:
            raise ValueError("an arena with extended sampling options or grammar masks needs the vocabulary size")
        self.slots = slots
        self.max_draft_tokens = max_draft_tokens
        self.device = device
        self.requests = RequestTable(
            slots=slots, stop_ids=stop_ids, device=device, extended=extended, vocab_size=vocab_size
        )
        self.logprobs = (
            LogprobFrames(slots=slots, width=max_draft_tokens + 1, vocab_size=vocab_size, device=device)
            if extended
            else None
        )
        self.forecasts = (
            ForecastFrames(slots=slots, width=confidence_width, device=device) if confidence_width else None
        )
        self.masks = (
            MaskFrames(slots=slots, width=max_draft_tokens + 1, vocab_size=vocab_size, device=device)
            if grammar
            else None
        )
        self.frames = torch.full(
            (2 * (slots + 1), METADATA_FIELDS + max_draft_tokens + 1), -1, dtype=torch.int64, device=device
        )
        self._scratch: dict[str, Tensor] = {}

    def scratch(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A view [*shape] of the named scratch buffer, which grows to the largest shape asked for at preparation.

        Views handed out before a growth keep their own storage, so shapes may be prepared in any order.
        """
        size = 1
        for extent in shape:
            size *= extent
        held = self._scratch.get(name)
        if held is None or held.numel() < size or held.dtype != dtype:
            held = torch.zeros(size, dtype=dtype, device=self.device)
            self._scratch[name] = held
        return held[:size].view(shape)

    def masked(self, lanes: Lanes, logits: Tensor) -> Tensor:
        """Logits [B, W, V] with −inf where a lane's mask of that row forbids the token; see ``masks.forbid``. Changes nothing.

        Raises ValueError if the arena holds no masks.
        """
        if self.masks is None:
            raise ValueError("grammar masks need an arena with grammar=True")
        return self.masks.apply(lanes, logits)

    def poison(self) -> None:
        """Overwrites all scratch: floats become NaN, integers −7. Host side, for tests: no later round may read any of it."""
        for tensor in self._scratch.values():
            tensor.fill_(float("nan") if tensor.is_floating_point() else -7)

    def read_frame(self, frame: int, slots: list[int]) -> list[list[int]]:
        """Records of the given slots as Python integers. Synchronises with the device; called between rounds only."""
        rows = torch.tensor([frame * (self.slots + 1) + slot for slot in slots], dtype=torch.int64).to(self.device)
        return self.frames.index_select(0, rows).cpu().tolist()

    def read_logprobs(self, frame: int, slots: list[int]) -> list[list[LogprobColumn]]:
        """Log-probabilities that extended rounds left beside the records of a frame. As ``read_frame``; read it before the next
        round but one. Raises ValueError if the arena holds none."""
        if self.logprobs is None:
            raise ValueError("log-probabilities need an arena with extended=True")
        return self.logprobs.read(frame, slots)

    def read_forecasts(self, frame: int, slots: list[int]) -> list[list[float]]:
        """Forecasts [K] that a round left beside the records of a frame. As ``read_frame``. Raises ValueError if the arena holds
        none."""
        if self.forecasts is None:
            raise ValueError("forecasts need an arena with confidence_width above 0")
        return self.forecasts.read(frame, slots)
