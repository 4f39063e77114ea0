"""Per-request state of the Qwen3.8-Flash target and of its MTP drafter, as layouts. No torch here.

Field sizes follow the architecture (``qwen4_exp``): gated delta net matrices and convolution windows, sparse attention pages
with compressed keys and the ring of raw selector keys, the n-gram embedding's window and token history, and the two rows a
drafter and a prefix checkpoint need, feedback and sampling vector.
"""

from typing import Any

from specdec.context_fields import absorbed_rows, group_fields, recurrent_dtype
from specdec.declaration import StateField, StateKind, StateLayout

from .geometry import Geometry

PAGE_TOKENS = 64
# Raw selector keys: after a width-W interval of which one input was accepted the next one may need two earlier positions, so
# W + 2 entries are necessary and sufficient; 16 holds eight inputs and divides the page.
RING_EXTENT = 16
RING_HISTORY = 2


def _sparse_attention(geometry: Geometry, layers: int, dtype: str) -> tuple[StateField, ...]:
    return (
        StateField(
            name="kv",
            kind=StateKind.PAGED,
            shape=(2, geometry.num_key_value_heads, geometry.head_dim),
            dtype=dtype,
            layers=layers,
            source="keys after norm and rope, and values, of every attention layer",
        ),
        *group_fields(
            layers=layers,
            dtype=dtype,
            group_tokens=geometry.indexer_compress_ratio,
            key_width=geometry.indexer_head_dim,
            raw_shape=(geometry.indexer_head_dim,),
            ring_extent=RING_EXTENT,
            key_source="one compressed selector key per indexer_compress_ratio tokens",
            raw_source="selector keys as projected, of the open group",
        ),
    )


def _delta_state(geometry: Geometry, columns: int, dtype: str, recurrence: str) -> tuple[StateField, ...]:
    """The recurrent matrices: one live matrix and records of a verification's rows, or one column per verified row."""
    heads = geometry.linear_num_key_heads
    values = geometry.value_width // heads
    common: dict[str, Any] = {"dtype": recurrent_dtype(dtype), "layers": len(geometry.linear_layers)}
    compact = recurrence == "records"
    matrix = StateField(
        name="delta_state",
        kind=StateKind.ROW if compact else StateKind.COLUMNS,
        shape=(heads, values, geometry.linear_key_head_dim),
        extent=1 if compact else columns,
        source="gated delta net matrices [value, key], one per value head, grouped by key head",
        **common,
    )
    if not compact:
        return (matrix,)
    records = (
        ("delta_corrections", (heads, values), "correction vectors β (v − S k) of verified rows"),
        ("delta_keys", (heads, geometry.linear_key_head_dim), "normalised keys of verified rows"),
        ("delta_decays", (heads, geometry.linear_num_value_heads // heads), "decays of verified rows"),
    )
    return (
        matrix,
        *(
            StateField(name=name, kind=StateKind.RECORDS, shape=shape, extent=columns, source=source, **common)
            for name, shape, source in records
        ),
    )


def target_layout(
    geometry: Geometry, *, max_draft_tokens: int = 7, dtype: str = "bfloat16", recurrence: str = "records"
) -> StateLayout:
    """State of one target request. dtype: torch dtype name of activations. Pure data; allocates nothing.

    recurrence: "records" keeps one live matrix a layer and small records of each verified row, which commit replays; "columns"
    keeps a whole matrix per verified row, the reference that the compact form is compared with.
    """
    columns = max_draft_tokens + 1
    linear, attention = len(geometry.linear_layers), len(geometry.attention_layers)
    fields = [
        *_delta_state(geometry, columns, dtype, recurrence),
        StateField(
            name="delta_conv",
            kind=StateKind.WINDOW,
            shape=(geometry.qkv_width,),
            dtype=dtype,
            layers=linear,
            extent=geometry.linear_conv_kernel_dim - 1,
            source="rows before the short convolution, linear_conv_kernel_dim − 1 of them",
        ),
        *_sparse_attention(geometry, attention, dtype),
        StateField(
            name="feedback",
            kind=StateKind.COLUMNS,
            shape=(geometry.streams_width,),
            dtype=dtype,
            extent=columns,
            source="multi-stream residual after the last layer, before the final mixer",
        ),
        StateField(
            name="sampling_vector",
            kind=StateKind.COLUMNS,
            shape=(geometry.hidden_size,),
            dtype=dtype,
            extent=columns,
            source="input of the vocabulary head",
        ),
    ]
    if geometry.ple_layers:
        fields += [
            StateField(
                name="ngram_conv",
                kind=StateKind.WINDOW,
                shape=(geometry.streams_width,),
                dtype=dtype,
                layers=len(geometry.ple_layers),
                extent=(geometry.ple_conv_kernel_size - 1) * geometry.ngram_size,
                source="normalised rows before the n-gram convolution: kernel − 1 taps, ngram_size apart",
            ),
            StateField(
                name="ngram_tokens",
                kind=StateKind.WINDOW,
                shape=(),
                dtype="int64",
                extent=geometry.ngram_size - 1,
                fill=geometry.eos_token_id,
                source="token ids hashed with the next token; before the sequence they read as the end-of-text id",
            ),
        ]
    return StateLayout(
        owner="target",
        fields=tuple(fields),
        max_draft_tokens=max_draft_tokens,
        page_tokens=PAGE_TOKENS,
        ring_history=RING_HISTORY,
    )


def drafter_layout(geometry: Geometry, *, max_draft_tokens: int = 7, dtype: str = "bfloat16") -> StateLayout:
    """State of the MTP layer for one request: one attention layer and the number of absorbed rows."""
    return StateLayout(
        owner="drafter",
        fields=(
            *_sparse_attention(geometry, 1, dtype),
            absorbed_rows(),
        ),
        max_draft_tokens=max_draft_tokens,
        page_tokens=PAGE_TOKENS,
        ring_history=RING_HISTORY,
    )
