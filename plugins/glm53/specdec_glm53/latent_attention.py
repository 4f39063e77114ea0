"""Indexed latent attention of GLM-5.3-Flash: one latent per token, attended over selected groups plus the open tail.

    r = rms(x Wqa);  q_h = r Wqb_h;  c = rms(x Wkva)          c is all that is cached of a token
    k_h = Wk_h c,  v_h = Wv_h c                               never formed: q'_h = Wk_hᵀ q_h,  y_h = Wv_h Σ_j p_j c_j
    p_h = softmax over j of q'_h · c_j / √key width           no positions anywhere
    s(z) = Σ_h w_h · relu(i_h · P_z),  i = r Wi,  w = x Ww    score of group z, of any sign
    P_z[c] = Σ_j a_j[c] · k_j[c],  a = softmax over the group's rows of (x Wg + position bias)[c],  k = layernorm(x Wk)

A query attends to the tokens of its ``budget_groups`` best complete groups and to the tokens after the last complete group
(``specdec.ops.grouped_rows``); its own group is not forced once it is complete. Source: the ``glm5_next`` class of
transformers 5.24. All heads are assumed local: Wqb, Wk, Wv split by head and the output by input column; everything else,
the indexer with all its heads included, is the same for every shard.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from specdec.checkpoint.weights import Weights
from specdec.ops.grouped_rows import Chosen, RowPlan
from specdec.ops.norms import rms_norm

from .geometry import Geometry

# Added to the variance of a raw index key; the constant of the reference class.
KEY_NORM_EPS = 1e-6


@frozen(kw_only=True, eq=False)
class IndexedAttention:
    """Weights of one layer.

    projection: [q rank + kv rank + 2 · index dim, H], rows query latent, token latent, index key, pooling gate; queries:
    [heads · key width + index heads · index dim, q rank], rows attention, then indexer; keys: [heads, key width, kv rank];
    values: [heads, kv rank, value width]; output: [H, heads · value width]. In the accumulate dtype: query_scale, latent_scale,
    key_scale, key_shift; positions: [index dim, group]; head_weights: [index heads, H], the score's constant factors included.
    """

    projection: Tensor
    query_scale: Tensor
    queries: Tensor
    latent_scale: Tensor
    keys: Tensor
    values: Tensor
    output: Tensor
    key_scale: Tensor
    key_shift: Tensor
    positions: Tensor
    head_weights: Tensor
    geometry: Geometry

    @classmethod
    def load(cls, weights: Weights, geometry: Geometry) -> IndexedAttention:
        """Reads one ``self_attn`` block. Raises CheckpointError for a missing or misshapen tensor."""
        g, index = geometry, weights.under("indexer.")
        hidden, heads, rank, dim = g.hidden_size, g.num_attention_heads, g.kv_lora_rank, g.index_head_dim
        # per head: rows that make keys, then rows that make values
        both = weights.matrix("kv_b_proj.weight", g.query_width + g.value_width, rank).view(heads, -1, rank)
        head_weights = index.precise_vector("weights_proj.weight", g.index_n_heads, hidden)
        return cls(
            projection=torch.cat(
                [
                    weights.matrix("q_a_proj.weight", g.q_lora_rank, hidden),
                    weights.matrix("kv_a_proj_with_mqa.weight", rank, hidden),
                    index.matrix("wk.weight", dim, hidden),
                    index.matrix("index_kpool_compress_gate", dim, hidden),
                ]
            ),
            query_scale=weights.precise_vector("q_a_layernorm.weight", g.q_lora_rank),
            queries=torch.cat(
                [
                    weights.matrix("q_b_proj.weight", g.query_width, g.q_lora_rank),
                    index.matrix("wq_b.weight", g.index_width, g.q_lora_rank),
                ]
            ),
            latent_scale=weights.precise_vector("kv_a_layernorm.weight", rank),
            keys=both[:, : g.qk_nope_head_dim].contiguous(),
            values=both[:, g.qk_nope_head_dim :].transpose(1, 2).contiguous(),
            output=weights.matrix("o_proj.weight", hidden, g.value_width),
            key_scale=index.precise_vector("k_norm.weight", dim),
            key_shift=index.precise_vector("k_norm.bias", dim),
            positions=index.precise_vector("index_kpool_compress_ape", g.index_kpool, dim).t().contiguous(),
            # relu(s · x) = s · relu(x): both factors of the score go into the weight of its head
            head_weights=head_weights * (g.index_n_heads * dim) ** -0.5,
            geometry=g,
        )

    def __call__(self, x: Tensor, plan: RowPlan, layer: int) -> Tensor:
        """x: [B·T, H] → [B·T, H]. Writes latents, group keys and the ring of ``layer``, then attends."""
        g = self.geometry
        projected = F.linear(x, self.projection)
        self._store(projected[:, g.q_lora_rank :], plan, layer)
        latent = rms_norm(projected[:, : g.q_lora_rank], self.query_scale, g.rms_norm_eps)
        # without selection the indexer's queries are not needed
        queries = F.linear(latent, self.queries if plan.select else self.queries[: g.query_width])
        heads = queries[:, : g.query_width].unflatten(-1, (g.num_attention_heads, -1)).transpose(0, 1)
        absorbed = torch.bmm(heads, self.keys)
        chosen = self._choose(queries, x, plan, layer) if plan.select else None
        rows = absorbed.unflatten(1, (plan.batch, plan.rows)).permute(1, 2, 0, 3)
        found = plan.attend(rows, "latents", layer, chosen, scale=self._scale, shared=True)
        if found is not None:
            attended = found.permute(2, 0, 1, 3).flatten(1, 2)
        elif chosen is not None and plan.gather:
            attended = self._attend_gathered(absorbed, chosen, plan, layer)
        else:
            visible = plan.causal if chosen is None else plan.visible(chosen)
            attended = self._attend_dense(absorbed, visible, plan, layer)
        return F.linear(torch.bmm(attended, self.values).transpose(0, 1).flatten(1), self.output)

    def write(self, x: Tensor, plan: RowPlan, layer: int) -> None:
        """Writes state for rows without attending: all that absorption needs. x: [B·T, H]."""
        self._store(F.linear(x, self.projection[self.geometry.q_lora_rank :]), plan, layer)

    def _store(self, projected: Tensor, plan: RowPlan, layer: int) -> None:
        """projected: [B·T, kv rank + 2 · index dim]. Group keys before the ring: a row's group reads what the ring carries."""
        g = self.geometry
        latent, key, gate = projected.split([g.kv_lora_rank, g.index_head_dim, g.index_head_dim], dim=-1)
        plan.write_tokens("latents", layer, rms_norm(latent, self.latent_scale, g.rms_norm_eps))
        precise = self.key_scale.dtype
        key = F.layer_norm(key.to(precise), (g.index_head_dim,), self.key_scale, self.key_shift, KEY_NORM_EPS)
        raw = torch.stack([key.to(gate.dtype), gate], dim=1).view(plan.batch, plan.rows, 2, -1)
        keys, gates = plan.members("raw_keys", layer, raw).to(precise).unbind(2)
        pooled = (torch.softmax(gates + self.positions, dim=-1) * keys).sum(-1)
        plan.write_groups("group_keys", layer, pooled.to(gate.dtype).flatten(0, 1))
        plan.keep_raw("raw_keys", layer, raw)

    def _choose(self, queries: Tensor, x: Tensor, plan: RowPlan, layer: int) -> Chosen:
        g = self.geometry
        precise = self.head_weights.dtype
        weights = F.linear(x.to(precise), self.head_weights)
        heads = queries[:, g.query_width :].view(plan.batch, plan.rows, g.index_n_heads, g.index_head_dim)
        found = plan.choose_scored(heads, weights, "group_keys", layer, factor=1.0)
        if found is not None:
            return found
        keys = plan.store.read_pages("group_keys", layer, plan.page_rows, plan.batch).to(precise)
        index = heads.to(precise).reshape(plan.batch, -1, g.index_head_dim)
        matched = (index @ keys.transpose(1, 2)).relu().view(plan.batch * plan.rows, g.index_n_heads, -1)
        return plan.choose(torch.bmm(weights.unsqueeze(1), matched).view(plan.batch, plan.rows, -1))

    def _attend_dense(self, q: Tensor, visible: Tensor, plan: RowPlan, layer: int) -> Tensor:
        """All pages of the context under a mask. q: [heads, B·T, kv rank] → the same shape."""
        heads, rank = q.shape[0], q.shape[-1]
        latents = plan.store.read_pages("latents", layer, plan.page_rows, plan.batch)
        # rows never written may hold anything, even NaN, and NaN · 0 is NaN
        latents = latents.masked_fill(plan.unwritten.unsqueeze(-1), 0).unsqueeze(1)
        grouped = q.view(heads, plan.batch, plan.rows, rank).transpose(0, 1).flatten(1, 2).unsqueeze(1)
        mask = visible.unsqueeze(1).expand(-1, heads, -1, -1).flatten(1, 2).unsqueeze(1)
        out = F.scaled_dot_product_attention(grouped, latents, latents, attn_mask=mask, scale=self._scale)
        return out.view(plan.batch, heads, plan.rows, rank).transpose(0, 1).flatten(1, 2)

    def _attend_gathered(self, q: Tensor, chosen: Chosen, plan: RowPlan, layer: int) -> Tensor:
        """Only the selected tokens. q: [heads, B·T, kv rank] → the same shape."""
        entries, counts = plan.gathered(chosen)
        latents = plan.store.paged("latents", layer).index_select(0, entries).view(*counts.shape, -1)
        latents = latents.masked_fill(~counts.unsqueeze(-1), 0).unsqueeze(1)
        grouped, mask = q.transpose(0, 1).unsqueeze(1), counts[:, None, None]
        out = F.scaled_dot_product_attention(grouped, latents, latents, attn_mask=mask, scale=self._scale)
        return out.squeeze(1).transpose(0, 1)

    @property
    def _scale(self) -> float:
        """The absorbed width does not enter: scores are those of the keys."""
        return self.geometry.qk_nope_head_dim**-0.5
