"""Mixture of experts with a softmax router, renormalised top-k weights and a gated shared expert.

    p = softmax(m Wrᵀ);  top-k of p, lower expert id first on ties;  w = p_top / Σ p_top
    y = Σ_e w_e · down_e( silu(gate_e m) ∘ up_e m )  +  sigmoid(m w_sᵀ) · shared(m)

Two forms of the same sum, chosen once at preparation and used at every width:

* *dense*: every expert is evaluated and unselected ones get weight zero. Two matrix products; best while all experts
  together are small (a small checkpoint on a CPU).
* *gathered*: the selected experts' weights are gathered per row and, if stored packed, dequantised after the gather.

Activation quantisation (W4A4) is a property of the expert weights handed in: ``quantise`` maps a projection's input to its
quantised-dequantised value, or is None (W4A16, plain weights).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from specdec.ops.norms import accumulate_dtype

# Below this many weight bytes in the activation dtype every expert is evaluated: two products over a few MiB cost less than
# gathering weights per row. Chosen by size so that the form never depends on the number of rows.
DENSE_LIMIT_BYTES = 8 << 20

Fetch = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
Quantise = Callable[[Tensor, Tensor], Tensor]


def route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Expert ids and weights of every row.

    logits: [T, E]. Returns ids [T, k] int64 and weights [T, k] in the accumulate dtype, summing to one. Ties take the lower id:
    the sort is stable.
    """
    probs = torch.softmax(logits.to(accumulate_dtype(logits.dtype)), dim=-1)
    ordered, ids = torch.sort(probs, dim=-1, descending=True, stable=True)
    chosen = ordered[:, :top_k]
    return ids[:, :top_k], chosen / chosen.sum(-1, keepdim=True)


@frozen(kw_only=True, eq=False)
class SharedExpert:
    """The expert every row visits. gate, up: [Is, H]; down: [H, Is]; gate_weight: [1, H]; all in the activation dtype."""

    gate: Tensor
    up: Tensor
    down: Tensor
    gate_weight: Tensor


@frozen(kw_only=True, eq=False)
class DenseMixture:
    """All experts, the shared one included, as two matrices.

    router: [E + 1, H], the shared expert's gate is its last row; gate_up: [2·(E·I + Is), H], rows gates, ups of the routed
    experts, then gates, ups of the shared one; down: [H, E·I + Is]. quantise_input: [T, H] → [T, H] and quantise_inner:
    [T, E, I] → [T, E, I] act on what the routed experts read (W4A4), or are None. Build with ``from_experts`` at preparation.
    """

    router: Tensor
    gate_up: Tensor
    down: Tensor
    num_experts: int
    width: int
    top_k: int
    quantise_input: Callable[[Tensor], Tensor] | None = None
    quantise_inner: Callable[[Tensor], Tensor] | None = None

    @classmethod
    def from_experts(
        cls,
        *,
        router: Tensor,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        shared: SharedExpert,
        top_k: int,
        quantise_input: Callable[[Tensor], Tensor] | None = None,
        quantise_inner: Callable[[Tensor], Tensor] | None = None,
    ) -> DenseMixture:
        """router: [E, H]; gate, up: [E, I, H]; down: [E, H, I]. Allocates the merged matrices."""
        experts, width, hidden = gate.shape
        return cls(
            router=torch.cat([router, shared.gate_weight], dim=0),
            gate_up=torch.cat([gate.reshape(-1, hidden), up.reshape(-1, hidden), shared.gate, shared.up], dim=0),
            down=torch.cat([down.permute(1, 0, 2).reshape(hidden, -1), shared.down], dim=1).contiguous(),
            num_experts=experts,
            width=width,
            top_k=top_k,
            quantise_input=quantise_input,
            quantise_inner=quantise_inner,
        )

    def __call__(self, m: Tensor) -> Tensor:
        """m: [T, H] → [T, H] in the same dtype. Does not change m."""
        experts, routed = self.num_experts, self.num_experts * self.width
        scores = F.linear(m, self.router)
        ids, weights = route(scores[:, :experts], self.top_k)
        table = torch.zeros_like(scores[:, :experts], dtype=weights.dtype).scatter(1, ids, weights)
        table = table.to(m.dtype).unsqueeze(-1)
        opened = torch.sigmoid(scores[:, experts:])
        if self.quantise_input is None:
            hidden = F.linear(m, self.gate_up)
            read, side = hidden[:, : 2 * routed], hidden[:, 2 * routed :]
        else:
            read = F.linear(self.quantise_input(m), self.gate_up[: 2 * routed])
            side = F.linear(m, self.gate_up[2 * routed :])
        inner = (F.silu(read[:, :routed]) * read[:, routed:]).view(-1, experts, self.width)
        if self.quantise_inner is not None:
            inner = self.quantise_inner(inner)
        gate, up = side.chunk(2, dim=-1)
        weighted = torch.cat([(inner * table).flatten(1), F.silu(gate) * up * opened], dim=-1)
        return F.linear(weighted, self.down)


@frozen(kw_only=True, eq=False)
class GatheredMixture:
    """Selected experts only.

    router: [E, H]; fetch(ids [n] int64) → gate [n, I, H], up [n, I, H], down [n, H, I] in the accumulate dtype;
    quantise_input / quantise_inner: (activation [n, ·], ids [n]) → activation, or None.
    """

    router: Tensor
    fetch: Fetch
    shared: SharedExpert
    top_k: int
    quantise_input: Quantise | None = None
    quantise_inner: Quantise | None = None

    def __call__(self, m: Tensor) -> Tensor:
        """m: [T, H] → [T, H] in the same dtype. Does not change m; experts accumulate in float32 or wider."""
        rows, hidden = m.shape
        ids, weights = route(F.linear(m, self.router), self.top_k)
        flat = ids.reshape(-1)
        gate, up, down = self.fetch(flat)
        precise = accumulate_dtype(m.dtype)
        x = m.to(precise).unsqueeze(1).expand(rows, self.top_k, hidden).reshape(-1, hidden)
        if self.quantise_input is not None:
            x = self.quantise_input(x, flat)
        x = x.unsqueeze(-1)
        inner = (F.silu(torch.bmm(gate, x)) * torch.bmm(up, x)).squeeze(-1)
        if self.quantise_inner is not None:
            inner = self.quantise_inner(inner, flat)
        routed = torch.bmm(down, inner.unsqueeze(-1)).view(rows, self.top_k, hidden)
        routed = (routed * weights.unsqueeze(-1)).sum(1).to(m.dtype)
        side = F.linear(F.silu(F.linear(m, self.shared.gate)) * F.linear(m, self.shared.up), self.shared.down)
        return routed + torch.sigmoid(F.linear(m, self.shared.gate_weight)) * side
