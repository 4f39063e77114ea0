"""The conformance suite on the checkpoint that the plugin ships: what a stranger gets who names the recipe and nothing else."""

from __future__ import annotations

import pytest
from qwen_conformance import QwenFacts

from specdec.testing.conformance import RoundConformance

pytestmark = pytest.mark.slow


class TestShipped(QwenFacts, RoundConformance):
    """Every standard test on sixteen trained layers."""
