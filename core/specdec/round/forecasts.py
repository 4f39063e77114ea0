"""Forecasts of acceptance as the host reads them: frames that alternate by round like completion records, one row per slot."""

from __future__ import annotations

import torch
from torch import Tensor


class ForecastFrames:
    """The persistent buffer [2 · (R + 1), width] float32; row frame · (R + 1) + slot, as completion frames have it."""

    def __init__(self, *, slots: int, width: int, device: torch.device) -> None:
        self.slots = slots
        self.width = width
        self.values = torch.zeros(2 * (slots + 1), width, dtype=torch.float32, device=device)

    def write(self, rows: Tensor, forecasts: Tensor) -> None:
        """Stores a round's forecasts; depths beyond its own become NaN. rows: [B] int64; forecasts: [B, K]. Capturable."""
        missing = self.width - forecasts.shape[1]
        padded = torch.nn.functional.pad(forecasts, (0, missing), value=torch.nan) if missing else forecasts
        self.values.index_copy_(0, rows, padded)

    def read(self, frame: int, slots: list[int], values: Tensor | None = None) -> list[list[float]]:
        """Forecasts of each slot. values: the host's copy of the buffer; None reads the buffer itself and synchronises with the
        device. Called between rounds only."""
        rows = torch.tensor([frame * (self.slots + 1) + slot for slot in slots], dtype=torch.int64)
        source = self.values if values is None else values
        return source.index_select(0, rows.to(source.device)).tolist()
