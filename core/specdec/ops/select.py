"""Which form of an operator runs: the plain torch reference, or its Triton kernel where the operands allow it.

A reference asks ``uses_cuda`` first. The question is asked while a round is captured, so a replay asks nothing. Two switches
force the references: the environment variable ``SPECDEC_OPERATORS=reference`` for a process, ``reference_operators`` for a
block of code. Nothing here imports triton on a machine without a CUDA device.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from specdec.errors import UsageError

__all__ = ["CUDA_OPERATORS", "active_operators", "reference_operators", "uses_cuda"]

VARIABLE = "SPECDEC_OPERATORS"
# Every operator that has a kernel, by the name its reference asks with.
CUDA_OPERATORS = (
    "apply_rope",
    "attend",
    "attend_window",
    "channel_delta_rule_rows",
    "channel_gates",
    "choose_groups",
    "collapse",
    "delta_rule_replay",
    "delta_rule_rows",
    "expand",
    "fp4_e4m3",
    "fp4_ue8m0",
    "fp8_ue8m0",
    "gated_rms_norm",
    "grouped_attention",
    "head_gates",
    "law",
    "mixes",
    "mixture",
    "read_streams",
    "rms",
    "rms_norm",
    "rotate_pairs",
    "short_conv",
    "silu_conv",
    "unit_norm",
)
# Float64 operands are a check of the mathematics and stay with the reference.
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_CAPABILITY = 8
_switched_off: ContextVar[frozenset[str]] = ContextVar("specdec_reference_operators", default=frozenset())


def uses_cuda(name: str, *tensors: Tensor) -> bool:
    """Whether the kernel of operator ``name`` runs on these operands.

    True if all are tensors of the current CUDA device and of float32, bfloat16 or float16, none is recorded for a gradient
    (kernels have no backward form), triton can be imported, the device has compute capability 8 or more and the operator is not
    switched off. Pass the floating operands only. Raises UsageError if ``SPECDEC_OPERATORS`` has a value other than auto and
    reference, and ValueError for a name not in ``CUDA_OPERATORS``.
    """
    for tensor in tensors:
        if not tensor.is_cuda or tensor.dtype not in _DTYPES or (tensor.requires_grad and torch.is_grad_enabled()):
            return False
    if name not in CUDA_OPERATORS:
        raise ValueError(f"operator {name!r} has no kernel; CUDA_OPERATORS lists those that have one")
    return bool(tensors) and _reason(name, tensors[0].device) is None


def active_operators(device: torch.device) -> dict[str, str]:
    """Operator names to ``triton``, or to ``reference (reason)``, as half or single precision operands on ``device`` get them.

    Raises as ``uses_cuda``.
    """
    reasons = {name: _reason(name, torch.device(device)) for name in CUDA_OPERATORS}
    return {name: "triton" if reason is None else f"reference ({reason})" for name, reason in reasons.items()}


@contextmanager
def reference_operators(*names: str) -> Iterator[None]:
    """Within the block the named operators, or all of them without a name, run as their references.

    Holds for the current thread or task. A graph keeps what was selected while it was captured. Raises ValueError for an
    unknown name.
    """
    unknown = sorted(set(names) - set(CUDA_OPERATORS))
    if unknown:
        raise ValueError(f"no operators {', '.join(unknown)}; there are {', '.join(CUDA_OPERATORS)}")
    token = _switched_off.set(_switched_off.get() | frozenset(names or CUDA_OPERATORS))
    try:
        yield
    finally:
        _switched_off.reset(token)


def _reason(name: str, device: torch.device) -> str | None:
    """Why ``name`` runs as its reference on ``device``; None if its kernel runs."""
    if device.type != "cuda":
        return f"{device.type} device"
    if name in _switched_off.get():
        return "switched off"
    asked = os.environ.get(VARIABLE) or "auto"
    if asked not in ("auto", "reference"):
        raise UsageError(f"{VARIABLE}={asked!r}; allowed: auto, reference")
    if asked == "reference":
        return f"{VARIABLE}=reference"
    current = _current_device()
    if device.index not in (None, current):
        return f"device {device.index} is not the current one, {current}"
    return _missing(current)


def _current_device() -> int:
    return torch.cuda.current_device()


@functools.cache
def _missing(index: int) -> str | None:
    """What device ``index`` lacks for any kernel, or None."""
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"triton cannot be imported: {error}"
    major, minor = torch.cuda.get_device_capability(index)
    if major < _CAPABILITY:
        return f"compute capability {major}.{minor}, kernels need {_CAPABILITY}.0"
    return None
