"""Weights in whatever format a checkpoint stores them.

The format is recognised by the stored dtype and by the companion tensors beside the weight, never by a table of names, so
releases of one model that differ in storage load through the same call. For a weight ``X.weight`` the companions are
``X.weight_scale``, ``X.weight_scale_2`` and ``X.weight_scale_inv``:

========  =====================  ========================================  ===========================================
format    stored                 companions                                value
========  =====================  ========================================  ===========================================
plain     float [...]            none                                      as stored
NVFP4     uint8 [..., o, i/2]    scale e4m3 [..., o, i/16], scale_2 f32     see :mod:`specdec.checkpoint.nvfp4`
FP8       e4m3 [...]             scale, one float element                  e4m3 · scale
FP8-128   e4m3 [o, i]            scale_inv float [o/128, i/128] (ceiling)   e4m3 · scale_inv of its 128 x 128 block
MXFP8     e4m3 [..., o, i]       scale E8M0 (uint8) [..., o, i/32]          e4m3 · 2^(scale - 127)
========  =====================  ========================================  ===========================================
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import field, frozen

from specdec.checkpoint import nvfp4
from specdec.checkpoint.reader import Checkpoint
from specdec.errors import CheckpointError

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_COMPANIONS = ("scale", "scale_2", "scale_inv")
_PLAIN = ("float64", "float32", "bfloat16", "float16")
_SCALES = ("float32", "bfloat16", "float16")
_BLOCK_128 = 128
_BLOCK_MX = 32
_KNOWN = (
    "plain float; uint8 with scale and scale_2 (NVFP4); float8_e4m3fn with scale (FP8, MXFP8) or scale_inv (FP8-128)"
)


def storage_of(checkpoint: Checkpoint, name: str, *, companions: str | None = None) -> str:
    """Return the storage format of a weight: ``plain``, ``nvfp4``, ``fp8``, ``fp8_128`` or ``mxfp8``.

    ``companions`` is the name the companion suffixes attach to, if not ``name`` itself (shards of one table share a scale).
    Reads headers only.

    Raises:
        CheckpointError: if dtype, shape and companions fit no known format; the line names the tensor and what was found.
    """
    base = companions or name
    weight = checkpoint.stored(name)
    beside = {
        suffix: checkpoint.stored(f"{base}_{suffix}") for suffix in _COMPANIONS if f"{base}_{suffix}" in checkpoint
    }
    shape, scale, inverse = weight.shape, beside.get("scale"), beside.get("scale_inv")
    kind = (weight.dtype, *beside)
    matrix = len(shape) >= 2
    if len(kind) == 1 and weight.dtype in _PLAIN:
        return "plain"
    if kind == ("uint8", "scale", "scale_2") and matrix and scale is not None:
        outer = beside["scale_2"]
        blocks = (*shape[:-1], shape[-1] * 2 // nvfp4.BLOCK)
        one_each = outer.shape == shape[:-2] or outer.shape == (1,)
        whole = shape[-1] * 2 % nvfp4.BLOCK == 0
        if whole and scale.dtype == "float8_e4m3fn" and scale.shape == blocks and outer.dtype == "float32" and one_each:
            return "nvfp4"
    if kind == ("float8_e4m3fn", "scale") and scale is not None:
        if scale.dtype in _SCALES and scale.shape in ((), (1,)):
            return "fp8"
        whole = matrix and shape[-1] % _BLOCK_MX == 0
        if (
            whole
            and scale.dtype in ("uint8", "float8_e8m0fnu")
            and scale.shape == (*shape[:-1], shape[-1] // _BLOCK_MX)
        ):
            return "mxfp8"
    if kind == ("float8_e4m3fn", "scale_inv") and inverse is not None and len(shape) == 2:
        blocks = tuple(-(-extent // _BLOCK_128) for extent in shape)
        if inverse.dtype in _SCALES and inverse.shape == blocks:
            return "fp8_128"
    found = ", ".join(f"{base}_{key} {item.dtype} {list(item.shape)}" for key, item in beside.items()) or "none"
    raise CheckpointError(
        f"{weight.path}: tensor {name}: no known storage is {weight.dtype} {list(shape)} with companions: {found}; "
        f"known: {_KNOWN}"
    )


def load_matrix(
    checkpoint: Checkpoint, name: str, dtype: torch.dtype, *, companions: str | None = None
) -> torch.Tensor:
    """Return the weight ``name`` decoded, as ``dtype`` on the CPU.

    Decoding runs in float32 and is followed by one rounding to ``dtype``. ``companions`` as in :func:`storage_of`. The
    result is a new tensor; nothing of the checkpoint changes.

    Raises:
        CheckpointError: if the tensor is missing or its storage is unknown (:func:`storage_of`).
    """
    base = companions or name
    storage = storage_of(checkpoint, name, companions=companions)
    if storage == "plain":
        return checkpoint.load(name).to(dtype)
    weight = checkpoint.load(name, mapped=True)
    if storage == "nvfp4":
        scale, scale_2 = checkpoint.load(f"{base}_scale", mapped=True), checkpoint.load(f"{base}_scale_2", mapped=True)
        return nvfp4.dequantise(weight, scale, scale_2).to(dtype)
    if storage == "fp8_128":
        scale = checkpoint.load(f"{base}_scale_inv", mapped=True).float()
        rows = scale.repeat_interleave(_BLOCK_128, dim=0)[: weight.shape[0]]
        return (weight.float() * rows.repeat_interleave(_BLOCK_128, dim=1)[:, : weight.shape[1]]).to(dtype)
    scale = checkpoint.load(f"{base}_scale", mapped=True)
    if storage == "fp8":
        return (weight.float() * scale.float().reshape(())).to(dtype)
    powers = scale.view(torch.float8_e8m0fnu).float()
    return (weight.float().unflatten(-1, (-1, _BLOCK_MX)) * powers.unsqueeze(-1)).flatten(-2).to(dtype)


@frozen(kw_only=True, eq=False)
class ExpertProjection:
    """One projection of all E experts of a layer.

    ``storage`` ``"nvfp4"``: ``weight`` is packed uint8 ``[E, out, in/2]``, ``scale`` float8_e4m3fn ``[E, out, in/16]``,
    ``scale_2`` float32 ``[E]``; ``input_scale`` float32 ``[E]`` if activations are to be quantised too (W4A4), else None
    (W4A16). ``storage`` ``"plain"``: ``weight`` is floating ``[E, out, in]`` and the rest is None.
    """

    storage: str
    weight: torch.Tensor = field(repr=False)
    scale: torch.Tensor | None = field(default=None, repr=False)
    scale_2: torch.Tensor | None = field(default=None, repr=False)
    input_scale: torch.Tensor | None = field(default=None, repr=False)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Return ``[E, out, in]`` as ``dtype``: NVFP4 decoded in float32, then rounded once. Plain storage of that dtype is
        returned as it is, not copied."""
        if self.scale is None or self.scale_2 is None:
            return self.weight.to(dtype)
        return nvfp4.dequantise(self.weight, self.scale, self.scale_2).to(dtype)


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

    Reads ``{prefix}.{e}.{projection}.weight`` for each expert, or the fused pair ``{prefix}.gate_up_proj [E, 2I, H]`` (gate
    rows first) and ``{prefix}.down_proj [E, H, I]``. NVFP4 stays packed and plain floats keep their dtype; other formats
    are decoded to ``decoded_dtype`` and become plain. Results are new tensors.

    Raises:
        CheckpointError: if an expert is missing, one is stored beyond ``num_experts``, two experts differ in shape, dtype
            or format, projections differ in format, or only some experts have an ``input_scale``.
    """
    if f"{prefix}.gate_up_proj" in checkpoint:
        return _fused_experts(checkpoint, prefix, num_experts, projections)
    surplus = f"{prefix}.{num_experts}.{projections[0]}.weight"
    if surplus in checkpoint:
        raise CheckpointError(
            f"{checkpoint.stored(surplus).path}: tensor {surplus} is beyond the {num_experts} experts config.json declares"
        )
    loaded = {}
    for projection in projections:
        names = [f"{prefix}.{expert}.{projection}.weight" for expert in range(num_experts)]
        loaded[projection] = _stack_projection(checkpoint, names, decoded_dtype)
    storages = {projection: item.storage for projection, item in loaded.items()}
    if len(set(storages.values())) > 1:
        raise CheckpointError(f"{checkpoint.directory}: {prefix}: projections are stored differently: {storages}")
    return ExpertTensors(storage=next(iter(storages.values())), projections=loaded)


def _fused_experts(checkpoint: Checkpoint, prefix: str, num_experts: int, projections: Sequence[str]) -> ExpertTensors:
    for name in (f"{prefix}.gate_up_proj", f"{prefix}.down_proj"):
        stored = checkpoint.stored(name)
        if len(stored.shape) != 3 or stored.shape[0] != num_experts or stored.dtype not in _PLAIN:
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
    if storage != "nvfp4":
        decoded = torch.stack([load_matrix(checkpoint, name, decoded_dtype) for name in names])
        return ExpertProjection(storage="plain", weight=decoded)
    inputs = [f"{name.removesuffix('weight')}input_scale" for name in names]
    return ExpertProjection(
        storage="nvfp4",
        weight=_stack(checkpoint, names),
        scale=_stack(checkpoint, [f"{name}_scale" for name in names]),
        scale_2=_stack(checkpoint, [f"{name}_scale_2" for name in names]).reshape(-1),
        # W4A4 needs the scale of every expert; with some absent the missing one is named.
        input_scale=_stack(checkpoint, inputs).reshape(-1) if any(name in checkpoint for name in inputs) else None,
    )


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


def quantisation_of(checkpoint: Checkpoint, module_name: str) -> Mapping[str, Any] | None:
    """Return what ``config.json`` says about the quantisation of a module, or None.

    The answer is the entry of ``quantization_config.quantized_layers`` for the module or its nearest listed ancestor.
    Engines that append the MTP layer to the decoder stack call it ``mtp.layers.{num_hidden_layers}``; files therefore list it
    under that name, ``mtp.layers.0``, or both. The two are one module here. The entry is information: loading
    follows the stored tensors, and no tensor carries the alias.

    Raises:
        CheckpointError: if both names are listed with different entries.
    """
    config = checkpoint.config
    text = config.get("text_config", config)
    declared = (config.get("quantization_config") or text.get("quantization_config") or {}).get(
        "quantized_layers"
    ) or {}
    alias, real = f"mtp.layers.{text.get('num_hidden_layers')}.", "mtp.layers.0."

    def canonical(name: str) -> str:
        return real + name.removeprefix(alias) if name.startswith(alias) else name

    module = canonical(module_name)
    while module:
        entries = {name: declared[name] for name in (module, _swap(module, real, alias)) if name in declared}
        if len(entries) == 2 and len({repr(sorted(entry.items())) for entry in entries.values()}) == 2:
            raise CheckpointError(
                f"{checkpoint.directory / 'config.json'}: quantization_config.quantized_layers gives one module two entries: "
                f"{entries}"
            )
        if entries:
            return next(iter(entries.values()))
        module = module.rpartition(".")[0]
    return None


def _swap(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name
