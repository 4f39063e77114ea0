"""Every size of a GLM-5.3-Flash model (architecture ``glm5_next``), read from its configuration and checked.

:class:`Geometry` is the single source of shapes for the inventory, the state layouts, the layers and the training script.
Field names are the keys of the published ``config.json``; derived widths are properties. The module imports neither torch
nor numpy. :data:`REAL` is the published model, :data:`TINY` a model with every feature of the architecture for tests.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import asdict, evolve, field, frozen

from specdec.config_fields import (
    as_items,
    build,
    check_rules,
    integer,
    is_integer,
    number,
    refuse,
    renamed_items,
    require_fixed,
    text_section,
)

# The published file writes ``deepseek_sparse_attention`` for its indexed layers; other implementations have other words.
_LAYER_TYPES = {
    "linear_attention": "linear_attention",
    "indexed_attention": "indexed_attention",
    "deepseek_sparse_attention": "indexed_attention",
    "full_attention": "indexed_attention",
}
_MLP_LAYER_TYPES = ("dense", "sparse")
# Keys that would change the mathematics, and the only value this implementation has.
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "qk_rope_head_dim": 0,
    "mla_use_nope": True,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "mhc": True,
    "index_kpool_compress": True,
    "index_kpool_always_select_tail": True,
}
# Absent from some exports; every implementation uses these values.
_DEFAULTS: dict[str, Any] = {
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 1,
    "index_share_for_mtp_iteration": False,
}
# The published file nests the sizes of its linear layers in ``linear_attn_config``; transformers writes them flat.
_LINEAR_KEYS = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
    "gate_lower_bound": "linear_lower_bound",
}
# The page size of the attention cache: groups of pooled keys may not straddle a page.
_PAGE_TOKENS = 64


def _ids(value: object) -> object:
    """One token id or a list of them, as a tuple."""
    return (value,) if is_integer(value) else as_items(value)


def _canonical_layer_types(value: object) -> object:
    return renamed_items(value, _LAYER_TYPES)


@frozen(kw_only=True)
class Geometry:
    """Sizes of one model, validated on construction.

    Fields carry the names and meanings of the published text configuration. ``layer_types`` holds ``linear_attention`` or
    ``indexed_attention`` for each decoder layer, whatever synonym the file used; ``mlp_layer_types`` holds ``dense`` or
    ``sparse``. ``eos_token_id`` is a tuple, whether the file has one id or several.

    Raises:
        CheckpointError: if a value has the wrong type or range, or two values contradict each other. The message is one
            line with the key, the value and what is allowed.
    """

    vocab_size: int = integer(1)
    hidden_size: int = integer(1)
    intermediate_size: int = integer(1)
    moe_intermediate_size: int = integer(1)
    num_hidden_layers: int = integer(1)
    layer_types: tuple[str, ...] = field(converter=_canonical_layer_types)
    mlp_layer_types: tuple[str, ...] = field(converter=as_items)
    num_attention_heads: int = integer(1)
    q_lora_rank: int = integer(1)
    kv_lora_rank: int = integer(1)
    qk_nope_head_dim: int = integer(1)
    v_head_dim: int = integer(1)
    linear_num_heads: int = integer(1)
    linear_head_dim: int = integer(1)
    linear_conv_kernel_dim: int = integer(2)
    linear_lower_bound: float = number(-math.inf, 0)
    index_n_heads: int = integer(1)
    index_head_dim: int = integer(1)
    index_topk: int = integer(1)
    index_kpool: int = integer(1)
    n_routed_experts: int = integer(1)
    num_experts_per_tok: int = integer(1)
    n_shared_experts: int = integer(0, default=_DEFAULTS["n_shared_experts"])
    routed_scaling_factor: float = number(0, math.inf)
    hc_mult: int = integer(2)
    hc_sinkhorn_iters: int = integer(1)
    hc_eps: float = number(0, 1)
    rms_norm_eps: float = number(0, 1)
    swiglu_limit: float = number(0, math.inf)
    max_position_embeddings: int = integer(1)
    num_nextn_predict_layers: int = integer(0, default=_DEFAULTS["num_nextn_predict_layers"])
    index_share_for_mtp_iteration: bool = _DEFAULTS["index_share_for_mtp_iteration"]
    eos_token_id: tuple[int, ...] = field(converter=_ids)

    def __attrs_post_init__(self) -> None:
        check_rules(self, self._rules())

    def _rules(self) -> Iterator[tuple[str, str, bool]]:
        """Key, what is allowed, whether it holds; later rules rely on earlier ones."""
        layers = self.num_hidden_layers
        for key, allowed, words in (
            ("layer_types", tuple(_LAYER_TYPES), ("linear_attention", "indexed_attention")),
            ("mlp_layer_types", _MLP_LAYER_TYPES, _MLP_LAYER_TYPES),
        ):
            types = getattr(self, key)
            yield key, "a list of layer names", isinstance(types, tuple)
            yield key, f"only {', '.join(allowed)}", all(item in words for item in types)
            yield key, f"one entry for each of num_hidden_layers = {layers}", len(types) == layers
        both = {"linear_attention", "indexed_attention"} <= set(self.layer_types)
        yield "layer_types", "at least one layer of linear and one of indexed attention", both
        yield "linear_lower_bound", "a number below 0", self.linear_lower_bound < 0
        pool = self.index_kpool
        yield "index_kpool", f"a divisor of the {_PAGE_TOKENS}-token page", _PAGE_TOKENS % pool == 0
        yield "index_topk", f"a multiple of index_kpool = {pool}", self.index_topk % pool == 0
        yield (
            "num_experts_per_tok",
            f"at most n_routed_experts = {self.n_routed_experts}",
            self.num_experts_per_tok <= self.n_routed_experts,
        )
        yield "n_shared_experts", "1", self.n_shared_experts == 1
        yield "num_nextn_predict_layers", "0 or 1", self.num_nextn_predict_layers <= 1
        yield "index_share_for_mtp_iteration", "true or false", isinstance(self.index_share_for_mtp_iteration, bool)
        ids = self.eos_token_id
        yield "eos_token_id", "a token id or a list of token ids", isinstance(ids, tuple) and bool(ids)
        yield (
            "eos_token_id",
            f"distinct token ids below vocab_size = {self.vocab_size}",
            all(is_integer(item) and 0 <= item < self.vocab_size for item in ids) and len(set(ids)) == len(ids),
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Geometry":
        """Build from the contents of a ``config.json``: the outer form with ``text_config``, or the text part alone.

        The sizes of linear layers may be flat (``linear_num_heads`` …) or nested in ``linear_attn_config``; flat keys win.
        ``mlp_layer_types`` may be given as ``first_k_dense_replace``. Unknown keys are ignored (the file also describes the
        vision tower and training). Does not change ``config``.

        Raises:
            CheckpointError: if a key is missing, has a value this implementation has not got, or contradicts another.
        """
        text = text_section(config)
        require_fixed(text, _FIXED)
        values = {**_DEFAULTS, **_nested_linear(text)}
        values |= {key: value for key, value in text.items() if value is not None}
        # the stop ids stand beside the text model in some exports
        if "eos_token_id" not in values and config.get("eos_token_id") is not None:
            values["eos_token_id"] = config["eos_token_id"]
        layers, first = values.get("num_hidden_layers"), values.get("first_k_dense_replace")
        if "mlp_layer_types" not in values and is_integer(layers) and is_integer(first):
            if values.get("moe_layer_freq", 1) != 1:
                raise refuse("moe_layer_freq", values["moe_layer_freq"], "1")
            values["mlp_layer_types"] = dense_first(layers, first)
        geometry = build(cls, values)
        for key, allowed, required in (
            ("num_key_value_heads", "num_attention_heads", geometry.num_attention_heads),
            ("qk_head_dim", "qk_nope_head_dim", geometry.qk_nope_head_dim),
        ):
            if values.get(key, required) != required:
                raise refuse(key, values[key], f"{allowed} = {required}")
        # one indexer in each indexed layer; none reuses the selection of another
        kinds = values.get("indexer_types", ())
        if not isinstance(kinds, (list, tuple)) or any(kind != "full" for kind in kinds):
            raise refuse("indexer_types", kinds, "a list of 'full'")
        return geometry

    def to_config(self) -> dict[str, Any]:
        """Return a text configuration (plain JSON types) that :meth:`from_config` reads back to an equal geometry."""
        values = asdict(self)
        lists = {key: list(values[key]) for key in ("layer_types", "mlp_layer_types", "eos_token_id")}
        # what transformers wants beside our fields: its defaults are those of the published model
        implied = {
            "num_key_value_heads": self.num_attention_heads,
            "indexer_types": ["full"] * self.num_hidden_layers,
            "pad_token_id": self.eos_token_id[0],
        }
        return {"model_type": "glm5_next_text", "dtype": "bfloat16", **_FIXED, **values, **lists, **implied}

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Indices, from 0, of the linear attention (KDA) layers."""
        return tuple(index for index, kind in enumerate(self.layer_types) if kind == "linear_attention")

    @property
    def indexed_layers(self) -> tuple[int, ...]:
        """Indices, from 0, of the indexed latent attention layers."""
        return tuple(index for index, kind in enumerate(self.layer_types) if kind == "indexed_attention")

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Indices, from 0, of the layers whose feed-forward block is one MLP."""
        return tuple(index for index, kind in enumerate(self.mlp_layer_types) if kind == "dense")

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Indices, from 0, of the layers whose feed-forward block is a mixture of experts."""
        return tuple(index for index, kind in enumerate(self.mlp_layer_types) if kind == "sparse")

    @property
    def mtp_layer(self) -> int:
        """Index under which the checkpoint stores the MTP layer: the one after the last decoder layer."""
        return self.num_hidden_layers

    @property
    def streams_width(self) -> int:
        """Width of the residual: hc_mult streams of hidden_size."""
        return self.hc_mult * self.hidden_size

    @property
    def hc_outputs(self) -> int:
        """Coefficients of one hyper-connection site: hc_mult to read, hc_mult to write, hc_mult² to mix the streams."""
        return self.hc_mult * (self.hc_mult + 2)

    @property
    def linear_width(self) -> int:
        """Width of all linear attention heads together; queries, keys and values each have it."""
        return self.linear_num_heads * self.linear_head_dim

    @property
    def query_width(self) -> int:
        """Width of all latent attention query (or key) heads together."""
        return self.num_attention_heads * self.qk_nope_head_dim

    @property
    def value_width(self) -> int:
        """Width of all latent attention value heads together."""
        return self.num_attention_heads * self.v_head_dim

    @property
    def index_width(self) -> int:
        """Width of all indexer query heads together."""
        return self.index_n_heads * self.index_head_dim

    @property
    def budget_groups(self) -> int:
        """Number of pooled groups a query may select."""
        return self.index_topk // self.index_kpool


def _nested_linear(text: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes in ``linear_attn_config``, under their flat names."""
    nested = text.get("linear_attn_config")
    if nested is None:
        return {}
    if not isinstance(nested, Mapping):
        raise refuse("linear_attn_config", nested, f"an object with {', '.join(_LINEAR_KEYS)}")
    return {flat: nested[key] for key, flat in _LINEAR_KEYS.items() if nested.get(key) is not None}


def interleaved(layers: int, interval: int) -> tuple[str, ...]:
    """Return layer types in which every ``interval``-th layer is indexed attention and the others are linear."""
    return tuple("linear_attention" if (index + 1) % interval else "indexed_attention" for index in range(layers))


def dense_first(layers: int, dense: int) -> tuple[str, ...]:
    """Return feed-forward types in which the first ``dense`` layers are dense and the others sparse."""
    return tuple("dense" if index < dense else "sparse" for index in range(layers))


# The text_config of the published checkpoint.
REAL = Geometry(
    vocab_size=154880,
    hidden_size=4096,
    intermediate_size=12288,
    moe_intermediate_size=2048,
    num_hidden_layers=45,
    layer_types=interleaved(45, 4),
    mlp_layer_types=dense_first(45, 3),
    num_attention_heads=64,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=256,
    v_head_dim=256,
    linear_num_heads=64,
    linear_head_dim=128,
    linear_conv_kernel_dim=4,
    linear_lower_bound=-5.0,
    index_n_heads=32,
    index_head_dim=128,
    index_topk=2048,
    index_kpool=4,
    n_routed_experts=288,
    num_experts_per_tok=8,
    n_shared_experts=1,
    routed_scaling_factor=2.5,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    rms_norm_eps=1e-5,
    swiglu_limit=10.0,
    max_position_embeddings=1048576,
    num_nextn_predict_layers=1,
    index_share_for_mtp_iteration=True,
    eos_token_id=(154820, 154827, 154829),
)

# Every feature of the architecture at small sizes (sparse selection begins at 36 tokens). Sixteen index heads, because exact
# ties of scores at zero, whose order no two implementations share, are frequent with eight and fewer.
TINY = evolve(
    REAL,
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    moe_intermediate_size=64,
    num_hidden_layers=9,
    layer_types=interleaved(9, 4),
    mlp_layer_types=dense_first(9, 3),
    num_attention_heads=4,
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    v_head_dim=32,
    linear_num_heads=4,
    linear_head_dim=32,
    index_n_heads=16,
    index_head_dim=32,
    index_topk=32,
    n_routed_experts=12,
    num_experts_per_tok=4,
    max_position_embeddings=4096,
    eos_token_id=(1,),
)
