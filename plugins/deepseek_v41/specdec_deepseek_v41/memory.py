"""What a loaded DeepSeek-V4.1-Flash holds, as data: the tensors that target and drafter keep after loading. No torch here.

Routed experts and n-gram tables stay in their storage format; other quantised weights are decoded to the activation dtype. Norms,
routers, hyper-connections, the vocabulary head and the pooling projections are kept in the accumulate dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from specdec.checkpoint.storages import expert_form, storage_of
from specdec.control.calibration import read_temperatures
from specdec.held import (
    ExpertForm,
    HeldTensor,
    Keeping,
    ModelMemory,
    row_steps,
    whole_pages,
)

from .geometry import REAL, Geometry
from .state import PAGE_TOKENS, drafter_layout, target_layout

if TYPE_CHECKING:
    from specdec.checkpoint.reader import Checkpoint
    from specdec.interfaces import Capacities

_PUBLISHED = ExpertForm(storage="mxfp4")
_BLOCK = 32

_Shapes = dict[str, tuple[str, tuple[int, ...]]]


def declare(
    settings: Mapping[str, Any] | None, checkpoint: Checkpoint | None, capacities: Capacities, kernels: bool
) -> ModelMemory:
    """See ``Recipe.memory``. Raises CheckpointError if the configuration is not one of this architecture."""
    g = REAL if settings is None else Geometry.from_config(settings)
    dtype = capacities.dtype
    keep = Keeping(dtype=dtype, kernels=kernels)
    return ModelMemory(
        vocab_size=g.vocab_size,
        target_layout=target_layout(g, max_draft_tokens=capacities.max_draft_tokens, dtype=dtype),
        drafter_layout=drafter_layout(g, max_draft_tokens=capacities.max_draft_tokens, dtype=dtype),
        target=(*_target(g, keep, checkpoint, whole_pages(capacities, PAGE_TOKENS)), row_steps(capacities)),
        drafter=tuple(_drafter(g, keep, checkpoint, capacities)),
        # streams and their norms in float32, queries, and the attention rows that each row copies; experts are read in place
        row_bytes=16 * g.streams_width + 12 * g.query_width + 8 * (g.sliding_window + g.index_topk) * g.head_dim,
        # an index source reads the keys of a lane's whole context
        lane_bytes=8 * whole_pages(capacities, PAGE_TOKENS) * g.index_head_dim,
        draft_constants=_calibration(checkpoint, capacities),
        context_limit=g.max_position_embeddings,
    )


def _calibration(checkpoint: Checkpoint | None, capacities: Capacities) -> int:
    """Bytes of a temperature where the checkpoint has a calibration for this block length, else 0."""
    if checkpoint is None or not capacities.draft_tokens:
        return 0
    temperatures = read_temperatures(checkpoint.directory, capacities.draft_tokens)
    return 4 if any(temperature != 1 for temperature in temperatures) else 0


def _target(g: Geometry, keep: Keeping, checkpoint: Checkpoint | None, tokens: int) -> Iterable[HeldTensor]:
    hidden, layers = g.hidden_size, g.num_hidden_layers
    turns = ("precise", (tokens, g.qk_rope_head_dim // 2, 2))
    shapes: _Shapes = {
        "embedding": ("act", (g.vocab_size, hidden)),
        "head": ("precise", (g.vocab_size, hidden)),
        "final scale": ("precise", (hidden,)),
        "plain rotations": turns,
        "compressed rotations": turns,
        "compressed ids": ("int64", (g.vocab_size,)),
        "n-gram lags": ("int64", (g.engram_max_ngram_size,)),
        "first read": ("precise", (g.hc_mult,)),
    }
    yield from keep.tensors("", 1, shapes)
    yield from _blocks(g, keep, "layers", layers)
    for ratio in (1, 2):
        yield from _compressors(g, keep, ratio)
    index: _Shapes = {
        "queries": ("act", (g.index_width, g.q_lora_rank)),
        "head weights": ("act", (g.index_n_heads, hidden)),
    }
    yield from keep.tensors("indexers", len(g.index_source_layer_ids), index)
    for layer, rows in zip(g.engram_layer_ids, g.engram_num_embeddings, strict=True):
        yield from _engram(g, keep, checkpoint, layer, rows)
    yield from _experts(g, keep, checkpoint, "layers.0.", layers, g.n_routed_experts)


def _drafter(g: Geometry, keep: Keeping, checkpoint: Checkpoint | None, capacities: Capacities) -> Iterable[HeldTensor]:
    hidden, rank = g.hidden_size, g.dspark_markov_rank
    shapes: _Shapes = {
        "projection": ("act", (hidden, g.feature_width)),
        "projection scale": ("precise", (hidden,)),
        "final scale": ("precise", (hidden,)),
        "token table": ("act", (g.vocab_size, rank)),
        "transition": ("precise", (g.vocab_size, rank)),
        "confidence": ("precise", (1, hidden + rank)),
        "first read": ("precise", (g.hc_mult,)),
        "noise tokens": ("int64", (1, max(capacities.draft_tokens - 1, 0))),
        "row numbers": ("int64", (max(capacities.max_draft_tokens + 1, g.sliding_window),)),
    }
    yield from keep.tensors("", 1, shapes)
    yield from _blocks(g, keep, "stages", g.num_stages)
    yield from _experts(g, keep, checkpoint, "mtp.0.", g.num_stages, g.dspark_n_routed_experts)


def _blocks(g: Geometry, keep: Keeping, name: str, count: int) -> Iterable[HeldTensor]:
    """What every layer and every stage has beside its experts."""
    yield from keep.sites(f"{name} mixers", 2 * count, streams=g.hc_mult, hidden=g.hidden_size)
    scale = ("precise", (g.hidden_size,))
    shapes: _Shapes = {
        "attention scale": scale,
        "forward scale": scale,
        "inputs": ("act", (g.q_lora_rank + g.head_dim, g.hidden_size)),
        "query scale": ("precise", (g.q_lora_rank,)),
        "row scale": ("precise", (g.head_dim,)),
        "queries": ("act", (g.query_width, g.q_lora_rank)),
        "groups": ("act", (g.o_groups, g.group_width, g.o_lora_rank)),
        "output": ("act", (g.hidden_size, g.output_width)),
        "sink": ("precise", (g.num_attention_heads,)),
    }
    yield from keep.tensors(name, count, shapes)


def _compressors(g: Geometry, keep: Keeping, ratio: int) -> list[HeldTensor]:
    shapes: _Shapes = {
        "inputs": ("act" if ratio == 1 else "precise", (ratio * g.head_dim, g.hidden_size)),
        "scale": ("precise", (g.head_dim,)),
        "keys": ("act", (g.index_head_dim, g.head_dim)),
        "key scale": ("precise", (g.index_head_dim,)),
    }
    return keep.tensors(f"compressors of {ratio}", len(g.sources_of_ratio(ratio)), shapes)


def _engram(g: Geometry, keep: Keeping, checkpoint: Checkpoint | None, layer: int, rows: int) -> list[HeldTensor]:
    shapes: _Shapes = {
        "multipliers": ("int64", (g.engram_max_ngram_size,)),
        "sizes": ("int64", (g.engram_rows,)),
        "starts": ("int64", (g.engram_rows,)),
        "projection": ("act", ((g.hc_mult + 1) * g.hidden_size, g.engram_width)),
        "gate": ("precise", (g.hc_mult, g.hidden_size)),
    }
    table = f"layers.{layer}.engram.embed.weight"
    if checkpoint is not None and table in checkpoint and storage_of(checkpoint, table) == "plain":
        shapes["table"] = ("act", (rows, g.engram_head_dim))
    else:
        shapes["table"] = ("uint8", (rows, g.engram_head_dim))
        shapes["table scales"] = ("uint8", (rows, g.engram_head_dim // _BLOCK))
    return keep.tensors(f"n-grams of layer {layer}", 1, shapes)


def _experts(
    g: Geometry, keep: Keeping, checkpoint: Checkpoint | None, first: str, count: int, experts: int
) -> list[HeldTensor]:
    """first: prefix of the first of the ``count`` blocks, whose storage speaks for all."""
    form = None if checkpoint is None else expert_form(checkpoint, f"{first}ffn.experts")
    return keep.experts(
        f"{'stages' if first.startswith('mtp') else 'layers'} experts",
        count,
        form=form or _PUBLISHED,
        experts=experts,
        hidden=g.hidden_size,
        inner=g.moe_intermediate_size,
        shared=g.moe_intermediate_size * g.n_shared_experts,
        router="precise",
        router_bias=True,
    )
