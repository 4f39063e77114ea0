"""Mixture of experts in two kernels: the experts are read as they are stored, and only those that a row selected.

``_open`` has a program for each row, each of its experts and each block of the inner width: it routes the row, quantises what
the expert reads if the layer does so, and leaves what the down projection reads, weighted. ``_close`` has a program for each row
and block of outputs and adds all experts in order. Nothing is decoded into memory. A row's result depends on that row alone, so
it is the same at every width and batch.

A router too large to be evaluated again by every program is a matrix product and a kernel of its own before these two.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from specdec.ops.cuda.block_formats import (
    MXFP4,
    NVFP4,
    PLAIN,
    QUANTISE_FP8,
    QUANTISE_NONE,
    QUANTISE_NVFP4,
    quantise_pairs,
    quantise_row,
    weight_pairs,
)
from specdec.ops.moe import BiasedRouter, GatheredMixture, SoftmaxRouter, StoredExperts, activation_limit

# Every program of ``_open`` evaluates a router of up to this many weights again: less than reading its share of an expert.
FUSED_ROUTER = 1 << 15
_FORMATS = {"plain": PLAIN, "nvfp4": NVFP4, "mxfp4": MXFP4}
_MODES = {"none": QUANTISE_NONE, "nvfp4": QUANTISE_NVFP4, "fp8_ue8m0": QUANTISE_FP8}
_BLOCKS = {QUANTISE_NONE: 16, QUANTISE_NVFP4: 16, QUANTISE_FP8: 32}
_NONE = tl.constexpr(QUANTISE_NONE)
_SCALED = tl.constexpr(QUANTISE_NVFP4)
_OUTER = tl.constexpr(NVFP4)
_SOFTMAX, _SIGMOID, _SQRT_SOFTPLUS = 0, 1, 2
_SOFT = tl.constexpr(_SOFTMAX)
_SIG = tl.constexpr(_SIGMOID)
_SMALLEST_SUM = tl.constexpr(1e-20)


def mixture(block: GatheredMixture, m: Tensor) -> Tensor:
    """See ``GatheredMixture.__call__``. m: [T, H], CUDA; ``block.stored`` is given."""
    experts, shared = block.stored, block.shared
    assert experts is not None
    m = m if m.stride(-1) == 1 else m.contiguous()
    rows, hidden = m.shape
    router = _router(block)
    count, width = experts.gate.shape[0], experts.gate.shape[1]
    side = shared.gate.shape[0]
    fused = block.router.shape[0] * hidden <= FUSED_ROUTER
    top_k = router.top_k
    shares = torch.empty(rows, top_k, dtype=torch.float32, device=m.device)
    ids = torch.empty(rows, top_k, dtype=torch.int32, device=m.device)
    if rows == 0:
        return torch.empty_like(m)
    if not fused:
        _select(F.linear(m.to(block.router.dtype), block.router), router, ids, shares)
    inner = torch.empty(rows, top_k + 1, max(width, side), dtype=torch.float32, device=m.device)
    factor = torch.empty(rows, dtype=torch.float32, device=m.device)
    mode = _MODES[experts.quantise]
    shared_mode = QUANTISE_NONE if shared.quantise is None else QUANTISE_FP8
    size = 32
    tile = min(max(triton.next_power_of_2(triton.cdiv(hidden, 2)), 16), 128)
    nothing = m
    _open[(rows * (top_k + 1), triton.cdiv(max(width, side), size))](
        m,
        block.router,
        nothing if router.bias is None else router.bias,
        ids,
        shares,
        *_operands(experts, "gate"),
        *_operands(experts, "up"),
        nothing if experts.input_scale is None else experts.input_scale,
        nothing if experts.inner_scale is None else experts.inner_scale,
        shared.gate,
        shared.up,
        nothing if shared.gate_weight is None else shared.gate_weight,
        inner,
        factor,
        m.stride(0),
        shared.gate.stride(0),
        shared.up.stride(0),
        count,
        hidden,
        width,
        side,
        inner.shape[2],
        router.scale,
        activation_limit(block.activation),
        TOP_K=top_k,
        PLACES=triton.next_power_of_2(top_k),
        ROUTE=router.kind if fused else -1,
        EXPERTS=triton.next_power_of_2(count),
        FORMAT=_FORMATS[experts.format],
        MODE=mode,
        SHARED_MODE=shared_mode,
        SHARED_GATE=shared.gate_weight is not None,
        WEIGH_FIRST=block.weigh_first,
        BLOCK=_BLOCKS[mode],
        SHARED_BLOCK=_BLOCKS[shared_mode],
        SIZE=size,
        TILE=tile,
        num_warps=4,
    )
    result = torch.empty_like(m)
    pairs = triton.cdiv(width, 2)
    size = 16
    _close[(rows, triton.cdiv(hidden, size))](
        ids,
        *_operands(experts, "down"),
        shared.down,
        inner,
        factor,
        result,
        shared.down.stride(0),
        result.stride(0),
        hidden,
        width,
        side,
        inner.shape[2],
        TOP_K=top_k,
        FORMAT=_FORMATS[experts.format],
        SHARED_GATE=shared.gate_weight is not None,
        SIZE=size,
        TILE=min(max(triton.next_power_of_2(pairs * top_k), 16), 128),
        SIDE_TILE=min(max(triton.next_power_of_2(side), 16), 128),
        num_warps=4,
    )
    return result


@frozen
class _Routing:
    """A router as kernels take it."""

    kind: int
    top_k: int
    bias: Tensor | None
    scale: float

    @classmethod
    def of(cls, route: SoftmaxRouter | BiasedRouter) -> _Routing:
        if isinstance(route, SoftmaxRouter):
            return cls(_SOFTMAX, route.top_k, None, 1.0)
        kind = {"sigmoid": _SIGMOID, "sqrt_softplus": _SQRT_SOFTPLUS}[route.score]
        return cls(kind, route.top_k, route.bias, float(route.scale))


def _router(block: GatheredMixture) -> _Routing:
    assert isinstance(block.route, SoftmaxRouter | BiasedRouter)
    return _Routing.of(block.route)


def _operands(experts: StoredExperts, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, block scales and per-matrix scales of a projection; what a format has not is never read."""
    projection = getattr(experts, name)
    weight, scale, outer = projection.weight, projection.scale, projection.scale_2
    scale = weight if scale is None else scale.view(torch.uint8)
    return weight, scale, weight if outer is None else outer


def _select(logits: Tensor, router: _Routing, ids: Tensor, shares: Tensor) -> None:
    rows, count = logits.shape
    _route_rows[(rows,)](
        logits,
        logits if router.bias is None else router.bias,
        ids,
        shares,
        logits.stride(0),
        count,
        router.scale,
        TOP_K=router.top_k,
        PLACES=triton.next_power_of_2(router.top_k),
        ROUTE=router.kind,
        EXPERTS=triton.next_power_of_2(count),
        num_warps=4,
    )


@triton.jit
def _softplus(x):
    """ln(1 + exp(x)), accurate where it is small."""
    u = tl.exp(-tl.abs(x))
    series = u * (1.0 - u * (0.5 - u * (0.33333334 - u * 0.25)))
    return tl.where(x > 0, x, 0.0) + tl.where(u < 0.01, series, tl.log(1.0 + u))


@triton.jit
def _scores(logits, bias, experts, seen, ROUTE: tl.constexpr):
    """Scores and what the selection compares, both float32 [EXPERTS]; −∞ compares where there is no expert."""
    if ROUTE == _SOFT:
        logits = tl.where(seen, logits, float("-inf"))
        powers = tl.exp(logits - tl.max(logits, axis=0))
        scores = tl.div_rn(powers, tl.sum(powers, axis=0))
        keys = scores
    else:
        if ROUTE == _SIG:
            scores = tl.div_rn(1.0, 1.0 + tl.exp(-logits))
        else:
            scores = tl.sqrt_rn(_softplus(logits))
        keys = scores + tl.load(bias + experts, mask=seen, other=0)
    return scores, tl.where(seen, keys, float("-inf"))


@triton.jit
def _pick(scores, keys, experts, last, scale, TOP_K: tl.constexpr, PLACES: tl.constexpr, ROUTE: tl.constexpr):
    """The selected experts, int32 [PLACES], and their weights; PLACES ≥ TOP_K. Ties take the lower expert; without any comparable
    key it is the last."""
    places = tl.arange(0, PLACES)
    ids = tl.zeros((PLACES,), tl.int32)
    chosen = tl.zeros((PLACES,), tl.float32)
    for number in tl.static_range(TOP_K):
        best = tl.max(keys, axis=0)
        found = tl.min(tl.where(keys == best, experts, last), axis=0)
        score = tl.sum(tl.where(experts == found, scores, 0.0), axis=0)
        ids = tl.where(places == number, found, ids)
        chosen = tl.where(places == number, score, chosen)
        keys = tl.where(experts == found, float("-inf"), keys)
    total = tl.sum(chosen, axis=0)
    if ROUTE == _SOFT:
        chosen = tl.div_rn(chosen, total)
    else:
        chosen = tl.div_rn(chosen, total + _SMALLEST_SUM) * scale
    return ids, chosen


@triton.jit
def _route_rows(
    logits,
    bias,
    ids,
    shares,
    stride,
    count,
    scale,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,
    ROUTE: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, EXPERTS)
    places = tl.arange(0, PLACES)
    seen = experts < count
    read = tl.load(logits + row * stride + experts, mask=seen, other=0).to(tl.float32)
    scores, keys = _scores(read, bias, experts, seen, ROUTE)
    found, chosen = _pick(scores, keys, experts, count - 1, scale, TOP_K, PLACES, ROUTE)
    tl.store(ids + row * TOP_K + places, found, mask=places < TOP_K)
    tl.store(shares + row * TOP_K + places, chosen, mask=places < TOP_K)


@triton.jit
def _logits(m, router, experts, seen, hidden, EXPERTS: tl.constexpr, TILE: tl.constexpr):
    """Product of one row with the router, rounded to the router's dtype, float32 [EXPERTS]."""
    total = tl.zeros((EXPERTS, TILE), tl.float32)
    for start in range(0, hidden, TILE):
        column = start + tl.arange(0, TILE)
        inside = column < hidden
        x = tl.load(m + column, mask=inside, other=0).to(tl.float32)
        at = router + experts[:, None] * hidden + column[None, :]
        total += tl.load(at, mask=seen[:, None] & inside[None, :], other=0).to(tl.float32) * x[None, :]
    return tl.sum(total, axis=1).to(router.dtype.element_ty).to(tl.float32)


@triton.jit
def _silu(x):
    return tl.div_rn(x, 1.0 + tl.exp(-x))


@triton.jit
def _bounded(gate, up, limit):
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate, up


@triton.jit
def _open(
    m,
    router,
    bias,
    ids,
    shares,
    gate,
    gate_scale,
    gate_outer,
    up,
    up_scale,
    up_outer,
    input_scale,
    inner_scale,
    shared_gate,
    shared_up,
    shared_weight,
    inner,
    factor,
    m_stride,
    shared_gate_stride,
    shared_up_stride,
    count,
    hidden,
    width,
    side,
    inner_stride,
    route_scale,
    limit,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,
    ROUTE: tl.constexpr,
    EXPERTS: tl.constexpr,
    FORMAT: tl.constexpr,
    MODE: tl.constexpr,
    SHARED_MODE: tl.constexpr,
    SHARED_GATE: tl.constexpr,
    WEIGH_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED_BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Inner values of one row's choice ``choice``, or of the shared expert behind the last. SIZE inner rows a program, 2·TILE
    columns at once."""
    row = (tl.program_id(0) // (TOP_K + 1)).to(tl.int64)
    choice = tl.program_id(0) % (TOP_K + 1)
    block = tl.program_id(1)
    rows = block * SIZE + tl.arange(0, SIZE)
    m += row * m_stride
    inner += (row * (TOP_K + 1) + choice) * inner_stride
    gates = tl.zeros((SIZE, TILE), tl.float32)
    ups = tl.zeros((SIZE, TILE), tl.float32)
    if choice < TOP_K:
        if ROUTE >= 0:
            experts = tl.arange(0, EXPERTS)
            seen = experts < count
            logits = _logits(m, router, experts, seen, hidden, EXPERTS, 64)
            scores, keys = _scores(logits, bias, experts, seen, ROUTE)
            places = tl.arange(0, PLACES)
            found, chosen = _pick(scores, keys, experts, count - 1, route_scale, TOP_K, PLACES, ROUTE)
            expert = tl.sum(tl.where(places == choice, found, 0), axis=0)
            share = tl.sum(tl.where(places == choice, chosen, 0.0), axis=0)
            if block == 0:
                tl.store(ids + row * TOP_K + choice, expert)
        else:
            expert = tl.load(ids + row * TOP_K + choice)
            share = tl.load(shares + row * TOP_K + choice)
        present = rows < width
        base = expert.to(tl.int64) * width + rows
        gate_factor = tl.load(gate_outer + expert).to(tl.float32) if FORMAT == _OUTER else 1.0
        up_factor = tl.load(up_outer + expert).to(tl.float32) if FORMAT == _OUTER else 1.0
        read_scale = tl.load(input_scale + expert).to(tl.float32) if MODE == _SCALED else 1.0
        for start in range(0, hidden, 2 * TILE):
            pair = start // 2 + tl.arange(0, TILE)
            inside = 2 * pair < hidden
            even = tl.load(m + 2 * pair, mask=inside, other=0).to(tl.float32)
            odd = tl.load(m + 2 * pair + 1, mask=2 * pair + 1 < hidden, other=0).to(tl.float32)
            if MODE != _NONE:
                even, odd = quantise_pairs(even, odd, read_scale, MODE, TILE, BLOCK)
            held = present[:, None] & inside[None, :]
            low, high = weight_pairs(gate, gate_scale, base[:, None], pair[None, :], hidden, held, gate_factor, FORMAT)
            gates += low * even[None, :] + high * odd[None, :]
            low, high = weight_pairs(up, up_scale, base[:, None], pair[None, :], hidden, held, up_factor, FORMAT)
            ups += low * even[None, :] + high * odd[None, :]
        bounded, kept = _bounded(tl.sum(gates, axis=1), tl.sum(ups, axis=1), limit)
        value = _silu(bounded) * kept
        if WEIGH_FIRST:
            value = value * share
        if MODE != _NONE:
            kept_scale = tl.load(inner_scale + expert).to(tl.float32) if MODE == _SCALED else 1.0
            value = quantise_row(value, kept_scale, MODE, SIZE, BLOCK)
        if not WEIGH_FIRST:
            value = value * share
        tl.store(inner + rows, value, mask=present)
    else:
        # the shared expert rounds where the activations are rounded
        kind = m.dtype.element_ty
        present = rows < side
        dots = tl.zeros((TILE,), tl.float32)
        for start in range(0, hidden, 2 * TILE):
            pair = start // 2 + tl.arange(0, TILE)
            inside = 2 * pair < hidden
            other = 2 * pair + 1 < hidden
            even = tl.load(m + 2 * pair, mask=inside, other=0).to(tl.float32)
            odd = tl.load(m + 2 * pair + 1, mask=other, other=0).to(tl.float32)
            if SHARED_GATE:
                dots += even * tl.load(shared_weight + 2 * pair, mask=inside, other=0).to(tl.float32)
                dots += odd * tl.load(shared_weight + 2 * pair + 1, mask=other, other=0).to(tl.float32)
            if SHARED_MODE != _NONE:
                even, odd = quantise_pairs(even, odd, 1.0, SHARED_MODE, TILE, SHARED_BLOCK)
            held = present[:, None] & inside[None, :]
            also = present[:, None] & other[None, :]
            at = shared_gate + rows.to(tl.int64)[:, None] * shared_gate_stride + 2 * pair[None, :]
            gates += tl.load(at, mask=held, other=0).to(tl.float32) * even[None, :]
            gates += tl.load(at + 1, mask=also, other=0).to(tl.float32) * odd[None, :]
            at = shared_up + rows.to(tl.int64)[:, None] * shared_up_stride + 2 * pair[None, :]
            ups += tl.load(at, mask=held, other=0).to(tl.float32) * even[None, :]
            ups += tl.load(at + 1, mask=also, other=0).to(tl.float32) * odd[None, :]
        bounded = tl.sum(gates, axis=1).to(kind).to(tl.float32)
        kept = tl.sum(ups, axis=1).to(kind).to(tl.float32)
        bounded, kept = _bounded(bounded, kept, limit)
        value = (_silu(bounded).to(kind).to(tl.float32) * kept).to(kind).to(tl.float32)
        if SHARED_MODE != _NONE:
            value = quantise_row(value, 1.0, SHARED_MODE, SIZE, SHARED_BLOCK)
        tl.store(inner + rows, value, mask=present)
        if SHARED_GATE:
            dot = tl.sum(dots, axis=0).to(kind).to(tl.float32)
            tl.store(factor + row, tl.div_rn(1.0, 1.0 + tl.exp(-dot)).to(kind).to(tl.float32), mask=block == 0)


@triton.jit
def _close(
    ids,
    down,
    down_scale,
    down_outer,
    shared_down,
    inner,
    factor,
    result,
    shared_stride,
    result_stride,
    hidden,
    width,
    side,
    inner_stride,
    TOP_K: tl.constexpr,
    FORMAT: tl.constexpr,
    SHARED_GATE: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SIDE_TILE: tl.constexpr,
):
    """SIZE outputs of one row: pairs of inner values of all choices, one choice after the other, then the shared expert."""
    row = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    present = outputs < hidden
    inner += row * (TOP_K + 1) * inner_stride
    pairs = (width + 1) // 2
    total = tl.zeros((SIZE, TILE), tl.float32)
    for start in range(0, TOP_K * pairs, TILE):
        place = start + tl.arange(0, TILE)
        inside = place < TOP_K * pairs
        choice = place // pairs
        pair = place % pairs
        expert = tl.load(ids + row * TOP_K + choice, mask=inside, other=0).to(tl.int64)
        outer = tl.load(down_outer + expert, mask=inside, other=0).to(tl.float32)[None, :] if FORMAT == _OUTER else 1.0
        at = inner + choice * inner_stride + 2 * pair
        even = tl.load(at, mask=inside, other=0)
        odd = tl.load(at + 1, mask=inside & (2 * pair + 1 < width), other=0)
        base = expert[None, :] * hidden + outputs[:, None]
        held = present[:, None] & inside[None, :]
        low, high = weight_pairs(down, down_scale, base, pair[None, :], width, held, outer, FORMAT)
        total += low * even[None, :] + high * odd[None, :]
    aside = tl.zeros((SIZE, SIDE_TILE), tl.float32)
    for start in range(0, side, SIDE_TILE):
        column = start + tl.arange(0, SIDE_TILE)
        inside = column < side
        x = tl.load(inner + TOP_K * inner_stride + column, mask=inside, other=0)
        at = shared_down + outputs.to(tl.int64)[:, None] * shared_stride + column[None, :]
        aside += tl.load(at, mask=present[:, None] & inside[None, :], other=0).to(tl.float32) * x[None, :]
    kind = result.dtype.element_ty
    shared = tl.sum(aside, axis=1).to(kind).to(tl.float32)
    if SHARED_GATE:
        shared = (shared * tl.load(factor + row)).to(kind).to(tl.float32)
    routed = tl.sum(total, axis=1).to(kind).to(tl.float32)
    tl.store(result + row * result_stride + outputs, (routed + shared).to(kind), mask=present)
