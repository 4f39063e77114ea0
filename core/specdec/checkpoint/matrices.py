"""Weights in whatever format a checkpoint stores them, as values.

The formats and how they are recognised: :mod:`specdec.checkpoint.storages`.
"""

from collections.abc import Mapping, Sequence

import torch
from attrs import field, frozen

from specdec.checkpoint import csf, microscaling, nvfp4
from specdec.checkpoint.reader import Checkpoint
from specdec.checkpoint.storages import BLOCK_128, CODED_SCALE, PLAIN, sibling_scale, storage_of
from specdec.errors import CheckpointError

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
#: Shorter names that some releases give the projections of an expert, in the same order.
_SHORT = ("w1", "w3", "w2")


def load_matrix(
    checkpoint: Checkpoint, name: str, dtype: torch.dtype, *, companions: str | None = None
) -> torch.Tensor:
    """Return the weight ``name`` decoded, as ``dtype`` on the CPU.

    Decoding runs in float32 and is followed by one rounding to ``dtype``. ``companions`` as in :func:`storage_of`. The
    result is a new tensor; nothing of the checkpoint changes.

    Raises:
        CheckpointError: if the tensor is missing, its storage is unknown (:func:`storage_of`), or its coded scales are damaged.
    """
    base = companions or name
    storage = storage_of(checkpoint, name, companions=companions)
    if storage == "plain":
        return checkpoint.load(name).to(dtype)
    weight = checkpoint.load(name, mapped=True)
    if storage == "nvfp4":
        scale_2 = checkpoint.load(f"{base}_scale_2", mapped=True)
        return nvfp4.dequantise(weight, _block_scale(checkpoint, base), scale_2).to(dtype)
    if storage == "fp8_128":
        scale = checkpoint.load(f"{base}_scale_inv", mapped=True).float()
        rows = scale.repeat_interleave(BLOCK_128, dim=0)[: weight.shape[0]]
        return (weight.float() * rows.repeat_interleave(BLOCK_128, dim=1)[:, : weight.shape[1]]).to(dtype)
    if storage == "fp8":
        scale = checkpoint.load(f"{base}_scale", mapped=True)
        return (weight.float() * scale.float().reshape(())).to(dtype)
    decode = microscaling.dequantise_fp4 if storage == "mxfp4" else microscaling.dequantise_fp8
    return decode(weight, _power_scale(checkpoint, base)).to(dtype)


@frozen(kw_only=True, eq=False)
class ExpertProjection:
    """One projection of all E experts of a layer.

    ``storage`` ``"nvfp4"``: ``weight`` is packed uint8 ``[E, out, in/2]``, ``scale`` float8_e4m3fn ``[E, out, in/16]``,
    ``scale_2`` float32 ``[E]``; ``input_scale`` float32 ``[E]`` if activations are to be quantised too (W4A4), else None
    (W4A16). ``storage`` ``"mxfp4"``: ``weight`` is packed uint8 ``[E, out, in/2]``, ``scale`` float8_e8m0fnu ``[E, out,
    in/32]`` and the rest is None. ``storage`` ``"plain"``: ``weight`` is floating ``[E, out, in]`` and the rest is None.
    """

    storage: str
    weight: torch.Tensor = field(repr=False)
    scale: torch.Tensor | None = field(default=None, repr=False)
    scale_2: torch.Tensor | None = field(default=None, repr=False)
    input_scale: torch.Tensor | None = field(default=None, repr=False)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, out, in) in values, however they are packed."""
        count, out, width = self.weight.shape
        return count, out, width if self.storage == "plain" else width * 2

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Return ``[E, out, in]`` as ``dtype``: packed values decoded in float32, then rounded once. Plain storage of that
        dtype is returned as it is, not copied."""
        return decode_experts(self.weight, self.scale, self.scale_2).to(dtype)


def decode_experts(weight: torch.Tensor, scale: torch.Tensor | None, scale_2: torch.Tensor | None) -> torch.Tensor:
    """Return ``[n, out, in]`` of n experts' ``weight``, ``scale`` and ``scale_2`` as :class:`ExpertProjection` has them.

    float32, or plain weights as they are, not copied. A tensor program: no synchronisation, does not change its inputs.
    """
    if scale is None:
        return weight
    if scale_2 is None:
        return microscaling.dequantise_fp4(weight, scale)
    return nvfp4.dequantise(weight, scale, scale_2)


@frozen(kw_only=True, eq=False)
class ExpertTensors:
    """The routed experts of one layer, by projection name; every projection has the same ``storage``."""

    storage: str
    projections: Mapping[str, ExpertProjection]

    def __getitem__(self, projection: str) -> ExpertProjection:
        return self.projections[projection]

    def dense(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return ``[E, out, in]`` as ``dtype`` for each projection."""
        return {name: projection.dense(dtype) for name, projection in self.projections.items()}


def load_experts(
    checkpoint: Checkpoint,
    prefix: str,
    num_experts: int,
    projections: Sequence[str] = PROJECTIONS,
    *,
    decoded_dtype: torch.dtype = torch.bfloat16,
) -> ExpertTensors:
    """Stack the experts stored under ``prefix`` (…``mlp.experts``) to ``[E, out, in]`` on the CPU.

    Reads ``{prefix}.{e}.{projection}.weight`` for each expert, where projections may also be called ``w1`` (gate), ``w3`` (up)
    and ``w2`` (down), or the fused pair ``{prefix}.gate_up_proj [E, 2I, H]`` (gate rows first) and ``{prefix}.down_proj
    [E, H, I]``. NVFP4 and MXFP4 stay packed and plain floats keep their dtype; other formats are decoded to ``decoded_dtype``
    and become plain. Results are new tensors.

    Raises:
        CheckpointError: if an expert is missing, one is stored beyond ``num_experts``, two experts differ in shape, dtype
            or format, projections differ in format, only some experts have an ``input_scale``, or coded scales are damaged.
    """
    if f"{prefix}.gate_up_proj" in checkpoint:
        return _fused_experts(checkpoint, prefix, num_experts, projections)
    short = f"{prefix}.0.{_SHORT[0]}.weight" in checkpoint
    stored_as = {name: alias if short else name for name, alias in zip(PROJECTIONS, _SHORT, strict=True)}
    surplus = f"{prefix}.{num_experts}.{stored_as[projections[0]]}.weight"
    if surplus in checkpoint:
        raise CheckpointError(
            f"{checkpoint.stored(surplus).path}: tensor {surplus} is beyond the {num_experts} experts config.json declares"
        )
    loaded = {}
    for projection in projections:
        names = [f"{prefix}.{expert}.{stored_as[projection]}.weight" for expert in range(num_experts)]
        loaded[projection] = _stack_projection(checkpoint, names, decoded_dtype)
    storages = {projection: item.storage for projection, item in loaded.items()}
    if len(set(storages.values())) > 1:
        raise CheckpointError(f"{checkpoint.directory}: {prefix}: projections are stored differently: {storages}")
    return ExpertTensors(storage=next(iter(storages.values())), projections=loaded)


def _fused_experts(checkpoint: Checkpoint, prefix: str, num_experts: int, projections: Sequence[str]) -> ExpertTensors:
    for name in (f"{prefix}.gate_up_proj", f"{prefix}.down_proj"):
        stored = checkpoint.stored(name)
        if len(stored.shape) != 3 or stored.shape[0] != num_experts or stored.dtype not in PLAIN:
            raise CheckpointError(
                f"{stored.path}: tensor {name}: expected floats [{num_experts}, out, in], "
                f"found {stored.dtype} {list(stored.shape)}"
            )
    gate, up = checkpoint.load(f"{prefix}.gate_up_proj", mapped=True).chunk(2, dim=1)
    down = checkpoint.load(f"{prefix}.down_proj", mapped=True)
    parts = {"gate_proj": gate, "up_proj": up, "down_proj": down}
    kept = {name: ExpertProjection(storage="plain", weight=parts[name].clone()) for name in projections}
    return ExpertTensors(storage="plain", projections=kept)


def _stack_projection(checkpoint: Checkpoint, names: list[str], decoded_dtype: torch.dtype) -> ExpertProjection:
    storage = storage_of(checkpoint, names[0])
    for name in names[1:]:
        other = storage_of(checkpoint, name)
        if other != storage:
            raise CheckpointError(
                f"{checkpoint.stored(name).path}: tensor {name} is stored as {other}, expert 0 as {storage}"
            )
    if storage == "plain":
        return ExpertProjection(storage="plain", weight=_stack(checkpoint, names))
    if storage == "mxfp4":
        scales = [_power_scale(checkpoint, name) for name in names]
        # the codes are the same bytes as int8 and as uint8
        packed = _stack(checkpoint, names).view(torch.uint8)
        return ExpertProjection(storage=storage, weight=packed, scale=torch.stack(scales))
    if storage != "nvfp4":
        decoded = torch.stack([load_matrix(checkpoint, name, decoded_dtype) for name in names])
        return ExpertProjection(storage="plain", weight=decoded)
    inputs = [f"{name.removesuffix('weight')}input_scale" for name in names]
    return ExpertProjection(
        storage="nvfp4",
        weight=_stack(checkpoint, names),
        scale=torch.stack([_block_scale(checkpoint, name) for name in names]),
        scale_2=_stack_scalars(checkpoint, [f"{name}_scale_2" for name in names]),
        # W4A4 needs the scale of every expert; with some absent the missing one is named.
        input_scale=_stack_scalars(checkpoint, inputs) if any(name in checkpoint for name in inputs) else None,
    )


def _power_scale(checkpoint: Checkpoint, base: str) -> torch.Tensor:
    """The power-of-two scales of the weight ``base``, float8_e8m0fnu, under either of their names."""
    sibling = sibling_scale(base)
    name = sibling if sibling in checkpoint else f"{base}_scale"
    return checkpoint.load(name, mapped=True).view(torch.float8_e8m0fnu)


def _block_scale(checkpoint: Checkpoint, base: str) -> torch.Tensor:
    """The block scales of the NVFP4 weight ``base``, float8_e4m3fn ``[..., o, i/16]``, decoded if they are coded."""
    if f"{base}_scale" in checkpoint:
        return checkpoint.load(f"{base}_scale", mapped=True)
    fixed, exceptions = (checkpoint.load(f"{base}_{suffix}", mapped=True) for suffix in CODED_SCALE)
    try:
        return csf.decode(fixed, exceptions)
    except ValueError as error:
        path = checkpoint.stored(f"{base}_{CODED_SCALE[0]}").path
        raise CheckpointError(f"{path}: tensor {base}_scale: damaged streams: {error}") from error


def _stack_scalars(checkpoint: Checkpoint, names: list[str]) -> torch.Tensor:
    """float32 ``[E]`` of tensors of one element; exporters store them as ``[]`` or ``[1]``, sometimes both in one file."""
    for name in names:
        stored = checkpoint.stored(name)
        if stored.dtype != "float32" or stored.shape not in ((), (1,)):
            raise CheckpointError(
                f"{stored.path}: tensor {name}: expected float32 [] or [1], found {stored.dtype} {list(stored.shape)}"
            )
    return torch.cat([checkpoint.load(name, mapped=True).reshape(1) for name in names])


def _stack(checkpoint: Checkpoint, names: list[str]) -> torch.Tensor:
    first = checkpoint.stored(names[0])
    stacked = torch.empty((len(names), *first.shape), dtype=getattr(torch, first.dtype))
    for index, name in enumerate(names):
        stored = checkpoint.stored(name)
        if stored.shape != first.shape or stored.dtype != first.dtype:
            raise CheckpointError(
                f"{stored.path}: tensor {name}: expected {first.dtype} {list(first.shape)} as {names[0]}, "
                f"found {stored.dtype} {list(stored.shape)}"
            )
        stacked[index] = checkpoint.load(name, mapped=True)
    return stacked
