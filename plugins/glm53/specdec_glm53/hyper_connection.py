"""Manifold-constrained hyper-connection (mHC) of GLM-5.3-Flash: a block reads through the weights of its own site.

The mathematics is ``specdec.ops.hyper_connection``. Source of the order and of the tensor names: the ``glm5_next`` class of
transformers 5.24.
"""

from __future__ import annotations

from typing import Self

from attrs import frozen
from torch import Tensor

from specdec.checkpoint.weights import Weights
from specdec.ops import hyper_connection as mhc

from .geometry import Geometry

combine = mhc.expand


@frozen(kw_only=True, eq=False)
class HyperConnection(mhc.HyperConnection):
    """One site of a layer; see the base class for its tensors."""

    @classmethod
    def load(cls, weights: Weights, geometry: Geometry, site: str) -> Self:
        """Reads ``hc_{site}_fn``, ``_base`` and ``_scale`` of a layer. site: ``attn`` or ``ffn``.

        Raises CheckpointError for a missing or misshapen tensor.
        """
        g = geometry
        return cls.build(
            fn=weights.precise_vector(f"hc_{site}_fn", g.hc_outputs, g.streams_width),
            base=weights.precise_vector(f"hc_{site}_base", g.hc_outputs),
            scale=weights.precise_vector(f"hc_{site}_scale", 3),
            iterations=g.hc_sinkhorn_iters,
            hc_eps=g.hc_eps,
            rms_eps=g.rms_norm_eps,
        )

    def mix(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """streams: [T, S, H] → block input u [T, H] in their dtype, write weights [T, S] and mixing matrix [T, S, S] (from
        stream, to stream) in the accumulate dtype. Does not change the streams."""
        pre, post, comb = self.mixes(streams)
        return mhc.collapse(streams, pre), post, comb
