"""Modules of the n-gram example, which is not installed in the development environment."""

import sys

from example_env import EXAMPLES

sys.path.insert(0, str(EXAMPLES / "specdec_ngram"))
from specdec_ngram.drafter import NgramDrafter
from specdec_ngram.recipe import RECIPE
from specdec_ngram.state import drafter_layout

# it holds a folder of tests, too, which is nobody's package
sys.path.remove(str(EXAMPLES / "specdec_ngram"))

__all__ = ["RECIPE", "NgramDrafter", "drafter_layout"]
