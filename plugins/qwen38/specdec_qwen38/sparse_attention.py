"""Sparse attention (QSA) of Qwen3.8-Flash: grouped-query attention over selected groups of tokens plus the open tail.

Groups of ``indexer_compress_ratio`` tokens have one compressed selector key; a query attends to the tokens of its
``budget_groups`` best complete groups and to the tokens after the last complete group. Ties take the lower group: the sort
is stable. Source: the ``qwen4_exp`` class of transformers 5.24; ring, tags and anchor as b12x's ``attention.qsa``.

``RowPlan`` holds what every layer of one call shares (addresses, rope, masks); ``SparseAttention`` is one layer's weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor

from specdec.ops.norms import accumulate_dtype, rms_norm
from specdec.ops.rope import RopeTable, apply_rope
from specdec.state.store import StateStore

from .geometry import Geometry
from .weights import Weights


@frozen(kw_only=True, eq=False)
class RowPlan:
    """Addresses of one call's rows in one store. B lanes, T rows each; positions [B, T].

    Invalid rows (masked by ``valid``) read like any other but write only to trash.
    """

    store: StateStore
    slots: Tensor
    batch: int
    rows: int
    positions: Tensor
    cos: Tensor  # [B, T, 1, rotated]
    sin: Tensor
    kv_entries: Tensor  # [B·T]
    group_entries: Tensor  # [B·T], trash where the row completes no group
    group_cos: Tensor
    group_sin: Tensor
    ring_read: Tensor  # [B·(ratio − 1)] flat ring entries of the positions just before the interval
    ring_valid: Tensor  # [B, ratio − 1, 1]
    ring_write: Tensor  # [B·kept]
    ring_rows: int
    page_rows: Tensor
    unwritten: Tensor  # [B, tokens] positions no row of this call may see
    causal: Tensor  # [B, T, tokens] positions ≤ the row's own
    select: bool
    gather: bool

    @classmethod
    def build(
        cls,
        store: StateStore,
        geometry: Geometry,
        rope: RopeTable,
        *,
        slots: Tensor,
        positions: Tensor,
        tokens: int,
        valid: Tensor | None = None,
    ) -> RowPlan:
        """Plans the rows and writes their ring tags; checks that the carried group members carry the expected tags.

        slots: [B]; positions: [B, T] consecutive per lane; tokens: attended positions 0 … tokens−1, a multiple of the page;
        valid: [B, T] bool or None for all.
        """
        batch, rows = positions.shape
        ratio = geometry.indexer_compress_ratio
        completes = positions % ratio == ratio - 1
        if valid is not None:
            completes = completes & valid
        cos, sin = rope.at(positions)
        first = (positions - (ratio - 1)).clamp(min=0)
        group_cos, group_sin = rope.at(first)
        extent = store.fields["raw_tags"].extent
        carried = positions[:, :1] - torch.arange(ratio - 1, 0, -1, device=positions.device)
        ring_read = (slots.unsqueeze(1) * extent + carried % extent).reshape(-1)
        tags = store["raw_tags"][0].flatten()
        held = tags.index_select(0, ring_read).view(batch, -1) == carried
        # row j needs the carried members that lie in its group: those at or after positions[j] − (ratio − 1)
        needed = completes.unsqueeze(-1) & (carried.unsqueeze(1) >= first.unsqueeze(-1))
        store.flag(slots, (needed & ~held.unsqueeze(1)).flatten(1).any(1))
        ring_rows = min(rows, extent)
        last = positions[:, rows - ring_rows :]
        write_slots = slots.unsqueeze(1)
        if valid is not None:
            write_slots = torch.where(valid[:, rows - ring_rows :], write_slots, store.spare)
        ring_write = (write_slots * extent + last % extent).reshape(-1)
        tags.index_copy_(0, ring_write, last.reshape(-1))
        groups = tokens // ratio
        select = groups > geometry.budget_groups
        seen = torch.arange(tokens, device=positions.device)
        return cls(
            store=store,
            slots=slots,
            batch=batch,
            rows=rows,
            positions=positions,
            cos=cos.unsqueeze(2),
            sin=sin.unsqueeze(2),
            kv_entries=store.entries(slots, positions, valid=valid),
            group_entries=store.entries(slots, positions, group=ratio, valid=completes),
            group_cos=group_cos,
            group_sin=group_sin,
            ring_read=ring_read,
            ring_valid=held.unsqueeze(-1),
            ring_write=ring_write,
            ring_rows=ring_rows,
            page_rows=store.page_rows(slots, tokens),
            unwritten=seen > positions[:, -1:],
            causal=seen <= positions.unsqueeze(-1),
            select=select,
            # gathering single tokens pays once the selection is a small part of the context; fixed by sizes, not by T
            gather=select and tokens > 2 * (geometry.indexer_budget + ratio),
        )

    def steps(self, geometry: Geometry) -> Iterator[RowPlan]:
        """The same rows as T calls of one row each: row j is planned as if rows before it had been called already.

        For recursive drafting, where a row's input is known only after the row before it has run. Needs ring extent ≥ T + ratio,
        so that the tags written for all rows at once hide no carried member.
        """
        ratio = geometry.indexer_compress_ratio
        extent = self.store.fields["raw_tags"].extent
        back = torch.arange(ratio - 1, 0, -1, device=self.positions.device)
        carried = self.positions.unsqueeze(-1) - back  # [B, T, ratio − 1]
        ring_read = self.slots[:, None, None] * extent + carried % extent
        # members at or after the first row are written by earlier steps, the others were checked by ``build``
        own = carried >= self.positions[:, :1].unsqueeze(-1)
        before = F.pad(self.ring_valid.squeeze(-1), (0, self.rows), value=True).unfold(1, ratio - 1, 1)
        held = own | before[:, : self.rows]
        kv_entries, group_entries = self.kv_entries.view(self.batch, -1), self.group_entries.view(self.batch, -1)
        ring_write = self.ring_write.view(self.batch, -1)
        seen = self.causal.logical_not()
        for j in range(self.rows):
            row = slice(j, j + 1)
            yield evolve(
                self,
                rows=1,
                positions=self.positions[:, row],
                cos=self.cos[:, row],
                sin=self.sin[:, row],
                kv_entries=kv_entries[:, j],
                group_entries=group_entries[:, j],
                group_cos=self.group_cos[:, row],
                group_sin=self.group_sin[:, row],
                ring_read=ring_read[:, j].reshape(-1),
                ring_valid=held[:, j].unsqueeze(-1),
                ring_write=ring_write[:, j],
                ring_rows=1,
                unwritten=seen[:, j],
                causal=self.causal[:, row],
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

    def __call__(self, m: Tensor, plan: RowPlan, layer: int) -> Tensor:
        """m: [B·T, H] → [B·T, H]. Writes keys, values, compressed keys and the ring of ``layer``, then attends."""
        g = self.geometry
        projected = F.linear(m, self.projection).view(plan.batch, plan.rows, -1)
        split = [g.query_width + g.kv_width, g.kv_width, g.query_width, g.index_width]
        qk, v, gate, index = projected.split(split, dim=-1)
        queries = self._store(qk, v, index, plan, layer)
        if plan.gather:
            attended = self._attend_gathered(queries, self._choose(index, plan, layer), plan, layer)
        else:
            visible = self._visible(self._choose(index, plan, layer), plan) if plan.select else plan.causal
            attended = self._attend_dense(queries, visible, plan, layer)
        return F.linear((attended * torch.sigmoid(gate)).flatten(0, 1), self.output)

    def write(self, m: Tensor, plan: RowPlan, layer: int) -> None:
        """Writes state for rows without attending: all that absorption needs. m: [B·T, H]."""
        g = self.geometry
        keys = self.projection[g.query_width : g.query_width + 2 * g.kv_width]
        kv = F.linear(m, keys).view(plan.batch, plan.rows, -1)
        raw = F.linear(m, self.projection[-g.indexer_head_dim :]).view(plan.batch, plan.rows, -1)
        k = kv[..., : g.kv_width].unflatten(-1, (g.num_key_value_heads, g.head_dim))
        k = apply_rope(rms_norm(k, self.qk_scale[g.num_attention_heads :], g.rms_norm_eps), plan.cos, plan.sin)
        self._store_kv(k, kv[..., g.kv_width :], plan, layer)
        self._store_group_keys(raw, plan, layer)

    def _store(self, qk: Tensor, v: Tensor, index: Tensor, plan: RowPlan, layer: int) -> Tensor:
        g = self.geometry
        heads = qk.unflatten(-1, (g.num_attention_heads + g.num_key_value_heads, g.head_dim))
        heads = apply_rope(rms_norm(heads, self.qk_scale, g.rms_norm_eps), plan.cos, plan.sin)
        self._store_kv(heads[:, :, g.num_attention_heads :], v, plan, layer)
        self._store_group_keys(index[..., -g.indexer_head_dim :], plan, layer)
        return heads[:, :, : g.num_attention_heads]

    def _store_kv(self, k: Tensor, v: Tensor, plan: RowPlan, layer: int) -> None:
        pair = torch.stack([k, v.reshape(k.shape)], dim=2).flatten(0, 1)
        plan.store.paged("kv", layer).index_copy_(0, plan.kv_entries, pair)

    def _store_group_keys(self, raw: Tensor, plan: RowPlan, layer: int) -> None:
        """Compressed key of the group that ends at each row (kept where one does), then the ring, reads before writes."""
        g = self.geometry
        ring = plan.store["raw_keys"][layer].flatten(0, 1)
        carried = ring.index_select(0, plan.ring_read).view(plan.batch, -1, g.indexer_head_dim)
        extended = torch.cat([torch.where(plan.ring_valid, carried, 0), raw], dim=1)
        precise = accumulate_dtype(raw.dtype)
        mean = extended.unfold(1, g.indexer_compress_ratio, 1).to(precise).mean(-1).to(raw.dtype)
        key = apply_rope(rms_norm(mean, self.index_key_scale, g.rms_norm_eps), plan.group_cos, plan.group_sin)
        plan.store.paged("group_keys", layer).index_copy_(0, plan.group_entries, key.flatten(0, 1))
        ring.index_copy_(0, plan.ring_write, raw[:, plan.rows - plan.ring_rows :].reshape(-1, g.indexer_head_dim))

    def _choose(self, index: Tensor, plan: RowPlan, layer: int) -> tuple[Tensor, Tensor]:
        """Chosen groups of every row: ids [B, T, budget] int64 and which of them count [B, T, budget] bool."""
        g = self.geometry
        iq = index[..., : -g.indexer_head_dim].unflatten(-1, (g.indexer_n_heads, g.indexer_head_dim))
        iq = apply_rope(rms_norm(iq, self.index_query_scale, g.rms_norm_eps), plan.cos, plan.sin)
        keys = plan.store.read_pages("group_keys", layer, plan.page_rows, plan.batch)
        precise = accumulate_dtype(iq.dtype)
        scores = iq.flatten(1, 2).to(precise) @ keys.to(precise).transpose(1, 2)
        scores = scores.relu().view(plan.batch, plan.rows, g.indexer_n_heads, -1).sum(2) / g.indexer_head_dim**0.5
        complete = (plan.positions + 1) // g.indexer_compress_ratio
        groups = torch.arange(scores.shape[-1], device=scores.device)
        # real scores are never negative, so −1 sorts every incomplete group behind them
        scores = scores.masked_fill(groups >= complete.unsqueeze(-1), -1)
        ordered, ids = torch.sort(scores, dim=-1, descending=True, stable=True)
        return ids[..., : g.budget_groups], ordered[..., : g.budget_groups] >= 0

    def _visible(self, chosen: tuple[Tensor, Tensor], plan: RowPlan) -> Tensor:
        ids, counted = chosen
        ratio = self.geometry.indexer_compress_ratio
        tokens = plan.causal.shape[-1]
        groups = torch.zeros(plan.batch, plan.rows, tokens // ratio, dtype=torch.bool, device=ids.device)
        groups = groups.scatter(2, ids, counted)
        tail = torch.arange(tokens, device=ids.device) >= ((plan.positions + 1) // ratio * ratio).unsqueeze(-1)
        picked = groups.unsqueeze(-1).expand(-1, -1, -1, ratio).flatten(2)
        return (picked | tail) & plan.causal

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

    def _attend_gathered(self, q: Tensor, chosen: tuple[Tensor, Tensor], plan: RowPlan, layer: int) -> Tensor:
        """Only the selected tokens. Returns [B, T, heads · head_dim]."""
        g = self.geometry
        ratio, repeat = g.indexer_compress_ratio, g.num_attention_heads // g.num_key_value_heads
        ids, counted = chosen
        members = torch.arange(ratio, device=ids.device)
        picked = (ids.unsqueeze(-1) * ratio + members).flatten(2)
        tail = ((plan.positions + 1) // ratio * ratio).unsqueeze(-1) + members[:-1]
        tokens = torch.cat([picked, tail], dim=-1)
        counts = torch.cat([counted.repeat_interleave(ratio, dim=-1), tail <= plan.positions.unsqueeze(-1)], dim=-1)
        entries = plan.store.entries(plan.slots, tokens.flatten(1), valid=counts.flatten(1))
        kv = plan.store.paged("kv", layer).index_select(0, entries)
        kv = kv.view(plan.batch * plan.rows, tokens.shape[-1], *kv.shape[1:])
        kv = kv.masked_fill(~counts.view(plan.batch * plan.rows, -1, 1, 1, 1), 0)
        k, v = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)
        grouped = q.flatten(0, 1).unflatten(1, (g.num_key_value_heads, repeat))
        mask = counts.view(plan.batch * plan.rows, 1, 1, -1)
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask)
        return out.reshape(plan.batch, plan.rows, -1)


def open_group_state(state: Mapping[str, Tensor], rows: int, geometry: Geometry) -> dict[str, Tensor]:
    """Ring tags and anchor of a state in which exactly ``rows`` positions are history.

    Only the members of the open group stay valid: a later interval reads no other carried key. The next interval starts at
    ``rows``, as after a prompt.
    """
    tags = state["raw_tags"]
    first = rows - rows % geometry.indexer_compress_ratio
    kept = (tags >= first) & (tags < rows)
    return {
        "raw_tags": torch.where(kept, tags, -1),
        "anchor": torch.full_like(state["anchor"], rows - 1),
    }
