"""Gated residual against b12x's hyper-connection references: mixing, injection, combination."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from double_oracle import KeepDouble
from qwen_models import random_weight

from specdec.checkpoint.reader import Checkpoint
from specdec.checkpoint.writer import write_checkpoint
from specdec_qwen38.geometry import TINY
from specdec_qwen38.hyper_connection import HyperConnection, combine
from specdec_qwen38.weights import Weights

reference = pytest.importorskip("b12x.norm.hyperconnection.reference")

S, H, D, EPS = TINY.hc_count, TINY.hidden_size, TINY.streams_width, TINY.rms_norm_eps
ROWS = 17
# Relative to the largest value. In bfloat16 ours rounds the injection weight and the gate, the reference keeps float32.
TOLERANCES = {"float64": 1e-13, "float32": 1e-6, "bfloat16": 2**-6}


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {
        "hc_norm.weight": (D,),
        "input_mix_weight_down.weight": (TINY.hc_lowrank, D),
        "input_mix_weight_up.weight": (D, TINY.hc_lowrank),
        "block_inject_weight.weight": (S, D),
    }
    return {name: random_weight(name, shape, generator).to(torch.bfloat16) for name, shape in shapes.items()}


@pytest.fixture(params=list(TOLERANCES))
def dtype(request) -> torch.dtype:
    return getattr(torch, request.param)


def mixer(directory, tensors, dtype: torch.dtype, *, injects: bool = True) -> HyperConnection:
    write_checkpoint(directory, tensors, TINY.to_config())
    with Checkpoint.open(directory) as checkpoint:
        weights = Weights(checkpoint, TINY, prefix="", dtype=dtype, device=torch.device("cpu"))
        return HyperConnection.load(weights, injects=injects)


def streams_of(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual streams of different scale, one of them nearly zero in one row, and a block output."""
    generator = torch.Generator().manual_seed(2)
    streams = torch.randn(ROWS, S, H, generator=generator) * torch.tensor([0.1, 1.0, 5.0, 30.0]).view(1, S, 1)
    streams[3, 1] *= 1e-4
    block = torch.randn(ROWS, H, generator=generator)
    return streams.to(torch.bfloat16).to(dtype), block.to(torch.bfloat16).to(dtype)


def expected(tensors, streams: torch.Tensor, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Block input [T, H] and combined streams [T, S, H]."""
    w = {name: tensor.to(streams.dtype) for name, tensor in tensors.items()}
    state = streams.flatten(1)
    with KeepDouble() if streams.dtype is torch.float64 else nullcontext():
        normed = reference.grouped_rmsnorm(state, w["hc_norm.weight"], streams=S, eps=EPS)
        low = reference.scaled_silu(F.linear(normed, w["input_mix_weight_down.weight"]), streams=S)
        mixed = reference.gate_mean(normed, F.linear(low, w["input_mix_weight_up.weight"]), streams=S)
        logits = F.linear(normed, w["block_inject_weight.weight"])
        combined = reference.combine(state, block, logits, streams=S)
    return mixed, combined.view_as(streams)


def error(ours: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((ours.double() - wanted.double()).abs().max() / wanted.double().abs().max()).item()


@torch.inference_mode()
def test_mix_and_combine(tensors, dtype, tmp_path):
    streams, block = streams_of(dtype)
    kept = streams.clone()
    m, inject = mixer(tmp_path, tensors, dtype).mix(streams)
    ours = combine(streams, block, inject)
    mixed, combined = expected(tensors, streams, block)
    assert m.dtype is ours.dtype is dtype
    tolerance = TOLERANCES[str(dtype).removeprefix("torch.")]
    assert error(m, mixed) <= tolerance
    # per stream, so that the largest does not hide the others
    for stream in range(S):
        assert error(ours[:, stream], combined[:, stream]) <= tolerance
    assert torch.equal(streams, kept)


@torch.inference_mode()
def test_final_mixer_mixes_the_same_and_injects_nothing(tensors, tmp_path):
    streams, _ = streams_of(torch.float32)
    final = {name: tensor for name, tensor in tensors.items() if "inject" not in name}
    m, inject = mixer(tmp_path / "final", final, torch.float32, injects=False).mix(streams)
    full, _ = mixer(tmp_path / "layer", tensors, torch.float32).mix(streams)
    assert inject.numel() == 0
    assert error(m, full) <= 1e-6


@torch.inference_mode()
def test_zero_weights_halve_the_norm_and_inject_one(tensors, tmp_path):
    zeros = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    streams, block = streams_of(torch.float64)
    m, inject = mixer(tmp_path, zeros, torch.float64).mix(streams)
    normed = streams / (streams.square().mean(-1, keepdim=True) + EPS).sqrt()
    assert error(m, normed.mean(1) / 2) <= 1e-13
    assert torch.equal(inject, torch.ones_like(inject))
    assert torch.equal(combine(streams, block, inject), streams + block.unsqueeze(1))


@torch.inference_mode()
def test_bfloat16_combination_rounds_once(tensors, tmp_path):
    streams, block = streams_of(torch.bfloat16)
    _, inject = mixer(tmp_path, tensors, torch.bfloat16).mix(streams)
    once = streams.float() + inject.float() * block.float().unsqueeze(1)
    assert torch.equal(combine(streams, block, inject), once.to(torch.bfloat16))
