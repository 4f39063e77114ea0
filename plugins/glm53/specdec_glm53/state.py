"""Per-request state of the GLM-5.3-Flash target and of its MTP drafter, as layouts. No torch here.

Field sizes follow the architecture (``glm5_next``): KDA matrices and convolution windows, latent pages with pooled index keys
and the ring of raw index keys, and the row a drafter and a prefix checkpoint need, which for this model is one and the same.
"""

from specdec.context_fields import absorbed_rows, group_fields, recurrent_dtype
from specdec.declaration import StateField, StateKind, StateLayout

from .geometry import Geometry

PAGE_TOKENS = 64
# Raw index keys and gates: after a round of W rows of which one was accepted, the next row may close a group whose first rows
# are the two before that round, so W + 2 entries are necessary; they suffice when a group is read before the round's later rows
# are written. A group and the widest round together, twelve in the published model, also hold the three open rows when all rows
# are written first.


def ring_extent_of(geometry: Geometry, max_draft_tokens: int = 7) -> int:
    """Entries of the ring of raw index keys unless a layout is asked for others: a group and the widest round."""
    return geometry.index_kpool + max_draft_tokens + 1


def _ring_history(geometry: Geometry) -> int:
    """Committed entries a ring holds beside a round's rows: of a group that the next round closes, all but an accepted row and
    the closing one."""
    return max(geometry.index_kpool - 2, 0)


def _indexed_attention(geometry: Geometry, layers: int, dtype: str, ring_extent: int) -> tuple[StateField, ...]:
    return (
        StateField(
            name="latents",
            kind=StateKind.PAGED,
            shape=(geometry.kv_lora_rank,),
            dtype=dtype,
            layers=layers,
            source="normalised latent of every token; keys and values of all heads are projections of it",
        ),
        *group_fields(
            layers=layers,
            dtype=dtype,
            group_tokens=geometry.index_kpool,
            key_width=geometry.index_head_dim,
            raw_shape=(2, geometry.index_head_dim),
            ring_extent=ring_extent,
            key_source="one pooled index key per index_kpool tokens",
            raw_source="index keys after their norm, and pooling gates, of the open group",
        ),
    )


def target_layout(
    geometry: Geometry, *, max_draft_tokens: int = 7, dtype: str = "bfloat16", ring_extent: int | None = None
) -> StateLayout:
    """State of one target request. dtype: torch dtype name of activations. Pure data; allocates nothing.

    ring_extent: entries of the ring of raw index keys; None takes ``ring_extent_of``.

    Raises:
        DeclarationError: if the ring is smaller than the open group and the rows of a round need; with both numbers.
    """
    columns = max_draft_tokens + 1
    if ring_extent is None:
        ring_extent = ring_extent_of(geometry, max_draft_tokens)
    fields = [
        StateField(
            name="kda_state",
            kind=StateKind.COLUMNS,
            shape=(geometry.linear_num_heads, geometry.linear_head_dim, geometry.linear_head_dim),
            dtype=recurrent_dtype(dtype),
            layers=len(geometry.linear_layers),
            extent=columns,
            source="KDA matrices [key, value] of each head, one for every verified row",
        ),
        StateField(
            name="kda_conv",
            kind=StateKind.WINDOW,
            shape=(3 * geometry.linear_width,),
            dtype=dtype,
            layers=len(geometry.linear_layers),
            extent=geometry.linear_conv_kernel_dim - 1,
            source="query, key and value rows before the short convolution, linear_conv_kernel_dim − 1 of them",
        ),
        *_indexed_attention(geometry, len(geometry.indexed_layers), dtype, ring_extent),
        StateField(
            name="feedback",
            kind=StateKind.COLUMNS,
            shape=(geometry.hidden_size,),
            dtype=dtype,
            extent=columns,
            source="output of the final norm: input of the vocabulary head and of the next MTP row",
        ),
    ]
    return StateLayout(
        owner="target",
        fields=tuple(fields),
        max_draft_tokens=max_draft_tokens,
        page_tokens=PAGE_TOKENS,
        ring_history=_ring_history(geometry),
    )


def drafter_layout(
    geometry: Geometry, *, max_draft_tokens: int = 7, dtype: str = "bfloat16", ring_extent: int | None = None
) -> StateLayout:
    """State of the MTP layer for one request: one indexed attention layer and the number of absorbed rows.

    Arguments and errors as for :func:`target_layout`.
    """
    if ring_extent is None:
        ring_extent = ring_extent_of(geometry, max_draft_tokens)
    return StateLayout(
        owner="drafter",
        fields=(
            *_indexed_attention(geometry, 1, dtype, ring_extent),
            absorbed_rows(),
        ),
        max_draft_tokens=max_draft_tokens,
        page_tokens=PAGE_TOKENS,
        ring_history=_ring_history(geometry),
    )
