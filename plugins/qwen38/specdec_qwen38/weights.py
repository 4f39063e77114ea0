"""Reading this model's tensors: name prefixes, shape checks, conversion to the activation dtype.

The target's text tensors live under one of three prefixes, depending on who exported the checkpoint; the drafter's under
``mtp.``. Quantised storage is recognised by ``specdec.checkpoint.matrices`` from each tensor's dtype and companions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.checkpoint import weights
from specdec.checkpoint.reader import Checkpoint
from specdec.checkpoint.weights import head_name
from specdec.tensor_names import TEXT_PREFIX, TEXT_PREFIXES

from .geometry import Geometry

DRAFTER_PREFIX = "mtp."


class Weights(weights.Weights):
    """The core's reader with this model's sizes and norms."""

    def __init__(
        self, checkpoint: Checkpoint, geometry: Geometry, *, prefix: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(checkpoint, prefix=prefix, dtype=dtype, device=device)
        self.geometry = geometry

    def norm_scale(self, name: str, *shape: int) -> Tensor:
        """1 + weight of a zero-centred norm, in the accumulate dtype."""
        return 1 + self.precise_vector(name, *shape)


def head_weight(checkpoint: Checkpoint, geometry: Geometry, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Vocabulary projection [V, H] in the activation dtype.

    Raises CheckpointError if it is stored under none of the known names or has another shape.
    """
    reader = Weights(checkpoint, geometry, prefix="", dtype=dtype, device=device)
    return reader.matrix(head_name(checkpoint), geometry.vocab_size, geometry.hidden_size)


def module_aliases(geometry: Geometry) -> dict[str, str]:
    """Other beginnings of module names, by stored name, as ``quantisation_of`` takes them.

    Configurations list modules under the official names whatever the tensors are called. Engines that append the MTP layer to the
    decoder stack call it ``mtp.layers.{num_hidden_layers}``; files therefore list it under that name, ``mtp.layers.0``, or both.
    """
    appended = {f"{DRAFTER_PREFIX}layers.{geometry.num_hidden_layers}.": f"{DRAFTER_PREFIX}layers.0."}
    return {**dict.fromkeys(TEXT_PREFIXES, TEXT_PREFIX), **appended}
