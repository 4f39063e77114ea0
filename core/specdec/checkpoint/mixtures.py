"""Expert blocks from stored experts: chooses the form of ``specdec.ops.moe`` from sizes and storage.

Experts whose projections have an ``input_scale`` may quantise activations too (W4A4); without it they never do (W4A16).
Experts of a drafter are W4A16 even where scales are stored: running them through the target's path is a bug, so the
caller says which it is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import evolve, frozen
from torch import Tensor

from specdec.checkpoint.matrices import PROJECTIONS, ExpertProjection, ExpertTensors, decode_experts
from specdec.checkpoint.nvfp4 import quantise_activation
from specdec.errors import CheckpointError
from specdec.held import DENSE_LIMIT_BYTES
from specdec.ops.block_quantisation import fp8_ue8m0
from specdec.ops.moe import (
    Activation,
    DenseMixture,
    GatheredMixture,
    Mixture,
    Route,
    SharedExpert,
    StoredExperts,
    has_kernel,
)
from specdec.ops.norms import accumulate_dtype
from specdec.ops.select import uses_cuda


def build_mixture(
    experts: ExpertTensors,
    *,
    router: Tensor,
    route: Route,
    activation: Activation,
    shared: SharedExpert,
    quantised_activations: bool,
    where: str,
    quantise: Callable[[Tensor], Tensor] | None = None,
    weigh_first: bool = False,
) -> Mixture:
    """The block of one layer. Preparation only: reads values and allocates.

    router: [E, H]; shared: its weights have the dtype and device that the block computes in. quantised_activations: whether
    stored input scales are honoured; gate and up, which read the same input, then use the larger of theirs. where: checkpoint
    and prefix of the experts, for the error. quantise: acts on what the routed experts' projections read where no input scale is
    stored. weigh_first: see ``specdec.ops.moe``. Every rank of a sharded block would hand in its slice of the inner width.
    Raises CheckpointError if scales are to be honoured and only some projections have them.
    """
    dtype, device = shared.gate.dtype, shared.gate.device
    scaled = [name for name in PROJECTIONS if experts[name].input_scale is not None]
    if quantised_activations and scaled and len(scaled) < len(PROJECTIONS):
        raise CheckpointError(
            f"{where}: only {', '.join(scaled)} have an input_scale; W4A4 experts need one for each projection"
        )
    quantised_activations = quantised_activations and bool(scaled)
    count, hidden, inner = experts["down_proj"].shape
    size = 3 * count * hidden * inner * dtype.itemsize
    scales = _common_scales(experts, device) if quantised_activations else None
    # packed weights in half precision: the per-matrix scale belongs after the float32 product, which the gathered form keeps
    rounded = experts.storage == "nvfp4" and dtype.itemsize < 4
    # kernels read the experts as they are stored, whatever their size
    known = has_kernel(route, activation, router, shared) and quantise in (None, fp8_ue8m0)
    fits = size <= DENSE_LIMIT_BYTES and not (known and uses_cuda("mixture", shared.gate))
    if fits and not rounded and (scales is not None or not quantised_activations):
        dense = {name: tensor.to(device) for name, tensor in experts.dense(dtype).items()}
        return DenseMixture.from_experts(
            router=router,
            gate=dense["gate_proj"],
            up=dense["up_proj"],
            down=dense["down_proj"],
            shared=shared,
            route=route,
            activation=activation,
            quantise_input=quantise if scales is None else _quantiser(scales[0]),
            quantise_inner=quantise if scales is None else _quantiser(scales[1]),
            weigh_first=weigh_first,
        )
    precise = accumulate_dtype(dtype)
    gate, up, down = (_GatheredProjection.load(experts[name], precise, device) for name in PROJECTIONS)
    quantise_input = quantise_inner = None if quantise is None else (lambda activation, ids: quantise(activation))
    common = None
    if quantised_activations:
        # projections that share an input use the larger of their scales, as fused loaders do
        common = _largest_scale([gate.stored, up.stored]), _largest_scale([down.stored])
        quantise_input, quantise_inner = map(_input_quantiser, common)
    return GatheredMixture(
        router=router,
        fetch=lambda ids: (gate(ids), up(ids), down(ids)),
        shared=shared,
        route=route,
        activation=activation,
        quantise_input=quantise_input,
        quantise_inner=quantise_inner,
        weigh_first=weigh_first,
        stored=_stored(gate, up, down, common, quantise is not None) if known else None,
    )


def _stored(
    gate: _GatheredProjection,
    up: _GatheredProjection,
    down: _GatheredProjection,
    scales: tuple[Tensor, Tensor] | None,
    rounded: bool,
) -> StoredExperts:
    """The experts as kernels read them. scales: those under which inputs are quantised; rounded: under powers of two."""
    scale = (None, None) if scales is None else scales
    return StoredExperts(
        format=gate.stored.storage,
        gate=gate.stored,
        up=up.stored,
        down=down.stored,
        quantise="nvfp4" if scales is not None else "fp8_ue8m0" if rounded else "none",
        input_scale=scale[0],
        inner_scale=scale[1],
    )


@frozen(kw_only=True, eq=False)
class _GatheredProjection:
    """One projection of all experts in its storage format; calling it gathers and dequantises the named experts."""

    stored: ExpertProjection
    precise: torch.dtype

    @classmethod
    def load(cls, projection: ExpertProjection, precise: torch.dtype, device: torch.device) -> _GatheredProjection:
        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        stored = evolve(
            projection,
            weight=projection.weight.to(device),
            scale=moved(projection.scale),
            scale_2=moved(projection.scale_2),
            input_scale=moved(projection.input_scale),
        )
        return cls(stored=stored, precise=precise)

    def __call__(self, ids: Tensor) -> Tensor:
        """ids: [n] int64 → [n, out, in] in the accumulate dtype."""
        weight = self.stored.weight.index_select(0, ids)
        scale, scale_2 = self.stored.scale, self.stored.scale_2
        if scale is not None:
            # float8 has no index kernel everywhere: gather the bytes
            scale = scale.view(torch.uint8).index_select(0, ids).view(scale.dtype)
        scale_2 = None if scale_2 is None else scale_2.index_select(0, ids)
        return decode_experts(weight, scale, scale_2).to(self.precise)


def _common_scales(experts: ExpertTensors, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Input scales of (gate and up, down) if every expert of the layer has the same, else None. Set-up: reads values."""
    found = []
    for names in (("gate_proj", "up_proj"), ("down_proj",)):
        scale = _largest_scale([experts[name] for name in names])
        if not bool((scale == scale[0]).all()):
            return None
        found.append(scale[0].clone().to(device))
    return found[0], found[1]


def _largest_scale(projections: list[ExpertProjection]) -> Tensor:
    """Input scale [E] of projections that read the same input."""
    return torch.stack([p.input_scale for p in projections if p.input_scale is not None]).amax(0)


def _quantiser(scale: Tensor) -> Callable[[Tensor], Tensor]:
    def quantise(activation: Tensor) -> Tensor:
        return quantise_activation(activation, scale).to(activation.dtype)

    return quantise


def _input_quantiser(scales: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Quantises a projection's input under the scale [E] of its expert."""

    def quantise(activation: Tensor, ids: Tensor) -> Tensor:
        return quantise_activation(activation, scales.index_select(0, ids)).to(activation.dtype)

    return quantise
