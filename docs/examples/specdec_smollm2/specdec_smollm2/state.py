"""What the target keeps of a request: keys and values in pages, and the last hidden state. No torch here."""

from specdec.declaration import StateField, StateKind, StateLayout

from .geometry import Geometry


def target_layout(geometry: Geometry, *, max_draft_tokens: int, dtype: str = "float32") -> StateLayout:
    """State for rounds of up to ``max_draft_tokens`` drafts. dtype: torch dtype name of activations."""
    return StateLayout(
        owner="target",
        fields=(
            StateField(
                name="kv",
                kind=StateKind.PAGED,
                shape=(2, geometry.num_key_value_heads, geometry.head_dim),
                dtype=dtype,
                layers=geometry.num_hidden_layers,
                source="keys after rope, and values, of every layer",
            ),
            StateField(
                name="feedback",
                kind=StateKind.COLUMNS,
                shape=(geometry.hidden_size,),
                dtype=dtype,
                extent=max_draft_tokens + 1,
                source="hidden state after the final norm, the input of the vocabulary head, of every verified row",
            ),
        ),
        max_draft_tokens=max_draft_tokens,
    )
