"""Per-layer hashed n-gram embedding (PLE): hash of the last tokens, table rows, gate, dilated convolution.

Source: the ``qwen4_exp`` class of transformers 5.24; hash constants in ``ngram_hash``. History is committed tokens only: a
candidate token reaches the rows at and after it, never an earlier one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from specdec.errors import CheckpointError
from specdec.ops.norms import rms_norm
from specdec.ops.short_conv import silu_conv
from specdec.state.store import StateStore

from .geometry import Geometry
from .weights import Weights

# Under the root of the gate; keeps its slope finite at zero. The constant of the reference class.
GATE_FLOOR = 1e-6


@frozen(kw_only=True, eq=False)
class NgramTable:
    """The hashed table. rows: [table, head_dim] in its stored dtype; scale: one value in the accumulate dtype, or None."""

    rows: Tensor
    scale: Tensor | None
    multipliers: Tensor
    primes: Tensor
    offsets: Tensor
    end_of_text: Tensor
    orders: int
    heads: int

    @classmethod
    def load(cls, weights: Weights, ordinal: int) -> NgramTable:
        """Reads the table (one tensor or shards) and checks the stored hash constants against the formula.

        Raises CheckpointError if a stored constant differs or the table has another size.
        """
        g = weights.geometry
        constants = {
            "layer_multipliers": g.ple_multipliers(ordinal),
            "ngram_heads_vocab_sizes": g.ple_primes(ordinal),
            "ngram_heads_offsets": g.ple_offsets(ordinal),
        }
        vectors = {}
        for name, expected in constants.items():
            vectors[name] = torch.tensor(expected, dtype=torch.int64, device=weights.device)
            if weights.has(name) and not torch.equal(weights.stored(name), vectors[name]):
                raise CheckpointError(
                    f"{weights.checkpoint.directory}: {weights.prefix}{name} differs from the hash formula for seed {g.seed}, "
                    f"which gives {list(expected)}"
                )
        if weights.has("ngram_embedding.weight"):
            rows = weights.stored("ngram_embedding.weight")
        else:
            shape = (g.ple_table_rows(ordinal) // g.split_ngram_parts, g.ngram_head_dim)
            parts = []
            for i in range(g.split_ngram_parts):
                part = weights.stored(f"ngram_embedding.shard_{i}.weight")
                if tuple(part.shape) != shape:
                    raise CheckpointError(
                        f"{weights.checkpoint.directory}: tensor {weights.prefix}ngram_embedding.shard_{i}.weight has shape "
                        f"{list(part.shape)}, the configuration needs {list(shape)}"
                    )
                parts.append(part)
            rows = torch.cat(parts)
        expected_shape = (g.ple_table_rows(ordinal), g.ngram_head_dim)
        if tuple(rows.shape) != expected_shape:
            raise CheckpointError(
                f"{weights.checkpoint.directory}: {weights.prefix}ngram_embedding has shape {list(rows.shape)}, the "
                f"configuration needs {list(expected_shape)}"
            )
        scale = None
        if weights.has("ngram_embedding.weight_scale"):
            scale = weights.precise_vector("ngram_embedding.weight_scale", 1)
        elif rows.dtype is torch.float8_e4m3fn:
            raise CheckpointError(
                f"{weights.checkpoint.directory}: {weights.prefix}ngram_embedding is float8 without a weight_scale"
            )
        elif rows.dtype is not weights.dtype:
            rows = rows.to(weights.dtype)
        return cls(
            rows=rows,
            scale=scale,
            multipliers=vectors["layer_multipliers"],
            primes=vectors["ngram_heads_vocab_sizes"],
            offsets=vectors["ngram_heads_offsets"],
            end_of_text=torch.tensor(g.eos_token_id, dtype=torch.int64, device=weights.device),
            orders=g.ngram_size,
            heads=g.heads_per_ngram,
        )

    def row_ids(self, tokens: Tensor) -> Tensor:
        """Table rows of every position but the carried ones.

        tokens: [B, n − 1 + T] int64, the carried history followed by T new tokens. Returns [B, T, heads] int64. An end-of-text
        token hides everything before it from later positions, though not from its own.
        """
        carried = self.orders - 1
        count = tokens.shape[1] - carried
        mixed = tokens[:, carried:] * self.multipliers[0]
        hidden = None
        mixes = []
        for lag in range(1, self.orders):
            earlier = tokens[:, carried - lag : carried - lag + count]
            if hidden is not None:
                earlier = torch.where(hidden, self.end_of_text, earlier)
            hidden = earlier == self.end_of_text
            mixed = mixed ^ (earlier * self.multipliers[lag])
            mixes.append(mixed.unsqueeze(-1).expand(-1, -1, self.heads))
        return torch.cat(mixes, dim=-1) % self.primes + self.offsets

    def embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Concatenated rows. ids: [B, T, heads] → [B·T, heads · head_dim] in ``dtype``."""
        flat = ids.reshape(-1)
        if self.rows.dtype is torch.float8_e4m3fn:
            # indexing has no float8 kernel everywhere; the bytes are gathered and reinterpreted
            rows = self.rows.view(torch.uint8).index_select(0, flat).view(torch.float8_e4m3fn)
        else:
            rows = self.rows.index_select(0, flat)
        if self.scale is not None:
            rows = rows.to(self.scale.dtype) * self.scale
        return rows.to(dtype).view(ids.shape[0] * ids.shape[1], -1)


@frozen(kw_only=True, eq=False)
class NgramEmbedding:
    """One PLE layer. projection: [D + H, embed], key rows then value rows; scales [S, H]; taps [kernel, D]."""

    table: NgramTable
    projection: Tensor
    key_scale: Tensor
    query_scale: Tensor
    conv_scale: Tensor
    taps: Tensor
    geometry: Geometry

    @classmethod
    def load(cls, weights: Weights, ordinal: int) -> NgramEmbedding:
        g = weights.geometry
        wide, hidden, streams = g.streams_width, g.hidden_size, (g.hc_count, g.hidden_size)
        taps = weights.precise_vector("conv1d.weight", wide, 1, g.ple_conv_kernel_size)
        return cls(
            table=NgramTable.load(weights.under("ple_embedding."), ordinal),
            projection=torch.cat(
                [
                    weights.matrix("key_proj.weight", wide, g.ple_embed_dim),
                    weights.matrix("value_proj.weight", hidden, g.ple_embed_dim),
                ]
            ),
            key_scale=weights.norm_scale("norm_key.weight", wide).view(streams),
            query_scale=weights.norm_scale("norm_query.weight", wide).view(streams),
            conv_scale=weights.norm_scale("norm_conv.weight", wide).view(streams),
            taps=taps[:, 0].t().contiguous(),
            geometry=g,
        )

    def __call__(
        self, streams: Tensor, tokens: Tensor, store: StateStore, layer: int, slots: Tensor, *, prompt: bool
    ) -> Tensor:
        """Amount added to the residual. streams: [B·T, S, H]; tokens: [B, T] int64. Returns [B·T, S, H]."""
        g = self.geometry
        batch, rows = tokens.shape
        extended = torch.cat([store.read_window("ngram_tokens", 0, slots), tokens], dim=1)
        embedded = self.table.embed(self.table.row_ids(extended), streams.dtype)
        key, value = F.linear(embedded, self.projection).split([g.streams_width, g.hidden_size], dim=-1)
        key = rms_norm(key.view_as(streams), self.key_scale, g.rms_norm_eps)
        query = rms_norm(streams, self.query_scale, g.rms_norm_eps)
        similarity = (key * query).sum(-1, keepdim=True) / g.hidden_size**0.5
        gate = torch.sigmoid(similarity.sign() * similarity.abs().clamp(min=GATE_FLOOR).sqrt())
        injected = gate * value.unsqueeze(1)
        normed = rms_norm(injected, self.conv_scale, g.rms_norm_eps).view(batch, rows, -1)
        history = torch.cat([store.read_window("ngram_conv", layer, slots), normed], dim=1)
        if prompt:
            store.write_window("ngram_conv", layer, slots, history[:, rows:])
        else:
            store.write_candidates("ngram_conv", layer, slots, normed)
        convolved = silu_conv(history, self.taps, rows, dilation=g.ngram_size, rounds_first=True)
        return injected + convolved.view_as(streams)
