"""Indexer of DeepSeek-V4.1: which compressed rows a query attends to, on two levels.

    i_h = qdq(rope(qr Wi_h)),  u = x Wu · (dim · heads)^(−½)
    s_j = Σ_h u_h · relu(i_h · k_j)                       for the groups j that are complete at the query

A query attends to its ``index_topk`` rows of greatest score. The candidate source also keeps the blocks of rows of greatest
score, the newest always among them, and the index sources after it select within these. At equal scores the lower row or block
wins. Layers between two index sources use the selection of the earlier. Source: official inference code of the release. All
index heads are the same for every shard.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from specdec.checkpoint.weights import Weights
from specdec.ops.block_quantisation import fp4_ue8m0
from specdec.ops.sink_attention import Groups, attends_in_place

from .geometry import Geometry
from .linear import Linear
from .rotary import rotate
from .rows import Rows

# Keys scored at once, which bounds the memory of the scores of single heads.
_KEYS_AT_ONCE = 8192


@frozen(kw_only=True, eq=False)
class Selected:
    """What the layers that share a selection attend to beside their windows: keys [P, k, d], finite everywhere, and the bias
    [P, 1, n + k] of window and selection; or, where a kernel reads them in place, which groups they are."""

    keys: Tensor | None = None
    bias: Tensor | None = None
    groups: Groups | None = None


@frozen(kw_only=True, eq=False)
class Indexer:
    """Weights of one index source. queries: [heads · dim, q rank]; head_weights: [heads, H] with the score's constant factor.
    ratio, layer: where its keys and rows are; qdq: as in ``Projections``."""

    queries: Linear
    head_weights: Tensor
    ratio: int
    layer: int
    geometry: Geometry
    publishes: bool  # candidate blocks for the index sources after it
    restricted: bool  # to these
    qdq: bool = True

    @classmethod
    def load(cls, weights: Weights, geometry: Geometry, layer: int, *, qdq: bool = True) -> Indexer:
        """Reads the query part of the ``indexer`` block of index source ``layer``.

        Raises CheckpointError for a missing or misshapen tensor.
        """
        g = geometry
        source = g.kv_source(layer)
        ratio = g.compress_ratios[source]
        # a power of two for published sizes, so that the product is exact
        factor = (g.index_head_dim * g.index_n_heads) ** -0.5
        return cls(
            queries=Linear.load(weights, {"wq_b.weight": g.index_width}, g.q_lora_rank),
            head_weights=weights.matrix("weights_proj.weight", g.index_n_heads, g.hidden_size) * factor,
            ratio=ratio,
            layer=g.sources_of_ratio(ratio).index(source),
            geometry=g,
            publishes=layer == g.candidate_source_layer_id,
            restricted=layer > g.candidate_source_layer_id,
            qdq=qdq,
        )

    def __call__(self, x: Tensor, qr: Tensor, rows: Rows, candidates: Tensor | None) -> tuple[Selected, Tensor | None]:
        """x: [P, H]; qr: [P, q rank]; candidates: [P, C] bool of the candidate source before, or None for all rows.

        Returns the selection, and the candidates for the index sources after this one.
        """
        g, complete = self.geometry, rows.complete[self.ratio].unsqueeze(1)
        total = rows.page_rows.shape[0] // rows.lay.lanes.shape[0] * rows.store.layout.page_tokens // self.ratio
        groups = torch.arange(total, device=x.device)
        if total <= g.index_topk:
            # every row fits; the blocks of all of them are candidates too
            if attends_in_place(x):
                return self._groups(rows, total), candidates
            return self._gather(groups.expand(rows.count, total), groups < complete, rows), candidates
        scores = self._scores(x, qr, rows)
        hidden = groups >= complete
        if self.restricted and candidates is not None:
            hidden = hidden | ~candidates
        scores = scores.masked_fill(hidden, float("-inf"))
        if self.publishes:
            candidates = candidate_rows(scores, complete, size=g.candidate_block_size, count=g.candidate_topk_blocks)
        best = torch.sort(scores, dim=-1, descending=True, stable=True)
        ids, values = best.indices[:, : g.index_topk], best.values[:, : g.index_topk]
        counted = values > float("-inf")
        if attends_in_place(x):
            return self._groups(rows, ids.shape[1], ids, counted), candidates
        return self._gather(ids, counted, rows), candidates

    def _scores(self, x: Tensor, qr: Tensor, rows: Rows) -> Tensor:
        """[P, C] in the dtype of x; anything for groups that are not complete, whose keys may be anything."""
        g, lay = self.geometry, rows.lay
        queries = self.queries(qr).view(rows.count, g.index_n_heads, g.index_head_dim)
        queries = rotate(queries, rows.compressed.forward.unsqueeze(1)).flatten(1)
        queries = lay.by_lane(fp4_ue8m0(queries) if self.qdq else queries)
        weights = lay.by_lane(F.linear(x, self.head_weights)).view(-1, g.index_n_heads, 1)
        lanes = lay.lanes.shape[0]
        heads = queries.reshape(lanes, -1, g.index_head_dim)
        keys = rows.store.read_pages(f"index_keys_r{self.ratio}", self.layer, rows.page_rows, lanes)
        pieces = []
        for piece in keys.split(_KEYS_AT_ONCE, dim=1):
            matched = torch.bmm(heads, piece.transpose(1, 2)).relu_().view(-1, g.index_n_heads, piece.shape[1])
            pieces.append((matched * weights).sum(1))
        return lay.by_row(torch.cat(pieces, dim=-1).view(lanes, lay.width, -1))

    def _groups(self, rows: Rows, most: int, ids: Tensor | None = None, counted: Tensor | None = None) -> Selected:
        """See ``Groups``."""
        groups = Groups(
            store=rows.store,
            entries=rows.store.paged(f"compressed_r{self.ratio}", self.layer),
            slots=rows.lay.slots,
            complete=rows.complete[self.ratio],
            ratio=self.ratio,
            most=most,
            ids=ids,
            counted=counted,
        )
        return Selected(groups=groups)

    def _gather(self, ids: Tensor, counted: Tensor, rows: Rows) -> Selected:
        """ids: [P, k] int64 groups; counted: [P, k], False where there are fewer."""
        store, ratio = rows.store, self.ratio
        entries = store.entries(rows.lay.slots, ids * ratio, group=ratio, valid=counted)
        keys = store.paged(f"compressed_r{ratio}", self.layer).index_select(0, entries).view(*ids.shape, -1)
        # what is not counted may hold anything, even NaN, and NaN · 0 is NaN
        hidden = ~counted
        bias = rows.bias.new_zeros(ids.shape).masked_fill_(hidden, float("-inf")).unsqueeze(1)
        return Selected(keys=keys.masked_fill_(hidden.unsqueeze(-1), 0), bias=torch.cat([rows.bias, bias], dim=-1))


def candidate_rows(scores: Tensor, complete: Tensor, *, size: int, count: int) -> Tensor | None:
    """Rows of the best blocks of every query, [P, C] bool, or None if all blocks are.

    scores: [P, C], −∞ for rows that are not complete; complete: [P, 1]; a block is ``size`` rows and scores as its best row, the
    last one with a complete row above all others.
    """
    total = scores.shape[-1]
    blocks = -(-total // size)
    if blocks <= count:
        return None
    padded = F.pad(scores, (0, blocks * size - total), value=float("-inf"))
    best = padded.unflatten(-1, (blocks, size)).amax(-1)
    newest = torch.div(complete - 1, size, rounding_mode="floor").clamp(min=0)
    best = best.scatter(1, newest, float("inf"))
    kept = torch.sort(best, dim=-1, descending=True, stable=True).indices[:, :count]
    # a kept block without complete rows adds none: scores of such rows are hidden in every layer
    picked = torch.zeros_like(best, dtype=torch.bool).scatter(1, kept, True)
    return picked.unsqueeze(-1).expand(-1, -1, size).flatten(1)[:, :total]
