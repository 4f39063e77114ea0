"""What a loaded GLM-5.3-Flash holds, as data: the tensors that ``target`` and ``drafter`` keep after loading. No torch here.

Projections that read one input are merged; norms, routers and hyper-connections are kept in the accumulate dtype; experts stay in
their storage format, coded scales decoded; everything else has the activation dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from specdec.checkpoint.quantisation import quantises_activations
from specdec.checkpoint.storages import expert_form
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

#: The experts of the recipe's checkpoint: the target's with activation scales, the drafter's without.
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
    drafts = bool(g.num_nextn_predict_layers)
    return ModelMemory(
        vocab_size=g.vocab_size,
        target_layout=target_layout(g, max_draft_tokens=capacities.max_draft_tokens, dtype=dtype),
        drafter_layout=drafter_layout(g, max_draft_tokens=capacities.max_draft_tokens, dtype=dtype),
        target=(*_target(g, keep, checkpoint), row_steps(capacities)),
        drafter=(*_drafter(g, keep, checkpoint), row_steps(capacities)) if drafts else (),
        # streams and their norms in float32, and queries as latents; experts are read in place
        row_bytes=16 * g.streams_width + 8 * g.num_attention_heads * g.kv_lora_rank + 16 * g.linear_width,
        # every indexed layer reads the latents of a lane's whole context
        lane_bytes=8 * whole_pages(capacities, PAGE_TOKENS) * g.kv_lora_rank,
        context_limit=g.max_position_embeddings,
    )


def _target(g: Geometry, keep: Keeping, checkpoint: Checkpoint | None) -> Iterable[HeldTensor]:
    hidden, layers = g.hidden_size, g.num_hidden_layers
    vocabulary, scale = ("act", (g.vocab_size, hidden)), ("precise", (hidden,))
    yield from keep.tensors("", 1, {"embedding": vocabulary, "head": vocabulary, "final scale": scale})
    yield from keep.sites("mixers", 2 * layers, streams=g.hc_mult, hidden=hidden)
    yield from keep.tensors("layers", layers, {"attention scale": scale, "forward scale": scale})
    yield from _delta_attention(g, keep, len(g.linear_layers))
    yield from _indexed_attention(g, keep, "attention", len(g.indexed_layers))
    inner = g.intermediate_size
    dense = {"gate_up": ("act", (2 * inner, hidden)), "down": ("act", (hidden, inner))}
    yield from keep.tensors("dense blocks", len(g.dense_layers), dense)
    form = None
    if checkpoint is not None and g.sparse_layers:
        form = expert_form(checkpoint, f"{TEXT_PREFIX}layers.{g.sparse_layers[0]}.mlp.experts")
    quantised = [_quantised(checkpoint, index) for index in g.sparse_layers]
    for wanted in sorted(set(quantised)):
        yield from _experts(g, keep, quantised.count(wanted), form or _PUBLISHED[0], wanted)


def _drafter(g: Geometry, keep: Keeping, checkpoint: Checkpoint | None) -> Iterable[HeldTensor]:
    hidden = g.hidden_size
    names = ("token scale", "hidden scale", "attention scale", "forward scale", "final scale")
    yield from keep.tensors("", 1, dict.fromkeys(names, ("precise", (hidden,))))
    yield from keep.tensors("", 1, {"fusion": ("act", (hidden, 2 * hidden))})
    yield from _indexed_attention(g, keep, "attention", 1)
    form = None
    if checkpoint is not None:
        form = expert_form(checkpoint, f"{TEXT_PREFIX}layers.{g.mtp_layer}.mlp.experts")
    yield from _experts(g, keep, 1, form or _PUBLISHED[1], quantised=False)


def _quantised(checkpoint: Checkpoint | None, index: int) -> bool:
    """Whether the experts of a layer quantise what they read, where their scales are stored."""
    if checkpoint is None:
        return True
    aliases = dict.fromkeys(TEXT_PREFIXES, TEXT_PREFIX)
    return quantises_activations(checkpoint, f"{TEXT_PREFIX}layers.{index}.mlp.experts", aliases=aliases)


def _delta_attention(g: Geometry, keep: Keeping, count: int) -> list[HeldTensor]:
    width, dim, heads = g.linear_width, g.linear_head_dim, g.linear_num_heads
    shapes = {
        "projection": ("act", (3 * width + 2 * dim + heads, g.hidden_size)),
        "forget_up": ("act", (width, dim)),
        "gate_up": ("act", (width, dim)),
        "taps": ("precise", (g.linear_conv_kernel_dim, 3 * width)),
        "rate": ("precise", (heads, 1)),
        "shift": ("precise", (heads, dim)),
        "norm": ("precise", (dim,)),
        "output": ("act", (g.hidden_size, width)),
    }
    return keep.tensors("delta attention", count, shapes)


def _indexed_attention(g: Geometry, keep: Keeping, name: str, count: int) -> list[HeldTensor]:
    hidden, heads, rank, dim = g.hidden_size, g.num_attention_heads, g.kv_lora_rank, g.index_head_dim
    shapes = {
        "projection": ("act", (g.q_lora_rank + rank + 2 * dim, hidden)),
        "query scale": ("precise", (g.q_lora_rank,)),
        "queries": ("act", (g.query_width + g.index_width, g.q_lora_rank)),
        "latent scale": ("precise", (rank,)),
        "keys": ("act", (heads, g.qk_nope_head_dim, rank)),
        "values": ("act", (heads, rank, g.v_head_dim)),
        "output": ("act", (hidden, g.value_width)),
        "index key scale": ("precise", (dim,)),
        "index key shift": ("precise", (dim,)),
        "positions": ("precise", (dim, g.index_kpool)),
        "head weights": ("precise", (g.index_n_heads, hidden)),
    }
    return keep.tensors(name, count, shapes)


def _experts(g: Geometry, keep: Keeping, count: int, form: ExpertForm, quantised: bool) -> list[HeldTensor]:
    return keep.experts(
        "experts",
        count,
        form=form,
        experts=g.n_routed_experts,
        hidden=g.hidden_size,
        inner=g.moe_intermediate_size,
        shared=g.moe_intermediate_size * g.n_shared_experts,
        router="precise",
        router_bias=True,
        quantised_activations=quantised,
    )
