"""Totals and names of the real-size inventory as published, and of the tiny one."""

import subprocess
import sys

import pytest
from attrs import evolve

from specdec.errors import DeclarationError
from specdec_deepseek_v41.geometry import REAL, TINY
from specdec_deepseek_v41.inventory import (
    COMPRESSED_IDS,
    PLAIN,
    StoredForm,
    dspark_inventory,
    inventories,
    target_inventory,
)
from specdec_deepseek_v41.recipe import RECIPE

#: The vision tower, which no inventory holds, and the entries of the published index.
VISION, INDEX = 266, 96_085


def totals(inventory, chosen):
    groups = [group for group in inventory.groups if chosen(group.name)]
    return sum(group.count for group in groups), sum(group.bytes for group in groups)


def test_totals_by_group():
    target, drafter = target_inventory(REAL), dspark_inventory(REAL)
    experts = lambda name: ".experts." in name and "shared" not in name  # noqa: E731
    assert totals(target, experts) == (92_160, 288_777_830_400)
    assert totals(target, lambda name: "engram.embed." in name) == (4, 202_758_032_400)
    assert totals(target, lambda name: "engram." in name and "embed." not in name) == (8, 315_043_840)
    assert totals(target, lambda name: "engram." not in name and not experts(name)) == (1_246, 9_531_704_768)
    assert totals(drafter, experts) == (2_304, 7_219_445_760)
    assert totals(drafter, lambda name: not experts(name)) == (97, 713_428_872)


def test_totals_of_the_parts_and_of_the_text_model():
    target, drafter = target_inventory(REAL), dspark_inventory(REAL)
    assert (drafter.count, drafter.bytes) == (2_401, 7_932_874_632)
    assert (target.count, target.bytes) == (93_363 + 55, 298_227_700_160 + 203_154_911_248)
    assert (target.count + drafter.count, target.bytes + drafter.bytes) == (95_819, 509_315_486_040)
    assert target.count + drafter.count + VISION == INDEX
    for name, inventory in (("target_inventory", target), ("drafter_inventory", drafter)):
        stated = RECIPE.source_of(name)
        assert f"{inventory.count:,}" in stated and f"{inventory.bytes:,}" in stated


def test_other_names_of_the_same_bytes_change_no_total():
    form = StoredForm(codes="uint8", scales="uint8")
    for build in (target_inventory, dspark_inventory):
        published, other = build(REAL), build(REAL, form)
        assert (published.count, published.bytes) == (other.count, other.bytes)
        assert {group.dtype for group in other.groups} == {"bfloat16", "float32", "float8_e4m3fn", "uint8"}


FP8, FP4, SCALE, BF16, F32 = "float8_e4m3fn", "int8", "float8_e8m0fnu", "bfloat16", "float32"


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "count"),
    [
        ("embed.weight", (129280, 5120), BF16, 1),
        ("head.weight", (129280, 5120), BF16, 1),
        ("norm.weight", (5120,), BF16, 1),
        ("layers.{l}.attn.attn_sink", (64,), F32, 40),
        ("layers.{l}.attn.wq_a.weight", (1280, 5120), FP8, 40),
        ("layers.{l}.attn.wq_a.scale", (40, 160), SCALE, 40),
        ("layers.{l}.attn.wq_b.weight", (32768, 1280), FP8, 40),
        ("layers.{l}.attn.wq_b.scale", (1024, 40), SCALE, 40),
        ("layers.{l}.attn.wkv.weight", (512, 5120), FP8, 40),
        ("layers.{l}.attn.wo_a.weight", (8192, 4096), FP8, 40),
        ("layers.{l}.attn.wo_a.scale", (256, 128), SCALE, 40),
        ("layers.{l}.attn.wo_b.weight", (5120, 8192), FP8, 40),
        ("layers.{l}.hc_attn_fn", (24, 20480), F32, 40),
        ("layers.{l}.hc_ffn_scale", (3,), F32, 40),
        ("layers.{l}.ffn.gate.weight", (384, 5120), BF16, 40),
        ("layers.{l}.ffn.gate.bias_vl", (384,), F32, 40),
        ("layers.{l}.ffn.experts.{e}.w1.weight", (2304, 2560), FP4, 15360),
        ("layers.{l}.ffn.experts.{e}.w2.weight", (5120, 1152), FP4, 15360),
        ("layers.{l}.ffn.experts.{e}.w2.scale", (5120, 72), SCALE, 15360),
        ("layers.{l}.ffn.experts.{e}.w3.scale", (2304, 160), SCALE, 15360),
        ("layers.{l}.ffn.shared_experts.w2.weight", (5120, 2304), FP8, 40),
        ("layers.{l}.ffn.shared_experts.w2.scale", (160, 72), SCALE, 40),
        ("layers.1.engram.embed.weight", (384006168, 256), FP8, 1),
        ("layers.1.engram.embed.scale", (384006168, 8), SCALE, 1),
        ("layers.14.engram.embed.weight", (384016682, 256), FP8, 1),
        ("layers.{l}.engram.wkv.weight", (25600, 6144), FP8, 2),
        ("layers.{l}.engram.wkv.scale", (800, 192), SCALE, 2),
        ("layers.{l}.engram.q_weight", (4, 5120), BF16, 2),
        ("layers.{l}.attn.compressor.wkv.weight", (512, 5120), BF16, 4),
        ("layers.{l}.attn.compressor.wgate.weight", (512, 5120), BF16, 3),
        ("layers.{l}.attn.indexer.wq_b.weight", (4096, 1280), FP8, 8),
        ("layers.{l}.attn.indexer.weights_proj.weight", (32, 5120), BF16, 8),
        ("layers.{l}.attn.indexer.wk.weight", (128, 512), BF16, 4),
        ("mtp.{s}.attn.wq_b.scale", (1024, 40), SCALE, 3),
        ("mtp.{s}.ffn.gate.weight", (128, 5120), BF16, 3),
        ("mtp.{s}.ffn.experts.{e}.w1.weight", (2304, 2560), FP4, 384),
        ("mtp.0.main_proj.weight", (5120, 15360), FP8, 1),
        ("mtp.0.main_proj.scale", (160, 480), SCALE, 1),
        ("mtp.2.norm.weight", (5120,), BF16, 1),
        ("mtp.2.markov_head.embed.weight", (129280, 256), BF16, 1),
        ("mtp.2.confidence_head.proj.weight", (1, 5376), BF16, 1),
    ],
)
def test_groups_of_the_published_checkpoint(name, shape, dtype, count):
    inventory = dspark_inventory(REAL) if name.startswith("mtp.") else target_inventory(REAL)
    (group,) = [group for group in inventory.groups if group.name == name]
    assert (group.shape, group.dtype, group.count) == (shape, dtype, count)


@pytest.mark.parametrize(
    "name",
    [
        "layers.3.attn.compressor.wkv.weight",  # reads the rows of layer 2
        "layers.20.attn.compressor.wgate.weight",  # its groups have one member
        "layers.24.attn.indexer.wk.weight",  # selects with the keys of layer 20
        "layers.25.attn.indexer.wq_b.weight",
        "layers.0.engram.q_weight",
        "layers.40.attn_norm.weight",
        "layers.0.ffn.experts.384.w1.weight",
        "mtp.0.ffn.experts.128.w1.weight",
        "mtp.1.main_proj.weight",
        "mtp.0.norm.weight",
        "mtp.3.attn_norm.weight",
        "hc_head_fn",
        "mtp.0.embed.weight",
        COMPRESSED_IDS,
    ],
)
def test_tensors_that_do_not_exist(name):
    assert target_inventory(REAL).lookup(name) is None and dspark_inventory(REAL).lookup(name) is None


def test_the_tiny_model_is_plain():
    target, drafter = target_inventory(TINY, PLAIN), dspark_inventory(TINY, PLAIN)
    assert target.count + drafter.count == 588
    assert sum(spec.numel for part in (target, drafter) for spec in part.expand()) == 2_811_006
    stored = target_inventory(TINY, evolve(PLAIN, compressed_ids=512)).lookup(COMPRESSED_IDS)
    assert (stored.shape, stored.dtype) == ((512,), "int32")


def test_without_a_checkpoint_the_published_form_is_declared():
    target, drafter = inventories({"text_config": REAL.to_config()})
    assert target.groups == RECIPE.target_inventory.groups and drafter.groups == RECIPE.drafter_inventory.groups


def test_refusals():
    with pytest.raises(DeclarationError, match="codes is 'int4', allowed: int8, uint8"):
        StoredForm(codes="int4")
    with pytest.raises(DeclarationError, match="multiples of 32, got 24"):
        dspark_inventory(evolve(TINY, moe_intermediate_size=24))


def test_declaring_both_inventories_imports_no_torch():
    code = (
        "import sys; from specdec_deepseek_v41 import geometry, inventory, recipe, plugin; "
        "inventory.target_inventory(geometry.REAL); inventory.dspark_inventory(geometry.REAL); "
        "assert not {'torch', 'numpy', 'safetensors', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
