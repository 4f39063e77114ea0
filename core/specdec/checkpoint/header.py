"""The header of one safetensors file, read and checked without touching its payload.

The format (https://huggingface.co/docs/safetensors): eight bytes with the header's length, little endian; that many bytes of
JSON, a name to dtype, shape and byte range for each tensor; then the payload, which the ranges must cover without gap or
overlap. Only the header is read, so a file of any size is checked in the time its header needs. Imports no torch.
"""

import json
from math import prod
from pathlib import Path
from typing import NamedTuple

from specdec.errors import CheckpointError

# The format's own limit; a larger value means that the file is something else.
_MAX_HEADER_BYTES = 100_000_000
#: Stored dtype code → (torch's name of the dtype, bytes per element).
DTYPES: dict[str, tuple[str, int]] = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "I16": ("int16", 2),
    "U16": ("uint16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I32": ("int32", 4),
    "U32": ("uint32", 4),
    "F32": ("float32", 4),
    "I64": ("int64", 8),
    "U64": ("uint64", 8),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}


class StoredTensor(NamedTuple):
    """Where a tensor lies: the name it has in its file, dtype (torch's name), shape, payload bytes, file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    path: Path


def read_header(path: Path) -> list[StoredTensor]:
    """Return the tensors of the safetensors file ``path`` in the order of their payload.

    Raises:
        CheckpointError: if the file is missing, unreadable, not safetensors, shorter or longer than its header says, or a
            tensor's range does not fit its shape or leaves a gap or overlap. One line naming the file and, where there is
            one, the tensor.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{path}: not a safetensors file, or cut off inside its header: the file has {size} bytes and "
                    f"announces a header of {length if size >= 8 else 'unknown'} bytes"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        entries = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not valid JSON: {error}") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: the header is a JSON {type(entries).__name__}, needs an object of tensors")
    entries.pop("__metadata__", None)
    ranges = sorted(_parse(path, name, entry) for name, entry in entries.items())
    position = 0
    for begin, end, tensor in ranges:
        if begin != position:
            fault = "overlaps the tensor before it" if begin < position else "leaves a gap after the tensor before it"
            raise CheckpointError(
                f"{path}: tensor {tensor.name} {fault}: it begins at payload byte {begin}, expected {position}"
            )
        position = end
        if 8 + length + end > size:
            raise CheckpointError(
                f"{path}: truncated inside tensor {tensor.name}: its payload ends at byte {8 + length + end}, the file has "
                f"{size} bytes; copy or download the file again"
            )
    if 8 + length + position != size:
        raise CheckpointError(
            f"{path}: {size - 8 - length - position} bytes follow the last tensor; the header accounts for "
            f"{8 + length + position} bytes, the file has {size}"
        )
    return [tensor for _, _, tensor in ranges]


def _parse(path: Path, name: str, entry: object) -> tuple[int, int, StoredTensor]:
    try:
        code, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]  # type: ignore[index]
        numbers = [*shape, begin, end]
        well_formed = (
            isinstance(code, str) and isinstance(shape, list) and all(type(n) is int and n >= 0 for n in numbers)
        )
    except (KeyError, TypeError, ValueError):
        well_formed = False
    if not well_formed:
        raise CheckpointError(
            f"{path}: tensor {name}: header entry {str(entry)[:80]!r} needs dtype, shape and data_offsets"
        )
    if code not in DTYPES:
        raise CheckpointError(f"{path}: tensor {name}: dtype {code} is not supported; known: {', '.join(DTYPES)}")
    dtype, width = DTYPES[code]
    if end - begin != prod(shape) * width:
        raise CheckpointError(
            f"{path}: tensor {name}: {code} {shape} needs {prod(shape) * width} bytes, its range holds {end - begin}"
        )
    return begin, end, StoredTensor(name, dtype, tuple(shape), end - begin, path)
