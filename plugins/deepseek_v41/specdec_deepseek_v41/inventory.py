"""Every tensor a DeepSeek-V4.1-Flash checkpoint stores: names, shapes and dtypes, as groups.

The published release stores its weights in FP8 and its routed experts in FP4, each ``X.weight`` with a sibling ``X.scale`` of
power-of-two scales; small checkpoints store plain floats. :func:`inventories` declares what a checkpoint at hand has. Names have
no prefix: ``embed``, ``layers.{l}``, ``norm`` and ``head`` are the target, ``mtp.{s}`` the stages of the drafter, which uses the
target's embedding and head. Groups follow the sizes of a :class:`~specdec_deepseek_v41.geometry.Geometry`, so the same functions
describe the published model and the small ones. Building an inventory expands nothing and imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import frozen

from specdec.declaration import TensorGroup, TensorInventory
from specdec.errors import DeclarationError

from .geometry import Geometry

if TYPE_CHECKING:
    from specdec.checkpoint.reader import Checkpoint

_SOURCE = (
    "official inference code and loaders of the release; with 266 vision tensors, the number of entries in its index"
)
#: Compressed id of each token id, stored where no tokenizer is there to build it from.
COMPRESSED_IDS = "engram.compressed_ids"
_BLOCK = 32
_Axes = Sequence[tuple[str, int | tuple[int, ...]]]


@frozen(kw_only=True)
class StoredForm:
    """How a release stores its weights.

    ``quantised``: FP8 and FP4 with scales, as published; otherwise one bfloat16 tensor each. ``codes`` and ``scales``: dtypes
    of packed FP4 values and of scales, which have the same bytes under either name. ``image_bias``: whether routers have the
    selection bias of image rows, which text never reads. ``compressed_ids``: length of that tensor, 0 if it is not stored.

    Raises:
        DeclarationError: if a dtype is not one of the two names.
    """

    quantised: bool = True
    codes: str = "int8"
    scales: str = "float8_e8m0fnu"
    image_bias: bool = True
    compressed_ids: int = 0

    def __attrs_post_init__(self) -> None:
        for key, allowed in (("codes", ("int8", "uint8")), ("scales", ("float8_e8m0fnu", "uint8"))):
            if getattr(self, key) not in allowed:
                raise DeclarationError(f"StoredForm.{key} is {getattr(self, key)!r}, allowed: {', '.join(allowed)}")


#: The published release, and small checkpoints.
PUBLISHED, PLAIN = StoredForm(), StoredForm(quantised=False, image_bias=False)


def target_inventory(geometry: Geometry, form: StoredForm = PUBLISHED) -> TensorInventory:
    """Return the tensors of the target, without vision tower and drafter.

    Raises:
        DeclarationError: if a width is no multiple of 32 where FP4 needs it.
    """
    every = (("l", geometry.num_hidden_layers),)
    layer, vocabulary = "layers.{l}.", (geometry.vocab_size, geometry.hidden_size)
    groups = [
        _group("embed.weight", vocabulary),
        _group("head.weight", vocabulary),
        _group("norm.weight", (geometry.hidden_size,)),
    ]
    groups += _block(geometry, layer, every, form, geometry.n_routed_experts)
    groups += _compressor(geometry, layer + "attn.compressor.")
    groups += _indexer(geometry, layer + "attn.indexer.", form)
    groups += _engram(geometry, layer + "engram.", form)
    if form.compressed_ids:
        groups.append(_group(COMPRESSED_IDS, (form.compressed_ids,), (), "int32"))
    return TensorInventory(groups=tuple(groups))


def dspark_inventory(geometry: Geometry, form: StoredForm = PUBLISHED) -> TensorInventory:
    """Return the tensors of the DSpark drafter: its stages, the projection of features, and the Markov and confidence heads.

    Raises:
        DeclarationError: as :func:`target_inventory`.
    """
    hidden, rank = geometry.hidden_size, geometry.dspark_markov_rank
    last = f"mtp.{geometry.num_stages - 1}."
    groups = _block(geometry, "mtp.{s}.", (("s", geometry.num_stages),), form, geometry.dspark_n_routed_experts)
    groups += _fp8("mtp.0.main_proj", (hidden, geometry.feature_width), (), form)
    groups += [
        _group("mtp.0.main_norm.weight", (hidden,)),
        _group(last + "norm.weight", (hidden,)),
        _group(last + "markov_head.embed.weight", (geometry.vocab_size, rank)),
        _group(last + "markov_head.head.weight", (geometry.vocab_size, rank)),
        _group(last + "confidence_head.proj.weight", (1, hidden + rank)),
    ]
    return TensorInventory(groups=tuple(groups))


def inventories(
    config: Mapping[str, Any], checkpoint: Checkpoint | None = None
) -> tuple[TensorInventory, TensorInventory]:
    """Return the (target, drafter) inventories of a checkpoint of any size, from the contents of its ``config.json``.

    ``checkpoint`` decides the form in which each of the two is declared; without one it is the published form. Reads headers
    only.

    Raises:
        CheckpointError: if the configuration is not one of this architecture.
    """
    geometry = Geometry.from_config(config)
    if checkpoint is None:
        return target_inventory(geometry), dspark_inventory(geometry)
    target, drafter = _stored_form(checkpoint, "layers.0."), _stored_form(checkpoint, "mtp.0.")
    return target_inventory(geometry, target), dspark_inventory(geometry, drafter)


def _stored_form(checkpoint: Checkpoint, layer: str) -> StoredForm:
    """The form of the part of the model whose first layer this is; of a part that is absent, the published one."""

    def dtype(name: str) -> str:
        return checkpoint.stored(layer + name).dtype if layer + name in checkpoint else ""

    codes, scales = dtype("ffn.experts.0.w1.weight"), dtype("attn.wkv.scale")
    ids = checkpoint.stored(COMPRESSED_IDS).shape if COMPRESSED_IDS in checkpoint else ()
    return StoredForm(
        quantised=bool(scales) or not dtype("attn.wkv.weight"),
        codes=codes if codes == "uint8" else "int8",
        scales=scales if scales == "uint8" else "float8_e8m0fnu",
        image_bias=bool(dtype("ffn.gate.bias_vl")) or not dtype("ffn.gate.bias"),
        compressed_ids=ids[0] if ids else 0,
    )


def _group(name: str, shape: Sequence[int], axes: _Axes = (), dtype: str = "bfloat16") -> TensorGroup:
    return TensorGroup(name=name, shape=tuple(shape), axes=tuple(axes), dtype=dtype, source=_SOURCE)


def _blocks(extent: int) -> int:
    return -(-extent // _BLOCK)


def _fp8(
    name: str, shape: tuple[int, int], axes: _Axes, form: StoredForm, *, rows_share: bool = True
) -> list[TensorGroup]:
    """A weight [out, in] in FP8: a scale for 32 columns of 32 rows, or of each row."""
    if not form.quantised:
        return [_group(name + ".weight", shape, axes)]
    rows = _blocks(shape[0]) if rows_share else shape[0]
    return [
        _group(name + ".weight", shape, axes, "float8_e4m3fn"),
        _group(name + ".scale", (rows, _blocks(shape[1])), axes, form.scales),
    ]


def _fp4(name: str, shape: tuple[int, int], axes: _Axes, form: StoredForm) -> list[TensorGroup]:
    """A weight [out, in] in FP4, two values a byte: a scale for 32 columns of each row."""
    if not form.quantised:
        return [_group(name + ".weight", shape, axes)]
    if shape[1] % _BLOCK:
        raise DeclarationError(
            f"FP4 experts need hidden_size and moe_intermediate_size in multiples of {_BLOCK}, got {shape[1]}"
        )
    return [
        _group(name + ".weight", (shape[0], shape[1] // 2), axes, form.codes),
        _group(name + ".scale", (shape[0], shape[1] // _BLOCK), axes, form.scales),
    ]


def _block(geometry: Geometry, prefix: str, axes: _Axes, form: StoredForm, experts: int) -> list[TensorGroup]:
    """What every layer of the target and every stage of the drafter has."""
    hidden, latent = geometry.hidden_size, geometry.head_dim
    attention = prefix + "attn."
    groups = [_group(f"{prefix}{name}.weight", (hidden,), axes) for name in ("attn_norm", "ffn_norm")]
    groups += [
        _group(attention + "attn_sink", (geometry.num_attention_heads,), axes, "float32"),
        _group(attention + "q_norm.weight", (geometry.q_lora_rank,), axes),
        _group(attention + "kv_norm.weight", (latent,), axes),
    ]
    for name, shape in (
        ("wq_a", (geometry.q_lora_rank, hidden)),
        ("wq_b", (geometry.query_width, geometry.q_lora_rank)),
        ("wkv", (latent, hidden)),
        ("wo_a", (geometry.output_width, geometry.group_width)),  # the rows of each group of heads, one below another
        ("wo_b", (hidden, geometry.output_width)),
    ):
        groups += _fp8(attention + name, shape, axes, form)
    for site in ("attn", "ffn"):
        groups += [
            _group(f"{prefix}hc_{site}_fn", (geometry.hc_outputs, geometry.streams_width), axes, "float32"),
            _group(f"{prefix}hc_{site}_base", (geometry.hc_outputs,), axes, "float32"),
            _group(f"{prefix}hc_{site}_scale", (3,), axes, "float32"),  # one for reading, writing and mixing each
        ]
    groups += [
        _group(prefix + "ffn.gate.weight", (experts, hidden), axes),
        _group(prefix + "ffn.gate.bias", (experts,), axes, "float32"),
    ]
    if form.image_bias:
        groups.append(_group(prefix + "ffn.gate.bias_vl", (experts,), axes, "float32"))
    for name, shape in _projections(geometry):
        groups += _fp4(f"{prefix}ffn.experts.{{e}}.{name}", shape, (*axes, ("e", experts)), form)
        groups += _fp8(f"{prefix}ffn.shared_experts.{name}", shape, axes, form)
    return groups


def _projections(geometry: Geometry) -> tuple[tuple[str, tuple[int, int]], ...]:
    """Gate, down and up projection of an expert."""
    hidden, inner = geometry.hidden_size, geometry.moe_intermediate_size
    return ("w1", (inner, hidden)), ("w2", (hidden, inner)), ("w3", (inner, hidden))


def _compressor(geometry: Geometry, prefix: str) -> list[TensorGroup]:
    latent, hidden = geometry.head_dim, geometry.hidden_size
    sources = (("l", geometry.kv_source_layer_ids),)
    groups = [
        _group(prefix + "wkv.weight", (latent, hidden), sources),
        _group(prefix + "norm.weight", (latent,), sources),
    ]
    pooled = geometry.sources_of_ratio(2)
    if pooled:  # a group of one needs no gate
        groups.append(_group(prefix + "wgate.weight", (latent, hidden), (("l", pooled),)))
    return groups


def _indexer(geometry: Geometry, prefix: str, form: StoredForm) -> list[TensorGroup]:
    """Queries in every layer that selects, keys in those that compress."""
    selects, compresses = (("l", geometry.index_source_layer_ids),), (("l", geometry.kv_source_layer_ids),)
    width = geometry.index_head_dim
    return [
        *_fp8(prefix + "wq_b", (geometry.index_width, geometry.q_lora_rank), selects, form),
        _group(prefix + "weights_proj.weight", (geometry.index_n_heads, geometry.hidden_size), selects),
        _group(prefix + "wk.weight", (width, geometry.head_dim), compresses),
        _group(prefix + "k_norm.weight", (width,), compresses),
    ]


def _engram(geometry: Geometry, prefix: str, form: StoredForm) -> list[TensorGroup]:
    layers, streams = (("l", geometry.engram_layer_ids),), geometry.hc_mult
    # one key for each stream, then the value
    groups = _fp8(prefix + "wkv", ((streams + 1) * geometry.hidden_size, geometry.engram_width), layers, form)
    groups += [_group(prefix + name, (streams, geometry.hidden_size), layers) for name in ("q_weight", "k_weight")]
    for layer, rows in zip(geometry.engram_layer_ids, geometry.engram_num_embeddings, strict=True):
        table = prefix.format(l=layer) + "embed"
        groups += _fp8(table, (rows, geometry.engram_head_dim), (), form, rows_share=False)
    return groups
