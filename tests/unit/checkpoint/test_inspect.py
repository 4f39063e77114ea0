"""``specdec inspect`` on a sparse full-size checkpoint, and on small ones with faults."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from attrs import evolve
from sparse_checkpoint import entries, inspect_alone, write_sparse

import specdec_qwen38
from specdec.checkpoint import Checkpoint
from specdec.checkpoint.inspect import inspect_checkpoint, recipe_for
from specdec.cli import inspect as command
from specdec.cli.main import main
from specdec.declaration import TensorGroup, TensorInventory
from specdec.errors import CheckpointError
from specdec_qwen38.geometry import REAL, TINY
from specdec_qwen38.inventory import mtp_inventory, target_inventory
from specdec_qwen38.recipe import RECIPE

VISION = [("model.visual.blocks.0.attn.qkv.weight", (3456, 1152), "bfloat16", 7_962_624)]


def use_recipes(monkeypatch, *recipes):
    named = {recipe.name: recipe for recipe in recipes}
    book = SimpleNamespace(recipe=named.__getitem__, discovery=SimpleNamespace(recipes=recipes))
    monkeypatch.setattr(command, "recipe_book", lambda: book)


SMALL = evolve(
    RECIPE,
    name="small",
    model_types=("small_type",),
    target_inventory=target_inventory(TINY),
    drafter_inventory=mtp_inventory(TINY),
    inventories=None,
)
SMALL_CONFIG = {"model_type": "small_type"}


def test_a_sparse_full_size_checkpoint_is_checked_by_its_headers(tmp_path):
    target, drafter = entries(target_inventory(REAL)), entries(mtp_inventory(REAL))
    half = len(target) // 2
    directory = tmp_path / "full"
    config = {"model_type": "qwen4_exp", "text_config": REAL.to_config()}
    described = write_sparse(directory, [target[:half], target[half:] + VISION, drafter], config)
    files = list(directory.glob("*.safetensors"))
    assert sum(file.stat().st_size for file in files) > 130e9
    if sum(file.stat().st_blocks for file in files) * 512 > 1e9:
        pytest.skip("this file system has no sparse files")

    seen = inspect_alone(directory, "specdec_qwen38.recipe")
    assert seen["code"] == 0 and seen["result"]["ok"] and seen["result"]["recipe"] == "qwen3.8-flash"
    parts = seen["result"]["parts"]
    assert (parts["drafter"]["found_count"], parts["drafter"]["found_bytes"]) == (4_637, 1_596_720_640)
    assert (parts["drafter"]["expected_count"], parts["drafter"]["expected_bytes"]) == (4_637, 1_596_720_640)
    assert parts["target"]["found_count"] == 296_111
    assert seen["result"]["other"] == {"count": 1, "bytes": 7_962_624}
    assert seen["heavy"] == []
    assert seen["read"] < described + 2_000_000  # headers, index, configuration, a few modules
    assert seen["seconds"] < 60  # about three seconds on one core; reading 130 GB would take minutes


def test_the_drafter_alone_is_found_complete_and_the_target_missing(tmp_path):
    write_sparse(
        tmp_path / "mtp", [entries(mtp_inventory(REAL))], {"model_type": "qwen4_exp", "text_config": REAL.to_config()}
    )
    with Checkpoint.open(tmp_path / "mtp") as checkpoint:
        result = inspect_checkpoint(checkpoint, RECIPE)
    target, drafter = (part.validation for part in result.parts)
    assert drafter.ok and drafter.found_bytes == 1_596_720_640
    assert not result.ok and target.missing_count == 296_111 and len(target.missing) == 10


def test_faults_are_listed_by_part_with_exit_code_4(tmp_path, monkeypatch, capsys):
    use_recipes(monkeypatch, SMALL)
    drafter = [entry for entry in entries(mtp_inventory(TINY)) if entry[0] != "mtp.fc_hidden.weight"]
    drafter[0] = (drafter[0][0], (64,), "bfloat16", 128)
    drafter.append(("mtp.layers.0.mlp.experts.0.up_proj.input_scale", (), "float32", 4))
    target = [*entries(target_inventory(TINY)), ("lm_head.bias", (512,), "bfloat16", 1024), *VISION]
    write_sparse(tmp_path / "small", [target, drafter], SMALL_CONFIG)

    assert main(["inspect", str(tmp_path / "small")]) == 4
    text = capsys.readouterr().out
    assert "drafter: 1 missing\n  mtp.fc_hidden.weight" in text
    assert "mtp.pre_fc_norm_embedding.weight: expected bfloat16 [128], found bfloat16 [64]" in text
    assert "drafter: 1 unexpected\n  mtp.layers.0.mlp.experts.0.up_proj.input_scale" in text
    assert "target: 1 unexpected\n  lm_head.bias" in text
    assert "other" in text and "7,962,624" in text

    assert main(["inspect", str(tmp_path / "small"), "--recipe", "small", "--json"]) == 4
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] is False and data["recipe"] == "small"
    assert data["parts"]["drafter"]["missing"] == ["mtp.fc_hidden.weight"]
    assert data["parts"]["target"]["mismatched_count"] == 0


def test_an_exact_checkpoint_is_ok(tmp_path, monkeypatch, capsys):
    use_recipes(monkeypatch, SMALL, RECIPE)
    shards = [entries(target_inventory(TINY)), entries(mtp_inventory(TINY))]
    write_sparse(tmp_path / "small", shards, SMALL_CONFIG)
    assert main(["inspect", str(tmp_path / "small")]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("drafter"))
    assert line.split() == ["drafter", "173", "173", "516,992", "516,992", "ok"]


def test_the_shipped_checkpoint_is_exact_at_its_own_sizes(capsys):
    assert main(["inspect", str(Path(specdec_qwen38.__file__).parent / "tiny")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    drafter = next(line for line in lines if line[:1] == ["drafter"])
    assert drafter == ["drafter", "173", "173", "516,992", "516,992", "ok"]
    assert next(line for line in lines if line[:1] == ["target"])[-1] == "ok"


def test_long_lists_say_how_many_follow(tmp_path, monkeypatch, capsys):
    use_recipes(monkeypatch, SMALL)
    write_sparse(tmp_path / "small", [entries(target_inventory(TINY))], SMALL_CONFIG)
    assert main(["inspect", str(tmp_path / "small")]) == 4
    text = capsys.readouterr().out
    assert "drafter: 173 missing" in text and "… and 163 more" in text


def test_a_drafter_inside_the_target_names_gets_its_own_tensors(tmp_path):
    """A drafter stored as one more layer of the stack: ``model.layers.2.`` beside ``model.layers.{0,1}.``"""

    def inventory(*groups):
        return TensorInventory(
            groups=tuple(
                TensorGroup(name=name, axes=axes, shape=(2,), dtype="float32", source="test") for name, axes in groups
            )
        )

    recipe = evolve(
        SMALL,
        target_inventory=inventory(("model.layers.{l}.w", (("l", 2),)), ("model.layers.2.shared", ()), ("head.w", ())),
        drafter_inventory=inventory(("model.layers.2.w", ()), ("model.layers.2.fc", ())),
        canonical_name=None,
    )
    names = [f"model.layers.{layer}.w" for layer in range(3)] + ["model.layers.2.shared", "model.layers.2.fc", "head.w"]
    names += ["model.layers.2.extra", "model.layers.7.w", "model.vision.w"]
    write_sparse(tmp_path / "model", [[(name, (2,), "float32", 8) for name in names]], SMALL_CONFIG)
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        result = inspect_checkpoint(checkpoint, recipe)
    target, drafter = (part.validation for part in result.parts)
    assert (target.found_count, target.missing_count, target.unexpected) == (5, 0, ("model.layers.7.w",))
    assert (drafter.found_count, drafter.missing_count, drafter.unexpected) == (3, 0, ("model.layers.2.extra",))
    assert (result.other_count, result.other_bytes) == (1, 8)


def test_damage_is_one_line_on_stderr(tmp_path, monkeypatch, capsys):
    use_recipes(monkeypatch, SMALL)
    write_sparse(tmp_path / "small", [entries(mtp_inventory(TINY))], SMALL_CONFIG)
    file = tmp_path / "small" / "part-0.safetensors"
    with file.open("r+b") as out:
        out.truncate(file.stat().st_size - 1)
    assert main(["inspect", str(tmp_path / "small")]) == 4
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert "part-0.safetensors" in captured.err and "truncated inside tensor" in captured.err
    assert main(["inspect", str(tmp_path / "absent")]) == 4
    assert "no such checkpoint directory; name a folder with config.json and safetensors" in capsys.readouterr().err


def test_the_recipe_is_found_by_either_model_type(tmp_path):
    def choose(config, *recipes):
        write_sparse(tmp_path / str(len(list(tmp_path.iterdir()))), [VISION], config)
        newest = max(tmp_path.iterdir(), key=lambda path: int(path.name))
        with Checkpoint.open(newest) as checkpoint:
            return recipe_for(checkpoint, recipes)

    assert choose({"model_type": "qwen4_exp"}, SMALL, RECIPE) is RECIPE
    assert choose({"model_type": "outer", "text_config": {"model_type": "small_type"}}, SMALL, RECIPE) is SMALL
    with pytest.raises(CheckpointError, match=r"'llama'.*small accepts small_type.*--recipe"):
        choose({"model_type": "llama"}, SMALL)
    with pytest.raises(CheckpointError, match="several recipes"):
        choose(SMALL_CONFIG, SMALL, evolve(SMALL, name="twin"))
