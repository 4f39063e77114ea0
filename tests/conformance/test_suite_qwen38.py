"""The conformance suite on Qwen3.8-Flash, four layers and random weights."""

from __future__ import annotations

from qwen_conformance import QwenConformance

from specdec.testing.conformance import RoundConformance


class TestQwen38(QwenConformance, RoundConformance):
    """Every standard test."""
