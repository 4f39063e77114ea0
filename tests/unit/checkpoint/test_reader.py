"""Opening, reading and refusing checkpoint directories."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from specdec.checkpoint import Checkpoint
from specdec.checkpoint.header import read_header
from specdec.declaration import TensorGroup, TensorInventory, TensorSpec
from specdec.errors import CheckpointError

BF16 = torch.bfloat16


def tensors():
    torch.manual_seed(0)
    return {
        "a.weight": torch.randn(6, 4).to(BF16),
        "b.weight": torch.randn(3).to(torch.float8_e4m3fn),
        "c": torch.arange(5),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
    }


def refusal(function, *args, **kwargs):
    with pytest.raises(CheckpointError) as caught:
        function(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rewrite_header(path, change):
    """Apply ``change`` to the parsed header of a safetensors file, keeping the payload."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    new = json.dumps(change(header) or header).encode()
    path.write_bytes(len(new).to_bytes(8, "little") + new + raw[8 + length :])


def test_single_file(make_checkpoint):
    path = make_checkpoint(tensors(), config={"model_type": "thing"})
    with Checkpoint.open(path) as checkpoint:
        assert checkpoint.config == {"model_type": "thing"} and checkpoint.directory == path
        assert set(checkpoint.names) == set(tensors()) and len(checkpoint) == 5
        assert "c" in checkpoint and "d" not in checkpoint
        assert checkpoint.spec("b.weight") == TensorSpec(name="b.weight", shape=(3,), dtype="float8_e4m3fn")
        assert checkpoint.spec("scalar") == TensorSpec(name="scalar", shape=(), dtype="float32")
        for name, expected in tensors().items():
            loaded = checkpoint.load(name)
            assert loaded.dtype == expected.dtype and loaded.shape == expected.shape
            assert torch.equal(loaded.view(torch.uint8) if loaded.ndim else loaded, as_bytes(expected))


def as_bytes(tensor):
    return tensor.view(torch.uint8) if tensor.ndim else tensor


def test_sharded(make_checkpoint):
    parts = tensors()
    shards = {"one.safetensors": {"a.weight": parts["a.weight"]}, "two.safetensors": {"c": parts["c"]}}
    with Checkpoint.open(make_checkpoint(shards)) as checkpoint:
        assert set(checkpoint.names) == {"a.weight", "c"}
        assert torch.equal(checkpoint.load("a.weight"), parts["a.weight"])
        assert torch.equal(checkpoint.load("c"), parts["c"])
        assert checkpoint.stored("c").path.name == "two.safetensors"


def test_a_loaded_tensor_is_a_private_copy_and_a_mapped_one_a_view(make_checkpoint):
    with Checkpoint.open(make_checkpoint(tensors())) as checkpoint:
        checkpoint.load("c").zero_()
        assert checkpoint.load("c").tolist() == [0, 1, 2, 3, 4]
        first, second = checkpoint.load("c", mapped=True), checkpoint.load("c", mapped=True)
        assert first.data_ptr() == second.data_ptr()
        checkpoint.close()
        assert first.tolist() == [0, 1, 2, 3, 4]
        assert checkpoint.load("c").tolist() == [0, 1, 2, 3, 4]


def test_renamed_tensors_load_under_their_new_name(make_checkpoint):
    path = make_checkpoint({"old.a": torch.ones(2), "old.b": torch.zeros(3)})
    with Checkpoint.open(path, rename=lambda name: name.replace("old", "new")) as checkpoint:
        assert set(checkpoint.names) == {"new.a", "new.b"}
        assert checkpoint.load("new.a").tolist() == [1, 1]
    message = refusal(Checkpoint.open, path, rename=lambda name: "same")
    assert "old.a" in message and "old.b" in message


def test_missing_directory_config_and_weights(tmp_path, make_checkpoint):
    assert "no such checkpoint directory" in refusal(Checkpoint.open, tmp_path / "nowhere")
    path = make_checkpoint(tensors())
    (path / "model.safetensors").unlink()
    assert "model.safetensors.index.json" in refusal(Checkpoint.open, path)
    (path / "config.json").write_text("[1]")
    assert "config.json" in refusal(Checkpoint.open, path)
    (path / "config.json").write_text("{")
    assert "not valid JSON" in refusal(Checkpoint.open, path)
    (path / "config.json").unlink()
    assert "config.json" in refusal(Checkpoint.open, path)


def test_truncated_file_names_file_and_tensor(make_checkpoint):
    path = make_checkpoint(tensors())
    file = path / "model.safetensors"
    last = read_header(file)[-1].name
    file.write_bytes(file.read_bytes()[:-1])
    message = refusal(Checkpoint.open, path)
    assert str(file) in message and last in message and "truncated" in message
    file.write_bytes(file.read_bytes() + b"abc")
    assert "2 bytes follow the last tensor" in refusal(Checkpoint.open, path)


@pytest.mark.parametrize("kept", [0, 5, 8, 40])
def test_a_file_cut_off_inside_its_header(make_checkpoint, kept):
    path = make_checkpoint(tensors())
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    message = refusal(Checkpoint.open, path)
    assert str(file) in message and "header" in message


def test_a_header_that_is_no_json(make_checkpoint):
    path = make_checkpoint(tensors())
    (path / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"{,,}")
    assert "header is not valid JSON" in refusal(Checkpoint.open, path)
    (path / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"[  ]")
    assert "needs an object" in refusal(Checkpoint.open, path)


def test_wrong_header_entries_name_the_tensor(make_checkpoint):
    path = make_checkpoint({"x": torch.zeros(4), "y": torch.zeros(4)})
    file = path / "model.safetensors"
    original = file.read_bytes()

    def broken(change):
        file.write_bytes(original)
        rewrite_header(file, change)
        message = refusal(Checkpoint.open, path)
        assert str(file) in message
        return message

    assert "tensor y: F32 [5] needs 20 bytes" in broken(lambda h: h["y"].update(shape=[5]))
    assert "tensor y overlaps" in broken(lambda h: h["y"].update(data_offsets=[8, 24]))
    assert "tensor y leaves a gap" in broken(lambda h: h["y"].update(data_offsets=[20, 36]))
    assert "tensor y: dtype F3" in broken(lambda h: h["y"].update(dtype="F3"))
    assert "tensor y: header entry" in broken(lambda h: h["y"].pop("dtype") and None)
    assert "tensor y: header entry" in broken(lambda h: h["y"].update(shape=[-4]))
    assert "tensor y: header entry" in broken(lambda h: h["y"].update(data_offsets=[16]))
    assert "tensor y: header entry" in broken(lambda h: h.update(y=3))


def test_missing_shard_names_file_and_tensor(make_checkpoint):
    path = make_checkpoint({"one.safetensors": {"x": torch.zeros(2)}, "two.safetensors": {"y": torch.zeros(2)}})
    (path / "two.safetensors").unlink()
    message = refusal(Checkpoint.open, path)
    assert str(path / "two.safetensors") in message and "tensor y" in message


def test_a_tensor_in_two_shards_names_both(make_checkpoint):
    shards = {
        f"{file}.safetensors": {n: torch.zeros(2) for n in names} for file, names in (("one", "wx"), ("two", "xy"))
    }
    message = refusal(Checkpoint.open, make_checkpoint(shards))
    assert "tensor x" in message and "one.safetensors" in message and "two.safetensors" in message


def test_an_index_that_names_a_missing_tensor(make_checkpoint):
    shards = {"one.safetensors": {"x": torch.zeros(2)}}
    path = make_checkpoint(shards, weight_map={"x": "one.safetensors", "ghost": "one.safetensors"})
    message = refusal(Checkpoint.open, path)
    assert "tensor ghost" in message and str(path / "one.safetensors") in message


@pytest.mark.parametrize("shard", ["../one.safetensors", "/etc/passwd", 3])
def test_an_index_may_not_lead_out_of_the_directory(make_checkpoint, shard):
    path = make_checkpoint({"one.safetensors": {"x": torch.zeros(2)}}, weight_map={"x": shard})
    assert "tensor x" in refusal(Checkpoint.open, path)


def test_an_index_without_a_weight_map(make_checkpoint):
    path = make_checkpoint({"one.safetensors": {"x": torch.zeros(2)}}, weight_map={})
    assert "weight_map" in refusal(Checkpoint.open, path)


def test_expectations_name_tensor_expected_and_found(make_checkpoint):
    with Checkpoint.open(make_checkpoint(tensors())) as checkpoint:
        checkpoint.expect(TensorSpec(name="a.weight", shape=(6, 4), dtype="bfloat16"))
        message = refusal(checkpoint.expect, TensorSpec(name="a.weight", shape=(4, 6), dtype="bfloat16"))
        assert "model.safetensors" in message
        assert "a.weight: expected bfloat16 [4, 6], found bfloat16 [6, 4]" in message
        message = refusal(checkpoint.expect, TensorSpec(name="c", shape=(5,), dtype="int32"))
        assert "c: expected int32 [5], found int64 [5]" in message
        assert "no tensor a.weigth" in refusal(checkpoint.load, "a.weigth")
        assert "similar: a.weight" in refusal(checkpoint.stored, "aa.weight")


def test_a_dtype_no_declaration_can_name(make_checkpoint):
    with Checkpoint.open(make_checkpoint({"x": torch.zeros(2, dtype=torch.int16)})) as checkpoint:
        assert "int16" in refusal(checkpoint.spec, "x")
        assert checkpoint.load("x").dtype == torch.int16


def test_a_file_that_vanishes_after_opening(make_checkpoint):
    path = make_checkpoint(tensors())
    checkpoint = Checkpoint.open(path)
    (path / "model.safetensors").unlink()
    message = refusal(checkpoint.load, "c")
    assert "tensor c cannot be read" in message


def inventory(*groups):
    return TensorInventory(groups=tuple(TensorGroup(dtype="float32", source="test", **group) for group in groups))


def test_validation_counts_everything_and_lists_ten(make_checkpoint):
    held = {f"layer.{n}.w": torch.zeros(2) for n in range(20)} | {f"extra.{n}": torch.zeros(1) for n in range(15)}
    held["layer.3.w"] = torch.zeros(3)
    wanted = inventory({"name": "layer.{l}.w", "axes": (("l", 40),), "shape": (2,)})
    with Checkpoint.open(make_checkpoint(held)) as checkpoint:
        result = checkpoint.validate(wanted)
        assert not result.ok
        assert (result.expected_count, result.expected_bytes) == (40, 320)
        assert (result.found_count, result.found_bytes) == (35, 20 * 8 + 4 + 15 * 4)
        assert (result.missing_count, len(result.missing), result.missing[0]) == (20, 10, "layer.20.w")
        assert (result.unexpected_count, len(result.unexpected)) == (15, 10)
        assert result.mismatched == ("layer.3.w: expected float32 [2], found float32 [3]",)
        assert "20 missing (first: layer.20.w)" in result.summary()
        layers = [name for name in checkpoint.names if name.startswith("layer")]
        assert checkpoint.validate(wanted, layers).unexpected_count == 0


def test_validation_of_an_exact_checkpoint(make_checkpoint):
    wanted = inventory({"name": "w.{l}", "axes": (("l", 3),), "shape": (2,)})
    with Checkpoint.open(make_checkpoint({f"w.{n}": torch.zeros(2) for n in range(3)})) as checkpoint:
        assert checkpoint.validate(wanted).ok
        assert checkpoint.validate(wanted).summary() == "3 tensors as expected"


def test_headers_written_by_the_library_are_read_as_it_reads_them(tmp_path):
    from safetensors import safe_open

    path = tmp_path / "x.safetensors"
    save_file(tensors(), path, metadata={"format": "pt"})
    with safe_open(path, framework="pt") as file:
        theirs = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert {tensor.name: tensor.shape for tensor in read_header(path)} == theirs


def test_opening_and_validating_import_no_torch(make_checkpoint):
    path = make_checkpoint(tensors())
    code = (
        "import sys; from specdec.checkpoint import Checkpoint; from specdec.declaration import TensorInventory; "
        f"c = Checkpoint.open({str(path)!r}); c.spec('c'); c.validate(TensorInventory(groups=())); "
        "assert not {'torch', 'safetensors', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
