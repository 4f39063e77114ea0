"""Totals and names of the real-size inventory, and the tiny one."""

import subprocess
import sys
from collections import Counter
from math import prod

import pytest
from attrs import evolve

from specdec.errors import DeclarationError
from specdec.tensor_names import canonical_name
from specdec_qwen38.geometry import REAL, TINY
from specdec_qwen38.inventory import mtp_inventory, target_inventory

LAYER = "model.language_model.layers."


def is_dense(group):
    return ".experts." not in group.name and ".ple_embedding." not in group.name


def test_mtp_totals_at_real_size():
    inventory = mtp_inventory(REAL)
    assert (inventory.count, inventory.bytes) == (4_637, 1_596_720_640)
    specs = list(inventory.expand())
    dense = [spec for spec in specs if spec.dtype == "bfloat16"]
    experts = [spec for spec in specs if spec.dtype != "bfloat16"]
    assert (len(dense), sum(spec.bytes for spec in dense)) == (29, 181_136_896)
    assert (len(experts), sum(spec.bytes for spec in experts)) == (4_608, 1_415_583_744)
    assert len({spec.name for spec in specs}) == 4_637
    assert not any("input_scale" in spec.name for spec in specs)


@pytest.mark.parametrize(
    ("name", "shape", "size"),
    [
        ("mtp.pre_fc_norm_hidden.weight", (10240,), 20_480),
        ("mtp.fc_hidden.weight", (2560, 2560), 13_107_200),
        ("mtp.hyper_connection_mixer.input_mix_weight_down.weight", (320, 10240), 6_553_600),
        ("mtp.layers.0.attn_hyper_connection.block_inject_weight.weight", (4, 10240), 81_920),
        ("mtp.layers.0.self_attn.q_proj.weight", (12288, 2560), 62_914_560),
        ("mtp.layers.0.self_attn.o_proj.weight", (2560, 6144), 31_457_280),
        ("mtp.layers.0.self_attn.indexer.index_qk_proj.weight", (640, 2560), 3_276_800),
        ("mtp.layers.0.mlp.gate.weight", (512, 2560), 2_621_440),
        ("mtp.layers.0.mlp.shared_expert_gate.weight", (1, 2560), 5_120),
        ("mtp.layers.0.mlp.experts.511.gate_proj.weight", (640, 1280), 819_200),
        ("mtp.layers.0.mlp.experts.0.down_proj.weight", (2560, 320), 819_200),
        ("mtp.layers.0.mlp.experts.7.down_proj.weight_scale", (2560, 40), 102_400),
        ("mtp.layers.0.mlp.experts.7.up_proj.weight_scale_2", (), 4),
    ],
)
def test_single_mtp_tensors(name, shape, size):
    spec = mtp_inventory(REAL).lookup(name)
    assert spec is not None and (spec.shape, spec.bytes) == (shape, size)


@pytest.mark.parametrize(
    "name",
    [
        "mtp.hyper_connection_mixer.block_inject_weight.weight",  # final mixers have none
        "mtp.layers.48.self_attn.q_proj.weight",  # an alias of metadata, never stored
        "mtp.layers.0.mlp.experts.512.up_proj.weight",
        "mtp.layers.0.mlp.experts.0.up_proj.input_scale",
        "mtp.embed_tokens.weight",
        "mtp.norm.weight",
    ],
)
def test_tensors_the_mtp_layer_has_not_got(name):
    assert mtp_inventory(REAL).lookup(name) is None


def test_dense_target_totals_at_real_size():
    dense = [group for group in target_inventory(REAL).groups if is_dense(group)]
    assert sum(group.count for group in dense) == 1_067
    assert sum(group.bytes for group in dense) == 9_895_397_120
    assert {group.dtype for group in dense} == {"bfloat16"}


def test_target_counts_of_the_nvfp4_release():
    inventory = target_inventory(REAL)
    # The audited release has 296,444 tensors without MTP, 333 of them vision.
    assert inventory.count == 296_444 - 333
    kinds = Counter()
    for group in inventory.groups:
        kind = "dense" if is_dense(group) else "experts" if ".experts." in group.name else group.name.rsplit(".", 2)[-2]
        kinds[kind] += group.count
    assert kinds["experts"] == 294_912 and kinds["shard_{s}"] == 128
    table = sum(group.bytes for group in inventory.groups if "shard_" in group.name)
    assert table == 320_001_536 * 160  # the 51.2 GB table


def test_fused_bfloat16_release():
    inventory = target_inventory(REAL, experts="bfloat16_fused", ple="bfloat16")
    spec = inventory.lookup(LAYER + "47.mlp.experts.gate_up_proj")
    assert spec is not None and (spec.shape, spec.dtype) == ((512, 1280, 2560), "bfloat16")
    assert inventory.lookup(LAYER + "0.mlp.experts.down_proj").shape == (512, 2560, 640)
    assert inventory.lookup(LAYER + "1.ple.ple_embedding.ngram_embedding.shard_127.weight").dtype == "bfloat16"
    assert inventory.lookup(LAYER + "1.ple.ple_embedding.ngram_embedding.weight_scale") is None
    assert inventory.lookup(LAYER + "0.mlp.experts.0.up_proj.weight") is None


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("0.linear_attn.in_proj_qkv.weight", (10240, 2560), "bfloat16"),
        ("0.linear_attn.conv1d.weight", (10240, 1, 4), "bfloat16"),
        ("46.linear_attn.A_log", (48,), "bfloat16"),
        ("47.self_attn.q_proj.weight", (12288, 2560), "bfloat16"),
        ("1.ple.key_proj.weight", (10240, 2560), "bfloat16"),
        ("1.ple.ple_embedding.layer_multipliers", (3,), "int64"),
        ("1.ple.ple_embedding.ngram_embedding.shard_0.weight", (2500012, 160), "float8_e4m3fn"),
        ("1.ple.ple_embedding.ngram_embedding.weight_scale", (1,), "bfloat16"),
        ("5.mlp.experts.9.down_proj.input_scale", (), "float32"),
    ],
)
def test_single_target_tensors(name, shape, dtype):
    spec = target_inventory(REAL).lookup(LAYER + name)
    assert spec is not None and (spec.shape, spec.dtype) == (shape, dtype)


def test_layers_have_only_their_own_kind():
    inventory = target_inventory(REAL)
    assert inventory.lookup(LAYER + "3.linear_attn.A_log") is None
    assert inventory.lookup(LAYER + "0.self_attn.q_proj.weight") is None
    assert inventory.lookup(LAYER + "2.ple.key_proj.weight") is None


def test_tiny_totals():
    drafter = mtp_inventory(TINY)
    assert (drafter.count, drafter.bytes) == (173, 516_992)
    target = target_inventory(TINY, experts="bfloat16_fused", ple="bfloat16")
    weights = [group for group in target.groups if group.dtype != "int64"]
    assert sum(group.count * prod(group.shape) for group in weights) == 1_632_740


def test_tiny_target_equals_the_tensors_of_another_implementation():
    torch = pytest.importorskip("torch")
    configuration = pytest.importorskip("transformers.models.qwen4_exp.configuration_qwen4_exp")
    modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    with torch.device("meta"):
        model = modeling.Qwen4ExpForCausalLM(configuration.Qwen4ExpTextConfig(**TINY.to_config()))
    theirs = {canonical_name(name): tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    inventory = target_inventory(TINY, experts="bfloat16_fused", ple="bfloat16")
    ours = {spec.name: spec.shape for spec in inventory.expand()}
    # In memory that class joins the shards of the n-gram table.
    table = [name for name in theirs if name.endswith("ngram_embedding.weight")]
    assert [theirs.pop(name) for name in table] == [(4064, 16)]
    assert {name: shape for name, shape in ours.items() if ".shard_" not in name} == theirs


def test_a_model_without_mtp_has_an_empty_drafter():
    assert mtp_inventory(evolve(TINY, mtp_num_hidden_layers=0)).count == 0


def test_refusals():
    with pytest.raises(DeclarationError, match="bfloat16_fused"):
        target_inventory(TINY, experts="int4")
    with pytest.raises(DeclarationError, match="float8"):
        target_inventory(TINY, ple="int8")
    with pytest.raises(DeclarationError, match="multiples of 16"):
        mtp_inventory(evolve(TINY, moe_intermediate_size=24))


@pytest.mark.parametrize(
    ("stored", "official"),
    [
        ("model.language_model.layers.0.mlp.gate.weight", LAYER + "0.mlp.gate.weight"),
        ("language_model.model.layers.0.mlp.gate.weight", LAYER + "0.mlp.gate.weight"),
        ("model.layers.0.mlp.gate.weight", LAYER + "0.mlp.gate.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("mtp.fc_hidden.weight", "mtp.fc_hidden.weight"),
        ("model.visual.patch_embed.proj.weight", "model.visual.patch_embed.proj.weight"),
    ],
)
def test_canonical_names(stored, official):
    assert canonical_name(stored) == official


def test_declaring_both_inventories_imports_no_torch():
    code = (
        "import sys; from specdec_qwen38 import geometry, inventory; "
        "inventory.target_inventory(geometry.REAL); inventory.mtp_inventory(geometry.REAL); "
        "assert not {'torch', 'numpy', 'safetensors'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
