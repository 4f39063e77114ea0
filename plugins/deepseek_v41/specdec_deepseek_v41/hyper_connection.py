"""Hyper-connection sites of DeepSeek-V4.1: ``specdec.ops.hyper_connection`` with a lag of one block.

A block reads the streams through the weights that the block before it produced; the first one reads stream 0. Weights to write
and to mix belong to the block that produced them. Source: official inference code of the release.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.checkpoint.weights import Weights
from specdec.ops.hyper_connection import HyperConnection, collapse, expand

from .geometry import Geometry

__all__ = ["HyperConnection", "collapse", "expand", "first_read", "load_site", "open_streams"]


def load_site(weights: Weights, geometry: Geometry, site: str) -> HyperConnection:
    """Reads ``hc_{site}_fn``, ``_base`` and ``_scale`` of a layer. site: ``attn`` or ``ffn``.

    Raises CheckpointError for a missing or misshapen tensor.
    """
    g = geometry
    return HyperConnection.build(
        fn=weights.precise_vector(f"hc_{site}_fn", g.hc_outputs, g.streams_width),
        base=weights.precise_vector(f"hc_{site}_base", g.hc_outputs),
        scale=weights.precise_vector(f"hc_{site}_scale", 3),
        iterations=g.hc_sinkhorn_iters,
        hc_eps=g.hc_eps,
        rms_eps=g.rms_norm_eps,
    )


def open_streams(embedded: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """Streams and read weights before the first layer: S copies of the embedding, read through ``first``.

    embedded: [T, H]; first: [S], one-hot of stream 0 in the accumulate dtype. Returns [T, S, H] and [T, S].
    """
    count = first.shape[0]
    return embedded.unsqueeze(1).repeat(1, count, 1), first.expand(embedded.shape[0], count)


def first_read(geometry: Geometry, like: Tensor) -> Tensor:
    """The one-hot [S] of ``open_streams``, with the dtype and device of ``like``. Allocates; preparation only."""
    return torch.eye(1, geometry.hc_mult, dtype=like.dtype, device=like.device)[0]
