"""Checkpoint directories for the tests, written with safetensors itself and not with the code under test."""

import json

import pytest
import torch
from safetensors.torch import save_file


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_checkpoint(tmp_path):
    """Write a directory: a dict of tensors for a single file, or a dict of shard name to such a dict."""

    def make(tensors, *, config=None, weight_map=None, directory="model"):
        path = tmp_path / directory
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config or {}))
        if not any(isinstance(value, dict) for value in tensors.values()):
            save_file(tensors, path / "model.safetensors")
            return path
        for shard, held in tensors.items():
            save_file(held, path / shard)
        found = {name: shard for shard, held in tensors.items() for name in held}
        index = {"metadata": {}, "weight_map": found if weight_map is None else weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        return path

    return make
