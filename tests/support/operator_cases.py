"""Operands for operators that have a kernel beside their reference, and the bound that a kernel's result must keep.

Sizes are neither powers of two nor multiples of a block where the operator allows it, next to sizes of real models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from attrs import frozen
from torch import Tensor

from specdec.ops import (
    block_quantisation,
    channel_delta_rule,
    delta_gates,
    delta_rule,
    gated_residual,
    hyper_connection,
    norms,
    rope,
    short_conv,
)

Operands = tuple[Tensor | int | float | str, ...]
Operator = Callable[..., Tensor | tuple[Tensor, ...]]
# A kernel adds in another order than the reference and uses other instructions for roots and exponentials. A result in half
# precision is the rounding of nearly the same number: the two differ only where that, or one rounded on the way, is nearly a tie.
MARGIN = {torch.float32: 8.0, torch.bfloat16: 3.0, torch.float16: 3.0}


@frozen(kw_only=True, eq=False)
class OperatorCase:
    """run: the operator as rounds call it; kernel: (module in specdec.ops.cuda, attribute), same operands and results; make:
    operands of one dtype, on the CPU."""

    name: str
    run: Operator
    kernel: tuple[str, Operator | str]
    make: Callable[[torch.Generator, torch.dtype], Operands]

    def __str__(self) -> str:
        return self.name

    def operands(self, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Operands:
        made = self.make(torch.Generator().manual_seed(seed), dtype)
        return tuple(_moved(x, device) if isinstance(x, Tensor) else x for x in made)


def _moved(x: Tensor, device: str) -> Tensor:
    """x on a device with the strides that it has: ``to`` would make a part of a tensor contiguous."""
    if x.is_contiguous():
        return x.to(device)
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return whole.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def tuple_of(result: object) -> tuple[Tensor, ...]:
    """Results of an operator as a flat tuple."""
    if isinstance(result, Tensor):
        return (result,)
    return tuple(x for part in result for x in tuple_of(part))  # type: ignore[attr-defined]


def widened(operands: Iterable[Tensor | int | float | str]) -> Operands:
    """The same values, floats as float64."""

    def wide(x: Tensor | int | float | str) -> Tensor | int | float | str:
        if isinstance(x, Tensor) and x.is_complex():
            return x.to(torch.complex128)
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    return tuple(wide(x) for x in operands)


def assert_within_bound(
    found: tuple[Tensor, ...],
    reference: tuple[Tensor, ...],
    exact: tuple[Tensor, ...],
    margin: Mapping[torch.dtype, float] = MARGIN,
) -> None:
    """No further from ``exact``, the reference in float64, than ``margin`` times what the reference itself is on these operands.

    The measured distance of the reference is the tolerance: nothing here is guessed but the margin. A reference that is exact
    asks for an exact kernel. Shapes and dtypes are those of the reference.
    """
    assert len(found) == len(reference) == len(exact)
    for index, (ours, theirs, true) in enumerate(zip(found, reference, exact, strict=True)):
        assert ours.shape == theirs.shape, (index, ours.shape, theirs.shape)
        assert ours.dtype == theirs.dtype, (index, ours.dtype, theirs.dtype)
        if not ours.numel():
            continue
        bound = margin[theirs.dtype] * (theirs.double() - true).abs().max()
        error = (ours.double() - true).abs().max()
        assert error <= bound, f"result {index}: error {error:.3e}, the reference allows {bound:.3e}"


def _normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def _unit(generator: torch.Generator, *shape: int) -> Tensor:
    x = torch.randn(*shape, generator=generator)
    return x / x.norm(dim=-1, keepdim=True)


# --- norms ---------------------------------------------------------------------------------------------------------------


def _norm_case(
    name: str, shape: tuple[int, ...], scale: tuple[int, ...] | None, cut: slice | None = None
) -> OperatorCase:
    """cut: x is this part of a wider tensor, so that its rows are not adjacent."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Operands:
        x = _normal(generator, *shape, dtype=dtype)
        x = x if cut is None else x[..., cut, :]
        return (x, 1e-6) if scale is None else (x, 1 + 0.1 * _normal(generator, *scale), 1e-6)

    label = f"{name}-{'x'.join(map(str, shape))}{'' if cut is None else '-cut'}"
    return OperatorCase(name=label, run=getattr(norms, name), kernel=("norms", name), make=make)


def _gated_case(rows: int, heads: int, dim: int, activation: str, *, rounds: bool) -> OperatorCase:
    """rounds: scale is in the activation dtype, so that the norm is rounded before the products."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Operands:
        # gates are a part of a wider projection
        gate = _normal(generator, rows, heads + 1, dim, dtype=dtype)[:, 1:]
        scale = 1 + 0.1 * _normal(generator, dim)
        return (_normal(generator, rows, heads, dim), gate, scale.to(dtype) if rounds else scale, 1e-5, activation)

    label = f"gated_rms_norm-{rows}x{heads}x{dim}-{activation}{'-rounds' if rounds else ''}"
    return OperatorCase(name=label, run=norms.gated_rms_norm, kernel=("norms", "gated_rms_norm"), make=make)


# --- rope and block formats ----------------------------------------------------------------------------------------------


def _rope_case(batch: int, rows: int, heads: int, dim: int, rotated: int, *, shared: bool = True) -> OperatorCase:
    """shared: the heads of a row have the same angles; x is the first part of a wider projection."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Operands:
        x = _normal(generator, batch, rows, heads + 1, dim, dtype=dtype)[:, :, :heads]
        shape = (batch, rows, 1 if shared else heads, rotated)
        angles = 100 * torch.rand(shape, generator=generator)
        return (x, angles.cos().to(dtype), angles.sin().to(dtype))

    label = f"apply_rope-{batch}x{rows}x{heads}x{dim}-{rotated}{'' if shared else '-own'}"
    return OperatorCase(name=label, run=rope.apply_rope, kernel=("rope", "apply_rope"), make=make)


def _pairs_case(rows: int, heads: int, dim: int, pairs: int) -> OperatorCase:
    """x is the first part of a wider projection; the operator changes a copy of it."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Operands:
        x = _normal(generator, rows, heads + 1, dim, dtype=dtype)[:, :heads]
        angles = 100 * torch.rand(rows, 1, pairs, generator=generator)
        return (x, torch.polar(torch.ones_like(angles), angles))

    def on_a_copy(operator: Operator) -> Operator:
        def run(x: Tensor, turns: Tensor) -> Tensor:
            wider = torch.cat([x, x[:, :1]], dim=1)
            return operator(wider[:, : x.shape[1]], turns)  # type: ignore[return-value]

        return run

    def fast(module: object) -> Operator:
        return on_a_copy(module.rotate_pairs)  # type: ignore[attr-defined]

    label = f"rotate_pairs-{rows}x{heads}x{dim}-{pairs}"
    return OperatorCase(name=label, run=on_a_copy(rope.rotate_pairs), kernel=("rope", fast), make=make)


def _block_case(name: str, *shape: int) -> OperatorCase:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Operands:
        # blocks of very different size, one of them zero
        scale = torch.exp2(torch.randint(-40, 40, (*shape[:-1], 1), generator=generator).float())
        values = (_normal(generator, *shape) * scale).to(dtype)
        values[0] = 0
        return (values,)

    label = f"{name}-{'x'.join(map(str, shape))}"
    run = getattr(block_quantisation, name)
    return OperatorCase(name=label, run=run, kernel=("block_quantisation", name), make=make)


# --- hyper-connections -----------------------------------------------------------------------------------------------------


def _mixes(
    streams: Tensor, fn: Tensor, base: Tensor, iterations: int, hc_eps: float, rms_eps: float
) -> tuple[Tensor, ...]:
    count = streams.shape[1]
    ones = torch.ones(count, 1, dtype=fn.dtype, device=fn.device)
    site = hyper_connection.HyperConnection(
        fn=fn, base=base, ones=ones, streams=count, iterations=iterations, hc_eps=hc_eps, rms_eps=rms_eps
    )
    return site.mixes(streams)


def _fast_mixes(module: object) -> Operator:
    def run(
        streams: Tensor, fn: Tensor, base: Tensor, iterations: int, hc_eps: float, rms_eps: float
    ) -> tuple[Tensor, ...]:
        return module.mixes(streams, fn, base, iterations=iterations, hc_eps=hc_eps, rms_eps=rms_eps)  # type: ignore[attr-defined]

    return run


def _mixes_case(rows: int, count: int, hidden: int, iterations: int = 20) -> OperatorCase:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Operands:
        outputs, width = count * (count + 2), count * hidden
        fn = _normal(generator, outputs, width) * width**-0.5
        streams = 3 * _normal(generator, rows, count, hidden, dtype=dtype)
        return (streams, fn, _normal(generator, outputs), iterations, 1e-6, 1e-20)

    label = f"mixes-{rows}x{count}x{hidden}-{iterations}"
    return OperatorCase(name=label, run=_mixes, kernel=("hyper_connection", _fast_mixes), make=make)


def _read_case(rows: int, count: int, hidden: int, weights: int) -> OperatorCase:
    """weights: columns of the write weights, a part of a wider projection; 0 as in a model's last mixer."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Operands:
        normed = _normal(generator, rows, count, hidden, dtype=dtype)
        gate = 3 * _normal(generator, rows, count * hidden, dtype=dtype)
        return (normed, gate, _normal(generator, rows, weights + 5, dtype=dtype)[:, 5:])

    label = f"read_streams-{rows}x{count}x{hidden}-{weights}"
    kernel = ("gated_residual", "read_streams")
    return OperatorCase(name=label, run=gated_residual.read_streams, kernel=kernel, make=make)


def _collapse_case(rows: int, count: int, hidden: int, *, shared: bool = False) -> OperatorCase:
    """shared: every row reads through the same weights, a tensor of stride 0, as before a model's first layer."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Operands:
        pre = torch.rand(1 if shared else rows, count, generator=generator).expand(rows, count)
        return (_normal(generator, rows, count, hidden, dtype=dtype), pre)

    label = f"collapse-{rows}x{count}x{hidden}{'-shared' if shared else ''}"
    return OperatorCase(name=label, run=hyper_connection.collapse, kernel=("hyper_connection", "collapse"), make=make)


def _expand_case(rows: int, count: int, hidden: int) -> OperatorCase:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Operands:
        streams = _normal(generator, rows, count, hidden, dtype=dtype)
        y = _normal(generator, rows, hidden, dtype=dtype)
        post = 2 * torch.rand(rows, count, generator=generator)
        return (streams, y, post, torch.rand(rows, count, count, generator=generator))

    label = f"expand-{rows}x{count}x{hidden}"
    return OperatorCase(name=label, run=hyper_connection.expand, kernel=("hyper_connection", "expand"), make=make)


# --- linear attention ------------------------------------------------------------------------------------------------------


def _conv_case(batch: int, rows: int, channels: int, count: int = 4, dilation: int = 1) -> OperatorCase:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Operands:
        extended = _normal(generator, batch, rows + (count - 1) * dilation, channels, dtype=dtype)
        return (extended, _normal(generator, count, channels), rows, dilation)

    label = f"short_conv-{batch}x{rows}x{channels}-{count}-{dilation}"
    return OperatorCase(name=label, run=short_conv.short_conv, kernel=("short_conv", "short_conv"), make=make)


def _silu_conv_case(batch: int, rows: int, channels: int, *, rounds_first: bool) -> OperatorCase:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Operands:
        return (_normal(generator, batch, rows + 3, channels, dtype=dtype), _normal(generator, 4, channels), rows)

    def fast(module: object) -> Operator:
        return partial(module.silu_conv, rounds_first=rounds_first)  # type: ignore[attr-defined]

    label = f"silu_conv-{batch}x{rows}x{channels}{'-rounds' if rounds_first else ''}"
    run = partial(short_conv.silu_conv, rounds_first=rounds_first)
    return OperatorCase(name=label, run=run, kernel=("short_conv", fast), make=make)


def _head_gates_case(batch: int, rows: int, heads: int) -> OperatorCase:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Operands:
        # both are parts of one projection; a reaches the linear part of the softplus
        projected = 8 * _normal(generator, batch, rows, 2 * heads + 3, dtype=dtype)
        a, b = projected[..., 3 : heads + 3], projected[..., heads + 3 :]
        return (a, b, -torch.rand(heads, generator=generator), _normal(generator, heads))

    label = f"head_gates-{batch}x{rows}x{heads}"
    return OperatorCase(name=label, run=delta_gates.head_gates, kernel=("delta_gates", "head_gates"), make=make)


def _channel_gates_case(batch: int, rows: int, heads: int, dim: int) -> OperatorCase:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Operands:
        raw = _normal(generator, batch, rows, heads, dim, dtype=dtype)
        b = _normal(generator, batch, rows, heads + 3, dtype=dtype)[..., 3:]
        return (raw, b, torch.rand(heads, 1, generator=generator), _normal(generator, heads, dim), -5.0)

    label = f"channel_gates-{batch}x{rows}x{heads}x{dim}"
    return OperatorCase(name=label, run=delta_gates.channel_gates, kernel=("delta_gates", "channel_gates"), make=make)


def _delta_rows(*operands: Tensor) -> tuple[Tensor, ...]:
    found = delta_rule.delta_rule_rows(*operands)
    return (found.outputs, found.corrections, *found.states)


def _delta_case(batch: int, rows: int, heads: int, group: int, value: int, dim: int) -> OperatorCase:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Operands:
        width = group * value
        # keys are every second vector of a tensor, as they lie beside the queries in a layer
        both = _unit(generator, batch, rows, 2, heads, dim)
        return (
            _normal(generator, batch, heads, width, dim),
            both[:, :, 0] * dim**-0.5,
            both[:, :, 1],
            _normal(generator, batch, rows, heads, width),
            torch.rand(batch, rows, heads, group, generator=generator),
            torch.rand(batch, rows, heads, group, generator=generator),
        )

    label = f"delta_rule_rows-{batch}x{rows}x{heads}x{group}x{value}x{dim}"
    return OperatorCase(name=label, run=_delta_rows, kernel=("delta_rule", "delta_rule_rows"), make=make)


def _replay_case(layers: int, batch: int, rows: int, heads: int, group: int, value: int, dim: int) -> OperatorCase:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Operands:
        width, kept = group * value, rows + 1
        taken = torch.randint(0, rows + 1, (batch,), generator=generator)
        records = (
            _normal(generator, layers, batch, kept, heads, width),
            _unit(generator, layers, batch, kept, heads, dim),
            torch.rand(layers, batch, kept, heads, group, generator=generator),
        )
        for record in records:
            for lane, count in enumerate(taken.tolist()):
                record[:, lane, count:] = float("nan")
        return (_normal(generator, layers, batch, heads, width, dim), *records, taken, rows)

    label = f"delta_rule_replay-{layers}x{batch}x{rows}x{heads}x{group}x{value}x{dim}"
    kernel = ("delta_rule", "delta_rule_replay")
    return OperatorCase(name=label, run=delta_rule.delta_rule_replay, kernel=kernel, make=make)


def _channel_case(batch: int, rows: int, heads: int, dim: int, width: int) -> OperatorCase:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Operands:
        both = _unit(generator, batch, rows, 2, heads, dim)
        return (
            _normal(generator, batch, heads, dim, width),
            both[:, :, 0] * dim**-0.5,
            both[:, :, 1],
            _normal(generator, batch, rows, heads, width),
            -5 * torch.rand(batch, rows, heads, dim, generator=generator),
            torch.rand(batch, rows, heads, generator=generator),
        )

    label = f"channel_delta_rule_rows-{batch}x{rows}x{heads}x{dim}x{width}"
    kernel = ("channel_delta_rule", "channel_delta_rule_rows")
    return OperatorCase(name=label, run=channel_delta_rule.channel_delta_rule_rows, kernel=kernel, make=make)


SMALL = [
    _norm_case("rms", (3, 5, 40), None),
    _norm_case("rms_norm", (6, 72), (72,)),
    _norm_case("rms_norm", (3, 4, 40), (4, 40)),
    _norm_case("rms_norm", (2, 3, 5, 24), (24,), slice(1, 3)),
    _norm_case("unit_norm", (2, 3, 3, 2, 16), None, slice(0, 1)),
    _mixes_case(3, 4, 40),
    _mixes_case(2, 3, 24, iterations=1),
    _mixes_case(2, 4, 300, iterations=3),
    _collapse_case(3, 4, 72),
    _collapse_case(3, 3, 40, shared=True),
    _expand_case(3, 4, 72),
    _expand_case(2, 3, 300),
    _gated_case(3, 2, 24, "sigmoid", rounds=False),
    _gated_case(3, 2, 40, "silu", rounds=True),
    _rope_case(2, 3, 3, 24, 12),
    _rope_case(2, 3, 2, 16, 16, shared=False),
    _pairs_case(5, 3, 24, 5),
    _pairs_case(3, 1, 16, 8),
    _block_case("fp8_ue8m0", 3, 5, 96),
    _block_case("fp4_ue8m0", 5, 64),
    _block_case("fp4_e4m3", 5, 48),
    _read_case(3, 4, 40, 4),
    _read_case(2, 3, 300, 0),
    _head_gates_case(2, 3, 6),
    _channel_gates_case(2, 3, 3, 24),
    _conv_case(2, 3, 40),
    _silu_conv_case(2, 3, 40, rounds_first=True),
    _silu_conv_case(2, 3, 40, rounds_first=False),
    _conv_case(2, 2, 24, count=3, dilation=3),
    _delta_case(2, 3, 2, 3, 8, 24),
    _delta_case(1, 1, 2, 1, 20, 16),
    _replay_case(2, 3, 4, 2, 2, 12, 24),
    _channel_case(2, 3, 2, 24, 20),
    _channel_case(1, 1, 3, 16, 16),
]
# sizes of the shipped and of the published models
LARGE = [
    _norm_case("rms_norm", (128, 4096), (4096,)),
    _norm_case("rms_norm", (8, 16384), (16384,)),
    _norm_case("rms_norm", (8, 4, 2048), (4, 2048)),
    _norm_case("rms", (8, 48, 128), None),
    _norm_case("unit_norm", (4, 8, 2, 16, 128), None),
    _mixes_case(128, 4, 128),
    _mixes_case(8, 4, 4096),
    _collapse_case(8, 4, 4096),
    _expand_case(8, 4, 4096),
    _gated_case(32, 48, 128, "sigmoid", rounds=True),
    _gated_case(32, 32, 128, "sigmoid", rounds=False),
    _rope_case(4, 8, 16, 256, 64),
    _pairs_case(32, 64, 512, 32),
    _block_case("fp8_ue8m0", 32, 4096),
    _block_case("fp4_ue8m0", 32, 64, 128),
    _block_case("fp4_e4m3", 32, 512),
    _read_case(32, 4, 2048, 4),
    _head_gates_case(4, 8, 48),
    _channel_gates_case(4, 8, 32, 128),
    _conv_case(4, 8, 10240),
    _silu_conv_case(4, 8, 10240, rounds_first=True),
    _delta_case(4, 8, 16, 3, 128, 128),
    _replay_case(3, 4, 8, 16, 3, 128, 128),
    _channel_case(4, 8, 32, 128, 128),
]
