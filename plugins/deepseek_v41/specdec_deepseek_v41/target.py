"""The DeepSeek-V4.1-Flash target: embedding, decoder layers on four streams, collapse, final norm, vocabulary head.

One row function serves prompts, decoding and verification, for whole blocks and for packed rows. Rows write their attention
rows, unpooled compressor inputs and token ids as window candidates, which commit shifts; compressed rows go straight to the
private pages, where nothing beyond the complete groups is read and a later row rewrites what a rejected one left. Feedback is
the mean of the streams that enter the tapped layers. Source: official inference code of the release.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from specdec.checkpoint.reader import Checkpoint
from specdec.checkpoint.weights import Weights
from specdec.declaration import Recipe
from specdec.interfaces import Capacities
from specdec.ops.moe import Mixture
from specdec.ops.norms import rms_norm
from specdec.round.allocation import PackedRows
from specdec.round.row_target import RowTarget

from .attention import Projections, attend_rows
from .compressor import Compressor
from .engram import Engram
from .engram_vocabulary import load_compressed_ids
from .geometry import Geometry
from .hyper_connection import HyperConnection, collapse, expand, first_read, load_site, open_streams
from .indexer import Indexer, Selected
from .mixture import load_mixture
from .rotary import RotaryTable
from .rows import Lay, Rows
from .state import target_layout

# Rows of a prompt that run at once: each holds a copy of the rows that it attends to.
SPAN = 256


@frozen(kw_only=True, eq=False)
class DecoderLayer:
    """One layer: what it has of Engram, compressor and indexer; attention and experts, each with a hyper-connection."""

    engram: Engram | None
    attention_mixer: HyperConnection
    attention_scale: Tensor  # [H], in the accumulate dtype
    attention: Projections
    compressed: bool
    compressor: Compressor | None
    indexer: Indexer | None
    forward_mixer: HyperConnection
    forward_scale: Tensor
    forward: Mixture

    @classmethod
    def load(cls, weights: Weights, geometry: Geometry, index: int, *, qdq: bool) -> DecoderLayer:
        """Reads layer ``index``. Raises CheckpointError for a missing or misshapen tensor."""
        g, attention = geometry, weights.under("attn.")
        return cls(
            engram=Engram.load(weights.under("engram."), g, index) if index in g.engram_layer_ids else None,
            attention_mixer=load_site(weights, g, "attn"),
            attention_scale=weights.precise_vector("attn_norm.weight", g.hidden_size),
            attention=Projections.load(attention, g, qdq=qdq),
            compressed=g.compress_ratios[index] > 0,
            compressor=Compressor.load(attention, g, index, qdq=qdq) if index in g.kv_source_layer_ids else None,
            indexer=Indexer.load(attention.under("indexer."), g, index, qdq=qdq)
            if index in g.index_source_layer_ids
            else None,
            forward_mixer=load_site(weights, g, "ffn"),
            forward_scale=weights.precise_vector("ffn_norm.weight", g.hidden_size),
            forward=load_mixture(weights.under("ffn."), g, experts=g.n_routed_experts, top_k=g.num_experts_per_tok),
        )


class DeepseekTarget(RowTarget):
    """Target weights and state. Build with ``build``; methods are the core's ``PackedTarget`` protocol.

    embedding: [V, H] in the activation dtype; head: [V, H] in the accumulate dtype; plain_table: rotations of layers without
    compressed rows.
    """

    feedback_field = "features"

    def __init__(
        self,
        checkpoint: Checkpoint,
        geometry: Geometry,
        capacities: Capacities,
        device: torch.device,
        *,
        qdq: bool = True,
    ) -> None:
        """qdq: whether caches round their rows; False only in tests."""
        g, dtype = geometry, getattr(torch, capacities.dtype)
        layout = target_layout(g, max_draft_tokens=capacities.max_draft_tokens, dtype=capacities.dtype)
        super().__init__(layout, capacities, device)
        weights = Weights(checkpoint, prefix="", dtype=dtype, device=device)
        self.geometry = g
        self.vocab_size = g.vocab_size
        self.device = device
        self.dtype = dtype
        self.embedding = weights.matrix("embed.weight", g.vocab_size, g.hidden_size)
        self.head = weights.precise_vector("head.weight", g.vocab_size, g.hidden_size)
        self.final_scale = weights.precise_vector("norm.weight", g.hidden_size)
        self.layers = [
            DecoderLayer.load(weights.under(f"layers.{index}."), g, index, qdq=qdq)
            for index in range(g.num_hidden_layers)
        ]
        self.plain_table, self.compressed_table = (
            RotaryTable.build(g, compressed=kind, positions=self.tokens, dtype=dtype, device=device)
            for kind in (False, True)
        )
        self._compressed_ids = load_compressed_ids(checkpoint, g).to(device)
        self._pad = self._compressed_ids[g.engram_pad_token_id]
        self._lags = torch.arange(g.engram_max_ngram_size, device=device)
        self._first_read = first_read(g, self.final_scale)
        self._ratios = tuple(sorted({g.compress_ratios[source] for source in g.kv_source_layer_ids}))

    @classmethod
    def build(
        cls, *, recipe: Recipe, checkpoint: Checkpoint, capacities: Capacities, device: torch.device
    ) -> DeepseekTarget:
        """Loads the target and allocates its state.

        Raises CheckpointError for a missing or misshapen tensor, unknown storage, or a configuration value that has no
        implementation.
        """
        return cls(checkpoint, Geometry.from_config(checkpoint.config), capacities, device)

    # --- RowTarget ---------------------------------------------------------------------------------------------------

    def run_rows(self, tokens: Tensor, slots: Tensor, positions: Tensor, *, prompt: bool) -> tuple[Tensor, Tensor]:
        """See ``RowTarget.run_rows``."""
        if not prompt:
            return self._run(tokens.reshape(-1), Lay.rectangle(slots, positions, prompt=False))
        spans = zip(tokens.split(SPAN, dim=1), positions.split(SPAN, dim=1), strict=True)
        found = [self._run(part[0], Lay.rectangle(slots, where, prompt=True)) for part, where in spans]
        features, vectors = zip(*found, strict=True)
        return torch.cat(features), torch.cat(vectors)

    def verify_rows(self, tokens: Tensor, rows: PackedRows) -> Tensor:
        """See ``PackedTarget.verify_rows``."""
        self._chunk = None
        cells = rows.lanes.count * rows.width
        lay = Lay(
            lanes=rows.lanes.slots,
            slots=rows.slots,
            index=rows.index,
            positions=rows.position,
            width=rows.width,
            # padding must not take the cell of a lane's row
            grid=torch.where(rows.live, rows.lane * rows.width + rows.index, cells),
            prompt=False,
        )
        features, vectors = self._run(tokens, lay)
        for name, values in ((self.feedback_field, features), (self.sampling_field, vectors)):
            columns = self.store[name][0].flatten(0, 1)
            columns.index_copy_(0, rows.slots * self.store.fields[name].extent + rows.index, values)
        return self._logits(vectors)

    # --- the model ---------------------------------------------------------------------------------------------------

    def _run(self, tokens: Tensor, lay: Lay) -> tuple[Tensor, Tensor]:
        """tokens: [P] → features [P, D] and inputs of the head [P, H]."""
        g = self.geometry
        rows = Rows.build(
            self.store,
            lay,
            ratios=self._ratios,
            tokens=self.tokens,
            plain=self.plain_table,
            compressed=self.compressed_table,
            like=self._first_read,
        )
        history = self._history(tokens, rows)
        streams, pre = open_streams(F.embedding(tokens, self.embedding), self._first_read)
        selected: Selected | None = None
        candidates: Tensor | None = None
        features = []
        for index, layer in enumerate(self.layers):
            if layer.engram is not None:
                streams = layer.engram(streams, history)
            if index in g.dspark_target_layer_ids:
                features.append(streams.mean(1))
            read, post, comb = layer.attention_mixer.mixes(streams)
            x = rms_norm(collapse(streams, pre), layer.attention_scale, g.rms_norm_eps)
            rotation = rows.compressed if layer.compressed else rows.plain
            q, qr, row = layer.attention.project(x, rotation)
            if layer.compressor is not None:
                layer.compressor(x, rows)
            if layer.indexer is not None:
                selected, candidates = layer.indexer(x, qr, rows, candidates)
            beside = selected if layer.compressed else None
            attended = attend_rows(q, row, rows, index, beside, layer.attention.sink)
            streams = expand(streams, layer.attention.write_back(attended, rotation), post, comb)
            pre, post, comb = layer.forward_mixer.mixes(streams)
            x = rms_norm(collapse(streams, read), layer.forward_scale, g.rms_norm_eps)
            streams = expand(streams, layer.forward(x), post, comb)
        h = rms_norm(collapse(streams, pre), self.final_scale, g.rms_norm_eps)
        return torch.cat(features, dim=-1), h

    def _history(self, tokens: Tensor, rows: Rows) -> Tensor:
        """Compressed ids of each row and the tokens before it, [P, n], newest first; the pad id before the first token."""
        buffer = rows.record("engram_ids", 0, self._compressed_ids.index_select(0, tokens))
        entries = rows.own["engram_ids"].unsqueeze(1) - self._lags
        ids = buffer.index_select(0, entries.reshape(-1)).view(entries.shape)
        return torch.where(ids < 0, self._pad, ids)
