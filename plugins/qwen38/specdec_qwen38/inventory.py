"""Every tensor a Qwen3.8-Flash checkpoint stores: names, shapes and dtypes, as groups.

The names are those of the official releases: ``model.language_model.`` and ``lm_head.`` for the target, ``mtp.`` for the
drafter. Groups follow the sizes of a :class:`~specdec_qwen38.geometry.Geometry`, so the same functions describe the
published model and the small ones. Building an inventory expands nothing and imports no torch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.declaration import TensorGroup, TensorInventory
from specdec.errors import DeclarationError

from .geometry import Geometry

_TARGET = "model.language_model."
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# A public header-only audit of the NVFP4 release lists these names and dtypes; its dense total (1,067 tensors,
# 9,895,397,120 bytes at the published sizes) only fits BF16 throughout, A_log and dt_bias included.
_AUDIT = "header audit of the published NVFP4 release"
_ORIGINAL = "layout of the published BF16 release"
# The published MTP total, 4,637 tensors and 1,596,720,640 bytes, is met exactly by unfused NVFP4 experts without input_scale.
_MTP = "published MTP totals: 4,637 tensors, 1,596,720,640 bytes"
_NVFP4_BLOCK = 16
# Older exports wrap the text model in other names; the tensors are the same.
_PREFIXES = (_TARGET, "language_model.model.", "model.")


def canonical_name(name: str) -> str:
    """Return the official name of a stored tensor: exports with other prefixes for the text model are accepted.

    ``language_model.model.X`` and ``model.X`` become ``model.language_model.X``; ``language_model.lm_head.X`` becomes
    ``lm_head.X``. Names of the drafter (``mtp.``) and of the vision tower (``model.visual.``) stay. For
    ``Checkpoint.open(directory, rename=canonical_name)``.
    """
    if name.startswith("language_model.lm_head."):
        return name.removeprefix("language_model.")
    if name.startswith("model.visual."):
        return name
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return _TARGET + name.removeprefix(prefix)
    return name


def target_inventory(geometry: Geometry, experts: str = "nvfp4", ple: str = "float8") -> TensorInventory:
    """Return the tensors of the target, without vision tower and drafter.

    ``experts``: ``"nvfp4"`` (unfused, W4A4 with ``input_scale``) or ``"bfloat16_fused"``. ``ple``: storage of the n-gram
    table, ``"float8"`` (with one BF16 scale for all shards) or ``"bfloat16"``. Defaults are the published NVFP4 release.

    Raises:
        DeclarationError: if a storage name is unknown, or NVFP4 is asked for with widths that are no multiple of 16.
    """
    if experts not in ("nvfp4", "bfloat16_fused"):
        raise DeclarationError(f"target_inventory: experts is {experts!r}, allowed: 'nvfp4', 'bfloat16_fused'")
    if ple not in ("float8", "bfloat16"):
        raise DeclarationError(f"target_inventory: ple is {ple!r}, allowed: 'float8', 'bfloat16'")
    every = (("l", geometry.num_hidden_layers),)
    linear = (("l", geometry.linear_layers),)
    attention = (("l", geometry.attention_layers),)
    layer = _TARGET + "layers.{l}."
    vocabulary = (geometry.vocab_size, geometry.hidden_size)
    groups = [_group(_TARGET + "embed_tokens.weight", vocabulary), _group("lm_head.weight", vocabulary)]
    groups += _hyper_connection(geometry, _TARGET + "hyper_connection_mixer.", inject=False)
    groups += _decoder_layer(geometry, layer, every)
    if geometry.linear_layers:
        groups += _gated_delta_net(geometry, layer + "linear_attn.", linear)
    if geometry.attention_layers:
        groups += _sparse_attention(geometry, layer + "self_attn.", attention)
    for ordinal, index in enumerate(geometry.ple_layers):
        groups += _ngram_embedding(geometry, f"{_TARGET}layers.{index}.ple.", ordinal, ple)
    if experts == "nvfp4":
        groups += _nvfp4_experts(geometry, layer + "mlp.experts.", every, input_scale=True, source=_AUDIT)
    else:
        count, hidden, inner = geometry.num_experts, geometry.hidden_size, geometry.moe_intermediate_size
        stacked = ("gate_up_proj", (count, 2 * inner, hidden)), ("down_proj", (count, hidden, inner))
        groups += [_group(f"{layer}mlp.experts.{name}", shape, every, source=_ORIGINAL) for name, shape in stacked]
    return TensorInventory(groups=tuple(groups))


def mtp_inventory(geometry: Geometry) -> TensorInventory:
    """Return the tensors of the MTP drafter: 29 BF16 tensors and nine for each expert (NVFP4, W4A16: no ``input_scale``).

    Empty if the geometry has no MTP layer.

    Raises:
        DeclarationError: if a width is no multiple of 16, which NVFP4 needs.
    """
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
    groups += _nvfp4_experts(geometry, "mtp.layers.0.mlp.experts.", (), input_scale=False, source=_MTP)
    return TensorInventory(groups=tuple(groups))


def inventories(config: Mapping[str, Any]) -> tuple[TensorInventory, TensorInventory]:
    """Return the (target, drafter) inventories of a checkpoint of any size, from the contents of its ``config.json``.

    Raises:
        CheckpointError: if the configuration is not one of this architecture.
    """
    geometry = Geometry.from_config(config)
    return target_inventory(geometry), mtp_inventory(geometry)


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


def _ngram_embedding(geometry: Geometry, prefix: str, ordinal: int, storage: str) -> list[TensorGroup]:
    streams, width = geometry.streams_width, geometry.ple_embed_dim
    dense = {
        "key_proj.weight": (streams, width),
        "value_proj.weight": (geometry.hidden_size, width),
        "norm_key.weight": (streams,),
        "norm_query.weight": (streams,),
        "norm_conv.weight": (streams,),
        "conv1d.weight": (streams, 1, geometry.ple_conv_kernel_size),
    }
    hashing = {
        "layer_multipliers": (geometry.ngram_size,),
        "ngram_heads_vocab_sizes": (geometry.ngram_heads,),
        "ngram_heads_offsets": (geometry.ngram_heads,),
    }
    parts = geometry.split_ngram_parts
    rows = geometry.ple_table_rows(ordinal) // parts
    table = prefix + "ple_embedding.ngram_embedding."
    source, dtype = (_AUDIT, "float8_e4m3fn") if storage == "float8" else (_ORIGINAL, "bfloat16")
    groups = [_group(prefix + name, shape) for name, shape in dense.items()]
    groups += [_group(f"{prefix}ple_embedding.{name}", shape, dtype="int64") for name, shape in hashing.items()]
    shard = table + "shard_{s}.weight"
    groups.append(_group(shard, (rows, geometry.ngram_head_dim), (("s", parts),), dtype=dtype, source=source))
    if storage == "float8":
        groups.append(_group(table + "weight_scale", (1,)))
    return groups


def _nvfp4_experts(
    geometry: Geometry, prefix: str, axes: _Axes, *, input_scale: bool, source: str
) -> list[TensorGroup]:
    hidden, inner = geometry.hidden_size, geometry.moe_intermediate_size
    if hidden % _NVFP4_BLOCK or inner % _NVFP4_BLOCK:
        raise DeclarationError(
            f"NVFP4 experts need hidden_size and moe_intermediate_size in multiples of {_NVFP4_BLOCK}, got {hidden}, {inner}"
        )
    axes = (*axes, ("e", geometry.num_experts))
    groups: list[TensorGroup] = []
    for name in _PROJECTIONS:
        rows, columns = (hidden, inner) if name == "down_proj" else (inner, hidden)
        one = f"{prefix}{{e}}.{name}."
        groups += [
            _group(one + "weight", (rows, columns // 2), axes, "uint8", source),
            _group(one + "weight_scale", (rows, columns // _NVFP4_BLOCK), axes, "float8_e4m3fn", source),
            _group(one + "weight_scale_2", (), axes, "float32", source),
        ]
        if input_scale:
            groups.append(_group(one + "input_scale", (), axes, "float32", source))
    return groups
