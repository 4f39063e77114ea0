"""The conformance suite on the n-gram example without installing it: its drafter in the place of Qwen's own, on random weights.

Over 24 token ids nearly everything was seen before, so that lookups of any length match, rightly and wrongly.
"""

from __future__ import annotations

from attrs import evolve
from ngram_example import NgramDrafter, drafter_layout
from qwen_conformance import QwenConformance

from specdec.testing.conformance import Bench


class NgramConformance(QwenConformance):
    """Facts as in the example's own test."""

    draft_lag = 0
    proposals = "placed"
    reads_feedback = False

    @classmethod
    def prepared(cls, bench: Bench) -> Bench:
        recipe = evolve(bench.recipe, drafter_layout=drafter_layout(bench.recipe.max_draft_tokens))
        drafter = NgramDrafter.build(recipe=recipe, target=bench.target, capacities=bench.capacities)
        return evolve(bench, recipe=recipe, drafter=drafter)
