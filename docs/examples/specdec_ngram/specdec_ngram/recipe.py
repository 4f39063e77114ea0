"""The recipe ``qwen3.8-ngram``: what this plugin adds to the target of ``qwen3.8-flash``."""

from specdec.declaration import DrafterRecipe, WidthCatalog

from .state import drafter_layout

RECIPE = DrafterRecipe(
    name="qwen3.8-ngram",
    summary="Qwen3.8-Flash-Next with drafts looked up in the request's own text",
    target="qwen3.8-flash",
    target_distribution="specdec-qwen38",
    drafter_method="n-gram",
    draft_source="lookup",
    default_draft_tokens=5,
    max_draft_tokens=7,
    widths=WidthCatalog(widths=range(1, 9)),
    supports_history_drafts=True,
    drafter_layout=drafter_layout(max_draft_tokens=7),
    sources=(
        ("default_draft_tokens", "as the target's own recipe"),
        ("max_draft_tokens", "the target verifies at most eight inputs: the pending token and seven drafts"),
        ("speculative_token_capacity", "default of the core: 128 target rows"),
    ),
)
