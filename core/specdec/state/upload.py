"""Small host values on their way to the device, without waiting for what is queued there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of host numbers on the device. The copy is ordered on the current stream; nothing waits for it.

    Host side, between rounds. On a CUDA device the copy is from pinned memory, which torch reuses only after it was read.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
