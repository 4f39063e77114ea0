"""The conformance suite on a GPU: the three models in float32 and bfloat16 on random checkpoints, rounds as CUDA graphs.

Each class of a model and a precision is two, of some parts of the suite each, so that twelve processes share the work::

    pytest -m gpu -n 12 --dist loadscope tests/gpu/test_conformance_cuda.py
"""

from __future__ import annotations

import pytest
import torch
from lower_precision import RoundedDeepseek, RoundedGlm, RoundedQwen, rounded

from specdec.testing.conformance import Conformance, RoundConformance
from specdec.testing.conformance.allocation import AllocationConformance
from specdec.testing.conformance.batching import BatchingConformance, RecordConformance
from specdec.testing.conformance.copies import CopyConformance
from specdec.testing.conformance.emitted_law import EmittedLawConformance
from specdec.testing.conformance.greedy import GreedyConformance
from specdec.testing.conformance.history import HistoryConformance
from specdec.testing.conformance.options import OptionsConformance
from specdec.testing.conformance.poisoning import PoisonConformance
from specdec.testing.conformance.prompt_scores import PromptScoreConformance
from specdec.testing.conformance.randomness import RandomnessConformance
from specdec.testing.conformance.termination import TerminationConformance
from specdec.testing.conformance.transaction import TransactionConformance

#: Parts that take about as long together; parts that share a fixture stay together.
HALVES: dict[str, tuple[type[Conformance], ...]] = {
    "Text": (
        GreedyConformance,
        TerminationConformance,
        OptionsConformance,
        BatchingConformance,
        RecordConformance,
        EmittedLawConformance,
        # shares the crowd of the part above
        AllocationConformance,
    ),
    "State": (
        TransactionConformance,
        HistoryConformance,
        CopyConformance,
        PromptScoreConformance,
        PoisonConformance,
        RandomnessConformance,
    ),
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class OnCuda(Conformance):
    """A round of 128 lanes takes a GPU as long as one of 64, so half as many give as many outcomes."""

    crowd_slots = 128
    crowd_batches = 24


for facts in (RoundedQwen, RoundedGlm, RoundedDeepseek):
    for dtype in ("float32", "bfloat16"):
        for half, parts in HALVES.items():
            name = f"Test{facts.__name__.removeprefix('Rounded')}{dtype.title()}{half}"
            globals()[name] = type(name, (OnCuda, rounded(facts, dtype, "cuda"), *parts), {"__module__": __name__})


def test_the_halves_are_the_whole_suite() -> None:
    """No part is left out, and none runs twice."""
    found = [part for parts in HALVES.values() for part in parts]
    assert len(found) == len(RoundConformance.__bases__)
    assert set(found) == set(RoundConformance.__bases__)
