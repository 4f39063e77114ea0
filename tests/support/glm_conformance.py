"""What the conformance suite must know about GLM-5.3-Flash."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve
from glm_models import write_random_checkpoint

from specdec.testing.conformance import Conformance
from specdec_glm53.geometry import TINY, dense_first, interleaved

#: Five layers with every feature; few token ids, so that a random drafter is right sometimes and laws can be counted.
GEOMETRY = evolve(
    TINY,
    vocab_size=24,
    eos_token_id=(23,),
    num_hidden_layers=5,
    layer_types=interleaved(5, 2),
    mlp_layer_types=dense_first(5, 1),
)
#: Weights whose greedy outputs do not repeat themselves.
SEED = 5


class GlmFacts(Conformance):
    """Facts of the recipe; the checkpoint is the shipped one."""

    recipe = "glm-5.3-flash"


class GlmConformance(GlmFacts):
    """On random weights, which the tests are quick with."""

    @classmethod
    def checkpoint(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_random_checkpoint(tmp_path_factory.mktemp("glm53"), SEED, GEOMETRY)
