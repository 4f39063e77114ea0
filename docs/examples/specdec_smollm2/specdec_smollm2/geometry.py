"""Every size of a Llama model, read from a ``config.json`` and checked. No torch here.

A GGUF file's metadata is brought into the same form first (``.gguf_checkpoint``), so the target knows one kind of settings.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import frozen

from specdec.config_fields import build, check_rules, integer, number, refuse, require_fixed

# Keys that would change the mathematics, and the only value this implementation has.
_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}


@frozen(kw_only=True)
class Geometry:
    """Sizes of one model; fields carry the names and meanings of a published ``config.json``.

    Raises:
        CheckpointError: if a value has the wrong type or range, or two values contradict each other.
    """

    vocab_size: int = integer(1)
    hidden_size: int = integer(1)
    intermediate_size: int = integer(1)
    num_hidden_layers: int = integer(1)
    num_attention_heads: int = integer(1)
    num_key_value_heads: int = integer(1)
    head_dim: int = integer(2)
    rms_norm_eps: float = number(0, 1)
    rope_theta: float = number(0, math.inf)
    max_position_embeddings: int = integer(1)
    tie_word_embeddings: bool = False

    def __attrs_post_init__(self) -> None:
        check_rules(self, self._rules())

    def _rules(self) -> Iterator[tuple[str, str, bool]]:
        heads, kv = self.num_attention_heads, self.num_key_value_heads
        yield "num_attention_heads", f"a multiple of num_key_value_heads = {kv}", heads % kv == 0
        yield "head_dim", "an even number", self.head_dim % 2 == 0
        yield "tie_word_embeddings", "true or false", isinstance(self.tie_word_embeddings, bool)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Geometry":
        """Builds from the contents of a ``config.json``. Unknown keys are ignored.

        Raises:
            CheckpointError: if a key is missing, has a value this implementation has not got, or contradicts another.
        """
        require_fixed(config, _FIXED)
        values = {key: value for key, value in config.items() if value is not None}
        # older files have rope_theta outside and rope_scaling, newer ones one object for both
        rope = values.get("rope_parameters", values.get("rope_scaling", {}))
        if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type", "default")) != "default":
            raise refuse("rope_parameters", rope, "an object whose rope_type is 'default'")
        values = {"rope_theta": 10_000.0, "tie_word_embeddings": False, **values, **rope}
        values.setdefault("num_key_value_heads", values.get("num_attention_heads"))
        hidden, heads = values.get("hidden_size"), values.get("num_attention_heads")
        if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
            values.setdefault("head_dim", hidden // heads)
        return build(cls, values)

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_key_value_heads * self.head_dim


#: SmolLM2-135M-Instruct, from the metadata of its GGUF file.
REAL = Geometry(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=100_000.0,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
