"""Configuration, parameter list and initialisation of the small checkpoint in its training form.

Parameters live in one flat dictionary whose keys are the checkpoint's tensor names before the experts are split:
``...ffn.experts.w1`` and ``...ffn.experts.w3`` ``[E, I, H]``, ``...ffn.experts.w2`` ``[E, H, I]``.
"""

import math
from pathlib import Path

import torch
from training.storage import hash_tables

from plugins.deepseek_v41.training import engram

COMPRESSED_IDS = "engram.compressed_ids"
# Tensors that the checkpoint keeps in float32.
FLOAT32 = ("hc_attn_fn", "hc_ffn_fn", "_base", "_scale", "attn_sink", "gate.bias")
LAYERS, STAGES, BLOCK = 16, 3, 7


def _sources(layers: int) -> tuple[list[int], list[int], list[int]]:
    """KV sources, index sources and compression ratios of ``layers`` layers in the architecture's pattern.

    Two layers without compression; three eighths of all layers of ratio 2 in two groups; the rest of ratio 1 with one
    source, whose second half selects again.
    """
    pairs = 2 * max(1, 3 * layers // 16)
    first_single = 2 + pairs
    ratios = [0, 0] + [2] * pairs + [1] * (layers - first_single)
    sources = [2, 2 + pairs // 2, first_single]
    return sources, [*sources, (first_single + layers) // 2], ratios


def text_config(layers: int = LAYERS, *, budget: int = 1024, table_base: int = 12_000, window: int = 128) -> dict:
    """Returns the ``text_config`` of a checkpoint with the tiny widths.

    ``budget``: compressed rows that the indexer may select (attention is exact while no query sees more);
    ``table_base``: lower bound of the primes of the Engram tables; ``window``: rows of the sliding window.
    """
    sources, selectors, ratios = _sources(layers)
    lookups = 6
    primes = hash_tables.primes(base=table_base, heads=2 * lookups, ordinal=0)
    return {
        "model_type": "deepseek_v41_text",
        "dtype": "bfloat16",
        "attention_bias": False,
        "bos_token_id": 500,
        "candidate_block_size": 8,
        "candidate_source_layer_id": sources[-1],
        "candidate_topk_blocks": 3 * budget // 16,
        "compress_ratios": ratios + [0] * STAGES,
        "compress_rope_theta": 160000,
        "dspark_block_size": BLOCK,
        "dspark_markov_rank": 64,
        "dspark_n_routed_experts": 8,
        # The byte 0xff never occurs in UTF-8, so no text has its token; the same holds for 0xfe, the pad token.
        "dspark_noise_token_id": 187,
        "dspark_num_experts_per_tok": 3,
        "dspark_target_layer_ids": [layers - 3, layers - 2, layers - 1],
        "engram_compressed_vocab_size": 403,
        "engram_head_dim": 32,
        "engram_layer_ids": [1, sources[1]],
        "engram_max_ngram_size": 4,
        "engram_n_heads": 2,
        "engram_num_embeddings": [sum(primes[:lookups]), sum(primes[lookups:])],
        "engram_pad_token_id": 186,
        "engram_vocab_size": table_base,
        "eos_token_id": 500,
        "hc_eps": 1e-06,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 128,
        "index_head_dim": 32,
        "index_n_heads": 4,
        "index_source_layer_ids": selectors,
        "index_topk": budget,
        "kv_source_layer_ids": sources,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 64,
        "n_routed_experts": 12,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts_per_tok": 4,
        "num_hidden_layers": layers,
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": STAGES,
        "o_groups": 2,
        "o_lora_rank": 32,
        "pad_token_id": 186,
        "q_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "rms_norm_eps": 1e-20,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 1024,
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": window,
        "swiglu_limit": 10.0,
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "vocab_size": 512,
    }


def parameter_list(config: dict) -> dict[str, tuple[tuple[int, ...], str, float]]:
    """Returns name → (shape, group, init).

    ``group`` is ``muon`` (matrices and stacks of matrices), ``adam`` (embeddings, heads, routers, mixing, indexers),
    ``table`` (Engram rows), ``plain`` (norms, sinks, scalars: no weight decay) or ``buffer`` (no gradient).  ``init`` is the
    standard deviation of a normal around zero.
    """
    c, h, layers = config, config["hidden_size"], config["num_hidden_layers"]
    heads, dim, rank, streams = c["num_attention_heads"], c["head_dim"], c["q_lora_rank"], c["hc_mult"]
    # Outputs into the residual streams start smaller, by the usual 1/sqrt(2 · layers).
    small = 1 / math.sqrt(2 * layers)
    found: dict[str, tuple[tuple[int, ...], str, float]] = {}

    def matrix(name: str, *shape: int, group: str = "muon", scale: float = 1.0) -> None:
        found[name] = (shape, group, scale / math.sqrt(shape[-1]))

    def norm(name: str, width: int) -> None:
        found[name + ".weight"] = ((width,), "plain", 0.0)

    def block(p: str, experts: int, output: float) -> None:
        norm(p + "attn_norm", h)
        norm(p + "ffn_norm", h)
        found[p + "attn.attn_sink"] = ((heads,), "plain", 0.0)
        matrix(p + "attn.wq_a.weight", rank, h)
        norm(p + "attn.q_norm", rank)
        matrix(p + "attn.wq_b.weight", heads * dim, rank)
        matrix(p + "attn.wkv.weight", dim, h)
        norm(p + "attn.kv_norm", dim)
        matrix(p + "attn.wo_a.weight", c["o_groups"] * c["o_lora_rank"], heads * dim // c["o_groups"])
        matrix(p + "attn.wo_b.weight", h, c["o_groups"] * c["o_lora_rank"], scale=output)
        for site in ("attn", "ffn"):
            rows = streams * (streams + 2)
            matrix(f"{p}hc_{site}_fn", rows, streams * h, group="adam")
            found[f"{p}hc_{site}_base"] = ((rows,), "plain", 0.0)
            found[f"{p}hc_{site}_scale"] = ((3,), "plain", 0.0)
        width = c["moe_intermediate_size"]
        matrix(p + "ffn.gate.weight", experts, h, group="adam")
        found[p + "ffn.gate.bias"] = ((experts,), "buffer", 0.0)
        for name, shape, scale in (("w1", (width, h), 1.0), ("w2", (h, width), output), ("w3", (width, h), 1.0)):
            matrix(f"{p}ffn.experts.{name}", experts, *shape, scale=scale)
            matrix(f"{p}ffn.shared_experts.{name}.weight", *shape, scale=scale)

    found["embed.weight"] = ((c["vocab_size"], h), "adam", 0.3)
    found["head.weight"] = ((c["vocab_size"], h), "adam", 0.02)
    norm("norm", h)
    found[COMPRESSED_IDS] = ((c["vocab_size"],), "buffer", 0.0)
    for layer in range(layers):
        p = f"layers.{layer}."
        block(p, c["n_routed_experts"], small)
        if layer in c["kv_source_layer_ids"]:
            matrix(p + "attn.compressor.wkv.weight", dim, h)
            norm(p + "attn.compressor.norm", dim)
            if c["compress_ratios"][layer] == 2:
                matrix(p + "attn.compressor.wgate.weight", dim, h, group="adam", scale=0.3)
            matrix(p + "attn.indexer.wk.weight", c["index_head_dim"], dim, group="adam")
            norm(p + "attn.indexer.k_norm", c["index_head_dim"])
        if layer in c["index_source_layer_ids"]:
            matrix(p + "attn.indexer.wq_b.weight", c["index_n_heads"] * c["index_head_dim"], rank, group="adam")
            matrix(p + "attn.indexer.weights_proj.weight", c["index_n_heads"], h, group="adam")
        if layer in c["engram_layer_ids"]:
            rows = c["engram_num_embeddings"][c["engram_layer_ids"].index(layer)]
            inputs = (c["engram_max_ngram_size"] - 1) * c["engram_n_heads"] * c["engram_head_dim"]
            found[p + "engram.embed.weight"] = ((rows, c["engram_head_dim"]), "table", 0.3)
            matrix(p + "engram.wkv.weight", (streams + 1) * h, inputs)
            for name in ("q_weight", "k_weight"):
                found[p + "engram." + name] = ((streams, h), "plain", 0.0)
    stages, markov = c["num_nextn_predict_layers"], c["dspark_markov_rank"]
    for stage in range(stages):
        block(f"mtp.{stage}.", c["dspark_n_routed_experts"], 1 / math.sqrt(2 * stages))
    matrix("mtp.0.main_proj.weight", h, len(c["dspark_target_layer_ids"]) * h)
    norm("mtp.0.main_norm", h)
    last = f"mtp.{stages - 1}."
    norm(last + "norm", h)
    found[last + "markov_head.embed.weight"] = ((c["vocab_size"], markov), "adam", 1.0)
    found[last + "markov_head.head.weight"] = ((c["vocab_size"], markov), "adam", 0.02)
    found[last + "confidence_head.proj.weight"] = ((1, h + markov), "adam", 0.02)
    return found


def _special(name: str, shape: tuple[int, ...], config: dict, generator: torch.Generator) -> torch.Tensor | None:
    """Initial values that are no zero-mean normal of one spread."""
    if name == COMPRESSED_IDS:
        return torch.arange(shape[0]) % config["engram_compressed_vocab_size"] * 1.0
    if name.endswith(("norm.weight", "q_weight", "k_weight")):
        return torch.ones(shape)
    if name.endswith("_scale"):
        return torch.full(shape, 0.3)
    if name.endswith("engram.wkv.weight"):
        # Keys at unit size, the value small: the lookup starts as a small addition to every stream.
        value = torch.randn(shape, generator=generator) / math.sqrt(shape[1])
        value[config["hc_mult"] * config["hidden_size"] :] *= 0.1
        return value
    if name.endswith("_base"):
        streams, parts = config["hc_mult"], name.split(".")
        site = 2 * int(parts[1]) + ("ffn" in parts[2])
        count = config["num_hidden_layers"] if parts[0] == "layers" else config["num_nextn_predict_layers"]
        # Every block reads mostly one stream, writes to all, and hands the streams on almost unmixed.  The weights made
        # here collapse the input of the next block; the last ones collapse the result, from all streams alike.
        pre = torch.full((streams,), -1.0)
        pre[(site + 1) % streams] = 1.0
        if site == 2 * count - 1:
            pre = torch.zeros(streams)
        post = 0.3 * torch.randn(streams, generator=generator)
        return torch.cat([pre, post, 4.0 * torch.eye(streams).flatten()])
    return None


def initialise(config: dict, seed: int, device: str | torch.device = "cpu") -> dict[str, torch.nn.Parameter]:
    """Returns freshly drawn FP32 parameters (drawn on the CPU, so equal on every device).

    The compressed ids are a placeholder until :func:`read_tokenizer`.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = {}
    for name, (shape, group, init) in parameter_list(config).items():
        value = _special(name, shape, config, generator)
        if value is None:
            value = torch.randn(shape, generator=generator) * init
        parameters[name] = torch.nn.Parameter(value.to(device), requires_grad=group != "buffer")
    return parameters


@torch.no_grad()
def read_tokenizer(config: dict, parameters: dict[str, torch.nn.Parameter], tokenizer: Path) -> None:
    """Sets the compressed ids from the tokenizer.

    Raises:
        SystemExit: if the tokenizer has another number of ids or of compressed ids than the configuration says.
    """
    ids = engram.compressed_ids(tokenizer)
    expected = (config["vocab_size"], config["engram_compressed_vocab_size"])
    if (len(ids), max(ids) + 1) != expected:
        raise SystemExit(
            f"{tokenizer}: {len(ids)} ids, {max(ids) + 1} compressed, expected {expected[0]}, {expected[1]}"
        )
    parameters[COMPRESSED_IDS].copy_(torch.tensor(ids))


def in_drafter(name: str, parameters) -> bool:
    """Whether a parameter belongs to the drafter."""
    return name.startswith("mtp.")
