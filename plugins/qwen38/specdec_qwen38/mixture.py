"""The expert block of a decoder layer: a softmax router, SwiGLU experts and a gated shared expert.

Target experts whose configuration says NVFP4 quantise activations too (W4A4); the drafter's are always W4A16.
"""

from __future__ import annotations

from specdec.checkpoint.mixtures import build_mixture
from specdec.ops.moe import Mixture, SharedExpert, SoftmaxRouter, swiglu

from .weights import Weights


def load_mixture(weights: Weights, *, quantised_activations: bool) -> Mixture:
    """Reads one ``mlp`` block. quantised_activations: whether stored ``input_scale`` values are honoured (W4A4)."""
    g = weights.geometry
    return build_mixture(
        weights.experts("experts", count=g.num_experts, hidden=g.hidden_size, inner=g.moe_intermediate_size),
        router=weights.matrix("gate.weight", g.num_experts, g.hidden_size),
        route=SoftmaxRouter(top_k=g.num_experts_per_tok),
        activation=swiglu,
        shared=load_shared(weights),
        quantised_activations=quantised_activations,
        where=f"{weights.checkpoint.directory}: {weights.prefix}experts",
    )


def load_shared(weights: Weights) -> SharedExpert:
    """The shared expert and its gate."""
    g = weights.geometry
    inner = g.shared_expert_intermediate_size
    return SharedExpert(
        gate=weights.matrix("shared_expert.gate_proj.weight", inner, g.hidden_size),
        up=weights.matrix("shared_expert.up_proj.weight", inner, g.hidden_size),
        down=weights.matrix("shared_expert.down_proj.weight", g.hidden_size, inner),
        gate_weight=weights.matrix("shared_expert_gate.weight", 1, g.hidden_size),
    )
