"""What the conformance suite must know about DeepSeek-V4.1-Flash."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve
from deepseek_models import config, random_tensors
from small_checkpoint import END_OF_TEXT, byte_tokenizer

from specdec.checkpoint.writer import write_checkpoint
from specdec.testing.conformance import Conformance
from specdec_deepseek_v41.geometry import TINY, Geometry

#: Seven layers with every feature: both ratios with a layer that reads an earlier source's rows, an index source beside the KV
#: sources, Engram before and inside the compressed layers. Few token ids, so that a random drafter is right sometimes and laws
#: can be counted.
GEOMETRY = evolve(
    TINY,
    vocab_size=24,
    eos_token_id=(23,),
    num_hidden_layers=7,
    compress_ratios=(0, 2, 2, 2, 1, 1, 1, 0, 0, 0),
    kv_source_layer_ids=(1, 3, 4),
    index_source_layer_ids=(1, 3, 4, 6),
    candidate_source_layer_id=4,
    engram_layer_ids=(0, 3),
    engram_compressed_vocab_size=20,
    dspark_target_layer_ids=(4, 5, 6),
    dspark_noise_token_id=22,
)
#: Weights whose greedy outputs do not repeat themselves.
SEED = 5
#: Random confidence weights give survivals that no round would verify; a tenth of them keeps forecasts around one half.
CONFIDENCE = 0.1


def write_serving_checkpoint(directory: Path) -> Path:
    """The same model over 512 ids with a byte-level tokenizer. Few of its tokens are probable, so that a random drafter is right
    sometimes."""
    geometry = evolve(GEOMETRY, vocab_size=512, engram_compressed_vocab_size=384, eos_token_id=(END_OF_TEXT,))
    tensors, last = random_tensors(SEED, geometry), f"mtp.{geometry.num_stages - 1}."
    for name in ("head.weight", f"{last}markov_head.head.weight"):
        tensors[name][6:] *= 0.03
    tensors[f"{last}confidence_head.proj.weight"] *= CONFIDENCE
    write_checkpoint(directory, tensors, config(geometry))
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def write_conformance_checkpoint(directory: Path, geometry: Geometry = GEOMETRY) -> Path:
    """Random weights that the suite runs on."""
    tensors = random_tensors(SEED, geometry)
    name = f"mtp.{geometry.num_stages - 1}.confidence_head.proj.weight"
    return write_checkpoint(directory, {**tensors, name: tensors[name] * CONFIDENCE}, config(geometry))


class DeepseekFacts(Conformance):
    """Facts of the recipe; the checkpoint is the shipped one."""

    recipe = "deepseek-v4.1-flash"
    draft_lag = 0
    proposals = "temperature"


class DeepseekConformance(DeepseekFacts):
    """On random weights, which the tests are quick with."""

    @classmethod
    def checkpoint(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_conformance_checkpoint(tmp_path_factory.mktemp("deepseek"))
