"""Whole-sequence forwards of the target and of the MTP drafter for training and evaluation.

:class:`Model` holds the parameter dictionary (keys are checkpoint names, see :mod:`parameters`) and evaluates both parts;
the blocks in :mod:`layers` may be replaced by compiled versions.  Quantisation-aware evaluation replaces expert weights
and the n-gram table by their stored values with straight-through gradients.
"""

import math

import layers as blocks
import torch
import torch.nn.functional as F
from parameters import MTP, TEXT, hash_vectors
from torch import nn

COMPILED = (
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


class Model:
    """Target and drafter over one parameter dictionary.

    ``dtype``: compute dtype of matrix products.  ``scales``: activation scales by layer prefix (float32 ``[2]``), used when
    ``quantised`` contains ``activations``; ``quantised`` may also contain ``weights``.
    """

    def __init__(self, config: dict, parameters: dict[str, nn.Parameter], dtype: torch.dtype = torch.float32):
        self.config, self.parameters, self.dtype = config, parameters, dtype
        self.device = next(iter(parameters.values())).device
        self.quantised: frozenset[str] = frozenset()
        self.scales: dict[str, torch.Tensor] = {}
        self.measure = False
        self.stored: dict[str, torch.Tensor] = {}
        self.blocks = {name: getattr(blocks, name) for name in COMPILED}
        self.hashes = {
            layer - 1: hash_vectors(config, ordinal)[:3] for ordinal, layer in enumerate(config["ple_layer_ids"])
        }
        self._rotary: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        # Depth counts as tensors: a Python number would compile one variant a depth.
        self._counts = torch.arange(16, device=self.device)

    def compile(self) -> None:
        """Compiles each block once (equal shapes share code)."""
        for name in COMPILED:
            self.blocks[name] = self.guarded(name, torch.compile(getattr(blocks, name), dynamic=False))

    def guarded(self, name: str, compiled):
        """The compiled block, replaced by the plain one for good when its forward cannot be compiled."""

        def call(*arguments):
            try:
                return compiled(*arguments)
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as error:  # any compiler failure has the same cure
                print(f"block {name} runs uncompiled: {type(error).__name__}: {str(error)[:500]}", flush=True)
                self.blocks[name] = getattr(blocks, name)
                return self.blocks[name](*arguments)

        return call

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: value.detach() for name, value in self.parameters.items()}

    def get(self, name: str) -> torch.Tensor:
        """The parameter, or its stored (quantised) value when quantisation-aware evaluation is on."""
        return self.stored.get(name, self.parameters[name])

    def rotary(self, length: int, shift: int = 0):
        """cos and sin ``[length, half]`` of positions ``shift`` … ``shift + length − 1``."""
        if (length, shift) not in self._rotary:
            tables = blocks.rotary_table(self.config, length + shift, self.device)
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
                o = blocks.attend(q, k, v, mask)
                y = self.blocks["attention_output"](o, gate, self.get(p + "o_proj.weight"))
            x = self.blocks["combine"](x, y, b)
            x = self.experts(prefix, x, statistics)
        sampling, _ = self.mix(TEXT + "hyper_connection_mixer.", x, inject=False)
        return blocks.linear(sampling, self.get("lm_head.weight")).float(), x, statistics

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
        rows = blocks.ngram_rows(tokens, *vectors, self.config["heads_per_ngram"], self.config["eos_token_id"])
        e = F.embedding(rows, self.get(p + "ple_embedding.ngram_embedding.weight")).flatten(-2).to(self.dtype)
        names = ("key_proj", "value_proj", "norm_key", "norm_query", "norm_conv", "conv1d")
        return self.blocks["layer_embedding"](
            x, e, *(self.get(f"{p}{n}.weight") for n in names), self.config["ngram_size"]
        )

    def group_scores(self, p: str, m) -> torch.Tensor:
        """Selector scores ``[B, T, groups]`` float32 of every query and compressed group (no causal masking)."""
        c, (cos, sin) = self.config, self.rotary(m.shape[1])
        heads, dim, ratio = c["indexer_n_heads"], c["indexer_head_dim"], c["indexer_compress_ratio"]
        qk = blocks.linear(m, self.get(p + "indexer.index_qk_proj.weight")).float()
        q, raw = qk.split([heads * dim, dim], -1)
        q = blocks.unit(q.unflatten(-1, (heads, dim))) * (1 + self.get(p + "indexer.q_layernorm.weight"))
        q = blocks.rotate(q, cos, sin)
        groups = m.shape[1] // ratio
        mean = raw[:, : groups * ratio].unflatten(1, (groups, ratio)).mean(2)
        key = (blocks.unit(mean) * (1 + self.get(p + "indexer.k_layernorm.weight"))).unsqueeze(-2)
        key = blocks.rotate(key, cos[: groups * ratio : ratio], sin[: groups * ratio : ratio]).squeeze(-2)
        return torch.relu(torch.einsum("bthd,bgd->bthg", q, key)).sum(2) / math.sqrt(dim)

    def selection(self, p: str, m) -> torch.Tensor:
        """Boolean mask ``[B, 1, T, T]`` of the tokens each query attends under the selector's budget."""
        ratio, length = self.config["indexer_compress_ratio"], m.shape[1]
        scores = self.group_scores(p, m)
        position = torch.arange(length, device=m.device)
        groups = torch.arange(scores.shape[-1], device=m.device)
        complete = groups < ((position + 1) // ratio).unsqueeze(-1)
        scores = scores.masked_fill(~complete, -1.0)  # scores are never negative
        order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
        keep = min(self.config["indexer_budget"] // ratio, scores.shape[-1])
        picked = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order[..., :keep], True) & complete
        token_group = position // ratio
        padded = F.pad(picked, (0, 1))  # tokens after the last complete group of the sequence
        chosen = padded[..., token_group]
        tail = position >= ((position + 1) // ratio * ratio).unsqueeze(-1)
        return ((chosen | tail) & (position <= position.unsqueeze(-1))).unsqueeze(1)

    def selector_loss(self, p: str, m, q, k) -> torch.Tensor:
        """Cross entropy of the selector's group scores against the attention mass of complete groups.

        Only the selector's parameters get gradients (pass detached inputs).
        """
        ratio, length = self.config["indexer_compress_ratio"], m.shape[1]
        groups = length // ratio
        position = torch.arange(length, device=m.device)
        complete = torch.arange(groups, device=m.device) < ((position + 1) // ratio).unsqueeze(-1)
        with torch.no_grad():
            key = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
            scores = (q @ key.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
            scores = scores.masked_fill(position > position.unsqueeze(-1), -math.inf)
            mass = torch.softmax(scores, -1).sum(1)[..., : groups * ratio].unflatten(-1, (groups, ratio)).sum(-1)
            mass = mass * complete
            mass = mass / mass.sum(-1, keepdim=True).clamp_min(1e-9)
        logs = self.group_scores(p, m).masked_fill(~complete, -1e4).log_softmax(-1)
        return -(mass * logs).sum(-1).mean()

    def chain(self, h: torch.Tensor, tokens: torch.Tensor, depths: int, *, keep: dict | None = None):
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
        r, statistics = h, {}
        chain_k, chain_v, committed = [], [], None
        for depth in range(1, depths + 1):
            e = F.embedding(tokens.roll(-depth, 1), embedding)
            x = self.blocks["feedback"](r, e, *fuse, self.dtype)
            m, b = self.mix(prefix + "attn_hyper_connection.", x)
            q, k, v, gate = self.attention_inputs(p, m, depth - 1)
            if committed is None:
                committed = (k, v)
                o = blocks.attend(q, k, v)
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
            yield blocks.linear(sampling, head).float()
