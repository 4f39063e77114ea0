"""Which operations a CUDA graph cannot contain, and why. The table behind `CapturableGuard`.

Torch tags operations whose output or its shape depends on data, and those that draw from a generator; the tags are the
base, so new operations are covered. The lists below add what the tags miss: operations that synchronise only in their
CUDA kernels, and transfers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_HOST_READ = "the host reads a tensor's value and waits for the device; decide with torch.where instead"
_DATA_SHAPE = "the result's shape depends on data, so the host waits for it; use masks, torch.where or gather"
_MASK_INDEX = "a boolean mask as index has a shape that depends on data; use torch.where or masked_fill_"
_REPEATS = "without output_size the host must read the repeats; give output_size"
_GENERATOR = "draws from torch's generator, whose state a replay does not own; use specdec.sampling.philox"
_HOST_DATA = (
    "host data enters the round; on a GPU this copies from pageable memory. Use arange, full or a prepared tensor"
)
_HOST_VIEW = "hands the tensor's memory to the host; stay with tensors on the device, and read results after the round"
_TO_HOST = (
    "copies to the host and waits for the device; stay with tensors on the device, and read results after the round"
)
_TRANSFER = "copies between devices; only copies to or from pinned memory with non_blocking=True can be captured"
_PINNING = "allocates page-locked host memory; do so at preparation"
_RESIZE = (
    "changes the storage of a tensor made outside the round; allocate the largest size at preparation and write a part"
)
_CUDA_SYNC = "its CUDA implementation waits for the device; compute the same from comparisons, sums and sorts"

# Kernels that synchronise on CUDA without a tag that says so.
_CUDA_SYNCHRONISING = {
    "_linalg_check_errors",
    "_linalg_eigh",
    "_linalg_svd",
    "_ctc_loss",
    "_coalesce",
    "_to_sparse",
    "embedding_renorm_",
    "histc",
    "histogram",
    "isin",
    "linalg_eig",
    "to_sparse",
}
_NAMED = {
    "_local_scalar_dense": _HOST_READ,
    "item": _HOST_READ,
    "is_nonzero": _HOST_READ,
    "equal": _HOST_READ,
    "allclose": _HOST_READ,
    "nonzero": _DATA_SHAPE,
    "nonzero_numpy": _DATA_SHAPE,
    "argwhere": _DATA_SHAPE,
    "masked_select": _DATA_SHAPE,
    "bincount": _DATA_SHAPE,
    "_unique": _DATA_SHAPE,
    "_unique2": _DATA_SHAPE,
    "unique_dim": _DATA_SHAPE,
    "unique_consecutive": _DATA_SHAPE,
    "unique_dim_consecutive": _DATA_SHAPE,
    "_pin_memory": _PINNING,
    "pin_memory": _PINNING,
} | dict.fromkeys(_CUDA_SYNCHRONISING, _CUDA_SYNC)
_INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"}
_RESIZING = {"resize_", "resize_as_", "set_"}
_LIFTING = {"lift", "lift_fresh"}

_FUNCTIONS = {
    # these would reach the dispatcher too, under names that nobody wrote
    Tensor.item: _HOST_READ,
    Tensor.__bool__: _HOST_READ,
    Tensor.__int__: _HOST_READ,
    Tensor.__float__: _HOST_READ,
    Tensor.__complex__: _HOST_READ,
    Tensor.__index__: _HOST_READ,
    Tensor.tolist: _HOST_READ,
    # on the CPU it does nothing, which is why only the name can be noticed there
    Tensor.cpu: _TO_HOST,
    Tensor.__contains__: _HOST_READ,
    Tensor.__repr__: _HOST_READ,
    Tensor.__format__: _HOST_READ,
    Tensor.numpy: _HOST_VIEW,
    Tensor.__array__: _HOST_VIEW,
    Tensor.__dlpack__: _HOST_VIEW,
}
_HOST_CONSTRUCTORS = {torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, torch.frombuffer}
_TENSOR_SPLITS = {torch.tensor_split, Tensor.tensor_split}


def refusal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], foreign: Callable[[Tensor], bool]) -> str | None:
    """Reason why an operation at the dispatcher cannot be captured, or None.

    Args:
        func: the operator overload.
        args, kwargs: its arguments.
        foreign: tells whether a tensor's storage was made outside the round.
    """
    name = func.overloadpacket.__name__
    if name in _NAMED:
        return _NAMED[name]
    if name in _LIFTING:
        # `x[..., 0] = 1.0` lifts its number too, but that one travels as a kernel argument.
        return _HOST_DATA if args[0].dim() else None
    if name in _INDEXING:
        return _MASK_INDEX if any(_is_mask(index) for index in args[1]) else None
    if name == "repeat_interleave":
        sized = _argument(func, args, kwargs, "output_size") is not None
        return None if sized or not _has_tensor_repeats(func) else _REPEATS
    if name in ("_to_copy", "copy_", "copy", "_copy_from"):
        return _transfer(name, args, kwargs)
    if name in _RESIZING:
        return _RESIZE if foreign(args[0]) else None
    if torch.Tag.data_dependent_output in func.tags:
        return _HOST_READ
    if torch.Tag.dynamic_output_shape in func.tags:
        return _DATA_SHAPE
    if torch.Tag.nondeterministic_seeded in func.tags:
        # Attention and dropout kernels carry the tag for a dropout that is off in inference.
        off = _argument(func, args, kwargs, "dropout_p") == 0.0 or _argument(func, args, kwargs, "train") is False
        return None if off else _GENERATOR
    return None


def refusal_of_function(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Reason why a Python-level torch call cannot be captured, or None.

    Catches what never reaches the dispatcher on the CPU: `tolist` and `numpy` read memory directly there.
    """
    if func in _HOST_CONSTRUCTORS:
        return None if args and isinstance(args[0], Tensor) else _HOST_DATA
    if func is Tensor.new_tensor:
        return _HOST_DATA
    if func in _TENSOR_SPLITS and any(isinstance(a, Tensor) for a in (*args[1:], *kwargs.values())):
        return _DATA_SHAPE
    return _FUNCTIONS.get(func)


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _has_tensor_repeats(func: Any) -> bool:
    return any(a.name == "repeats" and "Tensor" in str(a.type) for a in func._schema.arguments)


def _argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: str) -> Any:
    """Value of an operator's argument, its default if not given, None if it has no such argument."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == wanted:
            if wanted in kwargs:
                return kwargs[wanted]
            return args[position] if position < len(args) else argument.default_value
    return None


def _transfer(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    if name == "_to_copy":
        source = args[0].device
        target = torch.device(kwargs.get("device") or source)
        # "cuda" without an index means the current device, which `source` may well be.
        same = source.type == target.type and (target.index is None or source.index == target.index)
        return None if same else _TRANSFER
    target, source = args[0], args[1]
    if target.device == source.device:
        return None
    blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    host = [t for t in (target, source) if t.device.type == "cpu"]
    pinned = len(host) == 1 and host[0].is_pinned()
    return None if pinned and not blocking else _TRANSFER
