"""``specdec inspect`` on sparse full-size checkpoints in both codings of the scales, and on small ones in every storage."""

from types import SimpleNamespace

import pytest
from attrs import evolve
from sparse_checkpoint import entries, inspect_alone, write_sparse

from specdec.checkpoint import Checkpoint
from specdec.checkpoint.inspect import inspect_checkpoint
from specdec.cli import inspect as command
from specdec.cli.main import main
from specdec_glm53.geometry import REAL, TINY
from specdec_glm53.inventory import EXPERT_STORAGES, mtp_inventory, target_inventory
from specdec_glm53.recipe import RECIPE

VISION = [("model.visual.blocks.0.attn.qkv.weight", (3072, 1024), "bfloat16", 6_291_456)]
DENSE = (1_246, 17_842_600_184)
#: Exception words that every coded matrix is given here.
WORDS = 3


def listed(inventory):
    """Entries for a file, with a length for the lists."""
    return [
        (name, (WORDS,), dtype, 4 * WORDS) if dtype == "uint32" else (name, shape, dtype, size)
        for name, shape, dtype, size in entries(inventory)
    ]


def config(geometry):
    return {"model_type": "glm5_next", "text_config": geometry.to_config()}


@pytest.mark.parametrize(
    ("target", "experts", "drafter", "drafter_totals"),
    [
        ("nvfp4", (145_152, 171_228_556_800), "nvfp4_weights", (2_617, 4_446_537_728)),
        (
            "nvfp4_csf",
            (145_152 + 36_288, 161_814_965_760 + 36_288 * 4 * WORDS),
            "nvfp4",  # with the input_scale that reading ignores
            (3_481, 4_446_541_184),
        ),
    ],
)
def test_a_sparse_full_size_checkpoint_is_checked_by_its_headers(tmp_path, target, experts, drafter, drafter_totals):
    tensors = listed(target_inventory(REAL, target))
    half = len(tensors) // 2
    directory = tmp_path / "full"
    shards = [tensors[:half], tensors[half:] + VISION, listed(mtp_inventory(REAL, drafter))]
    write_sparse(directory, shards, config(REAL))
    files = list(directory.glob("*.safetensors"))
    assert sum(file.stat().st_size for file in files) > 180e9
    if sum(file.stat().st_blocks for file in files) * 512 > 1e9:
        pytest.skip("this file system has no sparse files")

    seen = inspect_alone(directory, "specdec_glm53.recipe")
    result = seen["result"]
    assert seen["code"] == 0 and result["ok"] and result["recipe"] == "glm-5.3-flash"
    expected = {"target": (DENSE[0] + experts[0], DENSE[1] + experts[1]), "drafter": drafter_totals}
    for name, totals in expected.items():
        part = result["parts"][name]
        assert (part["found_count"], part["found_bytes"]) == totals
        assert (part["expected_count"], part["expected_bytes"]) == totals
    assert result["other"] == {"count": 1, "bytes": 6_291_456}
    assert seen["heavy"] == []
    assert seen["seconds"] < 60


@pytest.mark.parametrize("drafter", ["nvfp4_weights", "nvfp4", "bfloat16"])
@pytest.mark.parametrize("target", EXPERT_STORAGES)
def test_every_storage_is_recognised_under_every_prefix(tmp_path, target, drafter):
    tensors = listed(target_inventory(TINY, target)) + listed(mtp_inventory(TINY, drafter))
    names = {
        "model.language_model.": "model.language_model.",
        "language_model.model.": "language_model.",
        "model.": "",
    }
    for number, (prefix, head) in enumerate(names.items()):
        renamed = [
            (
                name.replace("model.language_model.", prefix, 1)
                if name.startswith("model.")
                else name.replace("lm_head", "language_model.lm_head" if head == "language_model." else "lm_head"),
                *rest,
            )
            for name, *rest in tensors
        ]
        write_sparse(tmp_path / str(number), [renamed], config(TINY))
        with Checkpoint.open(tmp_path / str(number)) as checkpoint:
            result = inspect_checkpoint(checkpoint, RECIPE)
        assert result.ok, [part.validation.summary() for part in result.parts]
        assert sum(part.validation.found_count for part in result.parts) == len(tensors)


def test_the_official_fp8_storage_of_dense_weights_and_experts_is_accepted(tmp_path):
    """Float weights may be stored in blocks of 128 with an inverse scale, as the official release has them."""
    tensors = []
    for name, shape, dtype, size in listed(target_inventory(TINY, "bfloat16")) + listed(
        mtp_inventory(TINY, "bfloat16")
    ):
        if ".mlp." in name and name.endswith("_proj.weight"):
            blocks = tuple(-(-extent // 128) for extent in shape)
            tensors.append((name, shape, "float8_e4m3fn", size // 2))
            tensors.append((f"{name}_scale_inv", blocks, "float32", 4 * blocks[0] * blocks[1]))
        else:
            tensors.append((name, shape, dtype, size))
    write_sparse(tmp_path / "fp8", [tensors], config(TINY))
    with Checkpoint.open(tmp_path / "fp8") as checkpoint:
        result = inspect_checkpoint(checkpoint, RECIPE)
    assert result.ok, [part.validation.summary() for part in result.parts]


def test_faults_are_listed_by_part_with_exit_code_4(tmp_path, monkeypatch, capsys):
    book = SimpleNamespace(discovery=SimpleNamespace(recipes=(RECIPE,)))
    monkeypatch.setattr(command, "recipe_book", lambda: book)
    layer = "model.language_model.layers."
    lost, square = f"{layer}9.eh_proj.weight", f"{layer}3.mlp.experts.1.up_proj.weight_scale.nvfp4_csf_exceptions"
    tensors = [
        (name, (1, 3), dtype, 12) if name == square else (name, shape, dtype, size)
        for name, shape, dtype, size in listed(target_inventory(TINY)) + listed(mtp_inventory(TINY))
        if name != lost
    ]
    tensors.append((f"{layer}9.shared_head.head.weight", (512, 128), "bfloat16", 131_072))
    write_sparse(tmp_path / "small", [tensors], config(TINY))
    assert main(["inspect", str(tmp_path / "small")]) == 4
    text = capsys.readouterr().out
    assert f"drafter: 1 missing\n  {lost}" in text
    assert f"drafter: 1 unexpected\n  {layer}9.shared_head.head.weight" in text
    assert f"target: 1 mismatched\n  {square}: expected uint32 [any length], found uint32 [1, 3]" in text


def test_a_model_without_an_mtp_layer(tmp_path):
    geometry = evolve(TINY, num_nextn_predict_layers=0)
    write_sparse(tmp_path / "plain", [listed(target_inventory(geometry))], config(geometry))
    with Checkpoint.open(tmp_path / "plain") as checkpoint:
        result = inspect_checkpoint(checkpoint, RECIPE)
    assert result.ok and result.parts[1].validation.expected_count == 0
