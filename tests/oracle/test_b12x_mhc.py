"""Manifold-constrained hyper-connection against b12x's reference and transformers' module: coefficients, block input, streams."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from attrs import evolve
from double_oracle import KeepDouble
from glm_modules import hf_config, load_stored, randomise, stored
from transformers.models.glm5_next import modeling_glm5_next as hf

from specdec.errors import CheckpointError
from specdec.testing.guard import CapturableGuard
from specdec_glm53.geometry import TINY
from specdec_glm53.hyper_connection import HyperConnection, combine

S, H = TINY.hc_mult, TINY.hidden_size
ROWS = 17
# Relative to the largest value. In bfloat16 coefficients are the same float32 numbers and streams are rounded once.
TOLERANCES = {"float64": 1e-13, "float32": 2e-6, "bfloat16": 2**-8}


@pytest.fixture(scope="module")
def module() -> hf.Glm5NextTextHyperConnection:
    return randomise(hf.Glm5NextTextHyperConnection(hf_config()), 1)


@pytest.fixture(params=list(TOLERANCES))
def dtype(request) -> torch.dtype:
    return getattr(torch, request.param)


def site(module, directory, dtype: torch.dtype, name: str = "attn") -> HyperConnection:
    tensors = {f"hc_{name}_{part}": value for part, value in stored(module).items()}
    return load_stored(directory, tensors, dtype, lambda weights: HyperConnection.load(weights, TINY, name))


def streams_of(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual streams of different scale, one of them nearly zero in one row, and a block output."""
    generator = torch.Generator().manual_seed(2)
    streams = torch.randn(ROWS, S, H, generator=generator) * torch.tensor([0.1, 1.0, 5.0, 30.0]).view(1, S, 1)
    streams[3, 1] *= 1e-4
    y = torch.randn(ROWS, H, generator=generator)
    return streams.to(torch.bfloat16).to(dtype), y.to(torch.bfloat16).to(dtype)


def error(ours: torch.Tensor, wanted: torch.Tensor) -> float:
    assert torch.isfinite(ours).all()
    return ((ours.double() - wanted.double()).abs().max() / wanted.double().abs().max()).item()


def doubled(dtype: torch.dtype):
    return KeepDouble() if dtype is torch.float64 else nullcontext()


@torch.inference_mode()
@pytest.mark.parametrize("name", ["attn", "ffn"])
def test_mix_and_combine_equal_the_reference_of_b12x(module, dtype, tmp_path, name):
    reference = pytest.importorskip("b12x.testing.mhc")
    streams, y = streams_of(dtype)
    kept = streams.clone()
    u, post, comb = site(module, tmp_path, dtype, name).mix(streams)
    ours = combine(streams, y, post, comb)
    precise = torch.promote_types(dtype, torch.float32)
    fn, base, scale = (value.data.to(precise) for value in (module.fn, module.base, module.scale))
    with doubled(dtype):
        expected_u, expected_post, expected_comb = reference.pre_reference(
            streams, fn, scale, base, rms_eps=TINY.rms_norm_eps, hc_eps=TINY.hc_eps, sinkhorn_iters=20
        )
        combined = reference.post_reference(y, streams, expected_post, expected_comb)
    tolerance = TOLERANCES[str(dtype).removeprefix("torch.")]
    assert u.dtype is ours.dtype is dtype
    assert post.dtype is comb.dtype is precise
    assert error(u, expected_u) <= tolerance
    coefficients = min(tolerance, TOLERANCES["float32"])
    assert error(post, expected_post) <= coefficients
    assert error(comb, expected_comb) <= coefficients
    # per stream, so that the largest does not hide the others
    for stream in range(S):
        assert error(ours[:, stream], combined[:, stream]) <= tolerance
    assert torch.equal(streams, kept)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_mix_equals_the_transformers_module(module, dtype, tmp_path):
    streams, _ = streams_of(dtype)
    u, post, comb = site(module, tmp_path, dtype).mix(streams)
    with doubled(dtype):
        wanted_post, wanted_comb, wanted_u = module.to(dtype)(streams.unsqueeze(0))
    module.float()
    for found, wanted in ((u, wanted_u), (post, wanted_post), (comb, wanted_comb)):
        assert error(found, wanted[0]) <= TOLERANCES[str(dtype).removeprefix("torch.")]


@torch.inference_mode()
@pytest.mark.parametrize("iterations", [1, 2])
def test_few_iterations_equal_the_transformers_module(module, tmp_path, iterations):
    """Before the matrix has converged every ε of every step still shows."""
    streams, _ = streams_of(torch.float64)
    ours = evolve(site(module, tmp_path, torch.float64), iterations=iterations)
    short = hf.Glm5NextTextHyperConnection(hf_config(evolve(TINY, hc_sinkhorn_iters=iterations)))
    short.load_state_dict(module.state_dict())
    with KeepDouble():
        _, wanted, _ = short.double()(streams.unsqueeze(0))
    assert error(ours.mix(streams)[2], wanted[0]) <= TOLERANCES["float64"]


@torch.inference_mode()
def test_the_mixing_matrix_goes_from_the_first_index_to_the_second(module, tmp_path):
    """Column sums are what the last step makes one; a stream alone reaches stream j with weight comb[i, j]."""
    streams, y = streams_of(torch.float64)
    _, post, comb = site(module, tmp_path, torch.float64).mix(streams)
    assert (comb.sum(1) - 1).abs().max() <= 2e-6
    assert (comb - comb.transpose(1, 2)).abs().max() > 0.01
    alone = torch.zeros_like(streams)
    alone[:, 1] = streams[:, 1]
    moved = combine(alone, torch.zeros_like(y), post, comb)
    for stream in range(S):
        assert error(moved[:, stream], comb[:, 1, stream, None] * streams[:, 1]) <= 1e-14


@torch.inference_mode()
@pytest.mark.parametrize("case", ["one stream takes all", "permutation", "all alike"])
def test_extreme_matrices_stay_finite_and_equal_the_module(module, tmp_path, case):
    """Entries down to ε in whole columns, where sums of a step differ by six orders of magnitude."""
    strong = randomise(hf.Glm5NextTextHyperConnection(hf_config()), 4)
    strong.fn.data.zero_()
    mixing = torch.zeros(S, S)
    if case == "one stream takes all":
        mixing[:, 0] = 100.0
    elif case == "permutation":
        mixing = 100.0 * torch.eye(S).roll(1, 0)
    strong.base.data[2 * S :] = mixing.flatten()
    streams, _ = streams_of(torch.float32)
    _, _, comb = site(strong, tmp_path, torch.float32).mix(streams)
    with KeepDouble():
        _, wanted, _ = strong.double()(streams.double().unsqueeze(0))
    assert torch.isfinite(comb).all()
    assert (comb.double() - wanted[0]).abs().max() <= 1e-5


@torch.inference_mode()
def test_bfloat16_streams_are_rounded_once(module, tmp_path):
    streams, y = streams_of(torch.bfloat16)
    _, post, comb = site(module, tmp_path, torch.bfloat16).mix(streams)
    exact = post.double().unsqueeze(-1) * y.double().unsqueeze(1) + comb.double().transpose(1, 2) @ streams.double()
    ours = combine(streams, y, post, comb)
    # one float32 sum before the rounding: now and then bfloat16's neighbour
    assert (ours != exact.to(torch.bfloat16)).double().mean() <= 2e-4


@torch.inference_mode()
def test_a_row_does_not_depend_on_its_neighbours(module, tmp_path):
    streams, y = streams_of(torch.float64)
    ours = site(module, tmp_path, torch.float64)
    u, post, comb = ours.mix(streams)
    together = combine(streams, y, post, comb)
    for row in range(ROWS):
        one = slice(row, row + 1)
        alone_u, *alone = ours.mix(streams[one])
        assert error(alone_u, u[one]) <= 1e-14
        assert error(combine(streams[one], y[one], *alone), together[one]) <= 1e-14


@torch.inference_mode()
def test_mixing_is_capturable(module, tmp_path):
    streams, y = streams_of(torch.float32)
    ours = site(module, tmp_path, torch.float32)
    with CapturableGuard():
        combine(streams, y, *ours.mix(streams)[1:])


def test_a_misshapen_tensor_is_named(module, tmp_path):
    tensors = {f"hc_attn_{part}": value for part, value in stored(module).items()}
    tensors["hc_attn_base"] = tensors["hc_attn_base"][:20].clone()
    with pytest.raises(CheckpointError, match=r"hc_attn_base has shape \[20\], the configuration needs \[24\]"):
        load_stored(tmp_path, tensors, torch.float32, lambda weights: HyperConnection.load(weights, TINY, "attn"))
