"""What a loaded model holds: its tensors after loading, in the form that they are kept in, as data.

A checkpoint's inventory says what is stored; loading merges, converts and unpacks some of it and keeps the rest packed. A plugin
declares the outcome with these records, so that memory can be planned without weights, torch or a device. Tests compare every
declaration with what loading leaves behind.

Declaration layer: the standard library, attrs and other declaration modules only.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from specdec.layout import StateLayout
from specdec.tensors import DTYPE_BYTES
from specdec.validators import as_tuple, integer, one_of, text, tuple_of

if TYPE_CHECKING:
    from specdec.interfaces import Capacities

__all__ = [
    "DENSE_LIMIT_BYTES",
    "PLAIN_EXPERTS",
    "ExpertForm",
    "HeldTensor",
    "Keeping",
    "ModelMemory",
    "precise_dtype",
    "row_steps",
    "whole_pages",
]

#: Below this many weight bytes in the activation dtype every expert is evaluated: two products over a few MiB cost less than
#: gathering weights per row. Chosen by size so that the form never depends on the number of rows.
DENSE_LIMIT_BYTES = 8 << 20


@frozen(kw_only=True)
class HeldTensor:
    """``count`` like tensors that a loaded model keeps: name, shape of one and dtype name (a key of ``DTYPE_BYTES``).

    A complex tensor is declared as its real and imaginary parts, with a last axis of two.
    """

    name: str = field(validator=text())
    shape: tuple[int, ...] = field(converter=as_tuple, validator=tuple_of(int, minimum=0, empty=True))
    dtype: str = field(validator=one_of(tuple(DTYPE_BYTES)))
    count: int = field(default=1, validator=integer(minimum=0))

    @property
    def each(self) -> int:
        """Bytes of one of them."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        """Bytes of all of them."""
        return self.count * self.each


@frozen(kw_only=True)
class ModelMemory:
    """What a plugin declares of one checkpoint under given capacities: state layouts and held tensors of target and drafter.

    ``target`` and ``drafter`` list everything that the objects of the hooks hold beside their state stores: weights, tables,
    constants. ``row_bytes`` estimates what one row of a target pass has in work at once beside logits, and ``lane_bytes`` what a
    lane has whatever its rows, such as a copy of its context; both only ever enter the estimate of a graph pool.
    ``draft_constants``: bytes of constants that a round with drafts holds for each of them, such as a calibration.
    ``context_limit`` is the most positions that the checkpoint was made for, None if it does not say.
    """

    vocab_size: int = field(validator=integer(minimum=1))
    target_layout: StateLayout = field(repr=False)
    drafter_layout: StateLayout = field(repr=False)
    target: tuple[HeldTensor, ...] = field(converter=as_tuple, validator=tuple_of(HeldTensor, empty=True), repr=False)
    drafter: tuple[HeldTensor, ...] = field(converter=as_tuple, validator=tuple_of(HeldTensor, empty=True), repr=False)
    row_bytes: int = field(default=0, validator=integer(minimum=0))
    lane_bytes: int = field(default=0, validator=integer(minimum=0))
    draft_constants: int = field(default=0, validator=integer(minimum=0))
    context_limit: int | None = None


def precise_dtype(dtype: str) -> str:
    """Dtype name in which norms, scores and other delicate sums of ``dtype`` activations are kept: float32 or wider."""
    return "float64" if dtype == "float64" else "float32"


def whole_pages(capacities: Capacities, page_tokens: int) -> int:
    """Positions that a call may touch: the context and the widest round that starts at its last token, in whole pages."""
    return -(-(capacities.context + capacities.max_draft_tokens + 1) // page_tokens) * page_tokens


def row_steps(capacities: Capacities) -> HeldTensor:
    """The counting vector of targets (``specdec.round.row_target``) and recursive drafters."""
    steps = max(capacities.max_draft_tokens + 1, capacities.prefill_rows)
    return HeldTensor(name="row numbers", shape=(steps,), dtype="int64")


@frozen(kw_only=True)
class ExpertForm:
    """How loading finds the routed experts of a layer.

    ``storage``: ``nvfp4``, ``mxfp4`` or ``plain``, as ``specdec.checkpoint.matrices.load_experts`` keeps them; ``dtype`` of plain
    ones; ``input_scale``: whether each has a scale of what it reads.
    """

    storage: str = field(validator=one_of(("nvfp4", "mxfp4", "plain")))
    dtype: str = field(default="bfloat16", validator=one_of(tuple(DTYPE_BYTES)))
    input_scale: bool = False


#: Experts that are stored in another format and decoded.
PLAIN_EXPERTS = ExpertForm(storage="plain")


@frozen(kw_only=True)
class Keeping:
    """How a model keeps its tensors: makes the records of like modules.

    ``dtype`` is that of activations. ``kernels``: whether kernels read experts as they are stored, whatever their size. Where a
    kind of dtype is asked for, ``act`` and ``precise`` are those of activations and of delicate sums (``precise_dtype``), and any
    other is a dtype name.
    """

    dtype: str
    kernels: bool = False

    def tensors(self, prefix: str, count: int, shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[HeldTensor]:
        """What ``count`` like modules keep. shapes: kind of dtype and shape by name."""
        kinds = {"act": self.dtype, "precise": precise_dtype(self.dtype)}
        return [
            HeldTensor(
                name=f"{prefix}.{name}" if prefix else name, shape=shape, dtype=kinds.get(kind, kind), count=count
            )
            for name, (kind, shape) in shapes.items()
        ]

    def sites(self, prefix: str, count: int, *, streams: int, hidden: int) -> list[HeldTensor]:
        """``count`` hyper-connections of ``specdec.ops.hyper_connection``, for S streams of width H."""
        outputs = streams * (streams + 2)
        shapes = {"fn": (outputs, streams * hidden), "base": (outputs,), "ones": (streams, 1)}
        return self.tensors(prefix, count, {name: ("precise", shape) for name, shape in shapes.items()})

    def experts(
        self,
        prefix: str,
        count: int,
        *,
        form: ExpertForm,
        experts: int,
        hidden: int,
        inner: int,
        shared: int,
        router: str,
        shared_gate: bool = False,
        router_bias: bool = False,
        quantised_activations: bool = False,
    ) -> list[HeldTensor]:
        """What ``count`` blocks of ``specdec.checkpoint.mixtures.build_mixture`` keep.

        experts, hidden, inner: E, H, I of the routed experts; shared: inner width of the shared one, which has a gate of its own
        with ``shared_gate``. router: kind of dtype of the router. router_bias: whether it keeps a bias [E].
        quantised_activations: whether stored input scales are honoured. All experts of a layer are taken to have one input
        scale, as exporters calibrate them, which matters to models small enough for the dense form only.
        """
        size = DTYPE_BYTES[self.dtype]
        scaled = quantised_activations and form.input_scale
        rounded = form.storage == "nvfp4" and size < 4
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
        if 3 * experts * hidden * inner * size <= DENSE_LIMIT_BYTES and not (rounded or self.kernels):
            width = experts * inner + shared
            shapes["router"] = (router, (experts + shared_gate, hidden))
            shapes["gate_up"] = ("act", (2 * width, hidden))
            shapes["down"] = ("act", (hidden, width))
            if scaled:
                shapes |= {f"{name} scale": ("float32", ()) for name in ("input", "inner")}
        else:
            shapes["router"] = (router, (experts, hidden))
            for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
                shapes |= _projection(f"experts.{name}", form, experts, rows, columns)
                shapes[f"shared.{name}"] = ("act", (hidden, shared) if name == "down" else (shared, hidden))
            if shared_gate:
                shapes["shared.gate_weight"] = ("act", (1, hidden))
            if scaled:
                shapes |= {f"{name} scales": ("float32", (experts,)) for name in ("input", "inner")}
        if router_bias:
            shapes["router bias"] = (router, (experts,))
        return self.tensors(prefix, count, shapes)


def _projection(name: str, form: ExpertForm, experts: int, rows: int, columns: int) -> dict[str, Any]:
    if form.storage == "plain":
        return {name: (form.dtype, (experts, rows, columns))}
    packed: dict[str, Any] = {f"{name}.codes": ("uint8", (experts, rows, columns // 2))}
    if form.storage == "mxfp4":
        return {**packed, f"{name}.scales": ("float8_e8m0fnu", (experts, rows, columns // 32))}
    packed[f"{name}.scales"] = ("float8_e4m3fn", (experts, rows, columns // 16))
    packed[f"{name}.scale_2"] = ("float32", (experts,))
    if form.input_scale:
        packed[f"{name}.input_scale"] = ("float32", (experts,))
    return packed
