"""MTP input fusion against b12x's reference, bit for bit in bfloat16, and the composed oracle's fusion against the same."""

from __future__ import annotations

import pytest
import torch
from mtp_oracle import MtpOracle
from qwen_models import prepare, random_tensors

from specdec.checkpoint.writer import write_checkpoint
from specdec_qwen38.geometry import TINY

reference = pytest.importorskip("b12x.sequence.mtp_feedback.reference")

SEED = 3
G = TINY


def rounded(tensors):
    """Weights as a published checkpoint stores them: bfloat16."""
    return {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def tensors():
    return rounded(random_tensors(SEED))


@pytest.fixture(scope="module")
def drafter(tensors, tmp_path_factory):
    config = {"model_type": "qwen4_exp", "text_config": G.to_config()}
    directory = write_checkpoint(tmp_path_factory.mktemp("bfloat16"), tensors, config)
    return prepare(directory, dtype="bfloat16", slots=1).drafter


def inputs(rows: int):
    """Residuals whose streams differ in scale, so that one mean square over all of them is visible; and next tokens."""
    generator = torch.Generator().manual_seed(rows)
    scale = torch.tensor([0.1, 1.0, 3.0, 20.0]).view(1, G.hc_count, 1)
    residual = torch.randn(rows, G.hc_count, G.hidden_size, generator=generator) * scale
    return residual.to(torch.bfloat16), torch.randint(0, G.vocab_size, (rows,), generator=generator)


def expected(tensors, residual, tokens):
    return reference.feedback(
        tensors["model.language_model.embed_tokens.weight"][tokens],
        residual,
        tensors["mtp.pre_fc_norm_embedding.weight"],
        tensors["mtp.pre_fc_norm_hidden.weight"],
        tensors["mtp.fc_embedding.weight"],
        tensors["mtp.fc_hidden.weight"],
        eps=G.rms_norm_eps,
    )


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 64])
def test_fusion_equals_the_reference(drafter, tensors, rows):
    residual, tokens = inputs(rows)
    ours = drafter.fuse(residual.flatten(1), tokens)
    assert ours.dtype is torch.bfloat16 and ours.shape == (rows, G.hc_count, G.hidden_size)
    assert torch.equal(ours, expected(tensors, residual, tokens))


@torch.inference_mode()
def test_residual_norm_is_one_group(drafter, tensors):
    """A mean square per stream, which every other norm of this width has, is far from the reference."""
    residual, tokens = inputs(8)
    per_stream = residual * residual.float().square().mean(-1, keepdim=True).rsqrt().to(torch.bfloat16)
    ours, other = drafter.fuse(residual.flatten(1), tokens), drafter.fuse(per_stream.flatten(1), tokens)
    assert (ours - expected(tensors, residual, tokens)).abs().max() == 0
    assert (other - expected(tensors, residual, tokens)).abs().max() > 1


@torch.inference_mode()
def test_composed_oracle_fuses_as_the_reference(tensors):
    """Ties the float64 oracle of the whole MTP layer to the reference: same formula up to the reference's roundings."""
    oracle = MtpOracle(SEED)
    for module, name in (
        (oracle.token_norm, "mtp.pre_fc_norm_embedding.weight"),
        (oracle.residual_norm, "mtp.pre_fc_norm_hidden.weight"),
        (oracle.token_projection, "mtp.fc_embedding.weight"),
        (oracle.residual_projection, "mtp.fc_hidden.weight"),
        (oracle.target.model.embed_tokens, "model.language_model.embed_tokens.weight"),
    ):
        module.weight.copy_(tensors[name])
    residual, tokens = inputs(64)
    exact = oracle.fuse(residual.flatten(1).double(), tokens).view_as(residual)
    error = (expected(tensors, residual, tokens) - exact).norm() / exact.norm()
    # two roundings of 2^-9 relative each, in both summands
    assert error < 2**-8
