"""Sparse attention (QSA) of Qwen3.8-Flash: grouped-query attention over selected groups of tokens plus the open tail.

Groups of ``indexer_compress_ratio`` tokens have one compressed selector key; a query attends to the tokens of its
``budget_groups`` best complete groups and to the tokens after the last complete group (``specdec.ops.grouped_rows``). Source:
the ``qwen4_exp`` class of transformers 5.24; ring, tags and anchor as b12x's ``attention.qsa``.

``RopedRows`` adds rope to what every layer of one call shares; ``SparseAttention`` is one layer's weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor

from specdec.ops.grouped_rows import Chosen, RowPlan
from specdec.ops.norms import accumulate_dtype, rms_norm
from specdec.ops.rope import RopeTable, apply_rope
from specdec.state.store import StateStore

from .geometry import Geometry
from .weights import Weights


@frozen(kw_only=True, eq=False)
class RopedRows(RowPlan):
    """Rows of one call with their rotations: of each row's own position, and of the first position of a group that ends there."""

    cos: Tensor  # [B, T, 1, rotated]
    sin: Tensor
    group_cos: Tensor  # [B, T, rotated]
    group_sin: Tensor

    @classmethod
    def of(
        cls,
        store: StateStore,
        geometry: Geometry,
        rope: RopeTable,
        *,
        slots: Tensor,
        positions: Tensor,
        tokens: int,
        valid: Tensor | None = None,
    ) -> RopedRows:
        """See ``RowPlan.build``."""
        ratio = geometry.indexer_compress_ratio
        cos, sin = rope.at(positions)
        group_cos, group_sin = rope.at((positions - (ratio - 1)).clamp(min=0))
        return cls.build(
            store,
            ratio=ratio,
            budget=geometry.budget_groups,
            slots=slots,
            positions=positions,
            tokens=tokens,
            valid=valid,
            cos=cos.unsqueeze(2),
            sin=sin.unsqueeze(2),
            group_cos=group_cos,
            group_sin=group_sin,
        )

    def steps(self) -> Iterator[Self]:
        """See ``RowPlan.steps``."""
        for j, step in enumerate(super().steps()):
            row = slice(j, j + 1)
            yield evolve(
                step,
                cos=self.cos[:, row],
                sin=self.sin[:, row],
                group_cos=self.group_cos[:, row],
                group_sin=self.group_sin[:, row],
            )


@frozen(kw_only=True, eq=False)
class SparseAttention:
    """One layer. projection: rows queries, keys, values, gates, selector queries, raw selector key."""

    projection: Tensor
    qk_scale: Tensor  # [heads + kv heads, head_dim]
    index_query_scale: Tensor
    index_key_scale: Tensor
    output: Tensor
    geometry: Geometry

    @classmethod
    def load(cls, weights: Weights) -> SparseAttention:
        g = weights.geometry
        hidden, heads, kv, dim = g.hidden_size, g.num_attention_heads, g.num_key_value_heads, g.head_dim
        # stored per head as dim query rows, then dim gate rows
        paired = weights.matrix("q_proj.weight", 2 * g.query_width, hidden).view(heads, 2, dim, hidden)
        index = weights.under("indexer.")
        return cls(
            projection=torch.cat(
                [
                    paired[:, 0].reshape(-1, hidden),
                    weights.matrix("k_proj.weight", g.kv_width, hidden),
                    weights.matrix("v_proj.weight", g.kv_width, hidden),
                    paired[:, 1].reshape(-1, hidden),
                    index.matrix("index_qk_proj.weight", g.index_width, hidden),
                ]
            ),
            qk_scale=torch.cat(
                [
                    weights.norm_scale("q_norm.weight", dim).expand(heads, dim),
                    weights.norm_scale("k_norm.weight", dim).expand(kv, dim),
                ]
            ).contiguous(),
            index_query_scale=index.norm_scale("q_layernorm.weight", g.indexer_head_dim),
            index_key_scale=index.norm_scale("k_layernorm.weight", g.indexer_head_dim),
            output=weights.matrix("o_proj.weight", hidden, g.query_width),
            geometry=g,
        )

    def __call__(self, m: Tensor, plan: RopedRows, layer: int) -> Tensor:
        """m: [B·T, H] → [B·T, H]. Writes keys, values, compressed keys and the ring of ``layer``, then attends."""
        g = self.geometry
        projected = F.linear(m, self.projection).view(plan.batch, plan.rows, -1)
        split = [g.query_width + g.kv_width, g.kv_width, g.query_width, g.index_width]
        qk, v, gate, index = projected.split(split, dim=-1)
        queries = self._store(qk, v, index, plan, layer)
        chosen = self._choose(index, plan, layer) if plan.select else None
        found = plan.attend(queries, "kv", layer, chosen, scale=g.head_dim**-0.5)
        if found is not None:
            attended = found.flatten(2)
        elif chosen is not None and plan.gather:
            attended = self._attend_gathered(queries, chosen, plan, layer)
        else:
            visible = plan.causal if chosen is None else plan.visible(chosen)
            attended = self._attend_dense(queries, visible, plan, layer)
        return F.linear((attended * torch.sigmoid(gate)).flatten(0, 1), self.output)

    def write(self, m: Tensor, plan: RopedRows, layer: int) -> None:
        """Writes state for rows without attending: all that absorption needs. m: [B·T, H]."""
        g = self.geometry
        keys = self.projection[g.query_width : g.query_width + 2 * g.kv_width]
        kv = F.linear(m, keys).view(plan.batch, plan.rows, -1)
        raw = F.linear(m, self.projection[-g.indexer_head_dim :]).view(plan.batch, plan.rows, -1)
        k = kv[..., : g.kv_width].unflatten(-1, (g.num_key_value_heads, g.head_dim))
        k = apply_rope(rms_norm(k, self.qk_scale[g.num_attention_heads :], g.rms_norm_eps), plan.cos, plan.sin)
        self._store_kv(k, kv[..., g.kv_width :], plan, layer)
        self._store_group_keys(raw, plan, layer)

    def _store(self, qk: Tensor, v: Tensor, index: Tensor, plan: RopedRows, layer: int) -> Tensor:
        g = self.geometry
        heads = qk.unflatten(-1, (g.num_attention_heads + g.num_key_value_heads, g.head_dim))
        heads = apply_rope(rms_norm(heads, self.qk_scale, g.rms_norm_eps), plan.cos, plan.sin)
        self._store_kv(heads[:, :, g.num_attention_heads :], v, plan, layer)
        self._store_group_keys(index[..., -g.indexer_head_dim :], plan, layer)
        return heads[:, :, : g.num_attention_heads]

    def _store_kv(self, k: Tensor, v: Tensor, plan: RopedRows, layer: int) -> None:
        plan.write_tokens("kv", layer, torch.stack([k, v.reshape(k.shape)], dim=2).flatten(0, 1))

    def _store_group_keys(self, raw: Tensor, plan: RopedRows, layer: int) -> None:
        """Compressed key of the group that ends at each row (kept where one does), then the ring, reads before writes."""
        members = plan.members("raw_keys", layer, raw)
        mean = members.to(accumulate_dtype(raw.dtype)).mean(-1).to(raw.dtype)
        normed = rms_norm(mean, self.index_key_scale, self.geometry.rms_norm_eps)
        key = apply_rope(normed, plan.group_cos, plan.group_sin)
        plan.write_groups("group_keys", layer, key.flatten(0, 1))
        plan.keep_raw("raw_keys", layer, raw)

    def _choose(self, index: Tensor, plan: RopedRows, layer: int) -> Chosen:
        g = self.geometry
        iq = index[..., : -g.indexer_head_dim].unflatten(-1, (g.indexer_n_heads, g.indexer_head_dim))
        iq = apply_rope(rms_norm(iq, self.index_query_scale, g.rms_norm_eps), plan.cos, plan.sin)
        found = plan.choose_scored(iq, None, "group_keys", layer, factor=g.indexer_head_dim**-0.5)
        if found is not None:
            return found
        keys = plan.store.read_pages("group_keys", layer, plan.page_rows, plan.batch)
        precise = accumulate_dtype(iq.dtype)
        scores = iq.flatten(1, 2).to(precise) @ keys.to(precise).transpose(1, 2)
        scores = scores.relu().view(plan.batch, plan.rows, g.indexer_n_heads, -1).sum(2) / g.indexer_head_dim**0.5
        return plan.choose(scores)

    def _attend_dense(self, q: Tensor, visible: Tensor, plan: RowPlan, layer: int) -> Tensor:
        """All pages of the context under a mask. Returns [B, T, heads · head_dim]."""
        g = self.geometry
        repeat = g.num_attention_heads // g.num_key_value_heads
        kv = plan.store.read_pages("kv", layer, plan.page_rows, plan.batch)
        # rows never written may hold anything, even NaN, and NaN · 0 is NaN
        kv = kv.masked_fill(plan.unwritten[:, :, None, None, None], 0)
        k, v = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)
        grouped = q.unflatten(2, (g.num_key_value_heads, repeat)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        mask = visible.unsqueeze(1).expand(-1, repeat, -1, -1).flatten(1, 2).unsqueeze(1)
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask)
        out = out.unflatten(2, (repeat, plan.rows)).permute(0, 3, 1, 2, 4)
        return out.flatten(2)

    def _attend_gathered(self, q: Tensor, chosen: Chosen, plan: RowPlan, layer: int) -> Tensor:
        """Only the selected tokens. Returns [B, T, heads · head_dim]."""
        g = self.geometry
        repeat = g.num_attention_heads // g.num_key_value_heads
        entries, counts = plan.gathered(chosen)
        kv = plan.store.paged("kv", layer).index_select(0, entries)
        kv = kv.view(*counts.shape, *kv.shape[1:]).masked_fill(~counts[:, :, None, None, None], 0)
        k, v = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)
        grouped = q.flatten(0, 1).unflatten(1, (g.num_key_value_heads, repeat))
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=counts[:, None, None])
        return out.reshape(plan.batch, plan.rows, -1)
