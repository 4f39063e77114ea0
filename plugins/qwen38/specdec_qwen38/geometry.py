"""Every size of a Qwen3.8-Flash model (architecture ``qwen4_exp``), read from its configuration and checked.

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

from . import ngram_hash

# The published file writes ``full_attention`` for its sparse attention layers; other implementations have other words.
_LAYER_TYPES = {
    "linear_attention": "linear_attention",
    "full_attention": "full_attention",
    "indexed_attention": "full_attention",
    "qwen_sparse_attention": "full_attention",
}
# Keys that would change the mathematics, and the only value this implementation has.
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "indexer_kv_heads": 1,
    "mtp_use_dedicated_embeddings": False,
}
# Absent from the published file; every implementation uses these values.
_DEFAULTS: dict[str, Any] = {"seed": 1234, "norm_topk_prob": True, "ple_layer_ids": (), "mtp_num_hidden_layers": 1}
# The page size of the attention cache: groups of compressed keys may not straddle a page.
_PAGE_TOKENS = 64


def _canonical_layer_types(value: object) -> object:
    return renamed_items(value, _LAYER_TYPES)


@frozen(kw_only=True)
class Geometry:
    """Sizes of one model, validated on construction.

    Fields carry the names and meanings of the published text configuration. ``layer_types`` holds ``linear_attention`` or
    ``full_attention`` for each decoder layer, whatever synonym the file used. ``ple_layer_ids`` counts layers from one,
    as the file does; :attr:`ple_layers` counts from zero.

    Raises:
        CheckpointError: if a value has the wrong type or range, or two values contradict each other. The message is one
            line with the key, the value and what is allowed.
    """

    vocab_size: int = integer(1)
    hidden_size: int = integer(1)
    num_hidden_layers: int = integer(1)
    layer_types: tuple[str, ...] = field(converter=_canonical_layer_types)
    num_attention_heads: int = integer(1)
    num_key_value_heads: int = integer(1)
    head_dim: int = integer(1)
    rope_theta: float = number(0, math.inf)
    partial_rotary_factor: float = number(0, 1)
    indexer_n_heads: int = integer(1)
    indexer_head_dim: int = integer(1)
    indexer_budget: int = integer(1)
    indexer_compress_ratio: int = integer(1)
    linear_num_key_heads: int = integer(1)
    linear_num_value_heads: int = integer(1)
    linear_key_head_dim: int = integer(1)
    linear_value_head_dim: int = integer(1)
    linear_conv_kernel_dim: int = integer(2)
    num_experts: int = integer(1)
    num_experts_per_tok: int = integer(1)
    moe_intermediate_size: int = integer(1)
    shared_expert_intermediate_size: int = integer(1)
    hc_count: int = integer(2)
    hc_lowrank: int = integer(1)
    ple_layer_ids: tuple[int, ...] = field(converter=as_items)
    ple_embed_dim: int = integer(1)
    ple_conv_kernel_size: int = integer(2)
    ngram_size: int = integer(2)
    heads_per_ngram: int = integer(1)
    ngram_vocab_size_base: int = integer(2)
    make_ngram_vocab_size_divisible_by: int = integer(1)
    split_ngram_parts: int = integer(1)
    seed: int = integer(0, default=_DEFAULTS["seed"])
    eos_token_id: int = integer(0)
    rms_norm_eps: float = number(0, 1)
    max_position_embeddings: int = integer(1)
    norm_topk_prob: bool = True
    output_gate_type: str
    mtp_num_hidden_layers: int = integer(0, default=_DEFAULTS["mtp_num_hidden_layers"])

    def __attrs_post_init__(self) -> None:
        check_rules(self, self._rules())

    def _rules(self) -> Iterator[tuple[str, str, bool]]:
        """Key, what is allowed, whether it holds; later rules rely on earlier ones."""
        layers, names = self.num_hidden_layers, ("linear_attention", "full_attention")
        types = self.layer_types
        yield "layer_types", "a list of layer names", isinstance(types, tuple)
        yield "layer_types", f"only {', '.join(_LAYER_TYPES)}", all(item in names for item in types)
        yield "layer_types", f"one entry for each of num_hidden_layers = {layers}", len(types) == layers
        yield (
            "num_attention_heads",
            f"a multiple of num_key_value_heads = {self.num_key_value_heads}",
            self.num_attention_heads % self.num_key_value_heads == 0,
        )
        yield (
            "partial_rotary_factor",
            f"one that rotates an even number of the head_dim = {self.head_dim} dimensions, 2 or more",
            self.rotary_dim >= 2 and self.rotary_dim % 2 == 0,
        )
        yield (
            "indexer_head_dim",
            f"at least the {self.rotary_dim} rotated dimensions",
            self.indexer_head_dim >= self.rotary_dim,
        )
        ratio = self.indexer_compress_ratio
        yield "indexer_compress_ratio", f"a divisor of the {_PAGE_TOKENS}-token page", _PAGE_TOKENS % ratio == 0
        yield "indexer_budget", f"a multiple of indexer_compress_ratio = {ratio}", self.indexer_budget % ratio == 0
        yield (
            "linear_num_value_heads",
            f"a multiple of linear_num_key_heads = {self.linear_num_key_heads}",
            self.linear_num_value_heads % self.linear_num_key_heads == 0,
        )
        yield (
            "num_experts_per_tok",
            f"at most num_experts = {self.num_experts}",
            self.num_experts_per_tok <= self.num_experts,
        )
        ids = self.ple_layer_ids
        yield "ple_layer_ids", "a list of one-based layer numbers", isinstance(ids, tuple)
        in_range = all(is_integer(item) and 1 <= item <= layers for item in ids)
        yield (
            "ple_layer_ids",
            f"layer numbers from 1 to {layers}, increasing",
            in_range and list(ids) == sorted(set(ids)),
        )
        linear = all(types[item - 1] == "linear_attention" for item in ids)
        yield "ple_layer_ids", "only linear_attention layers", linear
        heads = self.ngram_heads
        yield "ple_embed_dim", f"a multiple of the {heads} n-gram heads", self.ple_embed_dim % heads == 0
        if ids:
            parts = self.split_ngram_parts
            rows = [self.ple_table_rows(ordinal) for ordinal in range(len(ids))]
            yield "split_ngram_parts", f"a divisor of the table rows {rows}", all(count % parts == 0 for count in rows)
        yield "eos_token_id", f"a token id below vocab_size = {self.vocab_size}", self.eos_token_id < self.vocab_size
        # the router renormalises always, as every implementation of this architecture does
        yield "norm_topk_prob", "true", self.norm_topk_prob is True
        yield "output_gate_type", "'sigmoid' or 'silu'", self.output_gate_type in ("sigmoid", "silu")
        yield "mtp_num_hidden_layers", "0 or 1", self.mtp_num_hidden_layers <= 1

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Geometry":
        """Build from the contents of a ``config.json``: the outer form with ``text_config``, or the text part alone.

        Unknown keys are ignored (the file also describes the vision tower and training). Does not change ``config``.

        Raises:
            CheckpointError: if a key is missing, has a value this implementation has not got, or contradicts another.
        """
        text = text_section(config)
        require_fixed(text, _FIXED)
        values = {**_DEFAULTS, **{key: value for key, value in text.items() if value is not None}}
        rope = values.get("rope_parameters", values.get("rope_scaling", {}))
        if not isinstance(rope, Mapping):
            raise refuse("rope_parameters", rope, "an object with rope_theta and partial_rotary_factor")
        if rope.get("rope_type", "default") != "default":
            raise refuse("rope_parameters.rope_type", rope["rope_type"], "'default'")
        values = {**values, **{key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}}
        values.setdefault("ple_embed_dim", values.get("hidden_size"))
        interval, layers = values.get("full_attention_interval"), values.get("num_hidden_layers")
        if "layer_types" not in values and is_integer(interval) and interval > 0 and is_integer(layers):
            values["layer_types"] = interleaved(layers, interval)
        return build(cls, values)

    def to_config(self) -> dict[str, Any]:
        """Return a text configuration (plain JSON types) that :meth:`from_config` reads back to an equal geometry."""
        values = asdict(self)
        rope = {key: values.pop(key) for key in ("rope_theta", "partial_rotary_factor")}
        fixed = {"model_type": "qwen4_exp_text", "dtype": "bfloat16", **_FIXED}
        lists = {"layer_types": list(self.layer_types), "ple_layer_ids": list(self.ple_layer_ids)}
        return {**fixed, **values, **lists, "rope_parameters": {"rope_type": "default", **rope}}

    @property
    def streams_width(self) -> int:
        """Width D of the residual: hc_count streams of hidden_size."""
        return self.hc_count * self.hidden_size

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Indices, from 0, of the gated delta net layers."""
        return tuple(index for index, kind in enumerate(self.layer_types) if kind == "linear_attention")

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices, from 0, of the sparse attention layers."""
        return tuple(index for index, kind in enumerate(self.layer_types) if kind == "full_attention")

    @property
    def ple_layers(self) -> tuple[int, ...]:
        """Indices, from 0, of the layers that add an n-gram embedding."""
        return tuple(number - 1 for number in self.ple_layer_ids)

    @property
    def query_width(self) -> int:
        """Width of all attention query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all attention key (or value) heads together."""
        return self.num_key_value_heads * self.head_dim

    @property
    def index_width(self) -> int:
        """Output width of the selector's projection: its query heads, then one raw key."""
        return (self.indexer_n_heads + 1) * self.indexer_head_dim

    @property
    def budget_groups(self) -> int:
        """Number of compressed groups a query may select."""
        return self.indexer_budget // self.indexer_compress_ratio

    @property
    def rotary_dim(self) -> int:
        """Rotated dimensions of a head: the first ones."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def key_width(self) -> int:
        """Width of all gated delta net key heads together (queries have the same)."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_width(self) -> int:
        """Width of all gated delta net value heads together."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def qkv_width(self) -> int:
        """Channels of the gated delta net convolution: queries, keys, values."""
        return 2 * self.key_width + self.value_width

    @property
    def ngram_heads(self) -> int:
        """Hash heads of one PLE layer: heads_per_ngram for each order from 2 to ngram_size."""
        return (self.ngram_size - 1) * self.heads_per_ngram

    @property
    def ngram_head_dim(self) -> int:
        """Width of one row of the n-gram table."""
        return self.ple_embed_dim // self.ngram_heads

    def ple_multipliers(self, ordinal: int = 0) -> tuple[int, ...]:
        """Return the ``ngram_size`` hash multipliers of the PLE layer number ``ordinal`` (its place in ple_layer_ids)."""
        return ngram_hash.multipliers(
            seed=self.seed, vocab_size=self.vocab_size, ngram_size=self.ngram_size, ordinal=ordinal
        )

    def ple_primes(self, ordinal: int = 0) -> tuple[int, ...]:
        """Return the table size, a prime, of each of the ``ngram_heads`` hash heads."""
        return ngram_hash.primes(base=self.ngram_vocab_size_base, heads=self.ngram_heads, ordinal=ordinal)

    def ple_offsets(self, ordinal: int = 0) -> tuple[int, ...]:
        """Return the first row of each hash head in the concatenated table."""
        return ngram_hash.offsets(self.ple_primes(ordinal))

    def ple_table_rows(self, ordinal: int = 0) -> int:
        """Return the rows of the concatenated table, padded to make_ngram_vocab_size_divisible_by."""
        divisor = self.make_ngram_vocab_size_divisible_by
        return -(-sum(self.ple_primes(ordinal)) // divisor) * divisor


def interleaved(layers: int, interval: int) -> tuple[str, ...]:
    """Return layer types in which every ``interval``-th layer is attention and the others are linear."""
    return tuple("linear_attention" if (index + 1) % interval else "full_attention" for index in range(layers))


# The text_config of the published checkpoint.
REAL = Geometry(
    vocab_size=248320,
    hidden_size=2560,
    num_hidden_layers=48,
    layer_types=interleaved(48, 4),
    num_attention_heads=24,
    num_key_value_heads=2,
    head_dim=256,
    rope_theta=10_000_000.0,
    partial_rotary_factor=0.25,
    indexer_n_heads=4,
    indexer_head_dim=128,
    indexer_budget=2048,
    indexer_compress_ratio=4,
    linear_num_key_heads=16,
    linear_num_value_heads=48,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
    num_experts=512,
    num_experts_per_tok=10,
    moe_intermediate_size=640,
    shared_expert_intermediate_size=640,
    hc_count=4,
    hc_lowrank=320,
    ple_layer_ids=(2,),
    ple_embed_dim=2560,
    ple_conv_kernel_size=4,
    ngram_size=3,
    heads_per_ngram=8,
    ngram_vocab_size_base=20_000_000,
    make_ngram_vocab_size_divisible_by=128,
    split_ngram_parts=128,
    eos_token_id=248044,
    rms_norm_eps=1e-6,
    max_position_embeddings=262144,
    output_gate_type="sigmoid",
)

# Every feature of the architecture at the smallest sizes that still exercise it (sparse selection begins at 20 tokens).
TINY = evolve(
    REAL,
    vocab_size=512,
    hidden_size=128,
    num_hidden_layers=4,
    layer_types=interleaved(4, 4),
    num_attention_heads=6,
    head_dim=32,
    indexer_head_dim=16,
    indexer_budget=16,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    num_experts=16,
    num_experts_per_tok=4,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    hc_lowrank=16,
    ple_embed_dim=64,
    heads_per_ngram=2,
    ngram_vocab_size_base=1000,
    make_ngram_vocab_size_divisible_by=8,
    split_ngram_parts=4,
    eos_token_id=500,
    max_position_embeddings=4096,
)
