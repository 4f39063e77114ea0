"""Reading this model's tensors: name prefixes, shape checks, conversion to the activation dtype.

The target's text tensors live under one of three prefixes, depending on who exported the checkpoint; the drafter's under
``mtp.``. Quantised storage is recognised by ``specdec.checkpoint.matrices`` from each tensor's dtype and companions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specdec.checkpoint.matrices import ExpertTensors, load_experts, load_matrix, quantisation_of
from specdec.checkpoint.reader import Checkpoint
from specdec.errors import CheckpointError

from .geometry import Geometry

# Official releases, some re-exports, and the plain text class of transformers.
TARGET_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight")
DRAFTER_PREFIX = "mtp."


def target_prefix(checkpoint: Checkpoint) -> str:
    """Prefix of the target's text tensors.

    Raises CheckpointError if the token embedding is under none of the known prefixes.
    """
    for prefix in TARGET_PREFIXES:
        if prefix + "embed_tokens.weight" in checkpoint:
            return prefix
    tried = ", ".join(f"{prefix}embed_tokens.weight" for prefix in TARGET_PREFIXES)
    raise CheckpointError(f"{checkpoint.directory}: no token embedding; looked for {tried}")


class Weights:
    """Tensors under one prefix, converted to the activation dtype and moved to the device. Used at preparation only."""

    def __init__(
        self, checkpoint: Checkpoint, geometry: Geometry, *, prefix: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.checkpoint = checkpoint
        self.geometry = geometry
        self.prefix = prefix
        self.dtype = dtype
        self.precise = torch.promote_types(dtype, torch.float32)
        self.device = device

    def under(self, prefix: str) -> Weights:
        """The same reader, one level down."""
        return Weights(
            self.checkpoint, self.geometry, prefix=self.prefix + prefix, dtype=self.dtype, device=self.device
        )

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
        """A small weight whose arithmetic is float32 or wider."""
        full = self.prefix + name
        return self._checked(full, load_matrix(self.checkpoint, full, self.precise), shape)

    def norm_scale(self, name: str, *shape: int) -> Tensor:
        """1 + weight of a zero-centred norm, in the accumulate dtype."""
        return 1 + self.precise_vector(name, *shape)

    def stored(self, name: str) -> Tensor:
        """A tensor as stored (table shards, integer vectors)."""
        return self.checkpoint.load(self.prefix + name).to(self.device)

    def experts(self, name: str) -> ExpertTensors:
        """The routed experts under ``prefix + name``, stacked, in their storage format."""
        g = self.geometry
        experts = load_experts(self.checkpoint, self.prefix + name, g.num_experts)
        hidden, inner = g.hidden_size, g.moe_intermediate_size
        for projection, shape in (
            ("gate_proj", (inner, hidden)),
            ("up_proj", (inner, hidden)),
            ("down_proj", (hidden, inner)),
        ):
            found = experts[projection]
            # NVFP4 packs two values a byte
            width = found.weight.shape[-1] * (2 if found.storage == "nvfp4" else 1)
            if (*found.weight.shape[:-1], width) != (g.num_experts, *shape):
                raise CheckpointError(
                    f"{self.checkpoint.directory}: {projection} of {self.prefix}{name} has shape "
                    f"{[*found.weight.shape[:-1], width]}, the configuration needs {[g.num_experts, *shape]}"
                )
        return experts


def head_weight(checkpoint: Checkpoint, geometry: Geometry, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Vocabulary projection [V, H] in the activation dtype.

    Raises CheckpointError if it is stored under none of the known names or has another shape.
    """
    for name in HEAD_NAMES:
        if name in checkpoint:
            reader = Weights(checkpoint, geometry, prefix="", dtype=dtype, device=device)
            return reader.matrix(name, geometry.vocab_size, geometry.hidden_size)
    raise CheckpointError(f"{checkpoint.directory}: no vocabulary head; looked for {', '.join(HEAD_NAMES)}")


def declared_quantisation(checkpoint: Checkpoint, geometry: Geometry, module_name: str) -> Mapping[str, Any] | None:
    """What ``config.json`` says about the quantisation of a module, or None; see ``quantisation_of``.

    Engines that append the MTP layer to the decoder stack call it ``mtp.layers.{num_hidden_layers}``; files therefore list it
    under that name, ``mtp.layers.0``, or both. No tensor carries the alias.

    Raises CheckpointError if both names are listed with different entries.
    """
    aliases = {f"{DRAFTER_PREFIX}layers.{geometry.num_hidden_layers}.": f"{DRAFTER_PREFIX}layers.0."}
    return quantisation_of(checkpoint, module_name, aliases=aliases)
