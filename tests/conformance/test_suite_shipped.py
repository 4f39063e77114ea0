"""The conformance suite on the checkpoints that plugins ship: what a stranger gets who names the recipe and nothing else."""

from __future__ import annotations

import pytest
from deepseek_conformance import DeepseekFacts
from glm_conformance import GlmFacts
from qwen_conformance import QwenFacts

from specdec.testing.conformance import RoundConformance

pytestmark = pytest.mark.slow


class TestShippedQwen38(QwenFacts, RoundConformance):
    """Every standard test on sixteen trained layers."""


class TestShippedGlm53(GlmFacts, RoundConformance):
    """Every standard test on seventeen trained layers, coded scales and quantised activations included."""


class TestShippedDeepseekV41(DeepseekFacts, RoundConformance):
    """Every standard test on sixteen trained layers: both compressions, Engram tables and a block drafter."""
