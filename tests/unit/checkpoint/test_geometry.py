"""Sizes of the published and the tiny model, and what a broken configuration is told."""

import json

import pytest

from specdec.errors import CheckpointError
from specdec_qwen38.geometry import REAL, TINY, Geometry


def published_config():
    """The text_config as published: its spellings, nested rope values, an unused multimodal part."""
    kinds = ["full_attention" if (layer + 1) % 4 == 0 else "linear_attention" for layer in range(48)]
    text = {
        "model_type": "qwen4_exp_text",
        "dtype": "bfloat16",
        "hidden_size": 2560,
        "num_hidden_layers": 48,
        "layer_types": kinds,
        "full_attention_interval": 4,
        "vocab_size": 248320,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-06,
        "max_position_embeddings": 262144,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 128,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "output_gate_type": "sigmoid",
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 640,
        "shared_expert_intermediate_size": 640,
        "hc_count": 4,
        "hc_lowrank": 320,
        "ple_layer_ids": [2],
        "ple_embed_dim": 2560,
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "heads_per_ngram": 8,
        "ngram_vocab_size_base": 20000000,
        "make_ngram_vocab_size_divisible_by": 128,
        "split_ngram_parts": 128,
        "bos_token_id": 248044,
        "eos_token_id": 248044,
        "pad_token_id": None,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
    }
    return {"model_type": "qwen4_exp", "text_config": text, "vision_config": {"depth": 27}}


def test_the_published_configuration_is_the_real_geometry():
    assert Geometry.from_config(published_config()) == REAL
    assert Geometry.from_config(published_config()["text_config"]) == REAL
    assert REAL.seed == 1234 and REAL.norm_topk_prob is True  # absent from the file


def test_derived_sizes_of_the_real_model():
    assert REAL.streams_width == 10240
    assert REAL.attention_layers == (3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43, 47)
    assert len(REAL.linear_layers) == 36 and REAL.linear_layers[:4] == (0, 1, 2, 4)
    assert REAL.ple_layers == (1,)
    assert (REAL.key_width, REAL.value_width, REAL.qkv_width) == (2048, 6144, 10240)
    assert (REAL.query_width, REAL.kv_width, REAL.index_width) == (6144, 512, 640)
    assert (REAL.budget_groups, REAL.rotary_dim) == (512, 64)
    assert (REAL.ngram_heads, REAL.ngram_head_dim) == (16, 160)
    assert REAL.ple_table_rows() == 320_001_536 == 128 * 2_500_012


def test_derived_sizes_of_the_tiny_model():
    assert TINY.streams_width == 512
    assert TINY.linear_layers == (0, 1, 2) and TINY.attention_layers == (3,)
    assert (TINY.key_width, TINY.value_width, TINY.qkv_width) == (64, 192, 320)
    assert (TINY.query_width, TINY.kv_width, TINY.index_width) == (192, 64, 80)
    assert (TINY.budget_groups, TINY.rotary_dim) == (4, 8)
    assert (TINY.ngram_heads, TINY.ngram_head_dim) == (4, 16)
    assert TINY.ple_table_rows() == 4064 == 4 * 1016


@pytest.mark.parametrize("geometry", [REAL, TINY])
def test_a_geometry_survives_json(geometry):
    text = json.loads(json.dumps(geometry.to_config()))
    assert Geometry.from_config(text) == geometry
    assert Geometry.from_config({"text_config": text}) == geometry


@pytest.mark.parametrize("spelling", ["full_attention", "indexed_attention", "qwen_sparse_attention"])
def test_every_spelling_of_attention_layers_is_one_geometry(spelling):
    config = TINY.to_config()
    config["layer_types"] = ["linear_attention"] * 3 + [spelling]
    assert Geometry.from_config(config) == TINY


def test_layer_types_follow_the_interval_when_absent():
    config = TINY.to_config()
    del config["layer_types"]
    config["full_attention_interval"] = 4
    assert Geometry.from_config(config) == TINY


def test_flat_rope_keys_are_read():
    config = TINY.to_config()
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope["rope_theta"], "partial_rotary_factor": rope["partial_rotary_factor"]}
    assert Geometry.from_config(config) == TINY


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("hidden_size", "128", "'128'"),
        ("hidden_size", 128.0, "128.0"),
        ("hidden_size", True, "True"),
        ("num_experts", 0, "at least 1"),
        ("hc_count", 1, "at least 2"),
        ("layer_types", ["linear_attention"] * 3, "num_hidden_layers = 4"),
        ("layer_types", ["linear_attention"] * 3 + ["sliding_attention"], "qwen_sparse_attention"),
        ("layer_types", 4, "a list of layer names"),
        ("num_attention_heads", 5, "num_key_value_heads = 2"),
        ("partial_rotary_factor", 1.5, "at most 1"),
        ("partial_rotary_factor", 0.1, "even number"),
        ("indexer_head_dim", 4, "8 rotated"),
        ("indexer_compress_ratio", 5, "64-token page"),
        ("indexer_budget", 18, "indexer_compress_ratio = 4"),
        ("linear_num_value_heads", 5, "linear_num_key_heads = 2"),
        ("num_experts_per_tok", 17, "num_experts = 16"),
        ("ple_layer_ids", [0], "from 1 to 4"),
        ("ple_layer_ids", [2, 2], "increasing"),
        ("ple_layer_ids", [4], "linear_attention"),
        ("ple_layer_ids", 2, "one-based"),
        ("ple_embed_dim", 66, "4 n-gram heads"),
        ("split_ngram_parts", 3, "4064"),
        ("eos_token_id", 512, "vocab_size = 512"),
        ("eos_token_id", [500], "[500]"),
        ("rms_norm_eps", 0, "above 0"),
        ("rms_norm_eps", float("nan"), "nan"),
        ("norm_topk_prob", 1, "true"),
        ("norm_topk_prob", False, "true"),
        ("output_gate_type", "gelu", "'sigmoid' or 'silu'"),
        ("mtp_num_hidden_layers", 2, "0 or 1"),
        ("hidden_act", "gelu", "'silu'"),
        ("tie_word_embeddings", True, "False"),
        ("attention_bias", True, "False"),
        ("indexer_kv_heads", 2, "allowed: 1"),
        ("rope_parameters", {"rope_type": "yarn"}, "'default'"),
        ("rope_parameters", 7, "rope_theta"),
    ],
)
def test_a_wrong_value_is_refused_with_key_value_and_allowed(key, value, words):
    config = TINY.to_config()
    if key == "partial_rotary_factor":
        config["rope_parameters"][key] = value
    else:
        config[key] = value
    with pytest.raises(CheckpointError) as caught:
        Geometry.from_config(config)
    message = str(caught.value)
    assert "\n" not in message and key in message and words in message and "allowed" in message


@pytest.mark.parametrize("key", ["hidden_size", "output_gate_type", "layer_types", "indexer_budget", "eos_token_id"])
def test_a_missing_key_is_named(key):
    config = TINY.to_config()
    config[key] = None
    with pytest.raises(CheckpointError, match=f"missing {key}"):
        Geometry.from_config(config)


def test_a_text_config_that_is_no_object_is_refused():
    with pytest.raises(CheckpointError, match="text_config"):
        Geometry.from_config({"text_config": [1]})


def test_a_model_without_ngram_embedding_is_allowed():
    config = TINY.to_config()
    config["ple_layer_ids"] = None
    geometry = Geometry.from_config(config)
    assert geometry.ple_layers == ()
