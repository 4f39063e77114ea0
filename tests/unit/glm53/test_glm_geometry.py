"""Sizes of the published and the tiny model, and what a broken configuration is told."""

import json

import pytest
from attrs import evolve

from specdec.errors import CheckpointError
from specdec_glm53.geometry import REAL, TINY, Geometry


def published_config():
    """The configuration as published: its spellings, nested linear sizes, unused rotary and multimodal parts."""
    sparse = list(range(3, 45, 4))
    text = {
        "model_type": "glm5_next_text",
        "dtype": "bfloat16",
        "vocab_size": 154880,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 45,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 256,
        "qk_rope_head_dim": 0,
        "qk_head_dim": 256,
        "v_head_dim": 256,
        "head_dim": 0,
        "mla_use_nope": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-05,
        "max_position_embeddings": 1048576,
        "tie_word_embeddings": False,
        "layer_types": ["deepseek_sparse_attention" if layer in sparse else "linear_attention" for layer in range(45)],
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 42,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "indexer_types": ["full"] * 45,
        "n_routed_experts": 288,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "moe_router_dtype": "float32",
        "linear_attn_config": {
            "num_heads": 64,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "kda_layers": [layer for layer in range(45) if layer not in sparse],
            "full_attn_layers": sparse,
        },
        "mhc": True,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-06,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "index_kpool": 4,
        "index_kpool_compress": True,
        "index_kpool_always_select_tail": True,
        "indexer_rope_interleave": True,
        "index_share_for_mtp_iteration": True,
        "pad_token_id": 154820,
        "eos_token_id": [154820, 154827, 154829],
    }
    return {"model_type": "glm5_next", "text_config": text, "vision_config": {"depth": 24}}


def test_the_published_configuration_is_the_real_geometry():
    assert Geometry.from_config(published_config()) == REAL
    assert Geometry.from_config(published_config()["text_config"]) == REAL


def test_derived_sizes_of_the_real_model():
    assert REAL.indexed_layers == (3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43)
    assert len(REAL.linear_layers) == 34 and REAL.linear_layers[-2:] == (42, 44)
    assert REAL.dense_layers == (0, 1, 2) and REAL.sparse_layers == tuple(range(3, 45))
    assert REAL.mtp_layer == 45
    assert (REAL.streams_width, REAL.hc_outputs) == (16384, 24)
    assert (REAL.linear_width, REAL.query_width, REAL.value_width, REAL.index_width) == (8192, 16384, 16384, 4096)
    assert REAL.budget_groups == 512


def test_derived_sizes_of_the_tiny_model():
    assert TINY.layer_types == tuple("linear_attention" if c == "L" else "indexed_attention" for c in "LLLILLLIL")
    assert TINY.mlp_layer_types == ("dense",) * 3 + ("sparse",) * 6
    assert TINY.mtp_layer == 9
    assert (TINY.streams_width, TINY.hc_outputs) == (512, 24)
    assert (TINY.linear_width, TINY.query_width, TINY.value_width, TINY.index_width) == (128, 128, 128, 512)
    assert TINY.budget_groups == 8


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("geometry", [REAL, TINY])
def test_every_declared_tensor_parallel_size_divides_what_is_sharded(geometry, size):
    sharded = ("vocab_size", "num_attention_heads", "linear_num_heads", "intermediate_size", "moe_intermediate_size")
    assert not [name for name in sharded if getattr(geometry, name) % size]
    # a rank's slice of the experts is whole blocks of sixteen
    assert geometry.moe_intermediate_size // size % 16 == 0


@pytest.mark.parametrize("geometry", [REAL, TINY, evolve(TINY, num_nextn_predict_layers=0)])
def test_a_geometry_survives_json(geometry):
    text = json.loads(json.dumps(geometry.to_config()))
    assert Geometry.from_config(text) == geometry
    assert Geometry.from_config({"text_config": text}) == geometry


def test_another_implementation_reads_our_configuration():
    configuration = pytest.importorskip("transformers.models.glm5_next.configuration_glm5_next")
    theirs = configuration.Glm5NextTextConfig(**TINY.to_config())
    assert theirs.layer_types == list(TINY.layer_types) and theirs.mlp_layer_types == list(TINY.mlp_layer_types)
    assert (theirs.qk_head_dim, theirs.index_kpool, theirs.linear_lower_bound) == (32, 4, -5.0)
    assert Geometry.from_config(theirs.to_dict() | {"num_nextn_predict_layers": 1}) == evolve(
        TINY, index_share_for_mtp_iteration=True
    )


@pytest.mark.parametrize("spelling", ["indexed_attention", "deepseek_sparse_attention", "full_attention"])
def test_every_spelling_of_indexed_layers_is_one_geometry(spelling):
    config = TINY.to_config()
    config["layer_types"] = [spelling if "indexed" in kind else kind for kind in config["layer_types"]]
    assert Geometry.from_config(config) == TINY


def test_nested_and_flat_linear_sizes_are_one_geometry():
    config = TINY.to_config()
    flat = {key: config.pop(key) for key in list(config) if key.startswith("linear_")}
    config["linear_attn_config"] = {
        "num_heads": 4,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
    }
    assert Geometry.from_config(config) == TINY
    config["linear_attn_config"]["num_heads"] = 99
    assert Geometry.from_config(config | flat) == TINY


def test_dense_layers_may_be_counted_instead_of_listed():
    config = TINY.to_config()
    del config["mlp_layer_types"]
    assert Geometry.from_config(config | {"first_k_dense_replace": 3}) == TINY
    with pytest.raises(CheckpointError, match="moe_layer_freq is 2, allowed: 1"):
        Geometry.from_config(config | {"first_k_dense_replace": 3, "moe_layer_freq": 2})
    with pytest.raises(CheckpointError, match="missing mlp_layer_types"):
        Geometry.from_config(config)


def test_stop_ids_may_be_one_or_several_inside_or_outside_the_text_model():
    config = TINY.to_config()
    assert Geometry.from_config(config | {"eos_token_id": 1}) == TINY
    del config["eos_token_id"]
    assert Geometry.from_config({"text_config": config, "eos_token_id": [1]}) == TINY
    with pytest.raises(CheckpointError, match="missing eos_token_id"):
        Geometry.from_config({"text_config": config})


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("hidden_size", "128", "'128'"),
        ("hidden_size", True, "True"),
        ("n_routed_experts", 0, "at least 1"),
        ("hc_mult", 1, "at least 2"),
        ("layer_types", ["linear_attention"] * 8, "num_hidden_layers = 9"),
        ("layer_types", ["linear_attention"] * 8 + ["sliding_attention"], "deepseek_sparse_attention"),
        ("layer_types", 4, "a list of layer names"),
        ("layer_types", ["linear_attention"] * 9, "at least one layer of linear and one of indexed attention"),
        ("layer_types", ["indexed_attention"] * 9, "at least one layer of linear and one of indexed attention"),
        ("linear_lower_bound", 0, "a number below 0"),
        ("mlp_layer_types", ["sparse"] * 8, "num_hidden_layers = 9"),
        ("mlp_layer_types", ["sparse"] * 8 + ["moe"], "only dense, sparse"),
        ("linear_lower_bound", 1.0, "at most 0"),
        ("linear_lower_bound", float("-inf"), "-inf"),
        ("linear_attn_config", 3, "short_conv_kernel_size"),
        ("index_kpool", 5, "64-token page"),
        ("index_topk", 34, "index_kpool = 4"),
        ("num_experts_per_tok", 13, "n_routed_experts = 12"),
        ("n_shared_experts", 2, "allowed: 1"),
        ("num_nextn_predict_layers", 2, "0 or 1"),
        ("index_share_for_mtp_iteration", 1, "true or false"),
        ("eos_token_id", 512, "vocab_size = 512"),
        ("eos_token_id", [], "a list of token ids"),
        ("eos_token_id", [1, 1], "distinct"),
        ("eos_token_id", "1", "a list of token ids"),
        ("rms_norm_eps", 0, "above 0"),
        ("rms_norm_eps", float("nan"), "nan"),
        ("swiglu_limit", 0, "above 0"),
        ("hidden_act", "gelu", "'silu'"),
        ("tie_word_embeddings", True, "False"),
        ("attention_bias", True, "False"),
        ("qk_rope_head_dim", 64, "allowed: 0"),
        ("qk_head_dim", 96, "qk_nope_head_dim = 32"),
        ("mla_use_nope", False, "True"),
        ("num_key_value_heads", 2, "num_attention_heads = 4"),
        ("n_group", 2, "allowed: 1"),
        ("topk_group", 2, "allowed: 1"),
        ("norm_topk_prob", False, "True"),
        ("scoring_func", "softmax", "'sigmoid'"),
        ("topk_method", "greedy", "'noaux_tc'"),
        ("mhc", False, "True"),
        ("index_kpool_compress", False, "True"),
        ("index_kpool_always_select_tail", False, "True"),
        ("indexer_types", ["full"] * 8 + ["shared"], "'full'"),
    ],
)
def test_a_wrong_value_is_refused_with_key_value_and_allowed(key, value, words):
    with pytest.raises(CheckpointError) as caught:
        Geometry.from_config(TINY.to_config() | {key: value})
    message = str(caught.value)
    assert "\n" not in message and key in message and words in message and "allowed" in message


@pytest.mark.parametrize("key", ["hidden_size", "index_kpool", "linear_lower_bound", "layer_types", "hc_eps"])
def test_a_missing_key_is_named(key):
    with pytest.raises(CheckpointError, match=f"missing {key}"):
        Geometry.from_config(TINY.to_config() | {key: None})


def test_a_text_config_that_is_no_object_is_refused():
    with pytest.raises(CheckpointError, match="text_config"):
        Geometry.from_config({"text_config": [1]})
