"""The expert block of a decoder layer: chooses the form of ``specdec.ops.moe`` from sizes and storage.

Target experts whose configuration says NVFP4 quantise activations too (W4A4); W4A16 experts never do. The drafter's are
always W4A16: running them through the target's path is a bug, so the caller says which it is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import evolve, frozen
from torch import Tensor

from specdec.checkpoint.matrices import PROJECTIONS, ExpertProjection, ExpertTensors
from specdec.checkpoint.nvfp4 import dequantise, quantise_activation
from specdec.errors import CheckpointError
from specdec.ops.moe import DENSE_LIMIT_BYTES, DenseMixture, GatheredMixture, SharedExpert

from .weights import Weights

Mixture = DenseMixture | GatheredMixture


def load_mixture(weights: Weights, *, quantised_activations: bool) -> Mixture:
    """Reads one ``mlp`` block. quantised_activations: whether stored ``input_scale`` values are honoured (W4A4)."""
    g = weights.geometry
    shared = load_shared(weights)
    router = weights.matrix("gate.weight", g.num_experts, g.hidden_size)
    experts = weights.experts("experts")
    scaled = [name for name in PROJECTIONS if experts[name].input_scale is not None]
    if scaled and len(scaled) < len(PROJECTIONS):
        raise CheckpointError(
            f"{weights.checkpoint.directory}: {weights.prefix}experts: only {', '.join(scaled)} have an input_scale; W4A4 "
            "experts need one for each projection"
        )
    quantised_activations = quantised_activations and bool(scaled)
    size = 3 * g.num_experts * g.moe_intermediate_size * g.hidden_size * weights.dtype.itemsize
    scales = _common_scales(experts, weights) if quantised_activations else None
    # packed weights in half precision: the per-matrix scale belongs after the float32 product, which the gathered form keeps
    rounded = experts.storage == "nvfp4" and weights.dtype.itemsize < 4
    if size <= DENSE_LIMIT_BYTES and not rounded and (scales is not None or not quantised_activations):
        dense = {name: tensor.to(weights.device) for name, tensor in experts.dense(weights.dtype).items()}
        return DenseMixture.from_experts(
            router=router,
            gate=dense["gate_proj"],
            up=dense["up_proj"],
            down=dense["down_proj"],
            shared=shared,
            top_k=g.num_experts_per_tok,
            quantise_input=None if scales is None else _quantiser(scales[0]),
            quantise_inner=None if scales is None else _quantiser(scales[1]),
        )
    gate, up, down = (_GatheredProjection.load(experts[name], weights) for name in PROJECTIONS)
    quantise_input = quantise_inner = None
    if quantised_activations:
        quantise_input, quantise_inner = _input_quantiser(gate, up), _input_quantiser(down)
    return GatheredMixture(
        router=router,
        fetch=lambda ids: (gate(ids), up(ids), down(ids)),
        shared=shared,
        top_k=g.num_experts_per_tok,
        quantise_input=quantise_input,
        quantise_inner=quantise_inner,
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


@frozen(kw_only=True, eq=False)
class _GatheredProjection:
    """One projection of all experts in its storage format; calling it gathers and dequantises the named experts."""

    stored: ExpertProjection
    precise: torch.dtype

    @classmethod
    def load(cls, projection: ExpertProjection, weights: Weights) -> _GatheredProjection:
        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(weights.device)

        stored = evolve(
            projection,
            weight=projection.weight.to(weights.device),
            scale=moved(projection.scale),
            scale_2=moved(projection.scale_2),
            input_scale=moved(projection.input_scale),
        )
        return cls(stored=stored, precise=weights.precise)

    def __call__(self, ids: Tensor) -> Tensor:
        """ids: [n] int64 → [n, out, in] in the accumulate dtype."""
        weight = self.stored.weight.index_select(0, ids)
        scale, scale_2 = self.stored.scale, self.stored.scale_2
        if scale is None or scale_2 is None:
            return weight.to(self.precise)
        # float8 has no index kernel everywhere: gather the bytes
        scale = scale.view(torch.uint8).index_select(0, ids).view(torch.float8_e4m3fn)
        return dequantise(weight, scale, scale_2.index_select(0, ids)).to(self.precise)


def _common_scales(experts: ExpertTensors, weights: Weights) -> tuple[Tensor, Tensor] | None:
    """Input scales of (gate and up, down) if every expert of the layer has the same, else None. Set-up: reads values."""
    found = []
    for names in (("gate_proj", "up_proj"), ("down_proj",)):
        scale = _largest_scale([experts[name] for name in names])
        if not bool((scale == scale[0]).all()):
            return None
        found.append(scale[0].to(weights.device))
    return found[0], found[1]


def _largest_scale(projections: list[ExpertProjection]) -> Tensor:
    """Input scale [E] of projections that read the same input."""
    return torch.stack([p.input_scale for p in projections if p.input_scale is not None]).amax(0)


def _quantiser(scale: Tensor) -> Callable[[Tensor], Tensor]:
    def quantise(activation: Tensor) -> Tensor:
        return quantise_activation(activation, scale).to(activation.dtype)

    return quantise


def _input_quantiser(*projections: _GatheredProjection) -> Callable[[Tensor, Tensor], Tensor]:
    """Quantises a projection's input; projections that share an input use the larger of their scales, as fused loaders do."""
    scales = _largest_scale([projection.stored for projection in projections])

    def quantise(activation: Tensor, ids: Tensor) -> Tensor:
        return quantise_activation(activation, scales.index_select(0, ids)).to(activation.dtype)

    return quantise
