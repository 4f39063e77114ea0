"""Every storage format against values computed by hand, the expert stacks, and quantisation metadata."""

import pytest
import torch
from attrs import evolve

from specdec.checkpoint import Checkpoint, nvfp4
from specdec.checkpoint.matrices import load_experts, load_matrix
from specdec.checkpoint.quantisation import quantisation_of
from specdec.checkpoint.storages import storage_of
from specdec.errors import CheckpointError

E4M3 = torch.float8_e4m3fn
F32, BF16 = torch.float32, torch.bfloat16
PREFIX = "mtp.layers.0.mlp.experts"


def refusal(function, *args, **kwargs):
    with pytest.raises(CheckpointError) as caught:
        function(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def generator(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, BF16, torch.float16])
def test_plain(make_checkpoint, dtype):
    weight = torch.randn(5, 3, generator=generator(0)).to(dtype)
    with Checkpoint.open(make_checkpoint({"w.weight": weight})) as checkpoint:
        assert storage_of(checkpoint, "w.weight") == "plain"
        loaded = load_matrix(checkpoint, "w.weight", dtype)
        assert torch.equal(loaded, weight)
        loaded.zero_()  # a private copy
        assert torch.equal(load_matrix(checkpoint, "w.weight", BF16), weight.to(BF16))


def test_nvfp4(make_checkpoint):
    packed = torch.tensor([[0x21, 0xF8] + [0] * 6 + [0x77] * 8], dtype=torch.uint8)
    scale = torch.tensor([[0.5, 3.5]]).to(E4M3)
    held = {"w.weight": packed, "w.weight_scale": scale, "w.weight_scale_2": torch.tensor(0.25)}
    expected = [0.0625, 0.125, -0.0, -0.75] + [0.0] * 12 + [5.25] * 16
    with Checkpoint.open(make_checkpoint(held)) as checkpoint:
        assert storage_of(checkpoint, "w.weight") == "nvfp4"
        assert load_matrix(checkpoint, "w.weight", F32).tolist() == [expected]


@pytest.mark.parametrize("scale", [torch.tensor(0.375), torch.tensor([0.375]), torch.tensor([0.375], dtype=BF16)])
def test_fp8_with_one_scale(make_checkpoint, scale):
    weight = torch.tensor([[1.0, -2.5], [448.0, 0.0]]).to(E4M3)
    with Checkpoint.open(make_checkpoint({"w.weight": weight, "w.weight_scale": scale})) as checkpoint:
        assert storage_of(checkpoint, "w.weight") == "fp8"
        assert load_matrix(checkpoint, "w.weight", F32).tolist() == [[0.375, -0.9375], [168.0, 0.0]]


def test_shards_of_a_table_share_their_scale(make_checkpoint):
    shard = torch.tensor([[2.0, 4.0]]).to(E4M3)
    held = {"t.shard_0.weight": shard, "t.weight_scale": torch.tensor([0.1], dtype=BF16)}
    with Checkpoint.open(make_checkpoint(held)) as checkpoint:
        loaded = load_matrix(checkpoint, "t.shard_0.weight", BF16, companions="t.weight")
        # bf16(e4m3 · scale): the scale is the BF16 value nearest 0.1.
        assert loaded.tolist() == [[0.2001953125, 0.400390625]]
        assert "companions: none" in refusal(load_matrix, checkpoint, "t.shard_0.weight", BF16)


def test_fp8_in_blocks_of_128(make_checkpoint):
    weight = torch.randn(200, 300, generator=generator(1)).to(E4M3)
    scale = torch.rand(2, 3, generator=generator(2)) + 0.5
    expected = [[(weight[r, c].float() * scale[r // 128, c // 128]).item() for c in range(300)] for r in range(200)]
    with Checkpoint.open(make_checkpoint({"w.weight": weight, "w.weight_scale_inv": scale})) as checkpoint:
        assert storage_of(checkpoint, "w.weight") == "fp8_128"
        assert torch.equal(load_matrix(checkpoint, "w.weight", F32), torch.tensor(expected))


def test_mxfp8(make_checkpoint):
    weight = torch.randn(3, 64, generator=generator(3)).to(E4M3)
    exponents = torch.tensor([[127, 120], [130, 1], [0, 140]], dtype=torch.uint8)
    expected = [
        [float(weight[r, c].float()) * 2.0 ** (int(exponents[r, c // 32]) - 127) for c in range(64)] for r in range(3)
    ]
    for stored in (exponents, exponents.view(torch.float8_e8m0fnu)):
        held = {"w.weight": weight, "w.weight_scale": stored}
        path = make_checkpoint(held, directory=str(stored.dtype))
        with Checkpoint.open(path) as checkpoint:
            assert storage_of(checkpoint, "w.weight") == "mxfp8"
            assert torch.equal(load_matrix(checkpoint, "w.weight", F32), torch.tensor(expected))


@pytest.mark.parametrize(
    "held",
    [
        {"": torch.zeros(2, 16, dtype=E4M3)},
        {"": torch.zeros(2, 16, dtype=torch.uint8)},
        {"": torch.zeros(2, 16, dtype=torch.int64)},
        {"": torch.zeros(2, 16), "_scale": torch.ones(1)},
        {"": torch.zeros(2, 16, dtype=torch.uint8), "_scale": torch.ones(2, 2).to(E4M3)},
        {"": torch.zeros(2, 16, dtype=torch.uint8), "_scale": torch.ones(2, 1).to(E4M3), "_scale_2": torch.tensor(1.0)},
        {"": torch.zeros(2, 16, dtype=torch.uint8), "_scale": torch.ones(2, 2), "_scale_2": torch.tensor(1.0)},
        {"": torch.zeros(2, 16, dtype=torch.uint8), "_scale": torch.ones(2, 2).to(E4M3), "_scale_2": torch.ones(2)},
        {"": torch.zeros(2, 16, dtype=E4M3), "_scale": torch.ones(2)},
        {"": torch.zeros(2, 64, dtype=E4M3), "_scale": torch.ones(2, 4, dtype=torch.uint8)},
        {"": torch.zeros(200, 64, dtype=E4M3), "_scale_inv": torch.ones(1, 1)},
        {"": torch.zeros(2, 16, dtype=E4M3), "_scale": torch.ones(1), "_scale_inv": torch.ones(1, 1)},
    ],
)
def test_unknown_storage_names_tensor_dtype_and_companions(make_checkpoint, held):
    path = make_checkpoint({f"w.weight{suffix}": tensor for suffix, tensor in held.items()})
    with Checkpoint.open(path) as checkpoint:
        message = refusal(load_matrix, checkpoint, "w.weight", BF16)
    assert "model.safetensors" in message and "tensor w.weight" in message and "companions" in message
    for suffix, tensor in held.items():
        assert str(tensor.dtype).removeprefix("torch.") in message
        assert f"w.weight{suffix}" in message


def test_a_missing_weight(make_checkpoint):
    with Checkpoint.open(make_checkpoint({"w.weight": torch.zeros(2, 2)})) as checkpoint:
        assert "no tensor v.weight" in refusal(load_matrix, checkpoint, "v.weight", BF16)


def nvfp4_experts(count=3, hidden=32, inner=16, input_scale=False):
    """Stored tensors of ``count`` experts and what they decode to, one matrix at a time."""
    held, dense = {}, {}
    for projection, shape in {
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }.items():
        for expert in range(count):
            weight = torch.randn(shape, generator=generator(100 * expert + len(projection)))
            packed, scale, scale_2 = nvfp4.quantise(weight)
            one = f"{PREFIX}.{expert}.{projection}"
            held |= {f"{one}.weight": packed, f"{one}.weight_scale": scale, f"{one}.weight_scale_2": scale_2}
            if input_scale:
                held[f"{one}.input_scale"] = torch.tensor(0.01 * (expert + 1))
            dense[projection, expert] = nvfp4.dequantise(packed, scale, scale_2)
    return held, dense


def test_nvfp4_experts_stay_packed(make_checkpoint):
    held, dense = nvfp4_experts()
    with Checkpoint.open(make_checkpoint(held)) as checkpoint:
        experts = load_experts(checkpoint, PREFIX, 3)
    assert experts.storage == "nvfp4" and set(experts.projections) == {"gate_proj", "up_proj", "down_proj"}
    down = experts["down_proj"]
    assert down.weight.shape == (3, 32, 8) and down.weight.dtype == torch.uint8
    assert down.scale.shape == (3, 32, 1) and down.scale.dtype == E4M3
    assert down.scale_2.shape == (3,) and down.input_scale is None
    for projection, stacked in experts.dense(F32).items():
        for expert in range(3):
            assert torch.equal(stacked[expert], dense[projection, expert])
    assert torch.equal(down.dense(BF16)[1], dense["down_proj", 1].to(BF16))


def test_w4a4_experts_have_their_input_scales(make_checkpoint):
    held, _ = nvfp4_experts(input_scale=True)
    with Checkpoint.open(make_checkpoint(held)) as checkpoint:
        experts = load_experts(checkpoint, PREFIX, 3, projections=("up_proj",))
    assert experts["up_proj"].input_scale.tolist() == pytest.approx([0.01, 0.02, 0.03])
    del held[f"{PREFIX}.1.up_proj.input_scale"]
    with Checkpoint.open(make_checkpoint(held, directory="partial")) as checkpoint:
        assert f"no tensor {PREFIX}.1.up_proj.input_scale" in refusal(load_experts, checkpoint, PREFIX, 3)


def test_plain_experts_keep_their_dtype(make_checkpoint):
    shapes = {"gate_proj": (16, 32), "up_proj": (16, 32), "down_proj": (32, 16)}
    held = {
        f"{PREFIX}.{expert}.{projection}.weight": torch.randn(shape, generator=generator(expert)).to(BF16)
        for projection, shape in shapes.items()
        for expert in range(2)
    }
    with Checkpoint.open(make_checkpoint(held)) as checkpoint:
        experts = load_experts(checkpoint, PREFIX, 2)
    assert experts.storage == "plain" and experts["gate_proj"].weight.dtype == BF16
    for projection in shapes:
        assert torch.equal(experts.dense(BF16)[projection][1], held[f"{PREFIX}.1.{projection}.weight"])


def test_fused_experts_split_gate_before_up(make_checkpoint):
    gate_up, down = torch.arange(2 * 8 * 3.0).reshape(2, 8, 3).to(BF16), torch.ones(2, 3, 4).to(BF16)
    held = {f"{PREFIX}.gate_up_proj": gate_up, f"{PREFIX}.down_proj": down}
    with Checkpoint.open(make_checkpoint(held)) as checkpoint:
        experts = load_experts(checkpoint, PREFIX, 2)
        assert experts.storage == "plain"
        assert torch.equal(experts["gate_proj"].weight, gate_up[:, :4])
        assert torch.equal(experts["up_proj"].weight, gate_up[:, 4:])
        assert torch.equal(experts["down_proj"].weight, down)
        assert "expected floats [3, out, in], found bfloat16 [2, 8, 3]" in refusal(load_experts, checkpoint, PREFIX, 3)


def test_fp8_experts_are_decoded(make_checkpoint):
    held = {}
    for expert in range(2):
        held[f"{PREFIX}.{expert}.up_proj.weight"] = torch.full((4, 4), 1.5 + expert).to(E4M3)
        held[f"{PREFIX}.{expert}.up_proj.weight_scale_inv"] = torch.tensor([[2.0]])
    with Checkpoint.open(make_checkpoint(held)) as checkpoint:
        experts = load_experts(checkpoint, PREFIX, 2, projections=("up_proj",))
    assert experts.storage == "plain" and experts["up_proj"].weight.dtype == BF16
    assert experts["up_proj"].weight[:, 0, 0].tolist() == [3.0, 5.0]


def test_inconsistent_experts_are_refused_by_name(make_checkpoint):
    def message(change, count=3, directory="model"):
        held, _ = nvfp4_experts()
        change(held)
        with Checkpoint.open(make_checkpoint(held, directory=directory)) as checkpoint:
            return refusal(load_experts, checkpoint, PREFIX, count)

    up = f"{PREFIX}.2.up_proj.weight"
    assert f"no tensor {up}" in message(lambda held: held.pop(up), directory="a")
    assert "beyond the 2 experts" in message(lambda held: None, count=2, directory="b")

    def narrower(held):
        packed, scale, scale_2 = nvfp4.quantise(torch.ones(16, 16))
        held |= {up: packed, f"{up}_scale": scale, f"{up}_scale_2": scale_2}

    said = message(narrower, directory="c")
    assert f"tensor {up}: expected uint8 [16, 16]" in said and "found uint8 [16, 8]" in said

    def plain(held):
        held[up] = torch.ones(16, 32)
        del held[f"{up}_scale"], held[f"{up}_scale_2"]

    assert f"tensor {up} is stored as plain, expert 0 as nvfp4" in message(plain, directory="d")

    def one_projection(held):
        for expert in range(3):
            one = f"{PREFIX}.{expert}.up_proj.weight"
            held[one] = torch.ones(16, 32)
            del held[f"{one}_scale"], held[f"{one}_scale_2"]

    assert "projections are stored differently" in message(one_projection, directory="e")


def config(entries, layers=48, outer=True):
    quantisation = {"quant_algo": "MIXED_PRECISION", "quantized_layers": entries}
    text = {"num_hidden_layers": layers}
    return (
        {"text_config": text, "quantization_config": quantisation}
        if outer
        else {**text, "quantization_config": quantisation}
    )


W4A16 = {"quant_algo": "W4A16_NVFP4", "group_size": 16}


ALIAS = {"draft.layers.48.": "draft.layers.0."}


@pytest.mark.parametrize("listed", ["draft.layers.0.mlp.experts", "draft.layers.48.mlp.experts"])
@pytest.mark.parametrize("asked", ["draft.layers.0.mlp.experts", "draft.layers.48.mlp.experts"])
@pytest.mark.parametrize("outer", [True, False])
def test_a_module_may_be_listed_under_an_alias(make_checkpoint, listed, asked, outer):
    path = make_checkpoint({"x": torch.zeros(1)}, config=config({listed: W4A16}, outer=outer))
    with Checkpoint.open(path) as checkpoint:
        assert quantisation_of(checkpoint, asked, aliases=ALIAS) == W4A16
        assert quantisation_of(checkpoint, asked + ".7.up_proj", aliases=ALIAS) == W4A16
        assert quantisation_of(checkpoint, "draft.layers.0.self_attn.q_proj", aliases=ALIAS) is None
        assert quantisation_of(checkpoint, "draft.layers.4.mlp.experts", aliases=ALIAS) is None
        # nobody but the caller knows that the names mean one module
        assert (quantisation_of(checkpoint, asked) == W4A16) is (asked == listed)


def test_both_names_may_be_listed_if_they_agree(make_checkpoint):
    both = {"draft.layers.0.mlp.experts": W4A16, "draft.layers.48.mlp.experts": dict(reversed(W4A16.items()))}
    with Checkpoint.open(make_checkpoint({"x": torch.zeros(1)}, config=config(both))) as checkpoint:
        assert quantisation_of(checkpoint, "draft.layers.48.mlp.experts.0.gate_proj", aliases=ALIAS) == W4A16
    both["draft.layers.48.mlp.experts"] = {"quant_algo": "NVFP4", "group_size": 16}
    path = make_checkpoint({"x": torch.zeros(1)}, config=config(both), directory="conflict")
    with Checkpoint.open(path) as checkpoint:
        message = refusal(quantisation_of, checkpoint, "draft.layers.0.mlp.experts", aliases=ALIAS)
        assert quantisation_of(checkpoint, "draft.layers.0.mlp.experts") == W4A16
    assert "draft.layers.0.mlp.experts" in message and "draft.layers.48.mlp.experts" in message
    assert "config.json" in message


@pytest.mark.parametrize("layers", [16, 48])
def test_the_qwen_plugin_knows_the_name_of_its_appended_layer(make_checkpoint, layers):
    from specdec_qwen38.geometry import REAL, interleaved
    from specdec_qwen38.weights import module_aliases

    geometry = evolve(REAL, num_hidden_layers=layers, layer_types=interleaved(layers, 4))
    entries = {"mtp.layers.16.mlp.experts": W4A16, "model.language_model.layers.3.mlp.experts": {"quant_algo": "NVFP4"}}
    path = make_checkpoint({"x": torch.zeros(1)}, config=config(entries, layers=layers))
    with Checkpoint.open(path) as checkpoint:
        found = quantisation_of(checkpoint, "mtp.layers.0.mlp.experts.5.up_proj", aliases=module_aliases(geometry))
        assert found == (W4A16 if layers == 16 else None)
        target = quantisation_of(
            checkpoint, "model.language_model.layers.3.mlp.experts", aliases=module_aliases(geometry)
        )
        assert target == {"quant_algo": "NVFP4"}


def test_the_nearest_listed_ancestor_decides(make_checkpoint):
    entries = {"a.mlp": {"quant_algo": "FP8"}, "a.mlp.experts": {"quant_algo": "NVFP4"}}
    with Checkpoint.open(make_checkpoint({"x": torch.zeros(1)}, config=config(entries))) as checkpoint:
        assert quantisation_of(checkpoint, "a.mlp.experts.3.up_proj") == {"quant_algo": "NVFP4"}
        assert quantisation_of(checkpoint, "a.mlp.gate") == {"quant_algo": "FP8"}
        assert quantisation_of(checkpoint, "a.attn") is None


def test_a_config_without_quantisation(make_checkpoint):
    with Checkpoint.open(make_checkpoint({"x": torch.zeros(1)})) as checkpoint:
        assert quantisation_of(checkpoint, "mtp.layers.0.mlp.experts") is None
