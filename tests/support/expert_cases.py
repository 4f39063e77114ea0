"""Mixtures of experts for kernels: blocks as plugins build them, and the same in float64 with the router's choice given."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from attrs import evolve, frozen
from torch import Tensor

from specdec.checkpoint import microscaling, mixtures, nvfp4
from specdec.checkpoint.matrices import ExpertProjection, ExpertTensors
from specdec.ops.block_quantisation import fp8_ue8m0
from specdec.ops.moe import BiasedRouter, GatheredMixture, SharedExpert, SoftmaxRouter, clamped_swiglu, swiglu


@frozen(kw_only=True, eq=False)
class ExpertCase:
    """experts E of inner width I and a shared one of width ``side``, top k; storage: plain, nvfp4 or mxfp4. quantise: none, nvfp4
    (W4A4 with an input scale for each expert) or fp8 (every projection, weights multiply what down reads). score: softmax in
    the activation dtype, or a biased router's score in float32."""

    name: str
    storage: str
    quantise: str
    score: str
    experts: int = 12
    hidden: int = 128
    inner: int = 64
    side: int = 64
    top_k: int = 4
    gate: bool = True

    def __str__(self) -> str:
        return self.name

    def _stored(self, generator: torch.Generator, out: int, width: int) -> ExpertProjection:
        weight = torch.randn(self.experts, out, width, generator=generator) / width**0.5
        if self.storage == "plain":
            return ExpertProjection(storage="plain", weight=weight.bfloat16())
        if self.storage == "mxfp4":
            packed, scale = microscaling.quantise_fp4(weight)
            return ExpertProjection(storage="mxfp4", weight=packed.view(torch.uint8), scale=scale)
        packed, scale, scale_2 = nvfp4.quantise(weight)
        inputs = 0.002 + 0.01 * torch.rand(self.experts, generator=generator) if self.quantise == "nvfp4" else None
        return ExpertProjection(storage="nvfp4", weight=packed, scale=scale, scale_2=scale_2, input_scale=inputs)

    def build(
        self,
        monkeypatch: pytest.MonkeyPatch,
        dtype: torch.dtype,
        device: str = "cpu",
        *,
        wide: bool = False,
        seed: int = 0,
    ) -> GatheredMixture:
        """The block on values of ``dtype``; wide: computing in float64 on the same values."""
        monkeypatch.setattr(mixtures, "DENSE_LIMIT_BYTES", 0)
        generator = torch.Generator().manual_seed(seed)
        shapes = {"gate_proj": (self.inner, self.hidden), "up_proj": (self.inner, self.hidden)}
        shapes["down_proj"] = (self.hidden, self.inner)
        projections = {name: self._stored(generator, *shape) for name, shape in shapes.items()}

        def draw(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            drawn = (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(kind)
            return (drawn.double() if wide else drawn).to(device)

        rounding = fp8_ue8m0 if self.quantise == "fp8" else None
        shared = SharedExpert(
            gate=draw(self.side, self.hidden),
            up=draw(self.side, self.hidden),
            down=draw(self.hidden, self.side),
            gate_weight=draw(1, self.hidden) if self.gate else None,
            quantise=rounding,
        )
        softmax = self.score == "softmax"
        precise = dtype if softmax else torch.float32
        bias = draw(self.experts, kind=torch.float32)
        route = (
            SoftmaxRouter(top_k=self.top_k)
            if softmax
            else BiasedRouter(score=self.score, bias=bias, top_k=self.top_k, scale=2.5)
        )
        block = mixtures.build_mixture(
            ExpertTensors(storage=self.storage, projections=projections),
            router=3 * draw(self.experts, self.hidden, kind=precise),
            route=route,
            activation=swiglu if softmax else partial(clamped_swiglu, limit=0.7),
            shared=shared,
            quantised_activations=self.quantise == "nvfp4",
            where="test",
            quantise=rounding,
            weigh_first=rounding is not None,
        )
        assert isinstance(block, GatheredMixture)
        assert block.stored is not None
        return block

    def inputs(self, rows: int, dtype: torch.dtype, device: str = "cpu", seed: int = 1) -> Tensor:
        return torch.randn(rows, self.hidden, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def routed_as(block: GatheredMixture, wide: GatheredMixture, m: Tensor) -> GatheredMixture:
    """``wide`` with the choice that ``block``, as a tensor program, makes for m: near ties are no error of what follows."""
    ids, weights = block.route(torch.nn.functional.linear(m.to(block.router.dtype), block.router))
    return evolve(wide, route=lambda logits: (ids, weights.double()))


#: The three models' blocks at their shipped sizes, sizes that divide nothing, and a router that is a product of its own.
EXPERTS = [
    ExpertCase(name="qwen-target", storage="nvfp4", quantise="nvfp4", score="softmax", experts=16, inner=32, side=32),
    ExpertCase(name="qwen-drafter", storage="nvfp4", quantise="none", score="softmax", experts=16, inner=32, side=32),
    ExpertCase(name="glm-target", storage="nvfp4", quantise="nvfp4", score="sigmoid", gate=False),
    ExpertCase(name="glm-drafter", storage="nvfp4", quantise="none", score="sigmoid", gate=False),
    ExpertCase(name="deepseek", storage="mxfp4", quantise="fp8", score="sqrt_softplus", gate=False),
    ExpertCase(
        name="deepseek-draft", storage="mxfp4", quantise="fp8", score="sqrt_softplus", gate=False, experts=8, top_k=3
    ),
    ExpertCase(
        name="plain-odd", storage="plain", quantise="none", score="softmax", experts=5, hidden=50, inner=21, side=37
    ),
    ExpertCase(
        name="apart", storage="nvfp4", quantise="none", score="sigmoid", experts=300, hidden=192, inner=96, top_k=7
    ),
]
LARGE_EXPERTS = [
    ExpertCase(
        name="qwen-real",
        storage="nvfp4",
        quantise="nvfp4",
        score="softmax",
        experts=64,
        hidden=2560,
        inner=640,
        side=640,
        top_k=10,
    ),
    ExpertCase(
        name="glm-real",
        storage="nvfp4",
        quantise="nvfp4",
        score="sigmoid",
        experts=16,
        hidden=4096,
        inner=2048,
        side=2048,
        top_k=8,
        gate=False,
    ),
]
