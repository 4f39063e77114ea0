"""Reading this model's tensors: name prefixes, shape checks, conversion to the activation dtype.

The target's text tensors live under one of three prefixes, depending on who exported the checkpoint; the drafter's under
``mtp.``. Quantised storage is recognised by ``specdec.checkpoint.matrices`` from each tensor's dtype and companions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.checkpoint import weights
from specdec.checkpoint.reader import Checkpoint
from specdec.checkpoint.weights import first_stored

from .geometry import Geometry

# Official releases, some re-exports, and the plain text class of transformers.
TARGET_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight")
DRAFTER_PREFIX = "mtp."


def target_prefix(checkpoint: Checkpoint) -> str:
    """Prefix of the target's text tensors.

    Raises CheckpointError if the token embedding is under none of the known prefixes.
    """
    name = "embed_tokens.weight"
    return first_stored(checkpoint, [prefix + name for prefix in TARGET_PREFIXES], "token embedding").removesuffix(name)


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
    name = first_stored(checkpoint, HEAD_NAMES, "vocabulary head")
    reader = Weights(checkpoint, geometry, prefix="", dtype=dtype, device=device)
    return reader.matrix(name, geometry.vocab_size, geometry.hidden_size)


def module_aliases(geometry: Geometry) -> dict[str, str]:
    """Names that engines give the MTP layer, by stored name, as ``quantisation_of`` takes them.

    Engines that append the layer to the decoder stack call it ``mtp.layers.{num_hidden_layers}``; files therefore list it under
    that name, ``mtp.layers.0``, or both. No tensor carries the alias.
    """
    return {f"{DRAFTER_PREFIX}layers.{geometry.num_hidden_layers}.": f"{DRAFTER_PREFIX}layers.0."}
