"""What the core allocates for rounds: request table, completion frames, staging and scratch that outlives an operator."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.round.completion import METADATA_FIELDS
from specdec.round.forecasts import ForecastFrames
from specdec.round.phases import PhaseMarks
from specdec.round.transfers import FrameTransfers
from specdec.sampling.logprobs import LogprobColumn, LogprobFrames
from specdec.sampling.masks import MaskFrames
from specdec.sampling.sampler import ReferenceSampler, Sampler
from specdec.state.requests import Lanes, RequestTable


class Arena:
    """Buffers shared by all round shapes of one loaded model. Allocation happens at preparation only.

    frames: [2 · (R + 1), 16 + W_max] int64, see ``completion``. extended: also hold what penalties, logit bias, minimum length
    and log-probabilities need, over ``vocab_size`` ids; ``logprobs`` is None without. confidence_width: forecasts per lane that
    rounds publish; ``forecasts`` is None for 0. grammar: also hold masks over ``vocab_size`` ids for every row of a verification;
    ``masks`` is None without. sampler: who samples, see ``sampler_for``; None is the reference. ``scratch`` returns a view of
    storage that rounds of the same model reuse: whatever must survive the round belongs to a state store, a frame or the request
    table.
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
        sampler: Sampler | None = None,
    ) -> None:
        if (extended or grammar) and vocab_size < 1:
            raise ValueError("an arena with extended sampling options or grammar masks needs the vocabulary size")
        self.slots = slots
        self.max_draft_tokens = max_draft_tokens
        self.device = device
        self.sampler: Sampler = ReferenceSampler() if sampler is None else sampler
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
        #: Where rounds leave marks for a benchmark; None leaves none.
        self.phases: PhaseMarks | None = None
        logprobs = () if self.logprobs is None else self.logprobs.buffers
        forecasts = () if self.forecasts is None else (self.forecasts.values,)
        #: How completion, log-probability and forecast frames reach the host while further rounds are queued.
        self.transfers = FrameTransfers((self.frames, *forecasts, *logprobs), device)

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
        """Records of the given slots as Python integers. Waits for the frame's transfer if its round was one of ``transfers``,
        else for the device; called between rounds only."""
        copies = self.transfers.host(frame)
        source = self.frames if copies is None else copies[0]
        rows = torch.tensor([frame * (self.slots + 1) + slot for slot in slots], dtype=torch.int64).to(source.device)
        return source.index_select(0, rows).tolist()

    def read_logprobs(self, frame: int, slots: list[int]) -> list[list[LogprobColumn]]:
        """Log-probabilities that extended rounds left beside the records of a frame. As ``read_frame``; read it before the next
        round but one. Raises ValueError if the arena holds none."""
        if self.logprobs is None:
            raise ValueError("log-probabilities need an arena with extended=True")
        copies = self.transfers.host(frame)
        return self.logprobs.read(frame, slots, None if copies is None else copies[-3:])

    def read_forecasts(self, frame: int, slots: list[int]) -> list[list[float]]:
        """Forecasts [K] that a round left beside the records of a frame. As ``read_frame``. Raises ValueError if the arena holds
        none."""
        if self.forecasts is None:
            raise ValueError("forecasts need an arena with confidence_width above 0")
        copies = self.transfers.host(frame)
        return self.forecasts.read(frame, slots, None if copies is None else copies[1])
