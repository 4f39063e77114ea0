"""transformers' GLM-5.3 text class and an MTP layer composed from its modules, in float64, with the weights of
``write_random_checkpoint``.

transformers has the target only and drops the layer after the last; the attention, expert and norm modules of its decoder
layers are what the MTP layer is made of.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from double_oracle import KeepDouble
from glm_models import PREFIX, hf_text_model, load_state, mtp_tensors, target_tensors
from glm_modules import hf_config
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.models.glm5_next import modeling_glm5_next as hf

from specdec_glm53.geometry import TINY, Geometry


class TargetOracle:
    """The text class. Selections of experts and groups have no exact ties at sixteen index heads, so its ``topk`` may stay."""

    def __init__(self, seed: int, geometry: Geometry = TINY) -> None:
        model, head = hf_text_model(seed, geometry)
        self.model, self.head = model.double(), head.double()

    def cache(self) -> DynamicCache:
        """An empty cache. It cannot be cropped: copy it before rows that may be rejected."""
        return DynamicCache(config=self.model.config)

    def rows(self, tokens: Tensor, cache: DynamicCache | None = None) -> Tensor:
        """Output h [T, H] of the final norm for tokens [T] that follow what the cache holds, which they join."""
        with torch.inference_mode(), KeepDouble():
            return self.model(tokens.unsqueeze(0), cache=cache, use_cache=cache is not None).last_hidden_state[0]

    def logits(self, rows: Tensor) -> Tensor:
        """[T, H] → [T, V]."""
        return rows @ self.head.t()


@frozen(kw_only=True, eq=False)
class MtpRows:
    """Rows of one pass. before: r [T, H] before the last norm; hidden: m [T, H] after it; logits: [T, V]."""

    before: Tensor
    hidden: Tensor
    logits: Tensor


class MtpOracle:
    """The MTP layer over whole sequences; nothing is kept between calls."""

    def __init__(self, seed: int, geometry: Geometry = TINY) -> None:
        g = geometry
        tensors = mtp_tensors(seed, g)
        prefix = f"{PREFIX}layers.{g.mtp_layer}."
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        config = hf_config(g)
        config.num_hidden_layers += 1
        config.layer_types = [*config.layer_types, "indexed_attention"]
        config.mlp_layer_types = [*config.mlp_layer_types, "sparse"]
        config.indexer_types = [*config.indexer_types, "full"]
        norms = ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "shared_head.norm")
        self.norms = {name: hf.Glm5NextTextRMSNorm(g.hidden_size, eps=g.rms_norm_eps) for name in norms}
        self.fusion = nn.Linear(2 * g.hidden_size, g.hidden_size, bias=False)
        self.attention = hf.Glm5NextTextAttention(config, layer_idx=g.mtp_layer)
        self.experts = hf.Glm5NextTextMoE(config)
        homes = {**self.norms, "eh_proj": self.fusion, "self_attn": self.attention, "mlp": self.experts}
        for name, module in homes.items():
            own = [key for key in tensors if key.startswith(f"{name}.")]
            load_state(module, {key.removeprefix(f"{name}."): tensors.pop(key) for key in own})
            module.double().eval()
        assert not tensors, f"weights without a home: {sorted(tensors)}"
        shared = target_tensors(seed, g)
        self.embedding = shared[f"{PREFIX}embed_tokens.weight"].double()
        self.head = shared["lm_head.weight"].double()

    def rows(self, feedback: Tensor, tokens: Tensor) -> MtpRows:
        """Runs rows 0 … T−1. feedback: [T, H]; tokens: [T], token i is the one after position i."""
        norm = self.norms
        with torch.inference_mode(), KeepDouble():
            pair = [norm["enorm"](self.embedding[tokens]), norm["hnorm"](feedback)]
            z = self.fusion(torch.cat(pair, dim=-1)).unsqueeze(0)
            mask = torch.ones(1, len(tokens), dtype=torch.bool)
            r = z + self.attention(norm["input_layernorm"](z), attention_mask=mask)[0]
            r = (r + self.experts(norm["post_attention_layernorm"](r)))[0]
            m = norm["shared_head.norm"](r)
            return MtpRows(before=r, hidden=m, logits=m @ self.head.t())

    def proposals(
        self, feedback: Tensor, tokens: Tensor, drafts: Sequence[int], *, before_norm: bool = False
    ) -> Tensor:
        """Logits [K, V] that draft K tokens after teacher-forced rows, if the drawn tokens are ``drafts`` (K of them).

        feedback: [N, H]; tokens: [N]; the last row's token is the pending one. ``before_norm`` is a wrong recursion: it carries
        the layer's output before the last norm.
        """
        logits = []
        for draft in drafts:
            rows = self.rows(feedback, tokens)
            logits.append(rows.logits[-1])
            carried = rows.before[-1:] if before_norm else rows.hidden[-1:]
            feedback = torch.cat([feedback, carried])
            tokens = torch.cat([tokens, torch.tensor([draft])])
        return torch.stack(logits)
