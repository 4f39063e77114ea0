"""A checkpoint directory: configuration and named tensors, sharded or not.

Opening reads ``config.json`` and every safetensors header (see :mod:`specdec.checkpoint.header`), so a missing shard or a
truncated file is reported before anything is allocated; payload is read only by :meth:`Checkpoint.load`, which is also the
only place that imports torch.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen

from specdec.checkpoint.header import StoredTensor, read_header
from specdec.checkpoint.storages import holds_values_of, is_companion
from specdec.declaration import DTYPE_BYTES, TensorInventory, TensorSpec
from specdec.errors import CheckpointError

if TYPE_CHECKING:
    from typing import Self

    import torch

    from specdec.checkpoint.tokenizer import Tokenizer

_SINGLE = "model.safetensors"
_CURE = "name a folder with config.json and safetensors"
_INDEX = "model.safetensors.index.json"
_SHOWN = 10


@frozen(kw_only=True)
class Validation:
    """What :meth:`Checkpoint.validate` found. Lists hold at most ten entries, counts are complete.

    ``mismatched`` holds one line per tensor with expected and found; ``found_bytes`` counts every considered tensor. The
    expected totals are those of the inventory, with lists of any length as long as they were found; with ``any_storage``, at
    the storage of each weight that was found.
    """

    expected_count: int
    expected_bytes: int
    found_count: int
    found_bytes: int
    missing_count: int
    missing: tuple[str, ...]
    unexpected_count: int
    unexpected: tuple[str, ...]
    mismatched_count: int
    mismatched: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True if every expected tensor is there with its shape and dtype, and nothing else is."""
        return not (self.missing_count or self.unexpected_count or self.mismatched_count)

    def summary(self) -> str:
        """Return one line: counts and the first case of each kind of difference."""
        faults = [
            f"{count} {kind} (first: {names[0]})"
            for kind, count, names in (
                ("missing", self.missing_count, self.missing),
                ("mismatched", self.mismatched_count, self.mismatched),
                ("unexpected", self.unexpected_count, self.unexpected),
            )
            if count
        ]
        return ", ".join(faults) or f"{self.found_count} tensors as expected"


@frozen(kw_only=True, eq=False, repr=False)
class Checkpoint:
    """An open checkpoint directory. Build it with :meth:`open`; usable as a context manager.

    ``config`` is the parsed ``config.json`` and must not be changed. Names are those of the files, or what ``rename`` made
    of them.

    A plugin whose checkpoints have another form (``Recipe.opener``) derives a class: it passes the path as ``directory``, the
    settings in the form of a ``config.json`` and the dtypes and shapes of its tensors as ``stored``, and replaces :meth:`load`,
    :meth:`tokenizer`, :meth:`generation_config` and :meth:`tokenizer_config`.
    """

    directory: Path
    config: dict[str, Any]
    _stored: dict[str, StoredTensor] = field(alias="stored")
    _files: dict[Path, Any] = field(factory=dict, init=False)

    @classmethod
    def open(cls, directory: str | Path, *, rename: Callable[[str], str] | None = None) -> "Checkpoint":
        """Open ``directory``, which holds ``config.json`` and either ``model.safetensors`` or sharded safetensors with
        ``model.safetensors.index.json`` (the single file wins if both exist, as in transformers).

        ``rename`` maps each stored name to the name used here (for exports with other prefixes). Reads headers only.

        Raises:
            CheckpointError: if a file is missing or damaged, a tensor is in two shards, the index names a tensor its shard
                has not got, or two names become the same. One line naming file and tensor.
        """
        directory = Path(directory)
        if not directory.is_dir():
            fault = (
                "a file; name a directory of safetensors, or the recipe that reads it"
                if directory.is_file()
                else f"no such checkpoint directory; {_CURE}"
            )
            raise CheckpointError(f"{directory}: {fault}")
        config = _read_object(directory / "config.json")
        single, index = directory / _SINGLE, directory / _INDEX
        if not single.exists() and not index.exists():
            raise CheckpointError(f"{directory}: neither {_SINGLE} nor {_INDEX} found; {_CURE}")
        tensors = read_header(single) if single.exists() else _read_shards(index)
        return cls(directory=directory, config=config, stored=_by_name(tensors, rename))

    def renamed(self, rename: Callable[[str], str]) -> "Self":
        """Return the same checkpoint under other names: ``rename`` maps each stored name, as for :meth:`open`.

        Raises:
            CheckpointError: if two stored names become the same.
        """
        return evolve(self, stored=_by_name(self._stored.values(), rename))

    def tokenizer(self) -> "Tokenizer":
        """Return the checkpoint's tokenizer.

        Raises:
            CheckpointError: if there is none, or it is not usable.
        """
        from specdec.checkpoint.tokenizer import Tokenizer

        return Tokenizer.load(self.directory)

    def generation_config(self) -> dict[str, Any]:
        """Return the parsed ``generation_config.json``: sampling and ``eos_token_id``; empty without the file.

        Raises:
            CheckpointError: if the file cannot be read or holds no JSON object.
        """
        return self._read_optional("generation_config.json")

    def tokenizer_config(self) -> dict[str, Any]:
        """Return the parsed ``tokenizer_config.json``, empty without the file: ``chat_template``, ``bos_token``, ``eos_token``.

        A file ``chat_template.jinja`` takes the place of ``chat_template``, as in transformers.

        Raises:
            CheckpointError: if a file cannot be read, or is not a JSON object or not text.
        """
        found = self._read_optional("tokenizer_config.json")
        template = self.directory / "chat_template.jinja"
        if template.is_file():
            try:
                found["chat_template"] = template.read_bytes().decode("utf-8")
            except OSError as error:
                raise CheckpointError(f"{template}: cannot be read: {error.strerror or error}") from error
            except UnicodeError as error:
                raise CheckpointError(f"{template}: not UTF-8 text: {error}") from error
        return found

    def _read_optional(self, name: str) -> dict[str, Any]:
        path = self.directory / name
        return _read_object(path) if path.is_file() else {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, in the order of the files."""
        return tuple(self._stored)

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __len__(self) -> int:
        return len(self._stored)

    def stored(self, name: str) -> StoredTensor:
        """Return dtype, shape, bytes and file of a tensor.

        Raises:
            CheckpointError: if there is no such tensor; close names are offered.
        """
        found = self._stored.get(name)
        if found is None:
            # Comparing with hundreds of thousands of names takes minutes; the last component is what is mistyped least.
            tail = name.rsplit(".", 1)[-1]
            likely = [other for other in self._stored if other.endswith(tail)][:2000]
            close = get_close_matches(name, likely, n=2, cutoff=0.8)
            hint = f"; similar: {', '.join(close)}" if close else ""
            raise CheckpointError(f"{self.directory}: no tensor {name} among {len(self._stored)}{hint}")
        return found

    def spec(self, name: str) -> TensorSpec:
        """Return name, shape and dtype of a tensor.

        Raises:
            CheckpointError: if there is no such tensor, or no declaration can name its dtype.
        """
        found = self.stored(name)
        if found.dtype not in DTYPE_BYTES:
            raise CheckpointError(
                f"{found.path}: tensor {name} has dtype {found.dtype}; usable: {', '.join(DTYPE_BYTES)}"
            )
        return TensorSpec(name=name, shape=found.shape, dtype=found.dtype)

    def expect(self, spec: TensorSpec) -> None:
        """Check that ``spec.name`` is stored with exactly that shape and dtype.

        Raises:
            CheckpointError: if it is missing or differs; the line names file, tensor, expected and found.
        """
        difference = _difference(spec, self.stored(spec.name))
        if difference:
            raise CheckpointError(f"{self._stored[spec.name].path}: tensor {difference}")

    def load(self, name: str, *, mapped: bool = False) -> "torch.Tensor":
        """Return a tensor on the CPU, as stored.

        A fresh copy by default. With ``mapped`` it is a view of the file's memory mapping: nothing is read until used, it
        must not be written to, and other views see the same memory (for tables larger than memory).

        Raises:
            CheckpointError: if there is no such tensor or its file can no longer be read.
        """
        from safetensors import SafetensorError, safe_open

        found = self.stored(name)
        try:
            if found.path not in self._files:
                self._files[found.path] = safe_open(found.path, framework="pt", device="cpu")
            tensor = self._files[found.path].get_tensor(found.name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{found.path}: tensor {name} cannot be read: {error}") from error
        return tensor if mapped else tensor.clone()

    def validate(
        self, inventory: TensorInventory, names: Iterable[str] | None = None, *, any_storage: bool = False
    ) -> Validation:
        """Compare ``names`` (default: all tensors) with ``inventory``; reads headers only and raises nothing.

        ``names`` selects the tensors that may belong to the inventory's part of the model: those among them that it does
        not declare are unexpected. Everything it declares must be in the checkpoint, selected or not. With ``any_storage``
        a declared float weight may be stored in every format of :mod:`specdec.checkpoint.storages`, its scales beside it.
        """
        unexpected, mismatched = _Listing(), _Listing()
        found_count = found_bytes = present = 0
        expected_count, expected_bytes = inventory.count, inventory.bytes
        for name in self._stored if names is None else names:
            stored, spec = self._stored[name], inventory.lookup(name)
            found_count, found_bytes = found_count + 1, found_bytes + stored.bytes
            if spec is None:
                if any_storage and is_companion(self, name, inventory):
                    expected_count, expected_bytes = expected_count + 1, expected_bytes + stored.bytes
                else:
                    unexpected.add(name)
                continue
            present += 1
            difference = _difference(spec, stored)
            if difference and any_storage and holds_values_of(self, spec):
                expected_bytes += stored.bytes - spec.bytes
            elif difference:
                mismatched.add(difference)
            elif spec.any_length:
                expected_bytes += stored.bytes
        missing = _Listing()
        if present < inventory.count:
            for spec in inventory.expand():
                if spec.name not in self._stored:
                    missing.add(spec.name)
        return Validation(
            expected_count=expected_count,
            expected_bytes=expected_bytes,
            found_count=found_count,
            found_bytes=found_bytes,
            missing_count=missing.count,
            missing=tuple(missing.first),
            unexpected_count=unexpected.count,
            unexpected=tuple(unexpected.first),
            mismatched_count=mismatched.count,
            mismatched=tuple(mismatched.first),
        )

    def close(self) -> None:
        """Release the open files. Mapped tensors stay valid; the checkpoint may be used again."""
        self._files.clear()

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Listing:
    """Counts everything, keeps the first few."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[str] = []

    def add(self, line: str) -> None:
        self.count += 1
        if self.count <= _SHOWN:
            self.first.append(line)


def _difference(spec: TensorSpec, stored: StoredTensor) -> str | None:
    fits = len(stored.shape) == 1 if spec.any_length else spec.shape == stored.shape
    if fits and spec.dtype == stored.dtype:
        return None
    shape = "[any length]" if spec.any_length else list(spec.shape)
    return f"{spec.name}: expected {spec.dtype} {shape}, found {stored.dtype} {list(stored.shape)}"


def _by_name(tensors: Iterable[StoredTensor], rename: Callable[[str], str] | None) -> dict[str, StoredTensor]:
    stored: dict[str, StoredTensor] = {}
    for tensor in tensors:
        name = rename(tensor.name) if rename else tensor.name
        if name in stored:
            raise CheckpointError(
                f"{tensor.path}: tensor {tensor.name} was already found as {stored[name].name} in "
                f"{stored[name].path.name}; each tensor may be stored once"
            )
        stored[name] = tensor
    return stored


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        cure = _CURE if isinstance(error, FileNotFoundError) else "make it readable"
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}; {cure}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(content).__name__}, needs an object")
    return content


def _read_shards(index: Path) -> list[StoredTensor]:
    weight_map = _read_object(index).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is missing or empty; it maps each tensor to its file")
    by_shard: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        # A name that leads out of the directory would let a downloaded index read any file.
        if not isinstance(shard, str) or Path(shard).is_absolute() or ".." in Path(shard).parts:
            raise CheckpointError(f"{index}: tensor {name}: {shard!r} is not a file name inside the directory")
        by_shard.setdefault(shard, []).append(name)
    tensors: list[StoredTensor] = []
    for shard in sorted(by_shard):
        path = index.parent / shard
        if not path.is_file():
            raise CheckpointError(f"{path}: missing shard; {index.name} expects tensor {by_shard[shard][0]} in it")
        held = read_header(path)
        absent = set(by_shard[shard]) - {tensor.name for tensor in held}
        if absent:
            raise CheckpointError(f"{path}: has no tensor {min(absent)}, although {index.name} names this file for it")
        tensors += held
    return tensors
