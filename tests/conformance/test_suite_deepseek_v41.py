"""The conformance suite on DeepSeek-V4.1-Flash, seven layers and random weights."""

from __future__ import annotations

from deepseek_conformance import DeepseekConformance

from specdec.testing.conformance import RoundConformance


class TestDeepseekV41(DeepseekConformance, RoundConformance):
    """Every standard test."""
