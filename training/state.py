"""Resumable FP32 weight files, and the archive of a checkpoint directory."""

import tarfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

STATE_FILE_BYTES = 14 * 2**20


def save_state(directory: Path, parameters, scales) -> None:
    """Writes FP32 parameters and activation scales to ``weights-N.safetensors`` files of at most 14 MiB."""
    for old in directory.glob("weights-*.safetensors"):
        old.unlink()
    everything = {n: v.detach().float().cpu().contiguous() for n, v in parameters.items()}
    everything |= {f"scales.{n}": v.detach().float().cpu() for n, v in scales.items()}
    part, size, index = {}, 0, 0
    for name, value in everything.items():
        if part and size + value.nbytes > STATE_FILE_BYTES:
            save_file(part, str(directory / f"weights-{index}.safetensors"))
            part, size, index = {}, 0, index + 1
        part[name] = value
        size += value.nbytes
    save_file(part, str(directory / f"weights-{index}.safetensors"))


def load_state(directory: Path, parameters) -> dict[str, torch.Tensor]:
    """Copies saved weights into ``parameters`` (all must be present, equal shapes); returns the activation scales."""
    found = {}
    for path in sorted(directory.glob("weights-*.safetensors")):
        found |= load_file(str(path))
    missing = [n for n in parameters if n not in found]
    if missing:
        raise SystemExit(f"{directory}: {len(missing)} tensors missing, first {missing[0]}")
    device = next(iter(parameters.values())).device
    for name, parameter in parameters.items():
        if found[name].shape != parameter.shape:
            raise SystemExit(f"{directory}: {name} is {tuple(found[name].shape)}, expected {tuple(parameter.shape)}")
        parameter.data.copy_(found[name])
    return {n.removeprefix("scales."): v.to(device) for n, v in found.items() if n.startswith("scales.")}


def pack(directory: Path, archive: Path) -> None:
    with tarfile.open(archive, "w") as bundle:
        bundle.add(directory, arcname=directory.name)
