"""Totals and names of the real-size inventory in every storage of the experts, and the tiny one."""

import subprocess
import sys
from math import prod

import pytest
from attrs import evolve

from specdec.errors import DeclarationError
from specdec.tensor_names import canonical_name
from specdec_glm53.geometry import REAL, TINY
from specdec_glm53.inventory import EXPERT_STORAGES, inventories, mtp_inventory, target_inventory

LAYER = "model.language_model.layers."
#: The vision tower, which no inventory holds.
VISION = (347, 1_127_254_016)


def totals(inventory, *, experts):
    groups = [group for group in inventory.groups if (".experts." in group.name) is experts]
    return sum(group.count for group in groups), sum(group.bytes for group in groups)


@pytest.mark.parametrize("storage", EXPERT_STORAGES)
def test_dense_target_totals_do_not_depend_on_the_experts(storage):
    assert totals(target_inventory(REAL, storage), experts=False) == (1_246, 17_842_600_184)


@pytest.mark.parametrize(
    ("storage", "tensors", "size"),
    [
        ("nvfp4", 145_152, 171_228_556_800),
        ("nvfp4_weights", 108_864, 171_228_556_800 - 36_288 * 4),
        ("nvfp4_csf", 145_152 + 36_288, 161_814_965_760),
        ("nvfp4_csf_weights", 108_864 + 36_288, 161_814_965_760 - 36_288 * 4),
        ("bfloat16", 36_288, 36_288 * 2048 * 4096 * 2),
    ],
)
def test_routed_expert_totals(storage, tensors, size):
    assert totals(target_inventory(REAL, storage), experts=True) == (tensors, size)


def test_mtp_totals():
    inventory = mtp_inventory(REAL)
    assert (inventory.count, inventory.bytes) == (2_617, 4_446_537_728)
    assert totals(inventory, experts=False) == (25, 369_670_784)
    with_scales = mtp_inventory(REAL, "nvfp4")
    assert (with_scales.count, with_scales.bytes) == (3_481, 4_446_541_184)
    assert mtp_inventory(REAL, "bfloat16").count == 889
    assert mtp_inventory(evolve(REAL, num_nextn_predict_layers=0)).count == 0


@pytest.mark.parametrize(
    ("storage", "tensors", "size"),
    [("nvfp4", 149_362, 194_644_948_728), ("nvfp4_csf", 185_650, 185_231_357_688)],
)
def test_whole_checkpoint_totals(storage, tensors, size):
    parts = target_inventory(REAL, storage), mtp_inventory(REAL)
    assert sum(part.count for part in parts) + VISION[0] == tensors
    assert sum(part.bytes for part in parts) + VISION[1] == size


def test_without_a_checkpoint_the_recipe_decides():
    target, drafter = inventories({"text_config": REAL.to_config()})
    assert target.groups == target_inventory(REAL, "nvfp4_csf").groups
    assert drafter.groups == mtp_inventory(REAL, "nvfp4_weights").groups


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("0.hc_attn_fn", (24, 16384), "bfloat16"),
        ("44.hc_ffn_base", (24,), "float32"),
        ("44.hc_ffn_scale", (3,), "float32"),
        ("44.self_attn.q_conv1d.weight", (8192, 1, 4), "bfloat16"),
        ("0.self_attn.A_log", (64,), "float32"),
        ("0.self_attn.dt_bias", (8192,), "float32"),
        ("0.self_attn.f_b_proj.weight", (8192, 128), "bfloat16"),
        ("0.self_attn.o_proj.weight", (4096, 8192), "bfloat16"),
        ("3.self_attn.o_proj.weight", (4096, 16384), "bfloat16"),
        ("3.self_attn.kv_b_proj.weight", (32768, 512), "bfloat16"),
        ("43.self_attn.indexer.k_norm.bias", (128,), "bfloat16"),
        ("43.self_attn.indexer.index_kpool_compress_gate", (128, 4096), "bfloat16"),
        ("2.mlp.down_proj.weight", (4096, 12288), "bfloat16"),
        ("3.mlp.gate.e_score_correction_bias", (288,), "float32"),
        ("3.mlp.shared_experts.up_proj.weight", (2048, 4096), "bfloat16"),
        ("44.mlp.experts.287.gate_proj.weight", (2048, 2048), "uint8"),
        ("44.mlp.experts.287.gate_proj.weight_scale.nvfp4_csf_fixed", (128, 2064), "uint8"),
        ("3.mlp.experts.0.down_proj.weight_scale.nvfp4_csf_fixed", (256, 1040), "uint8"),
        ("3.mlp.experts.0.down_proj.weight_scale.nvfp4_csf_exceptions", (0,), "uint32"),
        ("3.mlp.experts.0.down_proj.input_scale", (), "float32"),
    ],
)
def test_single_target_tensors(name, shape, dtype):
    spec = target_inventory(REAL).lookup(LAYER + name)
    assert spec is not None and (spec.shape, spec.dtype) == (shape, dtype)
    assert spec.any_length == name.endswith("exceptions")


@pytest.mark.parametrize(
    ("name", "shape", "size"),
    [
        ("45.eh_proj.weight", (4096, 8192), 67_108_864),
        ("45.shared_head.norm.weight", (4096,), 8_192),
        ("45.self_attn.indexer.wq_b.weight", (4096, 1536), 12_582_912),
        ("45.self_attn.indexer.index_kpool_compress_ape", (4, 128), 1_024),
        ("45.mlp.gate.weight", (288, 4096), 2_359_296),
        ("45.mlp.experts.9.up_proj.weight_scale", (2048, 256), 524_288),
        ("45.mlp.experts.9.down_proj.weight_scale_2", (), 4),
    ],
)
def test_single_mtp_tensors(name, shape, size):
    spec = mtp_inventory(REAL).lookup(LAYER + name)
    assert spec is not None and (spec.shape, spec.bytes) == (shape, size)


@pytest.mark.parametrize(
    "name",
    [
        "0.self_attn.kv_b_proj.weight",  # a linear layer
        "3.self_attn.A_log",  # an indexed layer
        "2.mlp.gate.weight",  # a dense layer
        "3.mlp.up_proj.weight",  # a sparse one
        "45.hc_attn_fn",
        "45.embed_tokens.weight",
        "45.shared_head.head.weight",
        "45.mlp.experts.0.up_proj.input_scale",
        "45.mlp.experts.288.up_proj.weight",
        "46.enorm.weight",
    ],
)
def test_tensors_that_do_not_exist(name):
    assert target_inventory(REAL).lookup(LAYER + name) is None
    assert mtp_inventory(REAL).lookup(LAYER + name) is None


def test_parameters_of_the_tiny_model():
    # the selection bias of a router is a buffer, not a parameter
    def parameters(inventory):
        groups = [group for group in inventory.groups if not group.name.endswith("e_score_correction_bias")]
        return sum(group.count * prod(group.shape) for group in groups)

    assert parameters(target_inventory(TINY, "bfloat16")) == 3_366_498
    assert parameters(mtp_inventory(TINY, "bfloat16")) == 455_104


def test_tiny_target_equals_the_tensors_that_another_implementation_writes(tmp_path):
    torch = pytest.importorskip("torch")
    configuration = pytest.importorskip("transformers.models.glm5_next.configuration_glm5_next")
    modeling = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
    from specdec.checkpoint import Checkpoint

    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "patch_size": 14}
    vision |= {"image_size": 28, "out_hidden_size": 128, "projection_intermediate_size": 64}
    tokens = ("image_token_id", "video_token_id", "image_start_token_id", "image_end_token_id")
    tokens += ("video_start_token_id", "video_end_token_id")
    config = configuration.Glm5NextConfig(
        text_config=TINY.to_config(), vision_config=vision, **{key: 500 + n for n, key in enumerate(tokens)}
    )
    modeling.Glm5NextForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(tmp_path)
    with Checkpoint.open(tmp_path, rename=canonical_name) as checkpoint:
        theirs = {name: checkpoint.stored(name).shape for name in checkpoint.names if ".visual." not in name}
    assert theirs == {spec.name: spec.shape for spec in target_inventory(TINY, "bfloat16").expand()}


def test_refusals():
    with pytest.raises(DeclarationError, match="nvfp4_csf_weights"):
        target_inventory(TINY, "int4")
    with pytest.raises(DeclarationError, match="multiples of 16, got 128, 24"):
        mtp_inventory(evolve(TINY, moe_intermediate_size=24))
    with pytest.raises(DeclarationError, match="multiples of 32, got 128, 48"):
        target_inventory(evolve(TINY, moe_intermediate_size=48))


def test_declaring_both_inventories_imports_no_torch():
    code = (
        "import sys; from specdec_glm53 import geometry, inventory, recipe, plugin; "
        "inventory.target_inventory(geometry.REAL); inventory.mtp_inventory(geometry.REAL); "
        "assert not {'torch', 'numpy', 'safetensors'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
