"""Written checkpoints, read back with the safetensors library."""

import json

import pytest
import torch
from safetensors.torch import load_file

from specdec.checkpoint import Checkpoint
from specdec.checkpoint.writer import write_checkpoint
from specdec.errors import CheckpointError


def tensors():
    base = torch.arange(24.0).reshape(4, 6)
    return {"b": base[:, :3], "a": base, "c": torch.tensor(1.5), "d": torch.ones(2, 16, dtype=torch.uint8)}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_single_file(tmp_path):
    path = write_checkpoint(tmp_path / "new" / "model", tensors(), {"model_type": "x", "n": [1]})
    assert same(load_file(path / "model.safetensors"), tensors())
    assert json.loads((path / "config.json").read_text()) == {"model_type": "x", "n": [1]}
    assert sorted(item.name for item in path.iterdir()) == ["config.json", "model.safetensors"]
    with Checkpoint.open(path) as checkpoint:
        assert set(checkpoint.names) == set(tensors())


def test_shards_hold_at_most_the_bytes_asked_for(tmp_path):
    path = write_checkpoint(tmp_path, tensors(), {}, max_shard_bytes=96)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 96 + 48 + 4 + 32
    files = sorted(set(index["weight_map"].values()))
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for file in files:
        assert sum(tensor.nbytes for tensor in load_file(path / file).values()) <= 96
    with Checkpoint.open(path) as checkpoint:
        assert same({name: checkpoint.load(name) for name in checkpoint.names}, tensors())


def test_rewriting_leaves_no_stale_weights(tmp_path):
    write_checkpoint(tmp_path, tensors(), {}, max_shard_bytes=50)
    write_checkpoint(tmp_path, {"only": torch.ones(1)}, {})
    assert sorted(item.name for item in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    write_checkpoint(tmp_path, tensors(), {}, max_shard_bytes=10**6)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert set(checkpoint.names) == set(tensors())


def test_equal_contents_give_equal_files(tmp_path):
    one = write_checkpoint(tmp_path / "1", tensors(), {})
    two = write_checkpoint(tmp_path / "2", dict(reversed(tensors().items())), {})
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()


def test_the_tokenizer_is_copied(tmp_path):
    source = tmp_path / "any.json"
    source.write_text('{"x": 1}')
    path = write_checkpoint(tmp_path / "model", tensors(), {}, tokenizer_path=source)
    assert (path / "tokenizer.json").read_text() == source.read_text()
    write_checkpoint(path, tensors(), {}, tokenizer_path=path / "tokenizer.json")
    assert (path / "tokenizer.json").read_text() == source.read_text()


def test_refusals(tmp_path):
    with pytest.raises(CheckpointError, match="at least one tensor"):
        write_checkpoint(tmp_path, {}, {})
    with pytest.raises(CheckpointError, match="max_shard_bytes is 0"):
        write_checkpoint(tmp_path, tensors(), {}, max_shard_bytes=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_checkpoint(tmp_path / "file", tensors(), {})
    with pytest.raises(CheckpointError, match=r"absent\.json"):
        write_checkpoint(tmp_path / "m", tensors(), {}, tokenizer_path=tmp_path / "absent.json")
