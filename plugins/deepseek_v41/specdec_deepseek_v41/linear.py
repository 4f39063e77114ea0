"""Linear layers of DeepSeek-V4.1: what a quantised weight multiplies is quantised too.

Weights stored with block scales read inputs in E4M3 blocks under power-of-two scales; products of the two formats are exact in
float32. Weights stored as plain floats read their inputs as they are. Source: official inference code of the release.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from specdec.checkpoint.matrices import storage_of
from specdec.checkpoint.weights import Weights
from specdec.ops.block_quantisation import fp8_ue8m0


@frozen(kw_only=True, eq=False)
class Linear:
    """weight: [out, in] in the activation dtype; quantised: whether inputs are quantised before the product."""

    weight: Tensor
    quantised: bool

    @classmethod
    def load(cls, weights: Weights, outputs: Mapping[str, int], inputs: int) -> Linear:
        """Weights that read one input, one below the other. outputs: rows by tensor name.

        Raises CheckpointError for a missing or misshapen tensor.
        """
        return cls(
            weight=torch.cat([weights.matrix(name, rows, inputs) for name, rows in outputs.items()]),
            quantised=any(quantised(weights, name) for name in outputs),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., in] → [..., out] in the same dtype. Does not change x."""
        return F.linear(fp8_ue8m0(x) if self.quantised else x, self.weight)


def quantised(weights: Weights, name: str) -> bool:
    """Whether a weight is stored with block scales. Raises CheckpointError if it is missing."""
    return storage_of(weights.checkpoint, weights.prefix + name) != "plain"
