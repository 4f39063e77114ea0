"""The exported checkpoint: names, types and sizes against the plugin's inventory, values against the NVFP4 formulas."""

import json

import pytest
import torch


@pytest.fixture(scope="module")
def exported(training_path, tmp_path_factory):
    from plugins.qwen38.training import export
    from plugins.qwen38.training.parameters import initialise, text_config

    config = text_config(16)
    parameters = initialise(config, seed=2)
    scales = {f"model.language_model.layers.{i}.": torch.tensor([0.01, 0.02]) for i in range(16)}
    folder = tmp_path_factory.mktemp("run")
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text("{}")
    counts = {"files": 1, "tokens": 2}
    results = {
        "corpus": {"counts": {"train": counts, "heldout": counts}, "sources": []},
        "parameters": {"target": 1, "mtp": 1},
        "hardware": "none",
        "torch": torch.__version__,
        "command": "none",
        "steps": {},
        "tokens": {},
        "history": [],
    }
    size = export.write_checkpoint(folder / "tiny", config, parameters, scales, tokenizer, results)
    return folder, config, parameters, scales, size


def test_stays_below_twelve_mebibytes(exported):
    assert exported[4] < 12 * 2**20 - 200_000


def test_tensors_match_the_inventory(exported):
    inventory = pytest.importorskip("specdec_qwen38.inventory")
    geometry = pytest.importorskip("specdec_qwen38.geometry")
    from safetensors import safe_open

    folder = exported[0] / "tiny"
    read = geometry.Geometry.from_config(json.loads((folder / "config.json").read_text()))
    expected = [*inventory.target_inventory(read).expand(), *inventory.mtp_inventory(read).expand()]
    short = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "U8": "uint8", "F32": "float32", "I64": "int64"}
    with safe_open(str(folder / "model.safetensors"), "pt") as stored:
        slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118
        found = {name: (tuple(s.get_shape()), short[s.get_dtype()]) for name, s in slices.items()}
    assert found == {spec.name: (tuple(spec.shape), spec.dtype) for spec in expected}


def test_quantised_layers_name_the_drafter_twice(exported):
    layers = json.loads((exported[0] / "tiny" / "config.json").read_text())["quantization_config"]["quantized_layers"]
    assert layers["mtp.layers.0.mlp.experts"] == layers["mtp.layers.16.mlp.experts"]
    assert layers["mtp.layers.0.mlp.experts"]["quant_algo"] == "W4A16_NVFP4"
    assert len(layers) == 18


def test_training_sees_the_stored_values(exported):
    from safetensors.torch import load_file
    from training.storage import nvfp4

    from plugins.qwen38.training.quantisation import checkpoint_values, straight_through

    folder, _, parameters, _, _ = exported
    stored = load_file(str(folder / "tiny" / "model.safetensors"))
    values = checkpoint_values(parameters)
    for part, stem in (("target", "model.language_model.layers.5.mlp.experts."), ("mtp", "mtp.layers.0.mlp.experts.")):
        trained = straight_through(parameters, part)
        for projection, rows, name in (
            ("gate_proj", slice(0, 32), "gate_up_proj"),
            ("up_proj", slice(32, 64), "gate_up_proj"),
            ("down_proj", slice(0, 128), "down_proj"),
        ):
            p = f"{stem}7.{projection}."
            expected = nvfp4.dequantise(*(stored[p + n] for n in ("weight", "weight_scale", "weight_scale_2")))
            assert torch.equal(values[stem + name][7, rows], expected)
            torch.testing.assert_close(trained[stem + name][7, rows], expected, atol=1e-6, rtol=0)
    table = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding."
    codes = torch.cat([stored[f"{table}shard_{i}.weight"].float() for i in range(4)])
    assert torch.equal(values[table + "weight"], (codes * stored[table + "weight_scale"].float()).bfloat16().float())
    name = "model.language_model.layers.3.self_attn.q_proj.weight"
    assert torch.equal(values[name], stored[name].float())


def test_state_round_trip(exported, tmp_path):
    from plugins.qwen38.training.parameters import initialise
    from training import state

    _, config, parameters, scales, _ = exported
    state.save_state(tmp_path, parameters, scales)
    files = sorted(tmp_path.glob("weights-*.safetensors"))
    assert all(f.stat().st_size < 15 * 2**20 for f in files)
    fresh = initialise(config, seed=9)
    loaded = state.load_state(tmp_path, fresh)
    assert all(torch.equal(fresh[n], parameters[n]) for n in parameters)
    assert all(torch.equal(loaded[n], scales[n]) for n in scales)
