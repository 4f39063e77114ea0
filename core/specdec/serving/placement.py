"""Where a model runs and in what numbers: names that callers give, checked before anything is loaded."""

from __future__ import annotations

import torch

from specdec.errors import UsageError
from specdec.preparation import ACTIVATION_DTYPES

__all__ = ["activation_dtype", "usable_device"]


def usable_device(device: str | torch.device) -> torch.device:
    """The device of a name, on which a tensor could be made.

    Raises UsageError for one that is neither a CPU nor a CUDA device, and for one that does not work here.
    """
    name = str(device)
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise UsageError(f"device {name!r} is not supported; allowed: cpu, cuda, cuda:N")
    try:
        found = torch.device(name)
        torch.zeros(1, device=found)
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).splitlines() or ["no reason given"])[0]
        raise UsageError(f"device {name!r} is not usable here: {reason}; use cpu") from error
    return found


def activation_dtype(dtype: str | None, device: torch.device) -> str:
    """The torch dtype name of activations; None takes float32 on a CPU and bfloat16 elsewhere.

    Raises UsageError for one that no recipe runs in.
    """
    if dtype is None:
        return "float32" if device.type == "cpu" else "bfloat16"
    if dtype not in ACTIVATION_DTYPES:
        raise UsageError(f"dtype is {dtype!r}; allowed: {', '.join(ACTIVATION_DTYPES)}")
    return dtype
