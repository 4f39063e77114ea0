"""Every tensor a Qwen3.8-Flash checkpoint stores: names, shapes and dtypes, as groups.

Releases differ in how they store experts and n-gram table (``EXPERT_STORAGES``, ``TABLE_STORAGES``); :func:`inventories`
declares what a checkpoint at hand has. Any other weight is declared in BF16, which stands for every format that loading
reads. The names are those of the official releases: ``model.language_model.`` and ``lm_head.`` for the target, ``mtp.`` for the
drafter. Groups follow the sizes of a :class:`~specdec_qwen38.geometry.Geometry`, so the same functions describe the
published model and the small ones. Building an inventory expands nothing and imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specdec.declaration import TensorGroup, TensorInventory
from specdec.errors import DeclarationError
from specdec.tensor_names import TEXT_PREFIX

from .geometry import Geometry

if TYPE_CHECKING:
    from specdec.checkpoint.reader import Checkpoint

_MTP_EXPERTS = "mtp.layers.0.mlp.experts."
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# A public header-only audit of the NVFP4 release lists these names and dtypes; its dense total (1,067 tensors,
# 9,895,397,120 bytes at the published sizes) only fits BF16 throughout, A_log and dt_bias included.
_AUDIT = "header audit of the published NVFP4 release"
_ORIGINAL = "layout of the published BF16 release"
_BY_EXPERT = "layout of the published NVFP4 release, unquantised; its own MTP experts have it in FP8 blocks of 128"
_JOINED = "state of the transformers class, which joins the shards"
# The published MTP total, 4,637 tensors and 1,596,720,640 bytes, is met exactly by unfused NVFP4 experts without input_scale.
_MTP = "published MTP totals: 4,637 tensors, 1,596,720,640 bytes"
_NVFP4_BLOCK = 16
#: How routed experts may be stored: NVFP4 by expert, with or without the activation scale ``input_scale``; one weight by
#: expert and projection; all experts of a layer in two tensors.
EXPERT_STORAGES = ("nvfp4", "nvfp4_weights", "bfloat16", "bfloat16_fused")
#: How the n-gram table may be stored: FP8 with one scale or BF16, in shards or as one tensor.
TABLE_STORAGES = ("float8", "bfloat16", "float8_whole", "bfloat16_whole")
_HASH_CONSTANTS = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")


def target_inventory(
    geometry: Geometry, experts: str = "nvfp4", ple: str = "float8", *, hash_constants: bool = True
) -> TensorInventory:
    """Return the tensors of the target, without vision tower and drafter.

    ``experts``: one of ``EXPERT_STORAGES``. ``ple``: storage of the n-gram table, one of ``TABLE_STORAGES``.
    ``hash_constants``: whether the integer vectors of the n-gram hash are stored; they follow from the configuration.
    Defaults are the published NVFP4 release.

    Raises:
        DeclarationError: if a storage name is unknown, or NVFP4 is asked for with widths that are no multiple of 16.
    """
    _check_storage("target_inventory", "experts", experts, EXPERT_STORAGES)
    _check_storage("target_inventory", "ple", ple, TABLE_STORAGES)
    every = (("l", geometry.num_hidden_layers),)
    linear = (("l", geometry.linear_layers),)
    attention = (("l", geometry.attention_layers),)
    layer = TEXT_PREFIX + "layers.{l}."
    vocabulary = (geometry.vocab_size, geometry.hidden_size)
    groups = [_group(TEXT_PREFIX + "embed_tokens.weight", vocabulary), _group("lm_head.weight", vocabulary)]
    groups += _hyper_connection(geometry, TEXT_PREFIX + "hyper_connection_mixer.", inject=False)
    groups += _decoder_layer(geometry, layer, every)
    if geometry.linear_layers:
        groups += _gated_delta_net(geometry, layer + "linear_attn.", linear)
    if geometry.attention_layers:
        groups += _sparse_attention(geometry, layer + "self_attn.", attention)
    for ordinal, index in enumerate(geometry.ple_layers):
        groups += _ngram_embedding(geometry, f"{TEXT_PREFIX}layers.{index}.ple.", ordinal, ple, hash_constants)
    groups += _experts(geometry, layer + "mlp.experts.", every, experts, _AUDIT)
    return TensorInventory(groups=tuple(groups))


def mtp_inventory(geometry: Geometry, experts: str = "nvfp4_weights") -> TensorInventory:
    """Return the tensors of the MTP drafter: 29 BF16 tensors and nine for each expert (NVFP4, W4A16: no ``input_scale``).

    ``experts``: one of ``EXPERT_STORAGES``. Empty if the geometry has no MTP layer.

    Raises:
        DeclarationError: if the storage name is unknown, or NVFP4 is asked for with a width that is no multiple of 16.
    """
    _check_storage("mtp_inventory", "experts", experts, EXPERT_STORAGES)
    if not geometry.mtp_num_hidden_layers:
        return TensorInventory(groups=())
    hidden, streams = geometry.hidden_size, geometry.streams_width
    groups = [
        _group("mtp.pre_fc_norm_embedding.weight", (hidden,), source=_MTP),
        _group("mtp.pre_fc_norm_hidden.weight", (streams,), source=_MTP),
        _group("mtp.fc_embedding.weight", (hidden, hidden), source=_MTP),
        _group("mtp.fc_hidden.weight", (hidden, hidden), source=_MTP),
    ]
    groups += _hyper_connection(geometry, "mtp.hyper_connection_mixer.", inject=False, source=_MTP)
    groups += _decoder_layer(geometry, "mtp.layers.0.", (), source=_MTP)
    groups += _sparse_attention(geometry, "mtp.layers.0.self_attn.", (), source=_MTP)
    groups += _experts(geometry, _MTP_EXPERTS, (), experts, _MTP)
    return TensorInventory(groups=tuple(groups))


def inventories(
    config: Mapping[str, Any], checkpoint: Checkpoint | None = None
) -> tuple[TensorInventory, TensorInventory]:
    """Return the (target, drafter) inventories of a checkpoint of any size, from the contents of its ``config.json``.

    ``checkpoint``, with canonical names, decides how experts and table are declared: as its first layer stores them. Without
    one, and for what it does not store, the published NVFP4 releases decide. Reads headers only.

    Raises:
        CheckpointError: if the configuration is not one of this architecture.
    """
    geometry = Geometry.from_config(config)
    if checkpoint is None:
        return target_inventory(geometry), mtp_inventory(geometry)
    first = next((f"{TEXT_PREFIX}layers.{index}.ple.ple_embedding." for index in geometry.ple_layers), "")
    table = _stored_table(checkpoint, first + "ngram_embedding.")
    target = target_inventory(
        geometry,
        experts=_stored_experts(checkpoint, f"{TEXT_PREFIX}layers.0.mlp.experts.", "nvfp4"),
        ple=table or "float8",
        hash_constants=table is None or any(first + name in checkpoint for name in _HASH_CONSTANTS),
    )
    return target, mtp_inventory(geometry, _stored_experts(checkpoint, _MTP_EXPERTS, "nvfp4_weights"))


def _stored_experts(checkpoint: Checkpoint, prefix: str, otherwise: str) -> str:
    """Which of ``EXPERT_STORAGES`` the experts under ``prefix`` have."""
    if prefix + "gate_up_proj" in checkpoint:
        return "bfloat16_fused"
    first = f"{prefix}0.{_PROJECTIONS[0]}."
    if first + "weight" not in checkpoint:
        return otherwise
    if checkpoint.stored(first + "weight").dtype != "uint8":
        return "bfloat16"
    return "nvfp4" if first + "input_scale" in checkpoint else "nvfp4_weights"


def _stored_table(checkpoint: Checkpoint, prefix: str) -> str | None:
    """Which of ``TABLE_STORAGES`` the n-gram table under ``prefix`` has; None if there is none."""
    whole, shard = prefix + "weight", prefix + "shard_0.weight"
    found = next((name for name in (whole, shard) if name in checkpoint), None)
    if found is None:
        return None
    dtype = "float8" if checkpoint.stored(found).dtype == "float8_e4m3fn" else "bfloat16"
    return f"{dtype}_whole" if found == whole else dtype


def _check_storage(function: str, argument: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise DeclarationError(f"{function}: {argument} is {value!r}, allowed: {', '.join(map(repr, allowed))}")


_Axes = Sequence[tuple[str, int | tuple[int, ...]]]


def _group(
    name: str, shape: Sequence[int], axes: _Axes = (), dtype: str = "bfloat16", source: str = _AUDIT
) -> TensorGroup:
    return TensorGroup(name=name, shape=tuple(shape), axes=tuple(axes), dtype=dtype, source=source)


def _hyper_connection(
    geometry: Geometry, prefix: str, axes: _Axes = (), *, inject: bool, source: str = _AUDIT
) -> list[TensorGroup]:
    streams, rank = geometry.streams_width, geometry.hc_lowrank
    groups = [
        _group(prefix + "hc_norm.weight", (streams,), axes, source=source),
        _group(prefix + "input_mix_weight_down.weight", (rank, streams), axes, source=source),
        _group(prefix + "input_mix_weight_up.weight", (streams, rank), axes, source=source),
    ]
    if inject:  # the final mixers only read the streams
        groups.append(_group(prefix + "block_inject_weight.weight", (geometry.hc_count, streams), axes, source=source))
    return groups


def _decoder_layer(geometry: Geometry, prefix: str, axes: _Axes, source: str = _AUDIT) -> list[TensorGroup]:
    """What every decoder layer has: two hyper-connections, the router and the shared expert."""
    hidden, inner = geometry.hidden_size, geometry.shared_expert_intermediate_size
    groups = _hyper_connection(geometry, prefix + "attn_hyper_connection.", axes, inject=True, source=source)
    groups += _hyper_connection(geometry, prefix + "mlp_hyper_connection.", axes, inject=True, source=source)
    shapes = {
        "gate": (geometry.num_experts, hidden),
        "shared_expert.gate_proj": (inner, hidden),
        "shared_expert.up_proj": (inner, hidden),
        "shared_expert.down_proj": (hidden, inner),
        "shared_expert_gate": (1, hidden),
    }
    return groups + [_group(f"{prefix}mlp.{name}.weight", shape, axes, source=source) for name, shape in shapes.items()]


def _gated_delta_net(geometry: Geometry, prefix: str, axes: _Axes) -> list[TensorGroup]:
    hidden, heads, values = geometry.hidden_size, geometry.linear_num_value_heads, geometry.value_width
    shapes = {
        "in_proj_qkv.weight": (geometry.qkv_width, hidden),
        "in_proj_z.weight": (values, hidden),
        "in_proj_b.weight": (heads, hidden),
        "in_proj_a.weight": (heads, hidden),
        "conv1d.weight": (geometry.qkv_width, 1, geometry.linear_conv_kernel_dim),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (geometry.linear_value_head_dim,),
        "out_proj.weight": (hidden, values),
    }
    return [_group(prefix + name, shape, axes) for name, shape in shapes.items()]


def _sparse_attention(geometry: Geometry, prefix: str, axes: _Axes, source: str = _AUDIT) -> list[TensorGroup]:
    hidden, query, kv = geometry.hidden_size, geometry.query_width, geometry.kv_width
    shapes = {
        "q_proj": (2 * query, hidden),  # each head's query, then its output gate
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, query),
        "q_norm": (geometry.head_dim,),
        "k_norm": (geometry.head_dim,),
        "indexer.index_qk_proj": (geometry.index_width, hidden),
        "indexer.q_layernorm": (geometry.indexer_head_dim,),
        "indexer.k_layernorm": (geometry.indexer_head_dim,),
    }
    return [_group(f"{prefix}{name}.weight", shape, axes, source=source) for name, shape in shapes.items()]


def _ngram_embedding(
    geometry: Geometry, prefix: str, ordinal: int, storage: str, hash_constants: bool
) -> list[TensorGroup]:
    streams, width = geometry.streams_width, geometry.ple_embed_dim
    dense = {
        "key_proj.weight": (streams, width),
        "value_proj.weight": (geometry.hidden_size, width),
        "norm_key.weight": (streams,),
        "norm_query.weight": (streams,),
        "norm_conv.weight": (streams,),
        "conv1d.weight": (streams, 1, geometry.ple_conv_kernel_size),
    }
    lengths = dict(zip(_HASH_CONSTANTS, (geometry.ngram_size, geometry.ngram_heads, geometry.ngram_heads), strict=True))
    table = prefix + "ple_embedding.ngram_embedding."
    rows, columns = geometry.ple_table_rows(ordinal), geometry.ngram_head_dim
    source, dtype = (_ORIGINAL, "bfloat16") if storage.startswith("bfloat16") else (_AUDIT, "float8_e4m3fn")
    groups = [_group(prefix + name, shape) for name, shape in dense.items()]
    if hash_constants:
        groups += [_group(f"{prefix}ple_embedding.{name}", (n,), dtype="int64") for name, n in lengths.items()]
    if storage.endswith("_whole"):
        groups.append(_group(table + "weight", (rows, columns), dtype=dtype, source=_JOINED))
    else:
        parts = geometry.split_ngram_parts
        axes = (("s", parts),)
        groups.append(_group(table + "shard_{s}.weight", (rows // parts, columns), axes, dtype=dtype, source=source))
    if dtype == "float8_e4m3fn":
        groups.append(_group(table + "weight_scale", (1,)))
    return groups


def _experts(geometry: Geometry, prefix: str, axes: _Axes, storage: str, source: str) -> list[TensorGroup]:
    count, hidden, inner = geometry.num_experts, geometry.hidden_size, geometry.moe_intermediate_size
    if storage == "bfloat16_fused":
        stacked = ("gate_up_proj", (count, 2 * inner, hidden)), ("down_proj", (count, hidden, inner))
        return [_group(prefix + name, shape, axes, source=_ORIGINAL) for name, shape in stacked]
    axes = (*axes, ("e", count))
    shapes = {name: (hidden, inner) if name == "down_proj" else (inner, hidden) for name in _PROJECTIONS}
    if storage == "bfloat16":
        return [
            _group(f"{prefix}{{e}}.{name}.weight", shape, axes, source=_BY_EXPERT) for name, shape in shapes.items()
        ]
    if hidden % _NVFP4_BLOCK or inner % _NVFP4_BLOCK:
        raise DeclarationError(
            f"NVFP4 experts need hidden_size and moe_intermediate_size in multiples of {_NVFP4_BLOCK}, got {hidden}, {inner}"
        )
    groups: list[TensorGroup] = []
    for name, (rows, columns) in shapes.items():
        one = f"{prefix}{{e}}.{name}."
        groups += [
            _group(one + "weight", (rows, columns // 2), axes, "uint8", source),
            _group(one + "weight_scale", (rows, columns // _NVFP4_BLOCK), axes, "float8_e4m3fn", source),
            _group(one + "weight_scale_2", (), axes, "float32", source),
        ]
        if storage == "nvfp4":
            groups.append(_group(one + "input_scale", (), axes, "float32", source))
    return groups
