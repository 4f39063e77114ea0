"""Names that exporters give the tensors of a text model which is part of a multimodal one, mapped to one spelling.

Declaration layer: nothing is imported here.
"""

__all__ = ["HEAD_NAMES", "TEXT_PREFIX", "TEXT_PREFIXES", "canonical_name"]

#: What the names of the text model's tensors begin with, the vocabulary head's apart.
TEXT_PREFIX = "model.language_model."
#: Older exports wrap the text model in other names, and transformers' plain text class in none; the tensors are the same.
TEXT_PREFIXES = (TEXT_PREFIX, "language_model.model.", "model.")
#: Names of the vocabulary head, the canonical one first.
HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight")


def canonical_name(name: str) -> str:
    """Return the canonical name of a stored tensor.

    ``language_model.model.X`` and ``model.X`` become ``model.language_model.X``; ``language_model.lm_head.X`` becomes
    ``lm_head.X``. Names of the vision tower (``model.visual.``) and names with other beginnings stay. For
    ``Recipe.canonical_name`` and ``Checkpoint.open(directory, rename=canonical_name)``.
    """
    if name.startswith("language_model.lm_head."):
        return name.removeprefix("language_model.")
    if name.startswith("model.visual."):
        return name
    for prefix in TEXT_PREFIXES:
        if name.startswith(prefix):
            return TEXT_PREFIX + name.removeprefix(prefix)
    return name
