"""What decides how a GLM-5.3 checkpoint is loaded: declarations under other prefixes, and a missing MTP layer."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from attrs import evolve
from glm_models import prepare, write_random_checkpoint
from safetensors.torch import load_file, save_file

from specdec.checkpoint.accepted import embedded_checkpoint
from specdec.errors import CheckpointError
from specdec.recipes import recipe_book
from specdec.tensor_names import TEXT_PREFIX, TEXT_PREFIXES
from specdec_glm53.geometry import TINY, dense_first, interleaved


def quantises(directory) -> bool:
    mixtures = [layer.forward for layer in prepare(directory).target.layers[3:]]
    found = {mixture.quantise_input is not None for mixture in mixtures}
    assert len(found) == 1
    return found.pop()


@pytest.fixture(scope="module")
def shipped():
    return embedded_checkpoint(recipe_book().recipe("glm-5.3-flash"))


@pytest.mark.parametrize("prefix", TEXT_PREFIXES)
@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4"])
def test_the_declared_arithmetic_of_experts_holds_under_every_prefix(shipped, tmp_path, prefix, algorithm):
    """Modules are listed under the official names whatever the tensors are called."""
    directory = tmp_path / "renamed"
    shutil.copytree(shipped, directory)
    tensors = load_file(shipped / "model.safetensors")
    renamed = {name.replace(TEXT_PREFIX, prefix): value for name, value in tensors.items()}
    save_file(renamed, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((shipped / "config.json").read_text())
    for entry in config["quantization_config"]["quantized_layers"].values():
        entry["quant_algo"] = algorithm
    (directory / "config.json").write_text(json.dumps(config))
    assert quantises(directory) is (algorithm == "NVFP4")


def test_a_checkpoint_without_the_mtp_layer_says_so(tmp_path):
    geometry = evolve(
        TINY, num_hidden_layers=4, layer_types=interleaved(4, 2), mlp_layer_types=dense_first(4, 1), index_kpool=4
    )
    directory = write_random_checkpoint(tmp_path / "whole", 3, geometry)
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["num_nextn_predict_layers"] = 0
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"num_nextn_predict_layers is 0.*--no-mtp"):
        prepare_through_the_hook(directory)


def prepare_through_the_hook(directory):
    from specdec.preparation import PreparationConfig
    from specdec.serving.model import LoadedModel

    recipe = recipe_book().recipe("glm-5.3-flash")
    shutil.copyfile(embedded_checkpoint(recipe) / "tokenizer.json", directory / "tokenizer.json")
    torch.set_num_threads(1)
    config = PreparationConfig.for_recipe(recipe, concurrency=1, context=64, adaptive_verification=False)
    return LoadedModel.prepare(recipe, config, directory=directory)
