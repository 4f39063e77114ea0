"""The plugin's hooks. Torch comes with ``.drafter``, inside the hook that needs it."""

from specdec import hookimpl

from .recipe import RECIPE


@hookimpl
def declare_speculation():
    """The one recipe of this plugin, ``qwen3.8-ngram``."""
    return [RECIPE]


@hookimpl
def load_drafter(recipe, target, capacities):
    """The lookup; there are no weights to load."""
    from .drafter import NgramDrafter

    return NgramDrafter.build(recipe=recipe, target=target, capacities=capacities)
