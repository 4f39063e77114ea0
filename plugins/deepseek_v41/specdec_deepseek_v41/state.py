"""Per-request state of the DeepSeek-V4.1-Flash target and of its DSpark drafter, as layouts. No torch here.

Every layer and every draft stage has a sliding window of rows that are keys and values at once. A few source layers also keep
compressed rows and index keys of the whole context, which the layers after them share. The drafter needs nothing that grows.
"""

from specdec.context_fields import recurrent_dtype
from specdec.declaration import StateField, StateKind, StateLayout

from .geometry import Geometry

PAGE_TOKENS = 64


def _window(geometry: Geometry, layers: int, dtype: str, source: str) -> StateField:
    return StateField(
        name="window",
        kind=StateKind.WINDOW,
        shape=(geometry.head_dim,),
        dtype=dtype,
        layers=layers,
        extent=geometry.sliding_window,
        source=source,
    )


def _compressed(geometry: Geometry, ratio: int, dtype: str) -> list[StateField]:
    """Rows and index keys of the sources with this ratio; a page holds whole groups."""
    layers = len(geometry.sources_of_ratio(ratio))
    if not layers:
        return []
    return [
        StateField(
            name=f"{name}_r{ratio}",
            kind=StateKind.PAGED,
            shape=(width,),
            dtype=dtype,
            layers=layers,
            extent=ratio,
            source=source,
        )
        for name, width, source in (
            ("compressed", geometry.head_dim, f"compressed key and value row of {ratio} tokens, FP4-representable"),
            ("index_keys", geometry.index_head_dim, f"index key of {ratio} tokens, FP4-representable"),
        )
    ]


def target_layout(geometry: Geometry, *, max_draft_tokens: int = 7, dtype: str = "bfloat16") -> StateLayout:
    """State of one target request. dtype: torch dtype name of activations. Pure data; allocates nothing.

    Row i of ``window`` with N consumed tokens is position N − extent + i; ``engram_ids`` are oldest first. The layers of a
    field ``…_r2`` or ``…_r1`` are the sources of that ratio in order, those of ``pending`` the sources of ratio 2.
    """
    columns = max_draft_tokens + 1
    fields = [
        _window(geometry, geometry.num_hidden_layers, dtype, "attention row of each layer, FP8-representable"),
        *_compressed(geometry, 2, dtype),
        *_compressed(geometry, 1, dtype),
    ]
    pooled = len(geometry.sources_of_ratio(2))
    if pooled:
        fields.append(
            StateField(
                name="pending",
                kind=StateKind.WINDOW,
                shape=(2, geometry.head_dim),
                dtype=recurrent_dtype(dtype),  # values that are still to be pooled
                layers=pooled,
                source="value and score of the last input, first half of an open group; meant only if N is odd",
            )
        )
    fields += [
        StateField(
            name="engram_ids",
            kind=StateKind.WINDOW,
            shape=(),
            dtype="int64",
            extent=geometry.engram_max_ngram_size - 1,
            fill=-1,
            source="compressed ids of the last inputs; -1 before the first",
        ),
        StateField(
            name="features",
            kind=StateKind.COLUMNS,
            shape=(geometry.feature_width,),
            dtype=dtype,
            extent=columns,
            source="stream means at the inputs of the tapped layers: what the drafter absorbs",
        ),
        StateField(
            name="sampling_vector",
            kind=StateKind.COLUMNS,
            shape=(geometry.hidden_size,),
            dtype=dtype,
            extent=columns,
            source="output of the final norm: input of the vocabulary head",
        ),
    ]
    return StateLayout(owner="target", fields=tuple(fields), max_draft_tokens=max_draft_tokens, page_tokens=PAGE_TOKENS)


def drafter_layout(geometry: Geometry, *, max_draft_tokens: int = 7, dtype: str = "bfloat16") -> StateLayout:
    """State of the drafter for one request: a window of each stage, and the number of absorbed inputs. As above.

    The rows of a drafted block are not kept, and a window does not depend on the length of the block.
    """
    return StateLayout(
        owner="drafter",
        fields=(
            _window(geometry, geometry.num_stages, dtype, "attention row of each stage, FP8-representable"),
            StateField(
                name="rows",
                kind=StateKind.ROW,
                shape=(),
                dtype="int64",
                source="absorbed inputs: as many as the target consumed",
            ),
        ),
        max_draft_tokens=max_draft_tokens,
        page_tokens=PAGE_TOKENS,
    )
