"""``specdec inspect`` on a sparse full-size checkpoint, and on small ones in every form that loading reads."""

import pytest
import torch
from deepseek_models import random_tensors, write_published_checkpoint
from sparse_checkpoint import entries, inspect_alone, write_sparse

from specdec.checkpoint import Checkpoint
from specdec.checkpoint.inspect import inspect_checkpoint
from specdec.checkpoint.matrices import load_matrix
from specdec.checkpoint.storages import storage_of
from specdec_deepseek_v41.geometry import REAL, TINY
from specdec_deepseek_v41.inventory import PLAIN, PUBLISHED, StoredForm, dspark_inventory, target_inventory
from specdec_deepseek_v41.recipe import RECIPE

#: Stands for the vision tower.
VISION = [("vision.blocks.0.attn.qkv.weight", (3072, 1024), "bfloat16", 6_291_456)]
TOTALS = {"target": (93_418, 501_382_611_408), "drafter": (2_401, 7_932_874_632)}


def config(geometry):
    return {"model_type": "deepseek_v41", "eos_token_id": 1, "text_config": geometry.to_config()}


@pytest.mark.parametrize("form", [PUBLISHED, StoredForm(codes="uint8", scales="uint8")], ids=["int8", "uint8"])
def test_a_sparse_full_size_checkpoint_is_checked_by_its_headers(tmp_path, form):
    tensors = entries(target_inventory(REAL, form))
    half = len(tensors) // 2
    directory = tmp_path / "full"
    shards = [tensors[:half], tensors[half:] + VISION, entries(dspark_inventory(REAL, form))]
    write_sparse(directory, shards, config(REAL))
    files = list(directory.glob("*.safetensors"))
    assert sum(file.stat().st_size for file in files) > 509e9
    if sum(file.stat().st_blocks for file in files) * 512 > 1e9:
        pytest.skip("this file system has no sparse files")

    seen = inspect_alone(directory, "specdec_deepseek_v41.recipe")
    result = seen["result"]
    assert seen["code"] == 0 and result["ok"] and result["recipe"] == "deepseek-v4.1-flash"
    for name, totals in TOTALS.items():
        part = result["parts"][name]
        assert (part["found_count"], part["found_bytes"]) == totals
        assert (part["expected_count"], part["expected_bytes"]) == totals
    assert result["other"] == {"count": 1, "bytes": 6_291_456}
    assert seen["heavy"] == []
    assert seen["seconds"] < 60


def inspected(directory, tensors):
    write_sparse(directory, [tensors], config(TINY))
    with Checkpoint.open(directory) as checkpoint:
        return inspect_checkpoint(checkpoint, RECIPE)


FORMS = [PUBLISHED, PLAIN, StoredForm(codes="uint8"), StoredForm(scales="uint8", image_bias=False, compressed_ids=512)]


@pytest.mark.parametrize("drafter", FORMS)
@pytest.mark.parametrize("target", FORMS)
def test_every_form_is_recognised(tmp_path, target, drafter):
    tensors = entries(target_inventory(TINY, target)) + entries(dspark_inventory(TINY, drafter))
    result = inspected(tmp_path / "model", tensors)
    assert result.ok, [part.validation.summary() for part in result.parts]
    assert sum(part.validation.found_count for part in result.parts) == len(tensors)
    assert result.other_count == 0


def test_a_checkpoint_in_the_storage_of_the_release_has_the_values_of_the_plain_one(tmp_path):
    plain = random_tensors(3)
    with Checkpoint.open(write_published_checkpoint(tmp_path / "model", 3)) as checkpoint:
        result = inspect_checkpoint(checkpoint, RECIPE)
        assert result.ok, [part.validation.summary() for part in result.parts]
        kinds = set()
        for name, values in plain.items():
            if not name.endswith("weight") or values.ndim < 2:
                continue
            kind = storage_of(checkpoint, name)
            kinds.add(kind)
            # half a step of three mantissa bits, or of one, relative to the largest value of a block
            step = {"plain": 2.0**-8, "mxfp8": 1 / 16, "fp8_32": 1 / 16, "mxfp4": 1 / 4}[kind]
            loaded = load_matrix(checkpoint, name, torch.float32)
            assert (loaded - values).abs().max() <= step * values.abs().max()
            assert torch.nn.functional.cosine_similarity(loaded.flatten(), values.flatten(), dim=0) > 0.99
    assert kinds == {"plain", "mxfp8", "fp8_32", "mxfp4"}


def test_wider_floats_and_a_single_quantised_matrix_are_what_they_stand_for(tmp_path):
    tensors = []
    for name, shape, dtype, size in entries(target_inventory(TINY, PLAIN)) + entries(dspark_inventory(TINY, PLAIN)):
        if name == "layers.3.attn.wo_b.weight":
            tensors.append((name, shape, "float8_e4m3fn", size // 2))
            tensors.append(("layers.3.attn.wo_b.scale", (4, 2), "uint8", 8))
        else:
            tensors.append((name, shape, "float32", size * (2 if dtype == "bfloat16" else 1)))
    assert inspected(tmp_path / "model", tensors).ok


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("layers.7.attn.wkv.scale", "target"),
        ("layers.4.engram.embed.weight", "target"),
        ("layers.9.ffn.experts.7.w3.weight", "target"),
        ("mtp.1.ffn.experts.3.w2.scale", "drafter"),
        ("mtp.2.confidence_head.proj.weight", "drafter"),
    ],
)
def test_a_missing_or_misshapen_tensor_is_named(tmp_path, name, part):
    tensors = entries(target_inventory(TINY)) + entries(dspark_inventory(TINY))
    (index,) = [number for number, entry in enumerate(tensors) if entry[0] == name]
    _, shape, dtype, size = tensors[index]
    rest = tensors[:index] + tensors[index + 1 :]
    for number, damaged in enumerate((rest, [*rest, (name, (*shape[::-1], 1), dtype, size)])):
        result = inspected(tmp_path / str(number), damaged)
        wrong, right = sorted(result.parts, key=lambda item: item.validation.ok)
        assert (wrong.name, right.validation.ok, wrong.validation.ok) == (part, True, False)
        listed = wrong.validation.mismatched if number else wrong.validation.missing
        assert any(name in line for line in listed)


def test_a_stray_scale_is_unexpected(tmp_path):
    tensors = entries(target_inventory(TINY, PLAIN)) + entries(dspark_inventory(TINY, PLAIN))
    result = inspected(tmp_path / "model", [*tensors, ("layers.0.attn.wkv.scale", (2, 4), "uint8", 8)])
    assert not result.ok
