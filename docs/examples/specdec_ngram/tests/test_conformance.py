"""The conformance suite of the core on the target's small checkpoint."""

from specdec.testing.conformance import RoundConformance


class TestNgram(RoundConformance):
    """Every standard test."""

    recipe = "qwen3.8-ngram"
    draft_lag = 0
    # tokens are placed, not drawn from logits, and nothing is read of what the target computed
    proposals = "placed"
    reads_feedback = False
