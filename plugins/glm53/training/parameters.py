"""Configuration, parameter list and initialisation of the small checkpoint in its training form.

Parameters live in one flat dictionary whose keys are the checkpoint's tensor names before the experts are split:
``...mlp.experts.gate_up_proj`` ``[E, 2I, H]`` and ``...mlp.experts.down_proj`` ``[E, H, I]``.
"""

import math

import torch

TEXT = "model.language_model."
# Tensors that the checkpoint keeps in float32.
FLOAT32 = ("_base", "_scale", "A_log", "dt_bias", "e_score_correction_bias")


def text_config(layers: int = 17, *, budget: int = 512) -> dict:
    """Returns the ``text_config`` of a checkpoint with the tiny widths.

    ``layers``: the pattern three linear layers, one indexed layer; the last layer is linear, so the count is one more than
    a multiple of four (or any other count, for checks).  ``budget``: tokens the indexer may select.
    """
    return {
        "model_type": "glm5_next_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "eos_token_id": [500],
        "hc_eps": 1e-06,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hidden_act": "silu",
        "hidden_size": 128,
        "index_head_dim": 32,
        "index_kpool": 4,
        "index_kpool_always_select_tail": True,
        "index_kpool_compress": True,
        "index_n_heads": 16,
        "index_share_for_mtp_iteration": True,
        "index_topk": budget,
        "indexer_types": ["full"] * layers,
        "initializer_range": 0.02,
        "intermediate_size": 256,
        "kv_lora_rank": 64,
        "layer_types": ["deepseek_sparse_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)],
        "linear_conv_kernel_dim": 4,
        "linear_head_dim": 32,
        "linear_lower_bound": -5.0,
        "linear_num_heads": 4,
        "max_position_embeddings": 4096,
        "mhc": True,
        "mla_use_nope": True,
        "mlp_layer_types": ["dense" if i < 3 else "sparse" for i in range(layers)],
        "moe_intermediate_size": 64,
        "moe_router_dtype": "float32",
        "n_group": 1,
        "n_routed_experts": 12,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts_per_tok": 4,
        "num_hidden_layers": layers,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 500,
        "q_lora_rank": 64,
        "qk_head_dim": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 0,
        "rms_norm_eps": 1e-05,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "swiglu_limit": 10.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 32,
        "vocab_size": 512,
    }


def mtp_prefix(config: dict) -> str:
    """Name prefix of the MTP layer: it follows the target's layers."""
    return f"{TEXT}layers.{config['num_hidden_layers']}."


def parameter_list(config: dict) -> dict[str, tuple[tuple[int, ...], str, float]]:
    """Returns name → (shape, group, init).

    ``group`` is ``muon`` (matrices and stacks of matrices), ``adam`` (embeddings, heads, routers, convolutions), ``plain``
    (norms, gates' scalars: no weight decay) or ``buffer`` (no gradient).  ``init`` is the standard deviation of a normal
    around zero, or around one for norms.
    """
    c, h, layers = config, config["hidden_size"], config["num_hidden_layers"]
    # Outputs into the residual streams start smaller, by the usual 1/sqrt(2 · layers).
    small = 1 / math.sqrt(2 * layers)
    found: dict[str, tuple[tuple[int, ...], str, float]] = {}

    def matrix(name: str, *shape: int, group: str = "muon", scale: float = 1.0) -> None:
        found[name] = (shape, group, scale / math.sqrt(shape[-1]))

    def norm(name: str, width: int) -> None:
        found[name + ".weight"] = ((width,), "plain", 0.0)

    def gated(prefix: str, width: int, output: float) -> None:
        matrix(prefix + "gate_proj.weight", width, h)
        matrix(prefix + "up_proj.weight", width, h)
        matrix(prefix + "down_proj.weight", h, width, scale=output)

    def experts(prefix: str, output: float) -> None:
        e, width = c["n_routed_experts"], c["moe_intermediate_size"]
        matrix(prefix + "gate.weight", e, h, group="adam")
        found[prefix + "gate.e_score_correction_bias"] = ((e,), "buffer", 0.0)
        matrix(prefix + "experts.gate_up_proj", e, 2 * width, h)
        matrix(prefix + "experts.down_proj", e, h, width, scale=output)
        gated(prefix + "shared_experts.", width, output)

    def delta_attention(p: str) -> None:
        heads, dim = c["linear_num_heads"], c["linear_head_dim"]
        for part in "qkv":
            matrix(f"{p}{part}_proj.weight", heads * dim, h)
            found[f"{p}{part}_conv1d.weight"] = ((heads * dim, 1, c["linear_conv_kernel_dim"]), "adam", 0.3)
        for part, scale in (("f", 0.5), ("g", 1.0)):
            matrix(f"{p}{part}_a_proj.weight", dim, h)
            matrix(f"{p}{part}_b_proj.weight", heads * dim, dim, scale=scale)
        matrix(p + "b_proj.weight", heads, h, group="adam")
        found[p + "A_log"] = ((heads,), "plain", 0.0)
        found[p + "dt_bias"] = ((heads * dim,), "plain", 0.0)
        norm(p + "o_norm", dim)
        matrix(p + "o_proj.weight", h, heads * dim, scale=small)

    def latent_attention(p: str, output: float) -> None:
        heads, rank, latent = c["num_attention_heads"], c["q_lora_rank"], c["kv_lora_rank"]
        matrix(p + "q_a_proj.weight", rank, h)
        norm(p + "q_a_layernorm", rank)
        matrix(p + "q_b_proj.weight", heads * c["qk_nope_head_dim"], rank)
        matrix(p + "kv_a_proj_with_mqa.weight", latent, h)
        norm(p + "kv_a_layernorm", latent)
        matrix(p + "kv_b_proj.weight", heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), latent)
        matrix(p + "o_proj.weight", h, heads * c["v_head_dim"], scale=output)
        p, count, dim = p + "indexer.", c["index_n_heads"], c["index_head_dim"]
        matrix(p + "wq_b.weight", count * dim, rank, group="adam")
        matrix(p + "wk.weight", dim, h, group="adam")
        norm(p + "k_norm", dim)
        found[p + "k_norm.bias"] = ((dim,), "plain", 0.0)
        matrix(p + "weights_proj.weight", count, h, group="adam")
        found[p + "index_kpool_compress_ape"] = ((c["index_kpool"], dim), "plain", 0.0)
        matrix(p + "index_kpool_compress_gate", dim, h, group="adam", scale=0.3)

    streams = c["hc_mult"]
    found[TEXT + "embed_tokens.weight"] = ((c["vocab_size"], h), "adam", 0.3)
    found["lm_head.weight"] = ((c["vocab_size"], h), "adam", 0.02)
    norm(TEXT + "norm", h)
    for layer, (kind, mlp) in enumerate(zip(c["layer_types"], c["mlp_layer_types"])):
        prefix = f"{TEXT}layers.{layer}."
        for site in ("attn", "ffn"):
            rows = streams * (streams + 2)
            matrix(f"{prefix}hc_{site}_fn", rows, streams * h, group="adam")
            found[f"{prefix}hc_{site}_base"] = ((rows,), "plain", 0.0)
            found[f"{prefix}hc_{site}_scale"] = ((3,), "plain", 0.0)
        norm(prefix + "input_layernorm", h)
        norm(prefix + "post_attention_layernorm", h)
        if kind == "linear_attention":
            delta_attention(prefix + "self_attn.")
        else:
            latent_attention(prefix + "self_attn.", small)
        if mlp == "dense":
            gated(prefix + "mlp.", c["intermediate_size"], small)
        else:
            experts(prefix + "mlp.", small)
    prefix = mtp_prefix(c)
    for name in ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "shared_head.norm"):
        norm(prefix + name, h)
    matrix(prefix + "eh_proj.weight", h, 2 * h)
    latent_attention(prefix + "self_attn.", 0.5)
    experts(prefix + "mlp.", 0.5)
    return found


def _special(name: str, shape: tuple[int, ...], config: dict, generator: torch.Generator) -> torch.Tensor | None:
    """Initial values that are no zero-mean normal."""
    if name.endswith("dt_bias"):
        # Initial decays log-uniform in [1e-3, 0.3] a step: the bias is the gate's inverse at exp(A_log) = 1.
        wanted = torch.exp(torch.empty(shape).uniform_(math.log(1e-3), math.log(0.3), generator=generator))
        return torch.logit(wanted / -config["linear_lower_bound"])
    if name.endswith("_scale"):
        return torch.full(shape, 0.3)
    if name.endswith("_base"):
        streams = config["hc_mult"]
        stem = name.split("layers.")[1].split(".")
        site = 2 * int(stem[0]) + ("ffn" in stem[1])
        # Every site reads mostly one stream, writes to all, and hands the streams on almost unmixed.
        pre = torch.full((streams,), -1.0)
        pre[site % streams] = 1.0
        post = 0.3 * torch.randn(streams, generator=generator)
        return torch.cat([pre, post, 4.0 * torch.eye(streams).flatten()])
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    return None


def initialise(config: dict, seed: int, device: str | torch.device = "cpu") -> dict[str, torch.nn.Parameter]:
    """Returns freshly drawn FP32 parameters (drawn on the CPU, so equal on every device)."""
    generator = torch.Generator().manual_seed(seed)
    parameters = {}
    for name, (shape, group, init) in parameter_list(config).items():
        value = _special(name, shape, config, generator)
        if value is None:
            value = torch.randn(shape, generator=generator) * init
        parameters[name] = torch.nn.Parameter(value.to(device), requires_grad=group != "buffer")
    return parameters
