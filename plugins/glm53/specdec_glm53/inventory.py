"""Every tensor a GLM-5.3-Flash checkpoint stores: names, shapes and dtypes, as groups.

Releases differ in how they store routed experts (``EXPERT_STORAGES``); :func:`inventories` declares what a checkpoint at hand
has. Any other weight is declared in the dtype of the official release, which stands for every format that loading reads. The
names are those of the official releases: ``model.language_model.`` and ``lm_head.`` for the target; the drafter is one more
layer of the stack, ``model.language_model.layers.45.`` at the published size. Groups follow the sizes of a
:class:`~specdec_glm53.geometry.Geometry`, so the same functions describe the published model and the small ones. Building an
inventory expands nothing and imports no torch.
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

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_RELEASE = "names, shapes and dtypes of the published release: 76,108 tensors, 328,326,771,576 bytes in its FP8 form"
_DERIVATIVES = "public NVFP4 derivatives; input_scale inferred from their readers"
_MTP = "names of the published MTP layer; NVFP4 experts without input_scale inferred from the recipe: BF16 activations"
#: How the routed experts may be stored: NVFP4, its block scales plain or coded (CSF), with or without the activation scale
#: ``input_scale``; or one weight by expert and projection.
EXPERT_STORAGES = ("nvfp4_csf", "nvfp4_csf_weights", "nvfp4", "nvfp4_weights", "bfloat16")
_NVFP4_BLOCK = 16
# Rows and columns of a scale matrix that one unit of its coded form covers.
_CSF_ROWS, _CSF_COLUMNS = 16, 2
_CSF_STREAMS = ("nvfp4_csf_fixed", "nvfp4_csf_exceptions")

_Axes = Sequence[tuple[str, int | tuple[int, ...]]]


def target_inventory(geometry: Geometry, experts: str = "nvfp4_csf") -> TensorInventory:
    """Return the tensors of the target, without vision tower and drafter. ``experts``: one of ``EXPERT_STORAGES``.

    Raises:
        DeclarationError: if the storage name is unknown, or a width is no multiple of what the storage needs.
    """
    every = (("l", geometry.num_hidden_layers),)
    layer = TEXT_PREFIX + "layers.{l}."
    vocabulary, hidden = (geometry.vocab_size, geometry.hidden_size), geometry.hidden_size
    groups = [
        _group(TEXT_PREFIX + "embed_tokens.weight", vocabulary),
        _group(TEXT_PREFIX + "norm.weight", (hidden,)),
        _group("lm_head.weight", vocabulary),
    ]
    groups += _layer_norms(geometry, layer, every)
    groups += _hyper_connections(geometry, layer, every)
    groups += _delta_attention(geometry, layer + "self_attn.", (("l", geometry.linear_layers),))
    groups += _indexed_attention(geometry, layer + "self_attn.", (("l", geometry.indexed_layers),))
    if geometry.dense_layers:
        groups += _mlp(layer + "mlp.", hidden, geometry.intermediate_size, (("l", geometry.dense_layers),))
    if geometry.sparse_layers:
        sparse = (("l", geometry.sparse_layers),)
        groups += _mixture(geometry, layer + "mlp.", sparse)
        groups += _experts(geometry, layer + "mlp.experts.", sparse, experts, _DERIVATIVES)
    return TensorInventory(groups=tuple(groups))


def mtp_inventory(geometry: Geometry, experts: str = "nvfp4_weights") -> TensorInventory:
    """Return the tensors of the MTP drafter: 25 dense ones and nine for each expert (NVFP4, W4A16: no ``input_scale``).

    ``experts``: one of ``EXPERT_STORAGES``; whether or not the drafter has an ``input_scale``, reading it makes no use of it.
    Empty if the geometry has no MTP layer.

    Raises:
        DeclarationError: if the storage name is unknown, or a width is no multiple of what the storage needs.
    """
    if not geometry.num_nextn_predict_layers:
        return TensorInventory(groups=())
    layer, hidden = _mtp_prefix(geometry), geometry.hidden_size
    groups = [_group(f"{layer}{name}.weight", (hidden,)) for name in ("enorm", "hnorm", "shared_head.norm")]
    groups.append(_group(layer + "eh_proj.weight", (hidden, 2 * hidden)))  # token embedding first, hidden state second
    groups += _layer_norms(geometry, layer, ())
    groups += _indexed_attention(geometry, layer + "self_attn.", ())
    groups += _mixture(geometry, layer + "mlp.", ())
    groups += _experts(geometry, layer + "mlp.experts.", (), experts, _MTP)
    return TensorInventory(groups=tuple(groups))


def inventories(
    config: Mapping[str, Any], checkpoint: Checkpoint | None = None
) -> tuple[TensorInventory, TensorInventory]:
    """Return the (target, drafter) inventories of a checkpoint of any size, from the contents of its ``config.json``.

    ``checkpoint``, with canonical names, decides how experts are declared: as its first mixture and its MTP layer store
    them. Without one, and for what it does not store, the recipe's checkpoint decides. Reads headers only.

    Raises:
        CheckpointError: if the configuration is not one of this architecture.
    """
    geometry = Geometry.from_config(config)
    if checkpoint is None:
        return target_inventory(geometry), mtp_inventory(geometry)
    first = next((f"{TEXT_PREFIX}layers.{index}." for index in geometry.sparse_layers), "")
    target = _stored_experts(checkpoint, first, "nvfp4_csf")
    drafter = _stored_experts(checkpoint, _mtp_prefix(geometry), "nvfp4_weights")
    return target_inventory(geometry, target), mtp_inventory(geometry, drafter)


def _mtp_prefix(geometry: Geometry) -> str:
    return f"{TEXT_PREFIX}layers.{geometry.mtp_layer}."


def _stored_experts(checkpoint: Checkpoint, layer: str, otherwise: str) -> str:
    """Which of ``EXPERT_STORAGES`` the experts of a layer have."""
    first = f"{layer}mlp.experts.0.{_PROJECTIONS[0]}."
    if first + "weight" not in checkpoint:
        return otherwise
    if checkpoint.stored(first + "weight").dtype != "uint8":
        return "bfloat16"
    scales = "nvfp4_csf" if f"{first}weight_scale.{_CSF_STREAMS[0]}" in checkpoint else "nvfp4"
    return scales if first + "input_scale" in checkpoint else f"{scales}_weights"


def _group(
    name: str, shape: Sequence[int], axes: _Axes = (), dtype: str = "bfloat16", source: str = _RELEASE
) -> TensorGroup:
    return TensorGroup(name=name, shape=tuple(shape), axes=tuple(axes), dtype=dtype, source=source)


def _layer_norms(geometry: Geometry, prefix: str, axes: _Axes) -> list[TensorGroup]:
    shape = (geometry.hidden_size,)
    return [_group(f"{prefix}{name}.weight", shape, axes) for name in ("input_layernorm", "post_attention_layernorm")]


def _hyper_connections(geometry: Geometry, prefix: str, axes: _Axes) -> list[TensorGroup]:
    """Both sites of a layer. Coefficients are float32; only the matrix is stored narrower."""
    groups = []
    for site in ("attn", "ffn"):
        groups += [
            _group(f"{prefix}hc_{site}_fn", (geometry.hc_outputs, geometry.streams_width), axes),
            _group(f"{prefix}hc_{site}_base", (geometry.hc_outputs,), axes, "float32"),
            _group(f"{prefix}hc_{site}_scale", (3,), axes, "float32"),  # one for reading, writing and mixing each
        ]
    return groups


def _delta_attention(geometry: Geometry, prefix: str, axes: _Axes) -> list[TensorGroup]:
    hidden, width, heads = geometry.hidden_size, geometry.linear_width, geometry.linear_num_heads
    rank = geometry.linear_head_dim  # the bottleneck of both gates has the width of a head
    groups = []
    for name in ("q", "k", "v"):
        groups += [
            _group(f"{prefix}{name}_proj.weight", (width, hidden), axes),
            _group(f"{prefix}{name}_conv1d.weight", (width, 1, geometry.linear_conv_kernel_dim), axes),
        ]
    for name in ("f", "g"):
        groups += [
            _group(f"{prefix}{name}_a_proj.weight", (rank, hidden), axes),
            _group(f"{prefix}{name}_b_proj.weight", (width, rank), axes),
        ]
    return [
        *groups,
        _group(prefix + "A_log", (heads,), axes, "float32"),
        _group(prefix + "dt_bias", (width,), axes, "float32"),
        _group(prefix + "b_proj.weight", (heads, hidden), axes),
        _group(prefix + "o_norm.weight", (geometry.linear_head_dim,), axes),
        _group(prefix + "o_proj.weight", (hidden, width), axes),
    ]


def _indexed_attention(geometry: Geometry, prefix: str, axes: _Axes) -> list[TensorGroup]:
    hidden, query_rank, latent = geometry.hidden_size, geometry.q_lora_rank, geometry.kv_lora_rank
    index = geometry.index_head_dim
    shapes = {
        "q_a_proj.weight": (query_rank, hidden),
        "q_a_layernorm.weight": (query_rank,),
        "q_b_proj.weight": (geometry.query_width, query_rank),
        "kv_a_proj_with_mqa.weight": (latent, hidden),
        "kv_a_layernorm.weight": (latent,),
        "kv_b_proj.weight": (geometry.query_width + geometry.value_width, latent),  # each head's keys, then its values
        "o_proj.weight": (hidden, geometry.value_width),
        "indexer.wq_b.weight": (geometry.index_width, query_rank),
        "indexer.wk.weight": (index, hidden),
        "indexer.k_norm.weight": (index,),
        "indexer.k_norm.bias": (index,),
        "indexer.weights_proj.weight": (geometry.index_n_heads, hidden),
        "indexer.index_kpool_compress_ape": (geometry.index_kpool, index),
        "indexer.index_kpool_compress_gate": (index, hidden),
    }
    return [_group(prefix + name, shape, axes) for name, shape in shapes.items()]


def _mlp(prefix: str, hidden: int, inner: int, axes: _Axes) -> list[TensorGroup]:
    return [_group(f"{prefix}{name}.weight", _shape(name, hidden, inner), axes) for name in _PROJECTIONS]


def _mixture(geometry: Geometry, prefix: str, axes: _Axes) -> list[TensorGroup]:
    """What a mixture has beside its routed experts: the router and the shared expert."""
    hidden, experts = geometry.hidden_size, geometry.n_routed_experts
    return [
        _group(prefix + "gate.weight", (experts, hidden), axes),
        _group(prefix + "gate.e_score_correction_bias", (experts,), axes, "float32"),
        *_mlp(prefix + "shared_experts.", hidden, geometry.moe_intermediate_size, axes),
    ]


def _shape(projection: str, hidden: int, inner: int) -> tuple[int, int]:
    return (hidden, inner) if projection == "down_proj" else (inner, hidden)


def _experts(geometry: Geometry, prefix: str, axes: _Axes, storage: str, source: str) -> list[TensorGroup]:
    if storage not in EXPERT_STORAGES:
        raise DeclarationError(f"experts is {storage!r}, allowed: {', '.join(map(repr, EXPERT_STORAGES))}")
    hidden, inner = geometry.hidden_size, geometry.moe_intermediate_size
    axes = (*axes, ("e", geometry.n_routed_experts))
    if storage == "bfloat16":
        return [_group(f"{prefix}{{e}}.{name}.weight", _shape(name, hidden, inner), axes) for name in _PROJECTIONS]
    coded = storage.startswith("nvfp4_csf")
    multiple = _NVFP4_BLOCK * (_CSF_COLUMNS if coded else 1)
    if hidden % multiple or inner % multiple:
        raise DeclarationError(
            f"{storage} experts need hidden_size and moe_intermediate_size in multiples of {multiple}, got {hidden}, {inner}"
        )
    groups: list[TensorGroup] = []
    for name in _PROJECTIONS:
        rows, columns = _shape(name, hidden, inner)
        one = f"{prefix}{{e}}.{name}."
        groups.append(_group(one + "weight", (rows, columns // 2), axes, "uint8", source))
        groups += _block_scales(one + "weight_scale", rows, columns // _NVFP4_BLOCK, axes, coded, source)
        groups.append(_group(one + "weight_scale_2", (), axes, "float32", source))
        if not storage.endswith("_weights"):
            groups.append(_group(one + "input_scale", (), axes, "float32", source))
    return groups


def _block_scales(name: str, rows: int, columns: int, axes: _Axes, coded: bool, source: str) -> list[TensorGroup]:
    if not coded:
        return [_group(name, (rows, columns), axes, "float8_e4m3fn", source)]
    slab = _CSF_ROWS * (1 + columns // _CSF_COLUMNS)
    fixed, exceptions = (f"{name}.{stream}" for stream in _CSF_STREAMS)
    return [
        _group(fixed, (rows // _CSF_ROWS, slab), axes, "uint8", source),
        # as many words as the matrix has values outside its windows
        TensorGroup(name=exceptions, shape=(0,), axes=tuple(axes), dtype="uint32", source=source, any_length=True),
    ]
