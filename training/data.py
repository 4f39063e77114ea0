"""Token files on the training device."""

import lzma
from pathlib import Path

import numpy
import torch


def load_tokens(path: Path, device, limit: int | None = None) -> torch.Tensor:
    """Returns the int16 tokens of a ``*.bin.xz`` file on ``device`` (at most ``limit``)."""
    with lzma.open(path) as stream:
        data = stream.read(-1 if limit is None else 2 * limit)
    return torch.from_numpy(numpy.frombuffer(data, dtype="<u2").astype(numpy.int16)).to(device)


def random_batch(tokens: torch.Tensor, batch: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """``[batch, length]`` int64 windows at uniformly drawn starts; no synchronisation."""
    starts = torch.randint(0, tokens.numel() - length, (batch, 1), device=tokens.device, generator=generator)
    return tokens[starts + torch.arange(length, device=tokens.device)].long()


def windows(tokens: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """``[n, length]`` int64: up to ``count`` disjoint windows spread evenly over a held-out file."""
    n = min(count, tokens.numel() // length)
    starts = torch.arange(n, device=tokens.device) * (tokens.numel() // n)
    return tokens[starts.unsqueeze(-1) + torch.arange(length, device=tokens.device)].long()
