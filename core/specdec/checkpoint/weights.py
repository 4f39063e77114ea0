"""Reading a model's tensors at preparation: one name prefix, shape checks, conversion to the activation dtype.

Quantised storage is recognised by ``specdec.checkpoint.matrices`` from each tensor's dtype and companions.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import Self

import torch
from torch import Tensor

from specdec.checkpoint.matrices import ExpertTensors, load_experts, load_matrix
from specdec.checkpoint.reader import Checkpoint
from specdec.errors import CheckpointError
from specdec.tensor_names import HEAD_NAMES, TEXT_PREFIXES

__all__ = ["Weights", "first_stored", "head_name", "text_prefix"]


def first_stored(checkpoint: Checkpoint, names: Iterable[str], what: str) -> str:
    """The first of ``names`` that the checkpoint stores; exporters differ in their prefixes.

    Raises CheckpointError naming ``what`` and all names tried if it stores none.
    """
    names = list(names)
    for name in names:
        if name in checkpoint:
            return name
    raise CheckpointError(f"{checkpoint.directory}: no {what}; looked for {', '.join(names)}")


def text_prefix(checkpoint: Checkpoint) -> str:
    """Prefix of the text model's tensors, one of ``specdec.tensor_names.TEXT_PREFIXES``.

    Raises CheckpointError if the token embedding is under none of them.
    """
    name = "embed_tokens.weight"
    return first_stored(checkpoint, [prefix + name for prefix in TEXT_PREFIXES], "token embedding").removesuffix(name)


def head_name(checkpoint: Checkpoint) -> str:
    """Name under which the vocabulary head is stored. Raises CheckpointError if it is stored under none of the known ones."""
    return first_stored(checkpoint, HEAD_NAMES, "vocabulary head")


class Weights:
    """Tensors under one prefix, converted to the activation dtype and moved to the device. Used at preparation only."""

    def __init__(self, checkpoint: Checkpoint, *, prefix: str, dtype: torch.dtype, device: torch.device) -> None:
        self.checkpoint = checkpoint
        self.prefix = prefix
        self.dtype = dtype
        self.precise = torch.promote_types(dtype, torch.float32)
        self.device = device

    def under(self, prefix: str) -> Self:
        """The same reader, one level down."""
        deeper = copy(self)
        deeper.prefix = self.prefix + prefix
        return deeper

    def has(self, name: str) -> bool:
        """Whether ``prefix + name`` is stored."""
        return self.prefix + name in self.checkpoint

    def _checked(self, full: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{self.checkpoint.directory}: tensor {full} has shape {list(tensor.shape)}, the configuration needs "
                f"{list(shape)}"
            )
        return tensor.to(self.device)

    def matrix(self, name: str, *shape: int) -> Tensor:
        """A weight in the activation dtype, dequantised if its storage is quantised."""
        full = self.prefix + name
        return self._checked(full, load_matrix(self.checkpoint, full, self.dtype), shape)

    def precise_vector(self, name: str, *shape: int) -> Tensor:
        """A weight whose arithmetic is float32 or wider."""
        full = self.prefix + name
        return self._checked(full, load_matrix(self.checkpoint, full, self.precise), shape)

    def stored(self, name: str) -> Tensor:
        """A tensor as stored (table shards, integer vectors)."""
        return self.checkpoint.load(self.prefix + name).to(self.device)

    def experts(self, name: str, *, count: int, hidden: int, inner: int) -> ExpertTensors:
        """The routed experts under ``prefix + name``, stacked on the CPU, in their storage format.

        gate and up: [inner, hidden] each; down: [hidden, inner]. Raises CheckpointError for a missing or misshapen expert.
        """
        experts = load_experts(self.checkpoint, self.prefix + name, count)
        for projection, shape in (
            ("gate_proj", (inner, hidden)),
            ("up_proj", (inner, hidden)),
            ("down_proj", (hidden, inner)),
        ):
            found = experts[projection].shape
            if found != (count, *shape):
                raise CheckpointError(
                    f"{self.checkpoint.directory}: {projection} of {self.prefix}{name} has shape {list(found)}, the "
                    f"configuration needs {[count, *shape]}"
                )
        return experts
