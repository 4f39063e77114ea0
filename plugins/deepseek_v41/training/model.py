"""Whole-sequence forwards of the target and of the DSpark drafter for training and evaluation.

:class:`Model` holds the parameter dictionary (keys are checkpoint names, see :mod:`parameters`) and evaluates both parts; the
blocks in :mod:`layers` may be replaced by compiled versions.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from training.blocks import linear
from training.sinkhorn import Sinkhorn

from plugins.deepseek_v41.training import engram, indexer, layers
from plugins.deepseek_v41.training.parameters import COMPRESSED_IDS
from plugins.deepseek_v41.training.rounding import wide
from training.model import WholeSequenceModel


def frequencies(config: dict, compressed: bool) -> torch.Tensor:
    """Rotation frequencies ``[pairs]`` float64 of layers without compression, or of compressed layers (YaRN)."""
    dim = config["qk_rope_head_dim"]
    base = config["compress_rope_theta" if compressed else "rope_theta"]
    pair = torch.arange(dim // 2, dtype=torch.float64)
    f = base ** (-2 * pair / dim)
    if not compressed:
        return f
    scaling = config["rope_scaling"]

    def turns(count: float) -> float:
        """The pair that turns ``count`` times over the original context."""
        length = scaling["original_max_position_embeddings"]
        return dim * math.log(length / (2 * math.pi * count)) / (2 * math.log(base))

    low, high = max(math.floor(turns(scaling["beta_fast"])), 0), min(math.ceil(turns(scaling["beta_slow"])), dim - 1)
    ramp = ((pair - low) / max(high - low, 1e-3)).clamp(0, 1)
    return f * (1 - ramp) + f / scaling["factor"] * ramp


class Model(WholeSequenceModel):
    """Target and drafter over one parameter dictionary.

    ``quantised`` may hold ``caches`` (rounding of cache rows) and ``inputs`` (rounding of what quantised weights multiply).
    """

    functions = layers
    compiled_names = (
        "attention",
        "block_attention",
        "combine",
        "compress",
        "fuse",
        "head_norm",
        "inject",
        "mixture",
        "projections",
        "site",
        "window_rows",
    )

    def __init__(self, config: dict, parameters: dict[str, nn.Parameter], dtype: torch.dtype = torch.float32):
        super().__init__(config, parameters, dtype)
        self.budget = config["index_topk"]
        self.sinkhorn = Sinkhorn(self.device, config["hc_sinkhorn_iters"], config["hc_eps"])
        self.compressed_ids = parameters[COMPRESSED_IDS].detach().round().long()
        self.lookups = {
            layer: engram.Lookup(config, i, self.device) for i, layer in enumerate(config["engram_layer_ids"])
        }
        # Positions beyond the context are for draft blocks.
        position = torch.arange(config["max_position_embeddings"] + 16, dtype=torch.float64).unsqueeze(-1)
        angle_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.tables = {}
        for compressed in (False, True):
            angle = position * frequencies(config, compressed)
            self.tables[compressed] = tuple(t.to(self.device, angle_dtype) for t in (angle.cos(), angle.sin()))

    def weights(self, prefix: str, names) -> list[torch.Tensor]:
        return [self.get(prefix + name) for name in names]

    @property
    def roundings(self) -> tuple[bool, bool]:
        return "caches" in self.quantised, "inputs" in self.quantised

    def angles(self, compressed: bool, length: int, step: int = 1) -> list[torch.Tensor]:
        """Cosines and sines ``[1, n, pairs]`` of positions 0, step, … below ``length``, in whole steps."""
        return [t[: length // step * step : step].unsqueeze(0) for t in self.tables[compressed]]

    def mix(self, prefix: str, name: str, x, pre):
        """Block input, weights that collapse the next block's input, output weights and mixing matrix of one site."""
        weights = self.weights(f"{prefix}hc_{name}_", ("fn", "base", "scale"))
        read = self.blocks["site"](x, pre, *weights, self.get(f"{prefix}{name}_norm.weight"), self.config["hc_eps"])
        m, following, post, logits = read
        return m, following, post, self.sinkhorn(logits)

    def start(self, embedded: torch.Tensor):
        """Streams and first collapse weights of embedded rows ``[B, T, H]``."""
        streams = self.config["hc_mult"]
        x = embedded.to(self.dtype).unsqueeze(-2).repeat_interleave(streams, -2)
        first = torch.arange(streams, device=x.device) == 0
        return x, first.to(wide(x).dtype).expand(x.shape[:-1]).contiguous()

    def experts(self, prefix: str, m, statistics: dict):
        c, p = self.config, prefix + "ffn."
        names = ("gate.weight", "gate.bias", "experts.w1", "experts.w2", "experts.w3")
        shared = (f"shared_experts.{n}.weight" for n in ("w1", "w2", "w3"))
        top_k = c["dspark_num_experts_per_tok" if prefix.startswith("mtp.") else "num_experts_per_tok"]
        y, balance, load = self.blocks["mixture"](
            m,
            *self.weights(p, (*names, *shared)),
            top_k,
            c["routed_scaling_factor"],
            c["swiglu_limit"],
            self.roundings[1],
        )
        statistics.setdefault("balance", []).append(balance)
        even = top_k / load.shape[0]
        statistics.setdefault("load", {}).setdefault(p + names[1], []).append(even - load.detach())
        return y

    def projections(self, p: str, m, cos, sin):
        names = ("wq_a.weight", "q_norm.weight", "wq_b.weight", "wkv.weight", "kv_norm.weight")
        heads = self.config["num_attention_heads"]
        return self.blocks["projections"](m, *self.weights(p, names), cos, sin, heads, *self.roundings)

    def compress(self, p: str, m, ratio: int):
        p += "compressor."
        gate = self.get(p + "wgate.weight") if ratio == 2 else None
        angles = self.angles(True, m.shape[1], ratio)
        return self.blocks["compress"](
            m, self.get(p + "wkv.weight"), gate, self.get(p + "norm.weight"), *angles, self.roundings[0]
        )

    def index_scores(self, layer: int, source: int, m, query_latent, latent) -> torch.Tensor:
        """Scores of index layer ``layer`` over the rows of KV source ``source``."""
        ratio = self.config["compress_ratios"][layer]
        caches, inputs = self.roundings
        key_angles = self.angles(True, latent.shape[1] * ratio, ratio)
        own = self.weights(f"layers.{source}.attn.indexer.", ("wk.weight", "k_norm.weight"))
        key = indexer.keys(latent, *own, *key_angles, caches)
        own = self.weights(f"layers.{layer}.attn.indexer.", ("wq_b.weight", "weights_proj.weight"))
        return indexer.scores(m, query_latent, key, *own, *self.angles(True, m.shape[1]), caches, inputs)

    def selected(self, layer: int, values: torch.Tensor, state: dict) -> torch.Tensor:
        """Rows that index layer ``layer`` selects; the candidate source leaves its candidates in ``state``."""
        c, ratio = self.config, self.config["compress_ratios"][layer]
        seen = layers.visible_rows(*values.shape[1:], ratio, values.device)
        if layer > c["candidate_source_layer_id"]:
            seen = seen & state["candidates"]
        if layer == c["candidate_source_layer_id"]:
            blocks = (c["candidate_topk_blocks"], c["candidate_block_size"])
            state["candidates"] = indexer.candidates(values, ratio, *blocks)
        return indexer.best(values, seen.expand_as(values), self.budget)

    def attention(self, layer: int, m, state: dict, select: bool, kept: dict | None):
        c, p = self.config, f"layers.{layer}.attn."
        ratio = c["compress_ratios"][layer]
        angles = self.angles(ratio > 0, m.shape[1])
        query_latent, q, k = self.projections(p, m, *angles)
        if layer in c["kv_source_layer_ids"]:
            state["source"] = layer
            state["latent"], state["rows"] = self.compress(p, m, ratio)
        rows = state["rows"] if ratio else None
        if select and layer in c["index_source_layer_ids"]:
            values = self.index_scores(layer, state["source"], m, query_latent, state["latent"])
            state["selected"] = self.selected(layer, values, state)
        if kept is not None and layer in c["index_source_layer_ids"]:
            read = (m, query_latent, state["latent"], q, k, rows)
            kept[layer] = (state["source"], *(t.detach() for t in read))
        weights = self.weights(p, ("attn_sink", "wo_a.weight", "wo_b.weight"))
        shape = (c["sliding_window"], ratio, c["o_groups"], self.roundings[1])
        return self.blocks["attention"](q, k, rows, *weights, *angles, *shape, state.get("selected") if ratio else None)

    def lookup(self, layer: int, history, x):
        p = f"layers.{layer}.engram."
        rows = F.embedding(self.lookups[layer].rows(history), self.get(p + "embed.weight"))
        weights = self.weights(p, ("wkv.weight", "q_weight", "k_weight"))
        return self.blocks["inject"](x, rows, *weights, self.roundings[1])

    def target(self, tokens: torch.Tensor, *, select: bool = False, keep: bool = False):
        """Runs the target on ``tokens [B, T]`` int64.

        Returns (logits ``[B, T, V]`` float32, the drafter's features ``[B, T, 3H]``, statistics).  ``select`` applies the
        sparse selection (otherwise every visible row is read); ``keep`` stores what :meth:`index_loss` needs under
        ``attention``.
        """
        c, statistics, state, features = self.config, {}, {}, []
        kept = statistics.setdefault("attention", {}) if keep else None
        ids = self.compressed_ids
        history = engram.histories(ids[tokens], ids[c["engram_pad_token_id"]], c["engram_max_ngram_size"])
        x, pre = self.start(F.embedding(tokens, self.get("embed.weight")))
        for layer in range(c["num_hidden_layers"]):
            prefix = f"layers.{layer}."
            if layer in self.lookups:
                x = self.lookup(layer, history, x)
            if layer in c["dspark_target_layer_ids"]:
                features.append(wide(x).mean(-2).to(self.dtype))
            m, pre, post, comb = self.mix(prefix, "attn", x, pre)
            x = self.blocks["combine"](x, self.attention(layer, m, state, select, kept), post, comb)
            m, pre, post, comb = self.mix(prefix, "ffn", x, pre)
            x = self.blocks["combine"](x, self.experts(prefix, m, statistics), post, comb)
        _, h = self.blocks["head_norm"](x, pre, self.get("norm.weight"))
        return wide(linear(h, self.get("head.weight"))), torch.cat(features, -1), statistics

    def draft(self, features: torch.Tensor, tokens: torch.Tensor, anchors: torch.Tensor, length: int, statistics=None):
        """Draft blocks of ``length`` rows, one for each of ``anchors [B, A]`` (positions of ``tokens [B, T']``).

        A block reads the token at its anchor and the features ``[B, T, 3H]`` of the rows before it.  Returns the collapsed
        streams ``h [B, A, L, H]`` and the base logits ``[B, A, L, V]`` float32.  Embedding and head are detached.
        """
        c, batch = self.config, tokens.shape[0]
        statistics = {} if statistics is None else statistics
        caches, inputs = self.roundings
        names = ("main_proj.weight", "main_norm.weight")
        project, weight = self.weights("mtp.0.", names)
        read = self.blocks["fuse"](features, project, weight, inputs)
        step = torch.arange(length, device=tokens.device)
        noise = torch.full_like(step, c["dspark_noise_token_id"])
        first = tokens.gather(1, anchors).unsqueeze(-1)
        ids = torch.where(step == 0, first, noise).flatten(1)
        position = (anchors.unsqueeze(-1) + step).flatten(1)
        angles = [t[position] for t in self.tables[False]]
        past = self.angles(False, features.shape[1])
        x, pre = self.start(F.embedding(ids, self.get("embed.weight").detach()))
        for stage in range(c["num_nextn_predict_layers"]):
            prefix = f"mtp.{stage}."
            p = prefix + "attn."
            m, pre, post, comb = self.mix(prefix, "attn", x, pre)
            own = self.weights(p, ("wkv.weight", "kv_norm.weight"))
            context = self.blocks["window_rows"](read, *own, *past, caches, inputs)
            _, q, k = self.projections(p, m, *angles)
            weights = self.weights(p, ("attn_sink", "wo_a.weight", "wo_b.weight"))
            shape = (c["sliding_window"], length, c["o_groups"], inputs)
            y = self.blocks["block_attention"](q, k, context, anchors, *weights, *angles, *shape)
            x = self.blocks["combine"](x, y, post, comb)
            m, pre, post, comb = self.mix(prefix, "ffn", x, pre)
            x = self.blocks["combine"](x, self.experts(prefix, m, statistics), post, comb)
        h, normed = self.blocks["head_norm"](x, pre, self.get(f"{prefix}norm.weight"))
        logits = wide(linear(normed, self.get("head.weight").detach()))
        shape = (batch, -1, length)
        return h.unflatten(1, shape[1:]), logits.unflatten(1, shape[1:])

    def correct(self, h: torch.Tensor, previous: torch.Tensor):
        """Markov bias ``[..., V]`` and confidence logit ``[...]``, float32, of rows ``h [..., H]`` after ids ``previous``."""
        p = f"mtp.{self.config['num_nextn_predict_layers'] - 1}."
        embed, head, confidence = self.weights(
            p, ("markov_head.embed.weight", "markov_head.head.weight", "confidence_head.proj.weight")
        )
        e = wide(F.embedding(previous, embed))
        bias = F.linear(e.to(self.dtype), head.to(self.dtype))
        read = torch.cat([wide(h), e.to(wide(h).dtype)], -1)
        return wide(bias), F.linear(read, confidence.to(read.dtype)).squeeze(-1)

    def index_loss(self, layer: int, source: int, m, query_latent, latent, q, k, rows) -> torch.Tensor:
        """The loss of one index layer's scores; only the indexer's parameters get gradients (detached inputs)."""
        c = self.config
        values = self.index_scores(layer, source, m, query_latent, latent)
        return indexer.loss(values, self.attention_mass(layer, q, k, rows), c["compress_ratios"][layer])

    @torch.no_grad()
    def attention_mass(self, layer: int, q, k, rows) -> torch.Tensor:
        """Probability mass ``[B, T, G]``, summed over heads, of a layer's compressed rows when all visible ones are read."""
        c, length = self.config, q.shape[1]
        extra = -length % c["sliding_window"]
        q, k = F.pad(q, (0, 0, 0, 0, 0, extra)), F.pad(k, (0, 0, 0, extra))
        sink, ratio = self.get(f"layers.{layer}.attn.attn_sink"), c["compress_ratios"][layer]
        far = layers.attention_probabilities(q, k, rows, sink, c["sliding_window"], ratio, None)[1]
        return far[:, :length].sum(2)

    @torch.no_grad()
    def rebalance(self, statistics: dict[str, dict], rate: float) -> None:
        """Moves the selection bias of every router by ``rate`` towards equal loads."""
        if rate == 0:
            return
        found = {name: lack for part in statistics.values() for name, lack in part.get("load", {}).items()}
        for name, lack in found.items():
            self.parameters[name].add_(rate * torch.sign(torch.stack(lack).mean(0)))
