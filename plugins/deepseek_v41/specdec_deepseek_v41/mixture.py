"""Feed-forward blocks of DeepSeek-V4.1: a mixture of experts with one shared expert, in every layer and every draft stage.

    s = √(ln(1 + exp(m Wrᵀ))) in float32;  experts of the largest s + bias;  w = scale · s / Σ s of the selected ones
    y = Σ_e W2_e (w_e · act(W1_e m, W3_e m)) + shared(m)              the shared expert has no factor

Experts are assumed local and whole: a shard would hold a slice of every inner width and add the parts of y afterwards; the
router is the same for every shard. Source: official inference code of the release.
"""

from __future__ import annotations

from functools import partial

from attrs import frozen

from specdec.checkpoint.mixtures import build_mixture
from specdec.checkpoint.weights import Weights
from specdec.ops.block_quantisation import fp8_ue8m0
from specdec.ops.moe import BiasedRouter, Mixture, SharedExpert, clamped_swiglu

from .geometry import Geometry
from .linear import quantised


def load_mixture(weights: Weights, geometry: Geometry, *, experts: int, top_k: int) -> Mixture:
    """Reads one ``ffn`` block. experts, top_k: of the target's layers or of the draft stages.

    Raises CheckpointError for a missing or misshapen tensor.
    """
    g = geometry
    return build_mixture(
        weights.experts("experts", count=experts, hidden=g.hidden_size, inner=g.moe_intermediate_size),
        # scores are float32 or wider whatever the activations are
        router=weights.precise_vector("gate.weight", experts, g.hidden_size),
        route=Router(bias=weights.precise_vector("gate.bias", experts), top_k=top_k, scale=g.routed_scaling_factor),
        activation=partial(clamped_swiglu, limit=g.swiglu_limit),
        shared=_load_shared(weights.under("shared_experts."), g),
        quantised_activations=False,
        quantise=fp8_ue8m0 if quantised(weights, "experts.0.w1.weight") else None,
        weigh_first=True,
        where=f"{weights.checkpoint.directory}: {weights.prefix}experts",
    )


def _load_shared(weights: Weights, geometry: Geometry) -> SharedExpert:
    hidden, inner = geometry.hidden_size, geometry.moe_intermediate_size * geometry.n_shared_experts
    return SharedExpert(
        gate=weights.matrix("w1.weight", inner, hidden),
        up=weights.matrix("w3.weight", inner, hidden),
        down=weights.matrix("w2.weight", hidden, inner),
        quantise=fp8_ue8m0 if quantised(weights, "w1.weight") else None,
    )


@frozen(kw_only=True, eq=False)
class Router(BiasedRouter):
    """Scores √softplus; bias [E], in the accumulate dtype, takes part in the selection only."""

    score: str = "sqrt_softplus"
