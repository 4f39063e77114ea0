"""GLM's exported checkpoint: names, types and sizes against the architecture's tensor list, values against the formulas."""

import json

import pytest
import torch

LAYERS = 17


@pytest.fixture(scope="module")
def exported(training_path, tmp_path_factory):
    from plugins.glm53.training import export
    from plugins.glm53.training.parameters import initialise, text_config

    config = text_config(LAYERS)
    parameters = initialise(config, seed=2)
    # A few blocks far below their row's usual scale: they need exceptions.
    stack = parameters["model.language_model.layers.5.mlp.experts.gate_up_proj"]
    stack.data[7, 3, :16] *= 1e-3
    stack.data[7, 90, 32:48] = 0
    scales = {f"model.language_model.layers.{i}.": torch.tensor([0.01, 0.02]) for i in range(3, LAYERS)}
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
    return folder / "tiny", config, parameters, size


def expected_tensors() -> dict[str, tuple[tuple[int, ...] | None, str]]:
    """Name → (shape, type) of every tensor, written down from the published layout with the small widths."""
    found: dict[str, tuple[tuple[int, ...] | None, str]] = {}

    def add(prefix, entries, dtype="BF16"):
        for name, *shape in entries:
            found[prefix + name] = (tuple(shape), dtype)

    text = "model.language_model."
    add(text, [("embed_tokens.weight", 512, 128), ("norm.weight", 128)])
    add("", [("lm_head.weight", 512, 128)])
    for i in range(LAYERS + 1):
        p, drafter = f"{text}layers.{i}.", i == LAYERS
        add(p, [("input_layernorm.weight", 128), ("post_attention_layernorm.weight", 128)])
        if drafter:
            add(p, [("enorm.weight", 128), ("hnorm.weight", 128), ("shared_head.norm.weight", 128)])
            add(p, [("eh_proj.weight", 128, 256)])
        else:
            for site in ("attn", "ffn"):
                add(p, [(f"hc_{site}_fn", 24, 512)])
                add(p, [(f"hc_{site}_base", 24), (f"hc_{site}_scale", 3)], "F32")
        a = p + "self_attn."
        if i % 4 == 3 or drafter:
            add(a, [("q_a_proj.weight", 64, 128), ("q_a_layernorm.weight", 64), ("q_b_proj.weight", 128, 64)])
            add(
                a,
                [("kv_a_proj_with_mqa.weight", 64, 128), ("kv_a_layernorm.weight", 64), ("kv_b_proj.weight", 256, 64)],
            )
            add(a, [("o_proj.weight", 128, 128), ("indexer.wq_b.weight", 512, 64), ("indexer.wk.weight", 32, 128)])
            add(
                a,
                [("indexer.k_norm.weight", 32), ("indexer.k_norm.bias", 32), ("indexer.weights_proj.weight", 16, 128)],
            )
            add(a + "indexer.index_kpool_compress_", [("ape", 4, 32), ("gate", 32, 128)])
        else:
            add(a, [(f"{n}_proj.weight", 128, 128) for n in "qkvo"])
            add(a, [(f"{n}_conv1d.weight", 128, 1, 4) for n in "qkv"])
            add(a, [("b_proj.weight", 4, 128), ("o_norm.weight", 32)])
            add(a, [(f"{n}_a_proj.weight", 32, 128) for n in "fg"] + [(f"{n}_b_proj.weight", 128, 32) for n in "fg"])
            add(a, [("A_log", 4), ("dt_bias", 128)], "F32")
        width = 256 if i < 3 else 64
        m = p + ("mlp." if i < 3 else "mlp.shared_experts.")
        add(m, [("gate_proj.weight", width, 128), ("up_proj.weight", width, 128), ("down_proj.weight", 128, width)])
        if i < 3:
            continue
        add(p + "mlp.gate.", [("weight", 12, 128)])
        add(p + "mlp.gate.", [("e_score_correction_bias", 12)], "F32")
        for e in range(12):
            for name, rows, columns in (("gate", 64, 128), ("up", 64, 128), ("down", 128, 64)):
                x = f"{p}mlp.experts.{e}.{name}_proj."
                found[x + "weight"] = ((rows, columns // 2), "U8")
                found[x + "weight_scale_2"] = ((), "F32")
                if drafter:
                    found[x + "weight_scale"] = ((rows, columns // 16), "F8_E4M3")
                else:
                    fixed = (rows // 16, 16 * (1 + columns // 32))
                    found[x + "weight_scale.nvfp4_csf_fixed"] = (fixed, "U8")
                    found[x + "weight_scale.nvfp4_csf_exceptions"] = (None, "U32")
                    found[x + "input_scale"] = ((), "F32")
    return found


def decoded(fixed: torch.Tensor, exceptions: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Scale bytes of a coded matrix, value by value."""
    slab, words = fixed.tolist(), exceptions.to(torch.int64).tolist()
    values = torch.zeros(rows, columns, dtype=torch.uint8)
    for row in range(rows):
        line = slab[row // 16]
        start = 16 + (row % 16) * (columns // 2)
        for column in range(columns):
            values[row, column] = line[row % 16] + ((line[start + column // 2] >> (4 * (column % 2))) & 15)
    for word in words:
        position = word & 0xFFFFFF
        values[position // columns, position % columns] = word >> 24
    assert words == sorted(words, key=lambda w: w & 0xFFFFFF)
    return values


def test_stays_below_twelve_mebibytes(exported):
    assert exported[3] < 12 * 2**20 - 200_000


def test_tensors_match_the_published_layout(exported):
    from safetensors import safe_open

    with safe_open(str(exported[0] / "model.safetensors"), "pt") as stored:
        slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118
        found = {name: (tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    expected = expected_tensors()
    assert found.keys() == expected.keys()
    for name, (shape, dtype) in expected.items():
        assert found[name][1] == dtype, name
        assert shape is None or found[name][0] == shape, name


def test_configuration_names_the_coded_layers(exported):
    content = json.loads((exported[0] / "config.json").read_text())
    layers = content["quantization_config"]["quantized_layers"]
    coded = {"quant_algo": "NVFP4", "group_size": 16, "weight_scale_encoding": "csf"}
    assert [n for n, v in layers.items() if v == coded] == [
        f"model.language_model.layers.{i}.mlp.experts" for i in range(3, LAYERS)
    ]
    assert layers["model.language_model.layers.17.mlp.experts"] == {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    assert content["text_config"]["layer_types"].count("deepseek_sparse_attention") == 4
    generation = json.loads((exported[0] / "generation_config.json").read_text())
    assert generation == {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "eos_token_id": [500]}


def test_training_sees_the_stored_values(exported):
    from safetensors.torch import load_file
    from training.storage import nvfp4

    from plugins.glm53.training.quantisation import checkpoint_values, straight_through

    folder, _, parameters, _ = exported
    stored = load_file(str(folder / "model.safetensors"))
    values = checkpoint_values(parameters)
    for part, layer in (("target", 5), ("mtp", LAYERS)):
        stem = f"model.language_model.layers.{layer}.mlp.experts."
        trained = straight_through(parameters, part)
        for projection, rows, name in (
            ("gate_proj", slice(0, 64), "gate_up_proj"),
            ("up_proj", slice(64, 128), "gate_up_proj"),
            ("down_proj", slice(0, 128), "down_proj"),
        ):
            p = f"{stem}7.{projection}."
            packed = stored[p + "weight"]
            if part == "target":
                coded = (stored[p + f"weight_scale.nvfp4_csf_{n}"] for n in ("fixed", "exceptions"))
                scale = decoded(*coded, packed.shape[0], packed.shape[1] // 8).view(torch.float8_e4m3fn)
            else:
                scale = stored[p + "weight_scale"]
            expected = nvfp4.dequantise(packed, scale, stored[p + "weight_scale_2"])
            assert torch.equal(values[stem + name][7, rows], expected)
            torch.testing.assert_close(trained[stem + name][7, rows], expected, atol=1e-6, rtol=0)
    first = "model.language_model.layers.5.mlp.experts.7."
    assert stored[first + "gate_proj.weight_scale.nvfp4_csf_exceptions"].numel() > 0
    assert stored[first + "gate_proj.weight_scale_2"] == stored[first + "up_proj.weight_scale_2"]
    name = "model.language_model.layers.3.self_attn.q_b_proj.weight"
    assert torch.equal(values[name], stored[name].float())


def test_mixing_matrices_are_doubly_stochastic(training_path):
    from training.sinkhorn import plain

    drawn = 3 * torch.randn(200, 4, 4, generator=torch.Generator().manual_seed(7))
    matrix = plain(drawn, 20, 1e-6)
    assert (matrix > 0).all()
    torch.testing.assert_close(matrix.sum(-2), torch.ones(200, 4), atol=1e-5, rtol=0)
    assert (matrix.sum(-1) - 1).abs().max() < 0.05
