"""The conformance suite of the core on a small random Llama, as a folder of safetensors."""

import pytest
import torch

from specdec.checkpoint.writer import write_checkpoint
from specdec.testing.conformance import RoundConformance
from specdec_smollm2.geometry import Geometry
from specdec_smollm2.inventory import target_inventory

SMALL = Geometry(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
)


def write_small(directory, seed=3):
    """Weights large enough that every layer and position matters."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for spec in target_inventory(SMALL).expand():
        values = torch.randn(spec.shape, generator=generator)
        tensors[spec.name] = 1 + 0.2 * values if len(spec.shape) == 1 else values * spec.shape[-1] ** -0.5
    fields = {item.name: getattr(SMALL, item.name) for item in SMALL.__attrs_attrs__}
    return write_checkpoint(directory, tensors, {"model_type": "llama", "hidden_act": "silu", **fields})


@pytest.mark.slow
class TestSmollm2(RoundConformance):
    """Every standard test."""

    recipe = "smollm2-135m"
    draft_lag = 0
    # tokens are placed, not drawn from logits, and nothing is read of what the target computed
    proposals = "placed"
    reads_feedback = False

    @classmethod
    def checkpoint(cls, tmp_path_factory):
        return write_small(tmp_path_factory.mktemp("small"))
