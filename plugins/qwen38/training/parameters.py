"""Configuration, parameter list and initialisation of the small checkpoint in its training form.

Parameters live in one flat dictionary whose keys are the checkpoint's tensor names before experts and table shards are
split (the fused BF16 naming: ``...mlp.experts.gate_up_proj`` ``[E, 2I, H]`` and ``...mlp.experts.down_proj`` ``[E, H, I]``,
``...ngram_embedding.weight`` as one table).
"""

import math

import torch

TEXT = "model.language_model."
MTP = "mtp."


def text_config(layers: int = 16, *, budget: int = 512, table_base: int = 20_000) -> dict:
    """Returns the ``text_config`` of a checkpoint with the tiny widths.

    ``layers``: a multiple of four (the pattern three linear layers, one attention layer).  ``budget``: tokens the indexer
    may select; ``table_base``: lower bound of each n-gram head's prime table size.
    """
    if layers % 4:
        raise ValueError(f"layers is {layers}, must be a multiple of 4")
    return {
        "model_type": "qwen4_exp_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 500,
        "dtype": "bfloat16",
        "eos_token_id": 500,
        "full_attention_interval": 4,
        "hc_count": 4,
        "hc_lowrank": 16,
        "head_dim": 32,
        "heads_per_ngram": 2,
        "hidden_act": "silu",
        "hidden_size": 128,
        "indexer_budget": budget,
        "indexer_compress_ratio": 4,
        "indexer_head_dim": 16,
        "indexer_kv_heads": 1,
        "indexer_n_heads": 4,
        "layer_types": ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(layers)],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_value_head_dim": 32,
        "make_ngram_vocab_size_divisible_by": 8,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 32,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "ngram_size": 3,
        "ngram_vocab_size_base": table_base,
        "norm_topk_prob": True,
        "num_attention_heads": 6,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "num_hidden_layers": layers,
        "num_key_value_heads": 2,
        "output_gate_type": "sigmoid",
        "pad_token_id": None,
        "ple_conv_kernel_size": 4,
        "ple_embed_dim": 64,
        "ple_layer_ids": [2],
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        "router_aux_loss_coef": 0.001,
        "seed": 1234,
        "shared_expert_intermediate_size": 32,
        "split_ngram_parts": 4,
        "tie_word_embeddings": False,
        "vocab_size": 512,
    }


def _splitmix64(value: int) -> int:
    mask = (1 << 64) - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


def hash_vectors(config: dict, ordinal: int = 0) -> tuple[list[int], list[int], list[int], int]:
    """Returns (multipliers, primes, offsets, padded rows) of one n-gram table."""
    half = max(1, ((2**63 - 1) // config["vocab_size"]) // 2)
    multipliers = []
    for lag in range(config["ngram_size"]):
        start = (config["seed"] + 10007 * ordinal + 0x9E3779B97F4A7C15 * (lag + 1)) & ((1 << 64) - 1)
        multipliers.append(2 * (_splitmix64(start) % half) + 1)
    heads = (config["ngram_size"] - 1) * config["heads_per_ngram"]
    primes, value = [], config["ngram_vocab_size_base"]
    while len(primes) < heads * (ordinal + 1):
        if all(value % d for d in range(2, math.isqrt(value) + 1)):
            primes.append(value)
        value += 1
    primes = primes[heads * ordinal :]
    offsets = [sum(primes[:i]) for i in range(heads)]
    divisor = config["make_ngram_vocab_size_divisible_by"]
    rows = -(-sum(primes) // divisor) * divisor
    return multipliers, primes, offsets, rows


def parameter_list(config: dict) -> dict[str, tuple[tuple[int, ...], str, float]]:
    """Returns name → (shape, group, init).

    ``group`` is ``muon`` (matrices and stacks of matrices), ``adam`` (embeddings, heads, routers, convolutions) or
    ``plain`` (norms and gates' scalars: no weight decay).  ``init`` is the standard deviation of a zero-mean normal.
    """
    c, h, s, e = config, config["hidden_size"], config["hc_count"], config["num_experts"]
    d, r, width = s * h, c["hc_lowrank"], c["moe_intermediate_size"]
    heads, kv, hd = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    key_width = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    value_width = c["linear_num_value_heads"] * c["linear_value_head_dim"]
    ih, idim, shared = c["indexer_n_heads"], c["indexer_head_dim"], c["shared_expert_intermediate_size"]
    # Outputs into the residual streams start smaller, by the usual 1/sqrt(2 · layers).
    small = 1 / math.sqrt(2 * c["num_hidden_layers"])
    found: dict[str, tuple[tuple[int, ...], str, float]] = {}

    def matrix(name: str, *shape: int, group: str = "muon", scale: float = 1.0) -> None:
        found[name] = (shape, group, scale / math.sqrt(shape[-1]))

    def mixer(prefix: str, inject: bool = True) -> None:
        found[prefix + "hc_norm.weight"] = ((d,), "plain", 0.0)
        matrix(prefix + "input_mix_weight_down.weight", r, d)
        matrix(prefix + "input_mix_weight_up.weight", d, r)
        if inject:
            matrix(prefix + "block_inject_weight.weight", s, d, group="adam")

    def attention(prefix: str) -> None:
        matrix(prefix + "q_proj.weight", heads * hd * 2, h)
        matrix(prefix + "k_proj.weight", kv * hd, h)
        matrix(prefix + "v_proj.weight", kv * hd, h)
        matrix(prefix + "o_proj.weight", h, heads * hd, scale=small)
        found[prefix + "q_norm.weight"] = ((hd,), "plain", 0.0)
        found[prefix + "k_norm.weight"] = ((hd,), "plain", 0.0)
        matrix(prefix + "indexer.index_qk_proj.weight", (ih + 1) * idim, h, group="adam")
        found[prefix + "indexer.q_layernorm.weight"] = ((idim,), "plain", 0.0)
        found[prefix + "indexer.k_layernorm.weight"] = ((idim,), "plain", 0.0)

    def experts(prefix: str) -> None:
        matrix(prefix + "gate.weight", e, h, group="adam")
        matrix(prefix + "experts.gate_up_proj", e, 2 * width, h)
        matrix(prefix + "experts.down_proj", e, h, width, scale=small)
        matrix(prefix + "shared_expert.gate_proj.weight", shared, h)
        matrix(prefix + "shared_expert.up_proj.weight", shared, h)
        matrix(prefix + "shared_expert.down_proj.weight", h, shared, scale=small)
        matrix(prefix + "shared_expert_gate.weight", 1, h, group="adam")

    found[TEXT + "embed_tokens.weight"] = ((c["vocab_size"], h), "adam", 0.3)
    found["lm_head.weight"] = ((c["vocab_size"], h), "adam", 0.02)
    mixer(TEXT + "hyper_connection_mixer.", inject=False)
    for layer, kind in enumerate(c["layer_types"]):
        prefix = f"{TEXT}layers.{layer}."
        mixer(prefix + "attn_hyper_connection.")
        mixer(prefix + "mlp_hyper_connection.")
        experts(prefix + "mlp.")
        if kind == "linear_attention":
            p = prefix + "linear_attn."
            vh = c["linear_num_value_heads"]
            matrix(p + "in_proj_qkv.weight", 2 * key_width + value_width, h)
            matrix(p + "in_proj_z.weight", value_width, h)
            matrix(p + "in_proj_b.weight", vh, h, group="adam")
            matrix(p + "in_proj_a.weight", vh, h, group="adam", scale=0.3)
            found[p + "conv1d.weight"] = ((2 * key_width + value_width, 1, c["linear_conv_kernel_dim"]), "adam", 0.3)
            found[p + "A_log"] = ((vh,), "plain", 0.0)
            found[p + "dt_bias"] = ((vh,), "plain", 0.0)
            found[p + "norm.weight"] = ((c["linear_value_head_dim"],), "plain", 0.0)
            matrix(p + "out_proj.weight", h, value_width, scale=small)
        else:
            attention(prefix + "self_attn.")
        if layer + 1 in c["ple_layer_ids"]:
            p, ple = prefix + "ple.", c["ple_embed_dim"]
            rows = hash_vectors(c, c["ple_layer_ids"].index(layer + 1))[3]
            ngram_heads = (c["ngram_size"] - 1) * c["heads_per_ngram"]
            matrix(p + "key_proj.weight", d, ple)
            matrix(p + "value_proj.weight", h, ple)
            for norm in ("norm_key", "norm_query", "norm_conv"):
                found[p + norm + ".weight"] = ((d,), "plain", 0.0)
            found[p + "conv1d.weight"] = ((d, 1, c["ple_conv_kernel_size"]), "adam", 0.0)
            found[p + "ple_embedding.ngram_embedding.weight"] = ((rows, ple // ngram_heads), "table", 0.1)
    found[MTP + "pre_fc_norm_embedding.weight"] = ((h,), "plain", 0.0)
    found[MTP + "pre_fc_norm_hidden.weight"] = ((d,), "plain", 0.0)
    matrix(MTP + "fc_embedding.weight", h, h)
    matrix(MTP + "fc_hidden.weight", h, h)
    mixer(MTP + "hyper_connection_mixer.", inject=False)
    small = 0.5
    mixer(MTP + "layers.0.attn_hyper_connection.")
    mixer(MTP + "layers.0.mlp_hyper_connection.")
    attention(MTP + "layers.0.self_attn.")
    experts(MTP + "layers.0.mlp.")
    return found


def initialise(config: dict, seed: int, device: str | torch.device = "cpu") -> dict[str, torch.nn.Parameter]:
    """Returns freshly drawn FP32 parameters (drawn on the CPU, so equal on every device)."""
    generator = torch.Generator().manual_seed(seed)
    parameters = {}
    for name, (shape, _, init) in parameter_list(config).items():
        value = torch.randn(shape, generator=generator) * init
        if name.endswith("A_log"):
            value = torch.empty(shape).uniform_(0.5, 16.0, generator=generator).log()
        elif name.endswith("dt_bias"):
            # Steps log-uniform in [1e-3, 0.1] as in Mamba; the bias is their inverse softplus.
            step = torch.exp(torch.empty(shape).uniform_(math.log(1e-3), math.log(0.1), generator=generator))
            value = step + torch.log(-torch.expm1(-step))
        elif name.endswith("linear_attn.norm.weight"):
            value = torch.ones(shape)
        parameters[name] = torch.nn.Parameter(value.to(device))
    return parameters
