"""One stage of the DSpark drafter: a layer without compressed rows that reads a window of committed inputs and a drafted block.

Rows of the window are made from the target's features by the stage's row projection alone, without the stage's norm. All rows of
a block see the same keys: the whole window, which is not shifted by offset, and the whole block. Source: official inference code
of the release.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from specdec.checkpoint.weights import Weights
from specdec.ops.moe import Mixture
from specdec.ops.norms import rms_norm

from .attention import Projections, attend
from .geometry import Geometry
from .hyper_connection import HyperConnection, collapse, expand, load_site
from .mixture import load_mixture
from .rotary import Rotation


@frozen(kw_only=True, eq=False)
class DraftStage:
    """Weights of ``mtp.{s}``. Norm scales [H] are in the accumulate dtype."""

    attention_site: HyperConnection
    attention_scale: Tensor
    attention: Projections
    forward_site: HyperConnection
    forward_scale: Tensor
    forward: Mixture
    geometry: Geometry

    @classmethod
    def load(cls, weights: Weights, geometry: Geometry, *, qdq: bool) -> DraftStage:
        """Reads one stage. qdq: see ``Projections``. Raises CheckpointError for a missing or misshapen tensor."""
        g = geometry
        return cls(
            attention_site=load_site(weights, g, "attn"),
            attention_scale=weights.precise_vector("attn_norm.weight", g.hidden_size),
            attention=Projections.load(weights.under("attn."), g, qdq=qdq),
            forward_site=load_site(weights, g, "ffn"),
            forward_scale=weights.precise_vector("ffn_norm.weight", g.hidden_size),
            forward=load_mixture(
                weights.under("ffn."), g, experts=g.dspark_n_routed_experts, top_k=g.dspark_num_experts_per_tok
            ),
            geometry=g,
        )

    def __call__(
        self, streams: Tensor, pre: Tensor, window: Tensor, bias: Tensor, rotation: Rotation
    ) -> tuple[Tensor, Tensor]:
        """Runs B blocks of L rows. streams: [B·L, S, H]; pre: [B·L, S], read weights that the block before left; window:
        [B, n, d], finite; bias: [B, 1, n + L], −∞ for window rows before the first input. Returns streams and read weights."""
        eps, lanes = self.geometry.rms_norm_eps, window.shape[0]
        read, write, mix = self.attention_site.mixes(streams)
        x = rms_norm(collapse(streams, pre), self.attention_scale, eps)
        q, _, rows = self.attention.project(x, rotation)
        keys = torch.cat([window, rows.unflatten(0, (lanes, -1))], dim=1)
        o = attend(q.unflatten(0, (lanes, -1)), keys, bias, self.attention.sink)
        streams = expand(streams, self.attention.write_back(o.flatten(0, 1), rotation), write, mix)
        next_read, write, mix = self.forward_site.mixes(streams)
        x = rms_norm(collapse(streams, read), self.forward_scale, eps)
        return expand(streams, self.forward(x), write, mix), next_read
