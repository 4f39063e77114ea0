"""The tensors of a Llama checkpoint, under the names of its safetensors form. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specdec.declaration import TensorGroup, TensorInventory

from .geometry import Geometry

if TYPE_CHECKING:
    from specdec.checkpoint.reader import Checkpoint

EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
#: Beginning of the names of a layer's tensors.
LAYER = "model.layers.{l}."


def target_inventory(g: Geometry, *, dtype: str = "float32", head: bool = False) -> TensorInventory:
    """All tensors. dtype: dtype name of all of them; float32 where quantised blocks are read as values. head: whether the
    vocabulary head is stored beside the embedding."""
    hidden, inner = g.hidden_size, g.intermediate_size
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (g.query_width, hidden),
        "self_attn.k_proj": (g.kv_width, hidden),
        "self_attn.v_proj": (g.kv_width, hidden),
        "self_attn.o_proj": (hidden, g.query_width),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    source = "tensor list of the GGUF file, names and order of rows as in the safetensors release"
    single = {EMBEDDING: (g.vocab_size, hidden), FINAL_NORM: (hidden,)}
    if head:
        single[HEAD] = (g.vocab_size, hidden)
    axes = (("l", g.num_hidden_layers),)
    return TensorInventory(
        groups=(
            *(TensorGroup(name=name, shape=shape, dtype=dtype, source=source) for name, shape in single.items()),
            *(
                TensorGroup(name=f"{LAYER}{name}.weight", axes=axes, shape=shape, dtype=dtype, source=source)
                for name, shape in layer.items()
            ),
        )
    )


def inventories(
    config: Mapping[str, Any], checkpoint: Checkpoint | None = None
) -> tuple[TensorInventory, TensorInventory]:
    """See ``Recipe.inventories``: the dtype is that of the embedding; the drafter stores nothing."""
    stored = checkpoint is not None and EMBEDDING in checkpoint
    dtype = checkpoint.spec(EMBEDDING).dtype if checkpoint is not None and stored else "float32"
    head = checkpoint is not None and HEAD in checkpoint
    return target_inventory(Geometry.from_config(config), dtype=dtype, head=head), TensorInventory(groups=())
