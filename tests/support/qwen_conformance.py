"""What the conformance suite must know about Qwen3.8-Flash."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve
from qwen_models import write_random_checkpoint

from specdec.testing.conformance import Conformance
from specdec_qwen38.geometry import TINY

#: Four layers with every feature; few token ids, so that a random drafter is right sometimes and laws can be counted.
GEOMETRY = evolve(TINY, vocab_size=24, eos_token_id=23)
#: Weights whose greedy outputs do not repeat themselves.
SEED = 5


class QwenFacts(Conformance):
    """Facts of the recipe; the checkpoint is the shipped one."""

    recipe = "qwen3.8-flash"


class QwenConformance(QwenFacts):
    """On random weights, which the tests are quick with."""

    @classmethod
    def checkpoint(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_random_checkpoint(tmp_path_factory.mktemp("qwen38"), SEED, GEOMETRY)
