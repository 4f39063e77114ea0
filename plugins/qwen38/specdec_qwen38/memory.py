"""What a loaded Qwen3.8-Flash holds, as data: the tensors that ``target`` and ``drafter`` keep after loading. No torch here.

Projections that read one input are merged, norms are kept as 1 + w in the accumulate dtype, experts and the n-gram table stay in
their storage format; everything else has the activation dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from specdec.checkpoint.quantisation import quantises_activations
from specdec.checkpoint.storages import expert_form
from specdec.declaration import DTYPE_BYTES
from specdec.held import (
    ExpertForm,
    HeldTensor,
    Keeping,
    ModelMemory,
    row_steps,
    whole_pages,
)
from specdec.tensor_names import TEXT_PREFIX, TEXT_PREFIXES, canonical_name

from .geometry import REAL, Geometry
from .state import PAGE_TOKENS, drafter_layout, target_layout

if TYPE_CHECKING:
    from specdec.checkpoint.reader import Checkpoint
    from specdec.interfaces import Capacities

#: The experts of the published NVFP4 release: the target's with activation scales, the drafter's without.
_PUBLISHED = ExpertForm(storage="nvfp4", input_scale=True), ExpertForm(storage="nvfp4")


def declare(
    settings: Mapping[str, Any] | None, checkpoint: Checkpoint | None, capacities: Capacities, kernels: bool
) -> ModelMemory:
    """See ``Recipe.memory``. Raises CheckpointError if the configuration is not one of this architecture."""
    g = REAL if settings is None else Geometry.from_config(settings)
    dtype = capacities.dtype
    keep = Keeping(dtype=dtype, kernels=kernels)
    if checkpoint is not None:
        checkpoint = checkpoint.renamed(canonical_name)
    tokens = whole_pages(capacities, PAGE_TOKENS)
    return ModelMemory(
        vocab_size=g.vocab_size,
        target_layout=target_layout(g, max_draft_tokens=capacities.max_draft_tokens, dtype=dtype),
        drafter_layout=drafter_layout(g, max_draft_tokens=capacities.max_draft_tokens, dtype=dtype),
        target=(*_target(g, keep, checkpoint, tokens), row_steps(capacities)),
        drafter=(*_drafter(g, keep, checkpoint), row_steps(capacities)),
        # streams and their norms in float32, projections of a block; experts are read in place
        row_bytes=16 * g.streams_width + 8 * (2 * g.query_width + g.qkv_width + g.value_width),
        # every attention layer reads the pages of a lane's whole context
        lane_bytes=2 * tokens * 2 * g.kv_width * DTYPE_BYTES[dtype],
        context_limit=g.max_position_embeddings,
    )


def _target(g: Geometry, keep: Keeping, checkpoint: Checkpoint | None, tokens: int) -> Iterable[HeldTensor]:
    vocabulary = ("act", (g.vocab_size, g.hidden_size))
    rotations = ("act", (tokens, g.rotary_dim))
    yield from keep.tensors("", 1, {"embedding": vocabulary, "head": vocabulary})
    yield from keep.tensors("rope", 1, {"cos": rotations, "sin": rotations})
    yield from _mixers(g, keep, "final mixer", 1, injects=False)
    yield from _mixers(g, keep, "mixers", 2 * g.num_hidden_layers, injects=True)
    yield from _delta_net(g, keep, len(g.linear_layers))
    yield from _sparse_attention(g, keep, "attention", len(g.attention_layers))
    for ordinal in range(len(g.ple_layers)):
        yield from _ngram_embedding(g, keep, checkpoint, ordinal)
    form = None if checkpoint is None else expert_form(checkpoint, f"{TEXT_PREFIX}layers.0.mlp.experts")
    quantised = [_quantised(g, checkpoint, index) for index in range(g.num_hidden_layers)]
    for wanted in sorted(set(quantised)):
        yield from _experts(g, keep, "experts", quantised.count(wanted), form or _PUBLISHED[0], wanted)


def _drafter(g: Geometry, keep: Keeping, checkpoint: Checkpoint | None) -> Iterable[HeldTensor]:
    square = ("act", (g.hidden_size, g.hidden_size))
    shapes = {
        "token scale": ("precise", (g.hidden_size,)),
        "residual scale": ("precise", (g.streams_width,)),
        "token projection": square,
        "residual projection": square,
    }
    yield from keep.tensors("fusion", 1, shapes)
    yield from _mixers(g, keep, "final mixer", 1, injects=False)
    yield from _mixers(g, keep, "mixers", 2, injects=True)
    yield from _sparse_attention(g, keep, "attention", 1)
    form = None if checkpoint is None else expert_form(checkpoint, "mtp.layers.0.mlp.experts")
    yield from _experts(g, keep, "experts", 1, form or _PUBLISHED[1], quantised=False)


def _quantised(g: Geometry, checkpoint: Checkpoint | None, index: int) -> bool:
    """Whether the experts of a layer quantise what they read, where their scales are stored."""
    if checkpoint is None:
        return True
    aliases = dict.fromkeys(TEXT_PREFIXES, TEXT_PREFIX)
    return quantises_activations(checkpoint, f"{TEXT_PREFIX}layers.{index}.mlp.experts", aliases=aliases)


def _mixers(g: Geometry, keep: Keeping, name: str, count: int, *, injects: bool) -> list[HeldTensor]:
    rows = g.hc_lowrank + (g.hc_count if injects else 0)
    shapes = {
        "scale": ("precise", (g.hc_count, g.hidden_size)),
        "down": ("act", (rows, g.streams_width)),
        "up": ("act", (g.streams_width, g.hc_lowrank)),
    }
    return keep.tensors(name, count, shapes)


def _delta_net(g: Geometry, keep: Keeping, count: int) -> list[HeldTensor]:
    heads, hidden, values = g.linear_num_value_heads, g.hidden_size, g.value_width
    shapes = {
        "projection": ("act", (g.qkv_width + values + 2 * heads, hidden)),
        "taps": ("precise", (g.linear_conv_kernel_dim, g.qkv_width)),
        "rate": ("precise", (heads,)),
        "bias": ("precise", (heads,)),
        "norm": ("act", (g.linear_value_head_dim,)),
        "output": ("act", (hidden, values)),
    }
    return keep.tensors("delta net", count, shapes)


def _sparse_attention(g: Geometry, keep: Keeping, name: str, count: int) -> list[HeldTensor]:
    shapes = {
        "projection": ("act", (2 * g.query_width + 2 * g.kv_width + g.index_width, g.hidden_size)),
        "query and key scales": ("precise", (g.num_attention_heads + g.num_key_value_heads, g.head_dim)),
        "index query scale": ("precise", (g.indexer_head_dim,)),
        "index key scale": ("precise", (g.indexer_head_dim,)),
        "output": ("act", (g.hidden_size, g.query_width)),
    }
    return keep.tensors(name, count, shapes)


def _experts(g: Geometry, keep: Keeping, name: str, count: int, form: ExpertForm, quantised: bool) -> list[HeldTensor]:
    return keep.experts(
        name,
        count,
        form=form,
        experts=g.num_experts,
        hidden=g.hidden_size,
        inner=g.moe_intermediate_size,
        shared=g.shared_expert_intermediate_size,
        router="act",
        shared_gate=True,
        quantised_activations=quantised,
    )


def _ngram_embedding(g: Geometry, keep: Keeping, checkpoint: Checkpoint | None, ordinal: int) -> list[HeldTensor]:
    streams = ("precise", (g.hc_count, g.hidden_size))
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "multipliers": ("int64", (g.ngram_size,)),
        "primes": ("int64", (g.ngram_heads,)),
        "offsets": ("int64", (g.ngram_heads,)),
        "end of text": ("int64", ()),
        "projection": ("act", (g.streams_width + g.hidden_size, g.ple_embed_dim)),
        "key scale": streams,
        "query scale": streams,
        "convolution scale": streams,
        "taps": ("precise", (g.ple_conv_kernel_size, g.streams_width)),
    }
    stored = _stored_table(g, checkpoint, ordinal)
    shapes["table"] = (stored or "act", (g.ple_table_rows(ordinal), g.ngram_head_dim))
    if stored is not None:
        shapes["table scale"] = ("precise", (1,))
    return keep.tensors("n-grams", 1, shapes)


def _stored_table(g: Geometry, checkpoint: Checkpoint | None, ordinal: int) -> str | None:
    """Dtype of a table that stays as stored because it has a scale; None for one in the activation dtype."""
    if checkpoint is None:
        return "float8_e4m3fn"
    table = f"{TEXT_PREFIX}layers.{g.ple_layers[ordinal]}.ple.ple_embedding.ngram_embedding."
    names = [table + name for name in ("weight", "shard_0.weight") if table + name in checkpoint]
    if not names:
        return "float8_e4m3fn"
    return checkpoint.stored(names[0]).dtype if table + "weight_scale" in checkpoint else None
