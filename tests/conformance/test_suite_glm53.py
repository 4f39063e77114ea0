"""The conformance suite on GLM-5.3-Flash, five layers and random weights."""

from __future__ import annotations

from glm_conformance import GlmConformance

from specdec.testing.conformance import RoundConformance


class TestGlm53(GlmConformance, RoundConformance):
    """Every standard test."""
