"""What a loaded model holds, as data; see ``Recipe.memory``. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from specdec.declaration import DTYPE_BYTES
from specdec.held import HeldTensor, Keeping, ModelMemory, row_steps, whole_pages
from specdec_ngram.state import drafter_layout

from .geometry import REAL, Geometry
from .inventory import HEAD
from .state import target_layout

if TYPE_CHECKING:
    from specdec.checkpoint.reader import Checkpoint
    from specdec.interfaces import Capacities


def declare(
    settings: Mapping[str, Any] | None, checkpoint: Checkpoint | None, capacities: Capacities, kernels: bool
) -> ModelMemory:
    """Weights in the dtype of activations, whatever the file stores. Raises CheckpointError for settings of another model."""
    g = REAL if settings is None else Geometry.from_config(settings)
    dtype, drafts = capacities.dtype, capacities.max_draft_tokens
    layout = target_layout(g, max_draft_tokens=drafts, dtype=dtype)
    tokens = whole_pages(capacities, layout.page_tokens)
    untied = checkpoint is not None and HEAD in checkpoint
    return ModelMemory(
        vocab_size=g.vocab_size,
        target_layout=layout,
        drafter_layout=drafter_layout(max_draft_tokens=drafts),
        target=(*_target(g, Keeping(dtype=dtype), tokens, heads=1 + untied), row_steps(capacities)),
        drafter=(),
        row_bytes=4 * (4 * g.hidden_size + 2 * g.query_width + 4 * g.kv_width + 3 * g.intermediate_size),
        # a layer copies the pages of a lane's whole context, twice while it masks them
        lane_bytes=2 * tokens * 2 * g.kv_width * DTYPE_BYTES[dtype],
        context_limit=g.max_position_embeddings,
    )


def _target(g: Geometry, keep: Keeping, tokens: int, *, heads: int) -> Iterable[HeldTensor]:
    hidden, inner = g.hidden_size, g.intermediate_size
    yield from keep.tensors("embedding and head", heads, {"weight": ("act", (g.vocab_size, hidden))})
    yield from keep.tensors("final norm", 1, {"scale": ("precise", (hidden,))})
    yield from keep.tensors("rope", 1, dict.fromkeys(("cos", "sin"), ("act", (tokens, g.head_dim))))
    layer: dict[str, tuple[str, tuple[int, ...]]] = {
        "norm scales": ("precise", (2, hidden)),
        "projection": ("act", (g.query_width + 2 * g.kv_width, hidden)),
        "output": ("act", (hidden, g.query_width)),
        "gate and up": ("act", (2 * inner, hidden)),
        "down": ("act", (hidden, inner)),
    }
    yield from keep.tensors("layers", g.num_hidden_layers, layer)
