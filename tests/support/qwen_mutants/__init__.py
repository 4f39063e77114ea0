"""Deliberate faults of the Qwen target and drafter, of state stores and of rounds, each with the standard test that must notice
it. Importing this package fills ``MUTANTS``."""

from mutants import MUTANTS

from qwen_mutants import copies, draft_history, lanes_and_ends, options, prompt_scores, sampling, target_state

__all__ = [
    "MUTANTS",
    "copies",
    "draft_history",
    "lanes_and_ends",
    "options",
    "prompt_scores",
    "sampling",
    "target_state",
]
