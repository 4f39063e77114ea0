"""Whole-sequence forwards of the target and of the MTP drafter for training and evaluation.

:class:`Model` holds the parameter dictionary (keys are checkpoint names, see :mod:`parameters`) and evaluates both parts;
the blocks in :mod:`layers` may be replaced by compiled versions.
"""

import torch
import torch.nn.functional as F
from torch import nn
from training.blocks import attend, linear
from training.sinkhorn import Sinkhorn

from plugins.glm53.training import layers
from plugins.glm53.training.parameters import TEXT, mtp_prefix
from training.model import WholeSequenceModel


class Model(WholeSequenceModel):
    """Target and drafter over one parameter dictionary."""

    functions = layers
    compiled_names = (
        "add_norm",
        "attend_chain",
        "attention_inputs",
        "coefficients",
        "combine",
        "delta_attention",
        "dense",
        "feedback",
        "mean_norm",
        "mixture",
    )

    def __init__(self, config: dict, parameters: dict[str, nn.Parameter], dtype: torch.dtype = torch.float32):
        super().__init__(config, parameters, dtype)
        self.ratio, self.budget = config["index_kpool"], config["index_topk"]
        self.sinkhorn = Sinkhorn(self.device, config["hc_sinkhorn_iters"], config["hc_eps"])

    def weights(self, prefix: str, names) -> list[torch.Tensor]:
        return [self.get(prefix + name) for name in names]

    def mix(self, prefix: str, site: str, x):
        """Block input ``m``, output weights and mixing matrix of one site (``attn`` or ``ffn``) of a layer."""
        weights = self.weights(f"{prefix}hc_{site}_", ("fn", "base", "scale"))
        following = "input_layernorm" if site == "attn" else "post_attention_layernorm"
        read = self.blocks["coefficients"](x, *weights, self.get(f"{prefix}{following}.weight"), self.config["hc_eps"])
        m, post, logits = read
        return m, post, self.sinkhorn(logits)

    def delta_attention(self, p: str, m):
        projections = (f"{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "q_conv1d", "k_conv1d", "v_conv1d"))
        gates = (f"{n}.weight" for n in ("f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "b_proj"))
        names = (*projections, *gates, "A_log", "dt_bias", "o_norm.weight", "o_proj.weight")
        return self.blocks["delta_attention"](m, *self.weights(p, names), self.config["linear_lower_bound"])

    def attention_inputs(self, p: str, m):
        """The normed query residual and queries, keys, values of every row."""
        names = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
        c = self.config
        weights = self.weights(p, (f"{n}.weight" for n in names))
        return self.blocks["attention_inputs"](m, *weights, c["num_attention_heads"], c["qk_nope_head_dim"])

    def group_scores(self, p: str, m, residual) -> torch.Tensor:
        """Selector scores ``[B, T, groups]`` float32 of every query and compressed group (no causal masking)."""
        names = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
        names = (*names, "index_kpool_compress_ape", "index_kpool_compress_gate")
        return layers.group_scores(m, residual, *self.weights(p + "indexer.", names), self.config["index_n_heads"])

    def latent_attention(self, p: str, m, select: bool, kept: dict | None):
        residual, q, k, v = self.attention_inputs(p, m)
        mask = self.selection(p, m, residual) if select else None
        if kept is not None:
            kept[p] = tuple(t.detach() for t in (m, residual, q, k))
        return linear(attend(q, k, v, mask), self.get(p + "o_proj.weight"))

    def experts(self, prefix: str, m, statistics: dict):
        c, p = self.config, prefix + "mlp."
        names = ("gate.weight", "gate.e_score_correction_bias", "experts.gate_up_proj", "experts.down_proj")
        shared = (f"shared_experts.{n}_proj.weight" for n in ("gate", "up", "down"))
        y, balance, load, largest = self.blocks["mixture"](
            m,
            *self.weights(p, (*names, *shared)),
            c["num_experts_per_tok"],
            c["routed_scaling_factor"],
            c["swiglu_limit"],
            self.scales.get(prefix) if "activations" in self.quantised else None,
            self.measure,
        )
        statistics.setdefault("balance", []).append(balance)
        statistics.setdefault("load", {}).setdefault(p + names[1], []).append(load.detach())
        statistics.setdefault("largest", {})[prefix] = largest
        return y

    def feed_forward(self, prefix: str, kind: str, m, statistics: dict):
        if kind == "sparse":
            return self.experts(prefix, m, statistics)
        weights = self.weights(prefix + "mlp.", (f"{n}_proj.weight" for n in ("gate", "up", "down")))
        return self.blocks["dense"](m, *weights, self.config["swiglu_limit"])

    def target(self, tokens: torch.Tensor, *, select: bool = False, keep: bool = False):
        """Runs the target on ``tokens [B, T]`` int64.

        Returns (logits ``[B, T, V]`` float32, ``h [B, T, H]`` after the final norm, statistics).  ``select`` applies the
        sparse selection (otherwise attention is dense); ``keep`` stores each indexed layer's detached (m, residual, q, k)
        under ``attention`` for the selector's loss.
        """
        c, statistics = self.config, {}
        kept = statistics.setdefault("attention", {}) if keep else None
        e = F.embedding(tokens, self.get(TEXT + "embed_tokens.weight")).to(self.dtype)
        x = e.unsqueeze(-2).repeat_interleave(c["hc_mult"], -2)
        for layer, (kind, mlp) in enumerate(zip(c["layer_types"], c["mlp_layer_types"])):
            prefix = f"{TEXT}layers.{layer}."
            m, post, comb = self.mix(prefix, "attn", x)
            if kind == "linear_attention":
                y = self.delta_attention(prefix + "self_attn.", m)
            else:
                y = self.latent_attention(prefix + "self_attn.", m, select, kept)
            x = self.blocks["combine"](x, y, post, comb)
            m, post, comb = self.mix(prefix, "ffn", x)
            x = self.blocks["combine"](x, self.feed_forward(prefix, mlp, m, statistics), post, comb)
        h = self.blocks["mean_norm"](x, self.get(TEXT + "norm.weight"))
        return linear(h, self.get("lm_head.weight")).float(), h, statistics

    def chain(self, h: torch.Tensor, tokens: torch.Tensor, depths: int, *, keep=None, statistics=None):
        """Teacher-forced recursive drafting from every row.

        ``h [B, T, H]``; chain i of depth k reads token ``x[i+k]`` and predicts ``x[i+k+1]``, as a round does whose drafts
        equal the text; its feedback row is the depth before's normed output.  Yields draft logits ``[B, T, V]`` float32 of
        depths 1…``depths``; the last k rows of depth k have no token to read and are meaningless.  Head and embedding are
        detached.
        """
        prefix = mtp_prefix(self.config)
        p = prefix + "self_attn."
        embedding = self.get(TEXT + "embed_tokens.weight").detach()
        head = self.get("lm_head.weight").detach()
        fuse = self.weights(prefix, ("enorm.weight", "hnorm.weight", "eh_proj.weight", "input_layernorm.weight"))
        after = self.weights(prefix, ("post_attention_layernorm.weight", "shared_head.norm.weight"))
        statistics = {} if statistics is None else statistics
        chain_k, chain_v, committed = [], [], None
        for depth in range(1, depths + 1):
            e = F.embedding(tokens.roll(-depth, 1), embedding).to(self.dtype)
            r, m = self.blocks["feedback"](h, e, *fuse)
            residual, q, k, v = self.attention_inputs(p, m)
            if committed is None:
                committed = (k, v)
                o = attend(q, k, v)
                if keep is not None:
                    keep[p] = tuple(t.detach() for t in (m, residual, q, k))
            else:
                chain_k.append(k)
                chain_v.append(v)
                # Padded to one shape for all depths, so that the block compiles once.
                blank = [torch.zeros_like(k)] * (depths - 1 - len(chain_k))
                stacked = (torch.stack([*chain_k, *blank], -2), torch.stack([*chain_v, *blank], -2))
                o = self.blocks["attend_chain"](q, *committed, *stacked, self._counts[len(chain_k)])
            r, m = self.blocks["add_norm"](r, linear(o, self.get(p + "o_proj.weight")), after[0])
            _, h = self.blocks["add_norm"](r, self.experts(prefix, m, statistics), after[1])
            yield linear(h, head).float()

    @torch.no_grad()
    def rebalance(self, statistics: dict[str, dict], rate: float) -> None:
        """Moves the selection bias of every router by ``rate`` towards equal loads."""
        if rate == 0:
            return
        even = self.config["num_experts_per_tok"] / self.config["n_routed_experts"]
        loads = {name: found for part in statistics.values() for name, found in part.get("load", {}).items()}
        names = list(loads)
        load = torch.stack([torch.stack(loads[name]).mean(0) for name in names])
        torch._foreach_add_([self.parameters[n] for n in names], list((rate * torch.sign(even - load)).unbind(0)))
