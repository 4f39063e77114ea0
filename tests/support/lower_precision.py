"""The conformance suite in lower precision than float64: checkpoints on which rounding stays small, and what it then does.

Choices are steps. Where an expert or a row is chosen by a hair, the last bit chooses, and everything behind it is different; the
float64 suite is where choosing is tested. Here all experts work and the indexers' budgets hold every row, so that two ways of
computing the same text differ by little and comparisons are sharp.

Measured on these checkpoints with rounds of every width against plain decoding, as the greatest change of the difference of two
logits of a row: on a CPU, and with noise that is worse than a GPU's other order of summation (float32: each matrix product off by
2e-7 of a row's size; bfloat16: one result in fifty off by a unit in the last place).

              float32: CPU, noise    bfloat16: CPU, noise
    Qwen      7e-6, 3e-5             0, 0.11
    GLM       9e-6, 3e-5             0.06, 0.14
    DeepSeek  0.014, 0.02            0.07, 0.43

DeepSeek rounds activations to FP8 and FP4, where a last bit may move a value by a whole code. Requests part only where two tokens
are nearly equal: in bfloat16 they were up to 0.02 apart on a CPU, and up to 0.04, 0.05 and 0.07 under noise; in float32 none
parted. The declared bounds are above what was measured on a CPU, and above every parting.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from attrs import evolve
from deepseek_conformance import GEOMETRY as DEEPSEEK
from deepseek_conformance import DeepseekFacts, write_conformance_checkpoint
from glm_conformance import GEOMETRY as GLM
from glm_conformance import SEED as GLM_SEED
from glm_conformance import GlmFacts
from glm_models import write_random_checkpoint as write_glm
from qwen_conformance import GEOMETRY as QWEN
from qwen_conformance import SEED as QWEN_SEED
from qwen_conformance import QwenFacts
from qwen_models import write_random_checkpoint as write_qwen

from specdec.testing.conformance import Conformance, Precision

#: More rows than a request ever has, and fewer than its pages hold: choosing runs, and chooses all there are.
EVERY_ROW = 200


class RoundedQwen(QwenFacts):
    """Four experts, all of them at work."""

    near_ties: ClassVar[dict[str, float]] = {"float32": 1e-3, "bfloat16": 0.1}

    @classmethod
    def checkpoint(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        geometry = evolve(QWEN, num_experts=QWEN.num_experts_per_tok, indexer_budget=EVERY_ROW)
        return write_qwen(tmp_path_factory.mktemp("qwen38"), QWEN_SEED, geometry)


class RoundedGlm(GlmFacts):
    """Four experts, all of them at work."""

    near_ties: ClassVar[dict[str, float]] = {"float32": 1e-3, "bfloat16": 0.1}

    @classmethod
    def checkpoint(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        geometry = evolve(GLM, n_routed_experts=GLM.num_experts_per_tok, index_topk=EVERY_ROW)
        return write_glm(tmp_path_factory.mktemp("glm53"), GLM_SEED, geometry)


class RoundedDeepseek(DeepseekFacts):
    """Two experts in every layer and stage, both at work."""

    near_ties: ClassVar[dict[str, float]] = {"float32": 0.03, "bfloat16": 0.15}
    # codes of FP4 are up to half a value apart; under noise fields differed by 0.01 of their norm in float32, 0.09 in bfloat16
    precisions: ClassVar[dict[str, Precision]] = {
        "float32": Precision(states=0.6, fields=0.05),
        "bfloat16": Precision(states=1.0, fields=0.15),
    }

    @classmethod
    def checkpoint(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        geometry = evolve(
            DEEPSEEK,
            n_routed_experts=DEEPSEEK.num_experts_per_tok,
            dspark_n_routed_experts=DEEPSEEK.dspark_num_experts_per_tok,
            index_topk=EVERY_ROW,
            # one block more than such rows fill, since the first and the last may be cut
            candidate_topk_blocks=EVERY_ROW // DEEPSEEK.candidate_block_size + 1,
        )
        return write_conformance_checkpoint(tmp_path_factory.mktemp("deepseek"), geometry)


def rounded(facts: type[Conformance], dtype: str, device: str) -> type[Conformance]:
    """The facts of a run: what is declared for the dtype."""
    precision = getattr(facts, "precisions", {}).get(dtype)
    near_tie = facts.near_ties[dtype]  # type: ignore[attr-defined]
    found = {"dtype": dtype, "device": device, "near_tie": near_tie, "precision": precision}
    return type(f"{facts.__name__}In{dtype.title()}", (facts,), found)
