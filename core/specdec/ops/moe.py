"""Mixture of experts with a shared expert.

    ids, w = route(m Wrᵀ)                                        k experts a row and their weights
    y = Σ_e w_e · down_e( act(gate_e m, up_e m) )  +  s · shared(m)

The model hands in ``route`` (``route_softmax``, or ``route_biased`` on scores of its choice) and ``act`` (``swiglu``,
``clamped_swiglu``). The shared expert's factor s is sigmoid(m w_sᵀ) where it has a gate and 1 where it has none.

Two forms of the same sum, chosen once at preparation and used at every width:

* *dense*: every expert is evaluated and unselected ones get weight zero. Two matrix products; best while all experts
  together are small (a small checkpoint on a CPU).
* *gathered*: the selected experts' weights are gathered per row and, if stored packed, dequantised after the gather. On a CUDA
  device two kernels do all of it without a copy of any weight (``specdec.ops.cuda.moe``).

Activation quantisation (W4A4) is a property of the expert weights handed in: ``quantise`` maps a projection's input to its
quantised-dequantised value, or is None (W4A16, plain weights). Down projections are linear, so w_e may multiply their result or
what they read; the two differ in rounding only, and ``weigh_first`` is the latter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from specdec.ops.block_quantisation import fp8_ue8m0
from specdec.ops.norms import accumulate_dtype
from specdec.ops.select import uses_cuda

Fetch = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
Quantise = Callable[[Tensor, Tensor], Tensor]
# logits [T, E] → ids [T, k] int64, weights [T, k] in the accumulate dtype
Route = Callable[[Tensor], tuple[Tensor, Tensor]]
# gate and up of one shape → what down reads
Activation = Callable[[Tensor, Tensor], Tensor]

# Of ``BiasedRouter``: non-negative scores of the logits. Above 40 a softplus equals its argument in float64; torch's default of
# 20 leaves 2e-9.
_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "sqrt_softplus": lambda logits: torch.sqrt(F.softplus(logits, threshold=40.0)),
}
# Keeps the weights of a row finite when all its selected scores underflow; the constant of the reference classes.
_SMALLEST_SUM = 1e-20


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) ∘ up, any shape. Source: Shazeer, "GLU Variants Improve Transformer" (arXiv:2002.05202)."""
    return F.silu(gate) * up


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) ∘ clamp(up, ±limit), any shape: the gate is bounded from above only, before the silu."""
    return F.silu(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit)


def activation_limit(activation: Activation) -> float | None:
    """Bound of a ``clamped_swiglu`` (a ``partial`` with ``limit``), infinity for ``swiglu``, None for any other function."""
    if activation is swiglu:
        return float("inf")
    if isinstance(activation, partial) and activation.func is clamped_swiglu and set(activation.keywords) == {"limit"}:
        return float(activation.keywords["limit"])
    return None


def route_softmax(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Expert ids and weights of every row: the largest probabilities, renormalised.

    logits: [T, E]. Returns ids [T, k] int64 and weights [T, k] in the accumulate dtype, summing to one. Ties take the lower id:
    the sort is stable.
    """
    probs = torch.softmax(logits.to(accumulate_dtype(logits.dtype)), dim=-1)
    ordered, ids = torch.sort(probs, dim=-1, descending=True, stable=True)
    chosen = ordered[:, :top_k]
    return ids[:, :top_k], chosen / chosen.sum(-1, keepdim=True)


def route_biased(scores: Tensor, bias: Tensor, *, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Expert ids and weights of every row where a bias takes part in the selection only.

    scores: [T, E], not negative, in the accumulate dtype; bias: [E] in the same. Returns the ids [T, k] int64 of the largest
    score + bias, lower id first on ties, and the weights scale · score / Σ selected scores [T, k].
    Source: DeepSeek-V3 technical report (arXiv:2412.19437), section 2.1.2.
    """
    ids = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = scores.gather(1, ids)
    return ids, chosen / (chosen.sum(-1, keepdim=True) + _SMALLEST_SUM) * scale


@frozen(kw_only=True, eq=False)
class SoftmaxRouter:
    """``route_softmax`` as a value: logits [T, E] → ids [T, k] int64 and weights [T, k]."""

    top_k: int

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return route_softmax(logits, self.top_k)


@frozen(kw_only=True, eq=False)
class BiasedRouter:
    """``route_biased`` on scores of the logits. score: ``sigmoid`` or ``sqrt_softplus``; bias: [E] in the accumulate dtype."""

    score: str
    bias: Tensor
    top_k: int
    scale: float

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits: [T, E] in the accumulate dtype → ids [T, k] int64 and weights [T, k]; ties take the lower id."""
        return route_biased(_SCORES[self.score](logits), self.bias, top_k=self.top_k, scale=self.scale)


class StoredProjection(Protocol):
    """One projection of all experts as ``specdec.checkpoint.matrices.ExpertProjection`` keeps it."""

    @property
    def weight(self) -> Tensor: ...
    @property
    def scale(self) -> Tensor | None: ...
    @property
    def scale_2(self) -> Tensor | None: ...
    @property
    def shape(self) -> tuple[int, int, int]: ...


@frozen(kw_only=True, eq=False)
class StoredExperts:
    """The routed experts as they are stored, for kernels that decode on the way.

    format: ``plain``, ``nvfp4`` or ``mxfp4``. quantise: what the projections read is ``none`` (as it is), ``nvfp4`` under
    input_scale (gate and up) and inner_scale (down), float32 [E], or ``fp8_ue8m0``.
    """

    format: str
    gate: StoredProjection
    up: StoredProjection
    down: StoredProjection
    quantise: str = "none"
    input_scale: Tensor | None = None
    inner_scale: Tensor | None = None


@frozen(kw_only=True, eq=False)
class SharedExpert:
    """The expert every row visits. gate, up: [Is, H]; down: [H, Is]; gate_weight: [1, H], or None for a factor of one; all in
    the activation dtype. quantise: acts on what gate, up and down read, or is None."""

    gate: Tensor
    up: Tensor
    down: Tensor
    gate_weight: Tensor | None = None
    quantise: Callable[[Tensor], Tensor] | None = None

    def read(self, x: Tensor) -> Tensor:
        """What a projection reads of x."""
        return x if self.quantise is None else self.quantise(x)


def has_kernel(route: Route, activation: Activation, router: Tensor, shared: SharedExpert) -> bool:
    """Whether kernels know everything about a block but its experts. Host side, reads no values."""
    return (
        isinstance(route, SoftmaxRouter | BiasedRouter)
        and activation_limit(activation) is not None
        and shared.quantise in (None, fp8_ue8m0)
        and router.is_contiguous()
        and all(weight.stride(-1) == 1 for weight in (shared.gate, shared.up, shared.down))
    )


@frozen(kw_only=True, eq=False)
class DenseMixture:
    """All experts, the shared one included, as two matrices.

    router: [E, H], or [E + 1, H] with the shared expert's gate as its last row; its product is computed in its own dtype;
    gate_up: [2·(E·I + Is), H], rows gates, ups of the routed experts, then gates, ups of the shared one; down: [H, E·I + Is].
    quantise_input: [T, H] → [T, H] and quantise_inner: [T, E, I] → [T, E, I] act on what the routed experts read (W4A4), or
    are None. weigh_first: weigh before ``quantise_inner``, not after. Build with ``from_experts`` at preparation.
    """

    router: Tensor
    gate_up: Tensor
    down: Tensor
    num_experts: int
    width: int
    route: Route
    activation: Activation
    quantise_input: Callable[[Tensor], Tensor] | None = None
    quantise_inner: Callable[[Tensor], Tensor] | None = None
    quantise_shared: Callable[[Tensor], Tensor] | None = None
    weigh_first: bool = False

    @classmethod
    def from_experts(
        cls,
        *,
        router: Tensor,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        shared: SharedExpert,
        route: Route,
        activation: Activation,
        quantise_input: Callable[[Tensor], Tensor] | None = None,
        quantise_inner: Callable[[Tensor], Tensor] | None = None,
        weigh_first: bool = False,
    ) -> DenseMixture:
        """router: [E, H]; gate, up: [E, I, H]; down: [E, H, I]. Allocates the merged matrices."""
        experts, width, hidden = gate.shape
        if shared.gate_weight is not None:
            router = torch.cat([router, shared.gate_weight.to(router.dtype)], dim=0)
        return cls(
            router=router,
            gate_up=torch.cat([gate.reshape(-1, hidden), up.reshape(-1, hidden), shared.gate, shared.up], dim=0),
            down=torch.cat([down.permute(1, 0, 2).reshape(hidden, -1), shared.down], dim=1).contiguous(),
            num_experts=experts,
            width=width,
            route=route,
            activation=activation,
            quantise_input=quantise_input,
            quantise_inner=quantise_inner,
            quantise_shared=shared.quantise,
            weigh_first=weigh_first,
        )

    def __call__(self, m: Tensor) -> Tensor:
        """m: [T, H] → [T, H] in the same dtype. Does not change m."""
        experts, routed = self.num_experts, self.num_experts * self.width
        logits = F.linear(m.to(self.router.dtype), self.router)
        ids, weights = self.route(logits[:, :experts])
        table = torch.zeros_like(logits[:, :experts], dtype=weights.dtype).scatter(1, ids, weights)
        table = table.to(m.dtype).unsqueeze(-1)
        if self.quantise_input is self.quantise_shared:
            hidden = F.linear(m if self.quantise_input is None else self.quantise_input(m), self.gate_up)
            read, side = hidden[:, : 2 * routed], hidden[:, 2 * routed :]
        else:
            read = F.linear(m if self.quantise_input is None else self.quantise_input(m), self.gate_up[: 2 * routed])
            side = F.linear(m if self.quantise_shared is None else self.quantise_shared(m), self.gate_up[2 * routed :])
        inner = self.activation(read[:, :routed], read[:, routed:]).view(-1, experts, self.width)
        if self.weigh_first:
            inner = inner * table
        if self.quantise_inner is not None:
            inner = self.quantise_inner(inner)
        if not self.weigh_first:
            inner = inner * table
        gate, up = side.chunk(2, dim=-1)
        shared = self.activation(gate, up)
        if self.quantise_shared is not None:
            shared = self.quantise_shared(shared)
        if logits.shape[1] > experts:
            shared = shared * torch.sigmoid(logits[:, experts:]).to(m.dtype)
        weighted = torch.cat([inner.flatten(1), shared], dim=-1)
        return F.linear(weighted, self.down)


@frozen(kw_only=True, eq=False)
class GatheredMixture:
    """Selected experts only.

    router: [E, H], its product is computed in its own dtype; fetch(ids [n] int64) → gate [n, I, H], up [n, I, H],
    down [n, H, I] in the accumulate dtype; quantise_input / quantise_inner: (activation [n, ·], ids [n]) → activation, or None;
    weigh_first: weigh what the down projections read, before ``quantise_inner``. stored: the experts that ``fetch`` reads and how
    their inputs are quantised, if kernels know all of it; None otherwise.
    """

    router: Tensor
    fetch: Fetch
    shared: SharedExpert
    route: Route
    activation: Activation
    quantise_input: Quantise | None = None
    quantise_inner: Quantise | None = None
    weigh_first: bool = False
    stored: StoredExperts | None = None

    def __call__(self, m: Tensor) -> Tensor:
        """m: [T, H] → [T, H] in the same dtype. Does not change m; experts accumulate in float32 or wider."""
        if self.stored is not None and uses_cuda("mixture", m, self.router, self.shared.gate):
            from specdec.ops.cuda.moe import mixture

            return mixture(self, m)
        rows, hidden = m.shape
        ids, weights = self.route(F.linear(m.to(self.router.dtype), self.router))
        flat, top_k = ids.reshape(-1), ids.shape[1]
        gate, up, down = self.fetch(flat)
        precise = accumulate_dtype(m.dtype)
        x = m.to(precise).unsqueeze(1).expand(rows, top_k, hidden).reshape(-1, hidden)
        if self.quantise_input is not None:
            x = self.quantise_input(x, flat)
        x = x.unsqueeze(-1)
        inner = self.activation(torch.bmm(gate, x), torch.bmm(up, x)).squeeze(-1)
        if self.weigh_first:
            inner = inner * weights.view(-1, 1)
        if self.quantise_inner is not None:
            inner = self.quantise_inner(inner, flat)
        routed = torch.bmm(down, inner.unsqueeze(-1)).view(rows, top_k, hidden)
        if not self.weigh_first:
            routed = routed * weights.unsqueeze(-1)
        routed = routed.sum(1).to(m.dtype)
        shared = self.shared
        x = shared.read(m)
        side = F.linear(shared.read(self.activation(F.linear(x, shared.gate), F.linear(x, shared.up))), shared.down)
        if shared.gate_weight is not None:
            side = torch.sigmoid(F.linear(m, shared.gate_weight)) * side
        return routed + side


Mixture = DenseMixture | GatheredMixture
