"""Whole-sequence forwards of the target and of the MTP drafter for training and evaluation.

:class:`Model` holds the parameter dictionary (keys are checkpoint names, see :mod:`parameters`) and evaluates both parts;
the blocks in :mod:`layers` may be replaced by compiled versions.  Quantisation-aware evaluation replaces expert weights
and the n-gram table by their stored values with straight-through gradients.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from training.blocks import attend, linear

from plugins.qwen38.training import layers
from plugins.qwen38.training.parameters import MTP, TEXT, hash_vectors
from training.model import WholeSequenceModel


class Model(WholeSequenceModel):
    """Target and drafter over one parameter dictionary."""

    functions = layers
    compiled_names = (
        "mix",
        "combine",
        "gated_delta_net",
        "attention_inputs",
        "attend_chain",
        "attention_output",
        "mixture",
        "layer_embedding",
        "feedback",
    )

    def __init__(self, config: dict, parameters: dict[str, nn.Parameter], dtype: torch.dtype = torch.float32):
        super().__init__(config, parameters, dtype)
        self.ratio, self.budget = config["indexer_compress_ratio"], config["indexer_budget"]
        self.hashes = {
            layer - 1: hash_vectors(config, ordinal)[:3] for ordinal, layer in enumerate(config["ple_layer_ids"])
        }
        self._rotary: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def rotary(self, length: int, shift: int = 0):
        """cos and sin ``[length, half]`` of positions ``shift`` … ``shift + length − 1``."""
        if (length, shift) not in self._rotary:
            tables = layers.rotary_table(self.config, length + shift, self.device)
            self._rotary[length, shift] = tuple(t[shift:].clone() for t in tables)
        return self._rotary[length, shift]

    def mix(self, prefix: str, x, inject: bool = True):
        weights = [self.get(f"{prefix}{n}.weight") for n in ("hc_norm", "input_mix_weight_down", "input_mix_weight_up")]
        last = self.get(prefix + "block_inject_weight.weight") if inject else None
        return self.blocks["mix"](x, *weights, last, self.dtype)

    def attention_inputs(self, prefix: str, m, shift: int = 0):
        """Queries, keys, values and gate; row i stands at position i + ``shift``."""
        names = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")
        weights = [self.get(f"{prefix}{n}.weight") for n in names]
        return self.blocks["attention_inputs"](m, *weights, *self.rotary(m.shape[1], shift))

    def experts(self, prefix: str, x, statistics: dict):
        m, b = self.mix(prefix + "mlp_hyper_connection.", x)
        p = prefix + "mlp."
        names = ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
        shared = ("gate_proj", "up_proj", "down_proj")
        scales = self.scales.get(prefix) if "activations" in self.quantised else None
        y, balance, largest = self.blocks["mixture"](
            m,
            *(self.get(p + n) for n in names),
            *(self.get(f"{p}shared_expert.{n}.weight") for n in shared),
            self.get(p + "shared_expert_gate.weight"),
            self.config["num_experts_per_tok"],
            scales,
            self.measure,
        )
        statistics.setdefault("balance", []).append(balance)
        statistics.setdefault("largest", {})[prefix] = largest
        return self.blocks["combine"](x, y, b)

    def target(self, tokens: torch.Tensor, *, select: bool = False, keep: bool = False):
        """Runs the target on ``tokens [B, T]`` int64.

        Returns (logits ``[B, T, V]`` float32, ``h [B, T, S, H]`` float32, statistics).  ``select`` applies the sparse
        selection (otherwise attention is dense); ``keep`` stores each attention layer's detached (m, q, k) under
        ``attention`` for the selector's loss.
        """
        statistics: dict = {}
        e = F.embedding(tokens, self.get(TEXT + "embed_tokens.weight"))
        x = e.float().unsqueeze(-2).repeat_interleave(self.config["hc_count"], -2)
        for layer, kind in enumerate(self.config["layer_types"]):
            prefix = f"{TEXT}layers.{layer}."
            if layer in self.hashes:
                x = x + self.ngram(prefix + "ple.", x, tokens, self.hashes[layer])
            m, b = self.mix(prefix + "attn_hyper_connection.", x)
            if kind == "linear_attention":
                y = self.linear_attention(prefix + "linear_attn.", m)
            else:
                p = prefix + "self_attn."
                q, k, v, gate = self.attention_inputs(p, m)
                mask = self.selection(p, m) if select else None
                if keep:
                    statistics.setdefault("attention", {})[p] = (m.detach(), q.detach(), k.detach())
                o = attend(q, k, v, mask)
                y = self.blocks["attention_output"](o, gate, self.get(p + "o_proj.weight"))
            x = self.blocks["combine"](x, y, b)
            x = self.experts(prefix, x, statistics)
        sampling, _ = self.mix(TEXT + "hyper_connection_mixer.", x, inject=False)
        return linear(sampling, self.get("lm_head.weight")).float(), x, statistics

    def linear_attention(self, p: str, m):
        names = ("in_proj_qkv.weight", "in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight", "conv1d.weight")
        names = (*names, "A_log", "dt_bias", "norm.weight", "out_proj.weight")
        c = self.config
        return self.blocks["gated_delta_net"](
            m,
            *(self.get(p + n) for n in names),
            c["linear_num_key_heads"],
            c["linear_key_head_dim"],
            c["linear_value_head_dim"],
        )

    def ngram(self, p: str, x, tokens, vectors):
        rows = layers.ngram_rows(tokens, *vectors, self.config["heads_per_ngram"], self.config["eos_token_id"])
        e = F.embedding(rows, self.get(p + "ple_embedding.ngram_embedding.weight")).flatten(-2).to(self.dtype)
        names = ("key_proj", "value_proj", "norm_key", "norm_query", "norm_conv", "conv1d")
        return self.blocks["layer_embedding"](
            x, e, *(self.get(f"{p}{n}.weight") for n in names), self.config["ngram_size"]
        )

    def group_scores(self, p: str, m) -> torch.Tensor:
        """Selector scores ``[B, T, groups]`` float32 of every query and compressed group (no causal masking)."""
        c, ratio, (cos, sin) = self.config, self.ratio, self.rotary(m.shape[1])
        heads, dim = c["indexer_n_heads"], c["indexer_head_dim"]
        qk = linear(m, self.get(p + "indexer.index_qk_proj.weight")).float()
        q, raw = qk.split([heads * dim, dim], -1)
        q = layers.unit(q.unflatten(-1, (heads, dim))) * (1 + self.get(p + "indexer.q_layernorm.weight"))
        q = layers.rotate(q, cos, sin)
        groups = m.shape[1] // ratio
        mean = raw[:, : groups * ratio].unflatten(1, (groups, ratio)).mean(2)
        key = (layers.unit(mean) * (1 + self.get(p + "indexer.k_layernorm.weight"))).unsqueeze(-2)
        key = layers.rotate(key, cos[: groups * ratio : ratio], sin[: groups * ratio : ratio]).squeeze(-2)
        return torch.relu(torch.einsum("bthd,bgd->bthg", q, key)).sum(2) / math.sqrt(dim)

    def chain(self, h: torch.Tensor, tokens: torch.Tensor, depths: int, *, keep=None, statistics=None):
        """Teacher-forced recursive drafting from every row.

        ``h [B, T, S, H]``; chain i of depth k reads token ``x[i+k]`` at position ``i+k−1`` and predicts ``x[i+k+1]``, as a
        round does whose drafts equal the text.  Yields draft logits ``[B, T, V]`` float32 of depths 1…``depths``; the last
        k rows of depth k have no token to read and are meaningless.  Head and embedding are detached.
        """
        prefix = MTP + "layers.0."
        p = prefix + "self_attn."
        embedding = self.get(TEXT + "embed_tokens.weight").detach()
        head = self.get("lm_head.weight").detach()
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc_embedding", "fc_hidden")
        fuse = [self.get(f"{MTP}{n}.weight") for n in names]
        r, statistics = h, {} if statistics is None else statistics
        chain_k, chain_v, committed = [], [], None
        for depth in range(1, depths + 1):
            e = F.embedding(tokens.roll(-depth, 1), embedding)
            x = self.blocks["feedback"](r, e, *fuse, self.dtype)
            m, b = self.mix(prefix + "attn_hyper_connection.", x)
            q, k, v, gate = self.attention_inputs(p, m, depth - 1)
            if committed is None:
                committed = (k, v)
                o = attend(q, k, v)
                if keep is not None:
                    keep[p] = (m.detach(), q.detach(), k.detach())
            else:
                chain_k.append(k)
                chain_v.append(v)
                # Padded to one shape for all depths, so that the block compiles once.
                blank = [torch.zeros_like(k)] * (depths - 1 - len(chain_k))
                stacked = (torch.stack([*chain_k, *blank], -2), torch.stack([*chain_v, *blank], -2))
                o = self.blocks["attend_chain"](q, *committed, *stacked, self._counts[len(chain_k)])
            y = self.blocks["attention_output"](o, gate, self.get(p + "o_proj.weight"))
            x = self.blocks["combine"](x, y, b)
            r = self.experts(prefix, x, statistics)
            sampling, _ = self.mix(MTP + "hyper_connection_mixer.", r, inject=False)
            yield linear(sampling, head).float()
