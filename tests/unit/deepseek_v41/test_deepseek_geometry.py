"""Sizes of the published and the tiny model, and what a broken configuration is told."""

import json

import pytest
from attrs import evolve

from specdec.errors import CheckpointError
from specdec_deepseek_v41.geometry import REAL, TINY, Geometry


def published_config():
    """The configuration as published: its spellings, nested YaRN numbers, unused multimodal parts."""
    text = {
        "model_type": "deepseek_v41_text",
        "vocab_size": 129280,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1280,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "max_position_embeddings": 1048576,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "compress_rope_theta": 160000,
        "sliding_window": 128,
        "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0, 0, 0],
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 512,
        "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "moe_intermediate_size": 2304,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-06,
        "engram_layer_ids": [1, 14],
        "engram_num_embeddings": [384006168, 384016682],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 16000000,
        "engram_n_heads": 8,
        "engram_head_dim": 256,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 99092,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [37, 38, 39],
        "dspark_markov_rank": 256,
        "dspark_n_routed_experts": 128,
        "dspark_num_experts_per_tok": 3,
        "tie_word_embeddings": False,
    }
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "text_config": text,
        "vision_config": {"num_hidden_layers": 32},
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0"},
    }


#: Names that the official inference code has instead.
OFFICIAL = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "qk_rope_head_dim": "rope_head_dim",
    "rms_norm_eps": "norm_eps",
    "max_position_embeddings": "max_seq_len",
    "sliding_window": "window_size",
    "kv_source_layer_ids": "kv_source_layers",
    "index_source_layer_ids": "index_source_layers",
    "candidate_source_layer_id": "candidate_source_layer",
    "moe_intermediate_size": "moe_inter_dim",
    "num_experts_per_tok": "n_activated_experts",
    "scoring_func": "score_func",
    "routed_scaling_factor": "route_scale",
    "engram_pad_token_id": "engram_pad_id",
    "num_nextn_predict_layers": "n_mtp_layers",
    "dspark_num_experts_per_tok": "dspark_n_activated_experts",
}


def test_the_published_configuration_is_the_real_geometry():
    config = published_config()
    assert Geometry.from_config(config) == REAL
    assert Geometry.from_config(config["text_config"] | {"eos_token_id": [1]}) == REAL


def test_the_names_of_the_official_code_are_the_same_geometry():
    text = {OFFICIAL.get(key, key): value for key, value in published_config()["text_config"].items()}
    scaling = text.pop("rope_scaling")
    text |= {"rope_factor": 16, "beta_fast": 32, "beta_slow": 1, "original_seq_len": 65536, "eos_token_id": 1}
    assert scaling["factor"] == 16 and not set(OFFICIAL) & set(text)
    assert Geometry.from_config(text) == REAL
    # the published name wins, and a refusal has it
    assert Geometry.from_config(text | {"hidden_size": 5120, "dim": 7}) == REAL
    with pytest.raises(CheckpointError, match="scoring_func is 'softmax', allowed: 'sqrtsoftplus'"):
        Geometry.from_config(text | {"score_func": "softmax"})


def test_derived_sizes_of_the_real_model():
    assert (REAL.streams_width, REAL.hc_outputs, REAL.query_width, REAL.group_width) == (20480, 24, 32768, 4096)
    assert (REAL.output_width, REAL.index_width, REAL.feature_width) == (8192, 4096, 15360)
    assert (REAL.engram_rows, REAL.engram_width, REAL.num_stages) == (24, 6144, 3)
    assert (REAL.sources_of_ratio(2), REAL.sources_of_ratio(1)) == ((2, 8, 14), (20,))


@pytest.mark.parametrize(
    ("layers", "rows", "selection"),
    [
        (range(2, 8), 2, 2),
        (range(8, 14), 8, 8),
        (range(14, 20), 14, 14),
        (range(20, 24), 20, 20),
        (range(24, 28), 20, 24),
        (range(28, 32), 20, 28),
        (range(32, 36), 20, 32),
        (range(36, 40), 20, 36),
    ],
)
def test_what_each_layer_reads(layers, rows, selection):
    assert {(REAL.kv_source(layer), REAL.index_source(layer)) for layer in layers} == {(rows, selection)}


def test_derived_sizes_of_the_tiny_model():
    assert (TINY.streams_width, TINY.hc_outputs, TINY.query_width, TINY.group_width) == (512, 24, 256, 128)
    assert (TINY.output_width, TINY.index_width, TINY.feature_width) == (64, 64, 384)
    assert (TINY.engram_rows, TINY.engram_width) == (6, 192)
    assert (TINY.sources_of_ratio(2), TINY.sources_of_ratio(1)) == ((2, 4), (6,))
    assert [TINY.index_source(layer) for layer in range(2, 10)] == [2, 2, 4, 4, 6, 6, 8, 8]


@pytest.mark.parametrize("geometry", [REAL, TINY, evolve(TINY, dspark_block_size=7, sliding_window=32)])
def test_a_geometry_survives_json(geometry):
    text = json.loads(json.dumps(geometry.to_config()))
    assert Geometry.from_config(text) == geometry
    assert Geometry.from_config({"text_config": text}) == geometry


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
        ("n_routed_experts", 0, "at least 1"),
        ("hc_mult", 1, "at least 2"),
        ("engram_max_ngram_size", 1, "at least 2"),
        ("compress_ratios", [0] * 12, "10 layers and 3 draft stages"),
        ("compress_ratios", [0, 0, 4, *[2] * 7, 0, 0, 0], "a list of 0, 1 and 2"),
        ("compress_ratios", 2, "a list of 0, 1 and 2"),
        ("compress_ratios", [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 1], "0 for the 3 draft stages"),
        ("kv_source_layer_ids", [4, 6], "layers without one: [2, 3]"),
        ("kv_source_layer_ids", [2, 4], "layers without one: [6, 7, 8, 9]"),
        ("kv_source_layer_ids", [2, 6, 4], "increasing layer numbers below 10"),
        ("kv_source_layer_ids", [], "increasing layer numbers below 10"),
        ("kv_source_layer_ids", [1, 2, 4, 6], "compress ratio above 0"),
        ("index_source_layer_ids", [2, 4, 8], "every KV source [2, 4, 6]"),
        ("index_source_layer_ids", [2, 4, 6, 10], "below 10"),
        ("candidate_source_layer_id", 4, "not before the last KV source 6"),
        ("candidate_source_layer_id", 7, "an index source"),
        ("index_topk", 14, "at most 13"),
        ("o_groups", 3, "num_attention_heads = 4"),
        ("head_dim", 48, "a multiple of 32"),
        ("index_head_dim", 24, "a multiple of 32"),
        ("qk_rope_head_dim", 15, "an even number up to"),
        ("qk_rope_head_dim", 34, "index_head_dim = 32"),
        ("num_experts_per_tok", 9, "n_routed_experts = 8"),
        ("dspark_num_experts_per_tok", 5, "dspark_n_routed_experts = 4"),
        ("n_shared_experts", 2, "allowed: 1"),
        ("engram_layer_ids", [4, 1], "increasing layer numbers below 10"),
        ("engram_num_embeddings", [462, 631], "[462, 630]"),
        ("engram_num_embeddings", [462], "[462, 630]"),
        ("engram_compressed_vocab_size", 513, "vocab_size = 512"),
        ("engram_pad_token_id", 512, "vocab_size = 512"),
        ("dspark_noise_token_id", 512, "vocab_size = 512"),
        ("dspark_target_layer_ids", [7, 8, 10], "below 10"),
        ("dspark_target_layer_ids", [7, 7], "increasing"),
        ("num_nextn_predict_layers", 0, "at least 1"),
        ("eos_token_id", 512, "vocab_size = 512"),
        ("eos_token_id", [], "a list of token ids"),
        ("rms_norm_eps", 0, "above 0"),
        ("rope_scaling", {"type": "linear", "factor": 4}, "'yarn'"),
        ("rope_scaling", 4, "'yarn'"),
        ("hidden_act", "gelu", "'silu'"),
        ("tie_word_embeddings", True, "False"),
        ("num_key_value_heads", 2, "allowed: 1"),
        ("scoring_func", "sigmoid", "'sqrtsoftplus'"),
        ("topk_method", "greedy", "'noaux_tc'"),
        ("norm_topk_prob", False, "True"),
        ("num_hash_layers", 3, "allowed: 0"),
        ("gate_temp", 0.5, "allowed: 1.0"),
    ],
)
def test_a_wrong_value_is_refused_with_key_value_and_allowed(key, value, words):
    with pytest.raises(CheckpointError) as caught:
        Geometry.from_config(TINY.to_config() | {key: value})
    message = str(caught.value)
    assert "\n" not in message and key in message and words in message and "allowed" in message


@pytest.mark.parametrize("key", ["hidden_size", "rope_scaling", "compress_ratios", "engram_vocab_size"])
def test_a_missing_key_is_named(key):
    named = "rope_factor, beta_fast, beta_slow" if key == "rope_scaling" else key
    with pytest.raises(CheckpointError, match=f"missing {named}"):
        Geometry.from_config(TINY.to_config() | {key: None})
