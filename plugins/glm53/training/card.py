"""The checkpoint's card (README.md)."""

from training import card

FORMS = {
    "bfloat16": "BF16, nothing quantised",
    "nvfp4_weights": "NVFP4 expert weights",
    "nvfp4_weights_and_activations": "the same with NVFP4 activations in the target's experts (as run)",
}


def render(results: dict) -> str:
    """Returns the card's Markdown from results.json."""
    return card.render(results, architecture="GLM-5.3-Flash", law="temperature 1, top-p 0.95", forms=FORMS)
