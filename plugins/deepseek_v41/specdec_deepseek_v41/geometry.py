"""Every size of a DeepSeek-V4.1-Flash model (architecture ``deepseek_v41``), read from its configuration and checked.

:class:`Geometry` is the single source of shapes for the inventory, the state layouts, the layers and the training script.
Field names are the keys of the published ``config.json``; derived widths are properties. The module imports neither torch
nor numpy. :data:`REAL` is the published model, :data:`TINY` a model with every feature of the architecture for tests.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import asdict, evolve, field, frozen

from specdec import hash_tables
from specdec.config_fields import (
    as_items,
    build,
    check_rules,
    integer,
    is_integer,
    number,
    refuse,
    require_fixed,
    text_section,
)

from . import engram_hash

# Keys that would change the mathematics, and the only value this implementation has.
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "num_key_value_heads": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_hash_layers": 0,
    "gate_temp": 1.0,
}
# Names that the official inference code gives the keys of the published file.
_SYNONYMS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "rope_head_dim": "qk_rope_head_dim",
    "norm_eps": "rms_norm_eps",
    "max_seq_len": "max_position_embeddings",
    "original_seq_len": "original_max_position_embeddings",
    "window_size": "sliding_window",
    "kv_source_layers": "kv_source_layer_ids",
    "index_source_layers": "index_source_layer_ids",
    "candidate_source_layer": "candidate_source_layer_id",
    "moe_inter_dim": "moe_intermediate_size",
    "n_activated_experts": "num_experts_per_tok",
    "score_func": "scoring_func",
    "route_scale": "routed_scaling_factor",
    "engram_layers": "engram_layer_ids",
    "engram_pad_id": "engram_pad_token_id",
    "n_mtp_layers": "num_nextn_predict_layers",
    "dspark_target_layers": "dspark_target_layer_ids",
    "dspark_n_activated_experts": "dspark_num_experts_per_tok",
}
# The published file nests these in ``rope_scaling``.
_ROPE_KEYS = {
    "factor": "rope_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "original_max_position_embeddings": "original_max_position_embeddings",
}
_LISTS = (
    "compress_ratios",
    "kv_source_layer_ids",
    "index_source_layer_ids",
    "engram_layer_ids",
    "engram_num_embeddings",
    "dspark_target_layer_ids",
    "eos_token_id",
)
# Values that share one scale in the caches and in the inputs of quantised weights.
_BLOCK = 32


def _items() -> Any:
    return field(converter=as_items)


def _ids(value: object) -> object:
    """One token id or a list of them, as a tuple."""
    return (value,) if is_integer(value) else as_items(value)


def _increasing(value: object, below: int) -> bool:
    """Whether ``value`` is a non-empty tuple of increasing integers from 0 to ``below`` − 1."""
    if not isinstance(value, tuple) or not value or not all(is_integer(item) for item in value):
        return False
    return value[0] >= 0 and value[-1] < below and all(a < b for a, b in zip(value, value[1:], strict=False))


@frozen(kw_only=True)
class Geometry:
    """Sizes of one model, validated on construction.

    Fields carry the names and meanings of the published text configuration; ``rope_factor``, ``beta_fast``, ``beta_slow`` and
    ``original_max_position_embeddings`` are those of its ``rope_scaling``. ``compress_ratios`` has an entry for each target
    layer and then for each draft stage. ``eos_token_id`` is a tuple, whether the file has one id or several.

    Raises:
        CheckpointError: if a value has the wrong type or range, or two values contradict each other. The message is one
            line with the key, the value and what is allowed.
    """

    vocab_size: int = integer(1)
    hidden_size: int = integer(1)
    num_hidden_layers: int = integer(1)
    num_attention_heads: int = integer(1)
    head_dim: int = integer(1)
    qk_rope_head_dim: int = integer(2)
    q_lora_rank: int = integer(1)
    o_lora_rank: int = integer(1)
    o_groups: int = integer(1)
    swiglu_limit: float = number(0, math.inf)
    rms_norm_eps: float = number(0, 1)
    max_position_embeddings: int = integer(1)
    rope_theta: float = number(1, math.inf)
    compress_rope_theta: float = number(1, math.inf)
    rope_factor: float = number(0, math.inf)
    beta_fast: float = number(0, math.inf)
    beta_slow: float = number(0, math.inf)
    original_max_position_embeddings: int = integer(1)
    sliding_window: int = integer(1)
    compress_ratios: tuple[int, ...] = _items()
    kv_source_layer_ids: tuple[int, ...] = _items()
    index_source_layer_ids: tuple[int, ...] = _items()
    index_n_heads: int = integer(1)
    index_head_dim: int = integer(1)
    index_topk: int = integer(1)
    candidate_source_layer_id: int = integer(0)
    candidate_topk_blocks: int = integer(1)
    candidate_block_size: int = integer(1)
    moe_intermediate_size: int = integer(1)
    n_routed_experts: int = integer(1)
    n_shared_experts: int = integer(0)
    num_experts_per_tok: int = integer(1)
    routed_scaling_factor: float = number(0, math.inf)
    hc_mult: int = integer(2)
    hc_sinkhorn_iters: int = integer(1)
    hc_eps: float = number(0, 1)
    engram_layer_ids: tuple[int, ...] = _items()
    engram_num_embeddings: tuple[int, ...] = _items()
    engram_max_ngram_size: int = integer(2)
    engram_vocab_size: int = integer(2)
    engram_n_heads: int = integer(1)
    engram_head_dim: int = integer(1)
    engram_pad_token_id: int = integer(0)
    engram_compressed_vocab_size: int = integer(1)
    num_nextn_predict_layers: int = integer(1)
    dspark_block_size: int = integer(1)
    dspark_noise_token_id: int = integer(0)
    dspark_target_layer_ids: tuple[int, ...] = _items()
    dspark_markov_rank: int = integer(1)
    dspark_n_routed_experts: int = integer(1)
    dspark_num_experts_per_tok: int = integer(1)
    eos_token_id: tuple[int, ...] = field(converter=_ids)

    def __attrs_post_init__(self) -> None:
        check_rules(self, self._rules())

    def _rules(self) -> Iterator[tuple[str, str, bool]]:
        """Key, what is allowed, whether it holds; later rules rely on earlier ones."""
        yield from self._compression_rules()
        heads, groups = self.num_attention_heads, self.o_groups
        yield "o_groups", f"a divisor of num_attention_heads = {heads}", heads % groups == 0
        rope = self.qk_rope_head_dim
        for key in ("head_dim", "index_head_dim"):
            width = getattr(self, key)
            yield key, f"a multiple of {_BLOCK}, the values of one scale in the caches", width % _BLOCK == 0
            yield "qk_rope_head_dim", f"an even number up to {key} = {width}", rope % 2 == 0 and rope <= width
        for key, count in (
            ("num_experts_per_tok", "n_routed_experts"),
            ("dspark_num_experts_per_tok", "dspark_n_routed_experts"),
        ):
            yield key, f"at most {count} = {getattr(self, count)}", getattr(self, key) <= getattr(self, count)
        yield "n_shared_experts", "1", self.n_shared_experts == 1
        layers, vocabulary = self.num_hidden_layers, self.vocab_size
        for key in ("engram_layer_ids", "dspark_target_layer_ids"):
            yield key, f"increasing layer numbers below {layers}", _increasing(getattr(self, key), layers)
        compressed = self.engram_compressed_vocab_size
        yield "engram_compressed_vocab_size", f"at most vocab_size = {vocabulary}", compressed <= vocabulary
        sums = tuple(sum(self.engram_primes(layer)) for layer in self.engram_layer_ids)
        yield (
            "engram_num_embeddings",
            f"{list(sums)}, the sums of the primes from engram_vocab_size = {self.engram_vocab_size}",
            self.engram_num_embeddings == sums,
        )
        for key in ("engram_pad_token_id", "dspark_noise_token_id"):
            yield key, f"a token id below vocab_size = {vocabulary}", getattr(self, key) < vocabulary
        ids = self.eos_token_id
        yield "eos_token_id", "a token id or a list of token ids", isinstance(ids, tuple) and bool(ids)
        yield (
            "eos_token_id",
            f"distinct token ids below vocab_size = {vocabulary}",
            all(is_integer(item) and 0 <= item < vocabulary for item in ids) and len(set(ids)) == len(ids),
        )

    def _compression_rules(self) -> Iterator[tuple[str, str, bool]]:
        layers, stages, ratios = self.num_hidden_layers, self.num_nextn_predict_layers, self.compress_ratios
        words = isinstance(ratios, tuple) and all(is_integer(item) and item in (0, 1, 2) for item in ratios)
        yield "compress_ratios", "a list of 0, 1 and 2", words
        yield (
            "compress_ratios",
            f"an entry for each of {layers} layers and {stages} draft stages",
            len(ratios) == layers + stages,
        )
        yield "compress_ratios", f"0 for the {stages} draft stages", not any(ratios[layers:])
        for key in ("kv_source_layer_ids", "index_source_layer_ids"):
            sources = getattr(self, key)
            yield key, f"increasing layer numbers below {layers}", _increasing(sources, layers)
            yield key, "only layers of a compress ratio above 0", all(ratios[layer] for layer in sources)
        sources = self.kv_source_layer_ids
        # a selection made from one source's rows means nothing to another's
        yield (
            "index_source_layer_ids",
            f"every KV source {list(sources)}",
            set(sources) <= set(self.index_source_layer_ids),
        )
        orphans = [layer for layer in range(layers) if ratios[layer] and not self._reads_own_ratio(layer)]
        yield (
            "kv_source_layer_ids",
            f"for every compressed layer a source before it with its ratio (layers without one: {orphans[:4]})",
            not orphans,
        )
        candidate = self.candidate_source_layer_id
        yield (
            "candidate_source_layer_id",
            f"an index source not before the last KV source {sources[-1]}",
            candidate in self.index_source_layer_ids and candidate >= sources[-1],
        )
        # the newest block may hold a single row
        reach = (self.candidate_topk_blocks - 1) * self.candidate_block_size + 1
        yield (
            "index_topk",
            f"at most {reach}, the rows that candidate blocks are sure to hold",
            self.index_topk <= reach,
        )

    def _reads_own_ratio(self, layer: int) -> bool:
        before = [source for source in self.kv_source_layer_ids if source <= layer]
        return bool(before) and self.compress_ratios[before[-1]] == self.compress_ratios[layer]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Geometry":
        """Build from the contents of a ``config.json``: the outer form with ``text_config``, or the text part alone.

        Keys may have the names of the published file or those of the official inference code; the published ones win. The
        YaRN numbers may be nested in ``rope_scaling`` or flat. Unknown keys are ignored (the file also describes the vision
        tower). Does not change ``config``.

        Raises:
            CheckpointError: if a key is missing, has a value this implementation has not got, or contradicts another.
        """
        text = text_section(config)
        values = {_SYNONYMS[key]: value for key, value in text.items() if key in _SYNONYMS and value is not None}
        values |= {key: value for key, value in text.items() if key not in _SYNONYMS and value is not None}
        require_fixed(values, _FIXED)
        for key, nested in _nested_rope(values).items():
            values.setdefault(key, nested)
        values.setdefault("n_shared_experts", 1)
        # the stop ids stand beside the text model in the published file
        if "eos_token_id" not in values and config.get("eos_token_id") is not None:
            values["eos_token_id"] = config["eos_token_id"]
        return build(cls, values)

    def to_config(self) -> dict[str, Any]:
        """Return a text configuration (plain JSON types) that :meth:`from_config` reads back to an equal geometry."""
        values: dict[str, Any] = {**asdict(self), **{key: list(getattr(self, key)) for key in _LISTS}}
        scaling = {"type": "yarn", **{nested: values.pop(flat) for nested, flat in _ROPE_KEYS.items()}}
        fixed = {key: value for key, value in _FIXED.items() if key not in ("num_hash_layers", "gate_temp")}
        return {
            "model_type": "deepseek_v41_text",
            "dtype": "bfloat16",
            **fixed,
            **values,
            "rope_scaling": scaling,
            "bos_token_id": 0,
            "pad_token_id": self.engram_pad_token_id,
        }

    @property
    def num_stages(self) -> int:
        """Stages of the drafter."""
        return self.num_nextn_predict_layers

    def kv_source(self, layer: int) -> int:
        """Layer whose compressed rows and index keys ``layer`` reads: the nearest source not after it.

        Only for layers of a compress ratio above 0.
        """
        return max(source for source in self.kv_source_layer_ids if source <= layer)

    def index_source(self, layer: int) -> int:
        """Layer whose selected rows ``layer`` reads: the nearest index source not after it. As for :meth:`kv_source`."""
        return max(source for source in self.index_source_layer_ids if source <= layer)

    def sources_of_ratio(self, ratio: int) -> tuple[int, ...]:
        """KV source layers with this compress ratio, in order; their place is the layer index of their cache fields."""
        return tuple(layer for layer in self.kv_source_layer_ids if self.compress_ratios[layer] == ratio)

    @property
    def streams_width(self) -> int:
        """Width of the residual: hc_mult streams of hidden_size."""
        return self.hc_mult * self.hidden_size

    @property
    def hc_outputs(self) -> int:
        """Coefficients of one hyper-connection site: hc_mult to read, hc_mult to write, hc_mult² to mix the streams."""
        return self.hc_mult * (self.hc_mult + 2)

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def group_width(self) -> int:
        """Width of the attention heads of one output group together."""
        return self.query_width // self.o_groups

    @property
    def output_width(self) -> int:
        """Width of all output groups after their first projection."""
        return self.o_groups * self.o_lora_rank

    @property
    def index_width(self) -> int:
        """Width of all index query heads together."""
        return self.index_n_heads * self.index_head_dim

    @property
    def feature_width(self) -> int:
        """Width of the drafter's input for one token: one hidden vector of each tapped layer."""
        return len(self.dspark_target_layer_ids) * self.hidden_size

    @property
    def engram_rows(self) -> int:
        """Table rows that an Engram layer looks up for each token: n-gram size outer, head inner."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def engram_width(self) -> int:
        """Width of the rows of one lookup together."""
        return self.engram_rows * self.engram_head_dim

    def engram_multipliers(self, layer: int) -> tuple[int, ...]:
        """Hash multipliers of Engram layer ``layer``, newest token first."""
        return engram_hash.multipliers(
            layer=layer, compressed_vocab=self.engram_compressed_vocab_size, max_ngram=self.engram_max_ngram_size
        )

    def engram_primes(self, layer: int) -> tuple[int, ...]:
        """Table sizes of the ``engram_rows`` lookups of Engram layer ``layer``."""
        ordinal = self.engram_layer_ids.index(layer)
        return hash_tables.primes(base=self.engram_vocab_size, heads=self.engram_rows, ordinal=ordinal)


def _nested_rope(text: Mapping[str, Any]) -> dict[str, Any]:
    """The YaRN numbers in ``rope_scaling``, under their flat names."""
    nested = text.get("rope_scaling")
    if nested is None:
        return {}
    kind = nested.get("type", nested.get("rope_type", "yarn")) if isinstance(nested, Mapping) else None
    if kind != "yarn":
        raise refuse("rope_scaling", nested, f"an object of type 'yarn' with {', '.join(_ROPE_KEYS)}")
    return {flat: nested[key] for key, flat in _ROPE_KEYS.items() if nested.get(key) is not None}


# The text_config of the published checkpoint.
REAL = Geometry(
    vocab_size=129280,
    hidden_size=5120,
    num_hidden_layers=40,
    num_attention_heads=64,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=1280,
    o_lora_rank=1024,
    o_groups=8,
    swiglu_limit=10.0,
    rms_norm_eps=1e-20,
    max_position_embeddings=1048576,
    rope_theta=10000,
    compress_rope_theta=160000,
    rope_factor=16,
    beta_fast=32,
    beta_slow=1,
    original_max_position_embeddings=65536,
    sliding_window=128,
    compress_ratios=(0, 0, *(2,) * 18, *(1,) * 20, 0, 0, 0),
    kv_source_layer_ids=(2, 8, 14, 20),
    index_source_layer_ids=(2, 8, 14, 20, 24, 28, 32, 36),
    index_n_heads=32,
    index_head_dim=128,
    index_topk=512,
    candidate_source_layer_id=20,
    candidate_topk_blocks=2048,
    candidate_block_size=8,
    moe_intermediate_size=2304,
    n_routed_experts=384,
    n_shared_experts=1,
    num_experts_per_tok=6,
    routed_scaling_factor=1.5,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    engram_layer_ids=(1, 14),
    engram_num_embeddings=(384006168, 384016682),
    engram_max_ngram_size=4,
    engram_vocab_size=16000000,
    engram_n_heads=8,
    engram_head_dim=256,
    engram_pad_token_id=2,
    engram_compressed_vocab_size=99092,
    num_nextn_predict_layers=3,
    dspark_block_size=5,
    dspark_noise_token_id=128799,
    dspark_target_layer_ids=(37, 38, 39),
    dspark_markov_rank=256,
    dspark_n_routed_experts=128,
    dspark_num_experts_per_tok=3,
    eos_token_id=(1,),
)

# Every feature of the architecture at small sizes: both ratios with shared rows, a second-level indexer, Engram before and
# inside the compressed layers, YaRN that bends (its range is reached after 64 tokens), three draft stages.
TINY = evolve(
    REAL,
    vocab_size=512,
    hidden_size=128,
    num_hidden_layers=10,
    num_attention_heads=4,
    head_dim=64,
    qk_rope_head_dim=16,
    q_lora_rank=64,
    o_lora_rank=32,
    o_groups=2,
    max_position_embeddings=512,
    rope_factor=4,
    original_max_position_embeddings=64,
    sliding_window=16,
    compress_ratios=(0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0),
    kv_source_layer_ids=(2, 4, 6),
    index_source_layer_ids=(2, 4, 6, 8),
    index_n_heads=2,
    index_head_dim=32,
    index_topk=8,
    candidate_source_layer_id=6,
    candidate_topk_blocks=4,
    candidate_block_size=4,
    moe_intermediate_size=32,
    n_routed_experts=8,
    num_experts_per_tok=2,
    engram_layer_ids=(1, 4),
    engram_num_embeddings=(462, 630),
    engram_vocab_size=64,
    engram_n_heads=2,
    engram_head_dim=32,
    engram_compressed_vocab_size=384,
    dspark_noise_token_id=511,
    dspark_target_layer_ids=(7, 8, 9),
    dspark_markov_rank=16,
    dspark_n_routed_experts=4,
    dspark_num_experts_per_tok=2,
)
