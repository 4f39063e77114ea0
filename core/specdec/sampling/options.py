"""Which options a request uses, and what refuses them before its first round. Torch-free."""

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import fields

from specdec.declaration import REQUEST_OPTIONS, Recipe
from specdec.errors import UsageError
from specdec.sampling.params import SamplingParams

__all__ = ["EXTENDED_OPTIONS", "MAX_LOGPROBS", "options_in_use", "refuse_unsupported"]

#: Options that ordinary rounds leave out: a model must be prepared for them, and rounds with such a lane are extended ones.
EXTENDED_OPTIONS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_new_tokens",
    "logprobs",
)
#: Alternatives that a request may ask for with ``logprobs`` or ``prompt_logprobs`` (OpenAI API reference, ``top_logprobs``).
MAX_LOGPROBS = 20
#: Without effect when the most probable token is taken.
_FILTERS = ("temperature", "top_k", "top_p", "min_p")


def options_in_use(sampling: SamplingParams, **others: Any) -> Mapping[str, Any]:
    """Options that change something, with their values, in the order of ``REQUEST_OPTIONS``.

    others: options of a request outside its sampling settings (``min_new_tokens``, ``ignore_eos``, ``logprobs``,
    ``prompt_logprobs``, ``stop``, ``grammar``); 0, False, None and () are off, except that 0 log-probabilities asks for those of
    the tokens alone.
    """
    neutral = {field.name: field.default for field in fields(SamplingParams)}
    used = {name: getattr(sampling, name) for name in neutral if getattr(sampling, name) != neutral[name]}
    if sampling.greedy:
        used = {name: value for name, value in used.items() if name not in _FILTERS}
    for name, value in others.items():
        if value is not None and (value or name in ("logprobs", "prompt_logprobs")):
            used[name] = value
    return {name: used[name] for name in REQUEST_OPTIONS if name in used}


def refuse_unsupported(recipe: Recipe, used: Iterable[str]) -> None:
    """Raises UsageError if one of the used options is among those that the recipe cannot honour."""
    refused = [name for name in used if name in recipe.unsupported_options]
    if refused:
        raise UsageError(
            f"recipe {recipe.name!r} cannot honour {', '.join(refused)}; leave {'it' if len(refused) == 1 else 'them'} out"
        )
