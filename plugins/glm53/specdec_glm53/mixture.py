"""Feed-forward blocks of GLM-5.3-Flash: one clamped SwiGLU in the first layers, a mixture of experts in the others.

    s = sigmoid(m Wrᵀ) in float32;  experts of the largest s + bias;  w = scale · s / Σ s of the selected ones
    y = Σ_e w_e · E_e(m) + shared(m)                                  the shared expert has no factor

Experts are assumed local and whole: a shard would hold a slice of every inner width and add the parts of y afterwards; the
router is the same for every shard.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from specdec.checkpoint.mixtures import build_mixture
from specdec.checkpoint.weights import Weights
from specdec.ops.moe import BiasedRouter, Mixture, SharedExpert, clamped_swiglu

from .geometry import Geometry


def load_mixture(weights: Weights, geometry: Geometry, *, quantised_activations: bool) -> Mixture:
    """Reads one ``mlp`` block with experts.

    quantised_activations: whether stored ``input_scale`` values are honoured (W4A4, the target's experts); the MTP layer's
    experts are W4A16, so its loader passes False. Raises CheckpointError for a missing or misshapen tensor.
    """
    g = geometry
    return build_mixture(
        weights.experts("experts", count=g.n_routed_experts, hidden=g.hidden_size, inner=g.moe_intermediate_size),
        # scores are float32 or wider whatever the activations are
        router=weights.precise_vector("gate.weight", g.n_routed_experts, g.hidden_size),
        route=Router(
            bias=weights.precise_vector("gate.e_score_correction_bias", g.n_routed_experts),
            top_k=g.num_experts_per_tok,
            scale=g.routed_scaling_factor,
        ),
        activation=partial(clamped_swiglu, limit=g.swiglu_limit),
        shared=_load_shared(weights.under("shared_experts."), g),
        quantised_activations=quantised_activations,
        where=f"{weights.checkpoint.directory}: {weights.prefix}experts",
    )


def _load_shared(weights: Weights, geometry: Geometry) -> SharedExpert:
    hidden, inner = geometry.hidden_size, geometry.moe_intermediate_size * geometry.n_shared_experts
    return SharedExpert(
        gate=weights.matrix("gate_proj.weight", inner, hidden),
        up=weights.matrix("up_proj.weight", inner, hidden),
        down=weights.matrix("down_proj.weight", hidden, inner),
    )


@frozen(kw_only=True, eq=False)
class Router(BiasedRouter):
    """Sigmoid scores; bias [E], in the accumulate dtype, takes part in the selection only."""

    score: str = "sigmoid"


@frozen(kw_only=True, eq=False)
class DenseBlock:
    """One MLP for every row. gate_up: [2·I, H], gate rows first; down: [H, I]; both in the activation dtype."""

    gate_up: Tensor
    down: Tensor
    limit: float

    def __call__(self, m: Tensor) -> Tensor:
        """m: [T, H] → [T, H] in the same dtype. Does not change m."""
        gate, up = F.linear(m, self.gate_up).chunk(2, dim=-1)
        return F.linear(clamped_swiglu(gate, up, self.limit), self.down)


def load_dense(weights: Weights, geometry: Geometry) -> DenseBlock:
    """Reads one ``mlp`` block without experts. Raises CheckpointError for a missing or misshapen tensor."""
    inner, hidden = geometry.intermediate_size, geometry.hidden_size
    return DenseBlock(
        gate_up=torch.cat([weights.matrix(f"{part}_proj.weight", inner, hidden) for part in ("gate", "up")]),
        down=weights.matrix("down_proj.weight", hidden, inner),
        limit=geometry.swiglu_limit,
    )
