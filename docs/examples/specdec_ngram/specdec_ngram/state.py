"""What the lookup keeps of a request: the tokens that it has consumed."""

from specdec.declaration import StateField, StateKind, StateLayout


def drafter_layout(max_draft_tokens):
    """State for rounds of up to ``max_draft_tokens`` drafts."""
    return StateLayout(
        owner="drafter",
        fields=(
            StateField(
                name="tokens", kind=StateKind.PAGED, shape=(), dtype="int64", source="token id of each position"
            ),
            StateField(name="rows", kind=StateKind.ROW, shape=(), dtype="int64", source="number of consumed tokens"),
        ),
        max_draft_tokens=max_draft_tokens,
    )
