"""State fields of a grouped context: what ``specdec.ops.grouped_rows`` and the drafters built on it expect in a layout.

A context whose tokens are compressed in groups keeps, beside the plugin's own pages, one key per group, a ring of raw rows of
the open group, and the account of positions. Declaration layer: no torch.
"""

from specdec.layout import StateField, StateKind

__all__ = ["absorbed_rows", "group_fields", "recurrent_dtype"]


def recurrent_dtype(dtype: str) -> str:
    """Dtype name of recurrent matrices beside activations of ``dtype``: float32, or float64 for float64."""
    return "float64" if dtype == "float64" else "float32"


def group_fields(
    *,
    layers: int,
    dtype: str,
    group_tokens: int,
    key_width: int,
    raw_shape: tuple[int, ...],
    ring_extent: int,
    key_source: str,
    raw_source: str,
) -> tuple[StateField, ...]:
    """``group_keys``, ``raw_keys``, ``raw_tags`` and ``anchor`` of ``layers`` layers that see the same positions.

    dtype: torch dtype name of keys. group_tokens: tokens of a group. key_width: elements of a group's key. raw_shape: what the
    ring keeps of each token. ring_extent: its entries. key_source, raw_source: what the two are, for people. Pure data.
    """
    return (
        StateField(
            name="group_keys",
            kind=StateKind.PAGED,
            shape=(key_width,),
            dtype=dtype,
            layers=layers,
            extent=group_tokens,
            source=key_source,
        ),
        StateField(
            name="raw_keys",
            kind=StateKind.RING,
            shape=raw_shape,
            dtype=dtype,
            layers=layers,
            extent=ring_extent,
            source=raw_source,
        ),
        StateField(
            name="raw_tags",
            kind=StateKind.RING,
            shape=(),
            dtype="int64",
            extent=ring_extent,
            fill=-1,
            source="exact position held by each ring entry; every layer of one owner sees the same positions",
        ),
        StateField(
            name="anchor",
            kind=StateKind.ROW,
            shape=(),
            dtype="int64",
            fill=-1,
            source="first position of the last interval; after a prompt its last position",
        ),
    )


def absorbed_rows() -> StateField:
    """``rows`` of a recursive drafter."""
    return StateField(
        name="rows",
        kind=StateKind.ROW,
        shape=(),
        dtype="int64",
        source="absorbed pairs: max(consumed − 1, 0) after every round",
    )
