"""Sparse attention of one request composed from b12x's pure-torch QSA references, fed with rows of known projections.

Inputs are token ids standing for one-hot rows of the layer's input: a projection of such a row is a column of the weight
matrix, exact in every dtype, so that nothing but the layer's own arithmetic is compared.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from b12x.attention.qsa import reference
from double_oracle import KeepDouble
from qwen_models import hf_config, random_weight
from torch import Tensor
from transformers.models.qwen4_exp import modeling_qwen4_exp as hf

from specdec_qwen38.geometry import Geometry

PAGE = 64
RING = 16


def layer_weights(geometry: Geometry, seed: int) -> dict[str, Tensor]:
    """bfloat16 weights of one attention layer; columns have unit spread."""
    g = geometry
    shapes = {
        "q_proj": (2 * g.query_width, g.hidden_size),
        "k_proj": (g.kv_width, g.hidden_size),
        "v_proj": (g.kv_width, g.hidden_size),
        "o_proj": (g.hidden_size, g.query_width),
        "indexer.index_qk_proj": (g.index_width, g.hidden_size),
        "q_norm": (g.head_dim,),
        "k_norm": (g.head_dim,),
        "indexer.q_layernorm": (g.indexer_head_dim,),
        "indexer.k_layernorm": (g.indexer_head_dim,),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: random_weight(name, shape, generator) for name, shape in shapes.items()}
    scaled = {
        name: tensor / 0.12 if "proj" in name and name != "o_proj" else tensor for name, tensor in tensors.items()
    }
    return {f"{name}.weight": tensor.to(torch.bfloat16) for name, tensor in scaled.items()}


class QsaOracle:
    """One request. In float64 the references' bfloat16 roundings are switched off; in bfloat16 they are what is compared."""

    def __init__(self, geometry: Geometry, weights: dict[str, Tensor], tokens: int, dtype: torch.dtype) -> None:
        g = geometry
        self.geometry = g
        self.dtype = dtype
        self.weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
        pages = tokens // PAGE
        self.keys = torch.zeros(pages, PAGE, g.num_key_value_heads, g.head_dim, dtype=dtype)
        self.values = torch.zeros_like(self.keys)
        self.group_keys = torch.zeros(pages, PAGE // g.indexer_compress_ratio, g.indexer_head_dim, dtype=dtype)
        # pages in reverse order, so that the table matters
        self.table = torch.arange(pages - 1, -1, -1).unsqueeze(0)
        self.ring = torch.zeros(RING, g.indexer_head_dim, dtype=dtype)
        self.tags = torch.full((RING,), -1)
        self.ring_positions = torch.zeros(RING, 1, dtype=torch.int64)
        self.anchor = -1
        self.selected: Tensor | None = None
        rotary = hf.Qwen4ExpTextRotaryEmbedding(hf_config(g))
        with self.mode():
            rotary.inv_freq = rotary.compute_default_rope_parameters(rotary.config)[0]
            self.cos, self.sin = (
                t[0] for t in rotary(torch.empty(0, dtype=dtype), torch.arange(tokens).view(1, 1, -1))
            )

    def mode(self) -> AbstractContextManager:
        """Where the references run."""
        return KeepDouble(torch.bfloat16) if self.dtype is torch.float64 else nullcontext()

    def rope(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: [T, heads, n] at positions [T, 1], or [n] at positions [1]."""
        at = positions.reshape(-1)
        shaped = x.view(at.numel(), -1, x.shape[-1])
        return hf.apply_rotary_pos_emb(shaped, cos=self.cos[at], sin=self.sin[at]).view_as(x)

    def columns(self, name: str, ids: Tensor) -> Tensor:
        """Projection of one-hot rows."""
        return self.weights[f"{name}.weight"][:, ids].t()

    def interval(self, ids: Tensor, start: int, *, accepted: int, prompt: bool) -> Tensor:
        """Processes rows start … start+T−1 and returns the layer's output [T, H].

        ids: [T]; accepted: rows of the preceding interval that stand (1 after a prompt and before anything).
        """
        with self.mode():
            return self._interval(ids, start, accepted=accepted, prompt=prompt)

    def _interval(self, ids: Tensor, start: int, *, accepted: int, prompt: bool) -> Tensor:
        g, w, rows = self.geometry, self.weights, ids.shape[0]
        positions = torch.arange(start, start + rows)
        norm = lambda x, name: reference.gemma_rmsnorm_reference(x, w[f"{name}.weight"], g.rms_norm_eps)  # noqa: E731
        query, gate = self.columns("q_proj", ids).view(rows, g.num_attention_heads, 2, g.head_dim).unbind(2)
        heads = (rows, g.num_key_value_heads, g.head_dim)
        query = self.rope(norm(query, "q_norm"), positions)
        key = self.rope(norm(self.columns("k_proj", ids).reshape(heads), "k_norm"), positions)
        page = self.table[0, positions // PAGE]
        self.keys[page, positions % PAGE] = key
        self.values[page, positions % PAGE] = self.columns("v_proj", ids).reshape(heads)

        index = self.columns("indexer.index_qk_proj", ids).view(rows, -1, g.indexer_head_dim)
        index_query, raw = reference.prepare_index_reference(
            index[:, :-1],
            index[:, -1],
            w["indexer.q_layernorm.weight"],
            g.rms_norm_eps,
            self.rope,
            positions.unsqueeze(1),
        )
        groups, representatives, self.anchor = reference.packed_stream_compress_reference(
            raw,
            positions,
            positions.unsqueeze(1),
            self.ring,
            self.tags,
            self.ring_positions,
            prior_interval_start_position=self.anchor,
            num_accepted_tokens=accepted,
            is_prefilling=prompt,
            compress_ratio=g.indexer_compress_ratio,
            key_norm_weight=w["indexer.k_layernorm.weight"],
            eps=g.rms_norm_eps,
            rope=self.rope,
        )
        reference.paged_store_compressed_reference(self.group_keys, self.table, 0, groups, representatives)
        _, self.selected = reference.score_select_reference(
            index_query,
            self.group_keys[self.table[0]].flatten(0, 1),
            positions,
            start + rows,
            g.indexer_compress_ratio,
            g.indexer_budget,
        )
        attended = reference.sparse_paged_gqa_reference(
            query,
            self.keys,
            self.values,
            self.table,
            torch.zeros(rows, dtype=torch.int64),
            self.selected,
            positions,
        )
        gated = attended.flatten(1) * torch.sigmoid(gate.reshape(rows, -1))
        return gated @ w["o_proj.weight"].t()
