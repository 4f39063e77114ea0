"""Storage formats of weights, recognised from headers.

The format is recognised by the stored dtype and by the companion tensors beside the weight, never by a table of names, so
releases of one model that differ in storage load through the same call. For a weight ``X.weight`` the companions are
``X.weight_scale``, ``X.weight_scale_2`` and ``X.weight_scale_inv``, or alone beside it ``X.scale``:

========  =====================  ========================================  ===========================================
format    stored                 companions                                value
========  =====================  ========================================  ===========================================
plain     float [...]            none                                      as stored
NVFP4     uint8 [..., o, i/2]    scale e4m3 [..., o, i/16], scale_2 f32     see :mod:`specdec.checkpoint.nvfp4`
NVFP4     uint8 [o, i/2]         the two streams of a coded scale, scale_2  see :mod:`specdec.checkpoint.csf`
FP8       e4m3 [...]             scale, one float element                  e4m3 · scale
FP8-128   e4m3 [o, i]            scale_inv float [o/128, i/128] (ceiling)   e4m3 · scale_inv of its 128 x 128 block
MXFP8     e4m3 [..., o, i]       scale E8M0 (uint8) [..., o, i/32]          e4m3 · 2^(scale - 127)
MXFP8     e4m3 [..., o, i]       X.scale E8M0 (uint8) [..., o, i/32]        e4m3 · 2^(scale - 127)
FP8-32    e4m3 [o, i]            X.scale E8M0 (uint8) [o/32, i/32], ceiling e4m3 · 2^(scale - 127) of its 32 x 32 block
MXFP4     uint8, int8 [..., i/2] X.scale E8M0 (uint8) [..., o, i/32]        e2m1 · 2^(scale - 127)
========  =====================  ========================================  ===========================================

Imports no torch; :mod:`specdec.checkpoint.matrices` reads the values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.errors import CheckpointError
from specdec.held import PLAIN_EXPERTS, ExpertForm

if TYPE_CHECKING:
    from specdec.checkpoint.header import StoredTensor
    from specdec.checkpoint.reader import Checkpoint
    from specdec.declaration import TensorInventory, TensorSpec

__all__ = [
    "BLOCK_128",
    "BLOCK_MX",
    "BLOCK_NVFP4",
    "CODED_SCALE",
    "PLAIN",
    "coded_scale_shape",
    "expert_form",
    "holds_values_of",
    "is_companion",
    "sibling_scale",
    "storage_of",
]

#: Dtypes of unquantised weights.
PLAIN = ("float64", "float32", "bfloat16", "float16")
#: Values that share one scale: of a row in NVFP4, MXFP8 and MXFP4, rows and columns of a square in FP8-128 and FP8-32.
BLOCK_NVFP4, BLOCK_MX, BLOCK_128 = 16, 32, 128
#: Companion suffixes of the two streams of a coded block scale, which take the place of ``scale``.
CODED_SCALE = ("scale.nvfp4_csf_fixed", "scale.nvfp4_csf_exceptions")
_COMPANIONS = ("scale", "scale_2", "scale_inv", *CODED_SCALE)
_SCALES = ("float32", "bfloat16", "float16")
_POWERS = ("float8_e8m0fnu", "uint8")
# Two values a byte; which of the two dtypes says nothing.
_PACKED = ("uint8", "int8")
_KNOWN = (
    "plain float; uint8 with scale, plain or coded, and scale_2 (NVFP4); "
    "float8_e4m3fn with scale (FP8, MXFP8) or scale_inv (FP8-128); beside X.weight a power-of-two X.scale, "
    "for float8_e4m3fn (MXFP8, FP8-32) or packed uint8 or int8 (MXFP4)"
)


def storage_of(checkpoint: Checkpoint, name: str, *, companions: str | None = None) -> str:
    """Return the storage format of a weight: ``plain``, ``nvfp4``, ``fp8``, ``fp8_128``, ``fp8_32``, ``mxfp8`` or ``mxfp4``.

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
    sibling = sibling_scale(base)
    if sibling in checkpoint:
        found = None if beside else _beside_a_sibling(weight, checkpoint.stored(sibling))
        if found is not None:
            return found
        beside[sibling] = checkpoint.stored(sibling)
        kind = (weight.dtype, *beside)
    matrix = len(shape) >= 2
    if len(kind) == 1 and weight.dtype in PLAIN:
        return "plain"
    if kind == ("uint8", "scale", "scale_2") and matrix and scale is not None:
        outer = beside["scale_2"]
        blocks = (*shape[:-1], shape[-1] * 2 // BLOCK_NVFP4)
        one_each = outer.shape == shape[:-2] or outer.shape == (1,)
        whole = shape[-1] * 2 % BLOCK_NVFP4 == 0
        if whole and scale.dtype == "float8_e4m3fn" and scale.shape == blocks and outer.dtype == "float32" and one_each:
            return "nvfp4"
    if kind == ("uint8", "scale_2", *CODED_SCALE) and len(shape) == 2 and _are_coded(shape, beside):
        return "nvfp4"
    if kind == ("float8_e4m3fn", "scale") and scale is not None:
        if scale.dtype in _SCALES and scale.shape in ((), (1,)):
            return "fp8"
        whole = matrix and shape[-1] % BLOCK_MX == 0
        if whole and scale.dtype in _POWERS and scale.shape == (*shape[:-1], shape[-1] // BLOCK_MX):
            return "mxfp8"
    if kind == ("float8_e4m3fn", "scale_inv") and inverse is not None and len(shape) == 2:
        blocks = tuple(-(-extent // BLOCK_128) for extent in shape)
        if inverse.dtype in _SCALES and inverse.shape == blocks:
            return "fp8_128"
    listed = ", ".join(
        f"{key if key == sibling else f'{base}_{key}'} {item.dtype} {list(item.shape)}" for key, item in beside.items()
    )
    raise CheckpointError(
        f"{weight.path}: tensor {name}: no known storage is {weight.dtype} {list(shape)} with companions: {listed or 'none'}; "
        f"known: {_KNOWN}"
    )


def expert_form(checkpoint: Checkpoint, prefix: str) -> ExpertForm | None:
    """How ``specdec.checkpoint.matrices.load_experts`` keeps the experts stored under ``prefix``; None if none are.

    The first expert speaks for all. Reads headers only. Raises CheckpointError if its storage is unknown.
    """
    fused = f"{prefix}.gate_up_proj"
    if fused in checkpoint:
        return ExpertForm(storage="plain", dtype=checkpoint.stored(fused).dtype)
    names = [name for name in (f"{prefix}.0.gate_proj.weight", f"{prefix}.0.w1.weight") if name in checkpoint]
    if not names:
        return None
    storage = storage_of(checkpoint, names[0])
    if storage == "plain":
        return ExpertForm(storage=storage, dtype=checkpoint.stored(names[0]).dtype)
    if storage == "nvfp4":
        return ExpertForm(storage=storage, input_scale=f"{names[0].removesuffix('weight')}input_scale" in checkpoint)
    return ExpertForm(storage=storage) if storage == "mxfp4" else PLAIN_EXPERTS


def sibling_scale(name: str) -> str:
    """Return ``X.scale`` for the name ``X.weight``, and nothing for any other name."""
    return name.removesuffix("weight") + "scale" if name.endswith(".weight") else ""


def _beside_a_sibling(weight: StoredTensor, scale: StoredTensor) -> str | None:
    """The format of a weight whose only companion is ``X.scale``."""
    shape, packed = weight.shape, weight.dtype in _PACKED
    if len(shape) < 2 or scale.dtype not in _POWERS or not (packed or weight.dtype == "float8_e4m3fn"):
        return None
    width = shape[-1] * 2 if packed else shape[-1]
    if width % BLOCK_MX == 0 and scale.shape == (*shape[:-1], width // BLOCK_MX):
        return "mxfp4" if packed else "mxfp8"
    blocks = tuple(-(-extent // BLOCK_MX) for extent in shape)
    return "fp8_32" if not packed and len(shape) == 2 and scale.shape == blocks else None


def coded_scale_shape(rows: int, columns: int) -> tuple[int, int] | None:
    """Return the shape of the fixed stream of coded scales ``[rows, columns]``, or None if that size cannot be coded.

    Slabs of 16 rows; pairs of columns; positions of 24 bits (see :mod:`specdec.checkpoint.csf`).
    """
    if rows % 16 or columns % 2 or not 0 < rows * columns <= 1 << 24:
        return None
    return rows // 16, 16 * (1 + columns // 2)


def _are_coded(shape: tuple[int, ...], beside: dict[str, StoredTensor]) -> bool:
    """Whether streams and outer scale have the form that a packed weight ``[o, i/2]`` needs."""
    fixed, exceptions, outer = (beside[suffix] for suffix in (*CODED_SCALE, "scale_2"))
    return (
        shape[1] * 2 % BLOCK_NVFP4 == 0
        and (fixed.dtype, fixed.shape) == ("uint8", coded_scale_shape(shape[0], shape[1] * 2 // BLOCK_NVFP4))
        and (exceptions.dtype, len(exceptions.shape)) == ("uint32", 1)
        and outer.dtype == "float32"
        and outer.shape in ((), (1,))
    )


def holds_values_of(checkpoint: Checkpoint, spec: TensorSpec) -> bool:
    """Whether the stored tensor ``spec.name`` is the declared float weight in some known format, with its companions.

    False for declarations of another kind (packed codes, scales, integers): those have one form only. Reads headers only.
    """
    if spec.dtype not in PLAIN or spec.name not in checkpoint:
        return False
    try:
        storage = storage_of(checkpoint, spec.name)
    except CheckpointError:
        return False
    shape = checkpoint.stored(spec.name).shape
    return spec.shape == ((*shape[:-1], shape[-1] * 2) if storage in ("nvfp4", "mxfp4") else shape)


def is_companion(checkpoint: Checkpoint, name: str, inventory: TensorInventory) -> bool:
    """Whether ``name`` is a scale of a declared float weight that is stored quantised. Reads headers only."""
    if name.endswith(".scale"):
        spec = inventory.lookup(name.removesuffix("scale") + "weight")
        return spec is not None and holds_values_of(checkpoint, spec)
    for suffix in _COMPANIONS:
        weight = name.removesuffix(f"_{suffix}")
        if weight != name:
            spec = inventory.lookup(weight)
            return spec is not None and holds_values_of(checkpoint, spec)
    return False
