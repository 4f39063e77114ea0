"""The conformance suite in float32 and bfloat16 on the CPU: what lower precision changes in it is tested without a GPU.

Some parts here are ordinary tests, the whole suites are slow ones. ``tests/gpu/test_conformance_cuda.py`` runs them on a GPU.
"""

from __future__ import annotations

import pytest
from lower_precision import RoundedDeepseek, RoundedGlm, RoundedQwen, rounded

from specdec.testing.conformance import RoundConformance
from specdec.testing.conformance.history import HistoryConformance
from specdec.testing.conformance.options import OptionsConformance
from specdec.testing.conformance.poisoning import PoisonConformance
from specdec.testing.conformance.prompt_scores import PromptScoreConformance
from specdec.testing.conformance.termination import TerminationConformance
from specdec.testing.conformance.transaction import TransactionConformance


class TestPartsOfQwen38InFloat32(  # type: ignore[misc]
    rounded(RoundedQwen, "float32", "cpu"), TransactionConformance, OptionsConformance, PromptScoreConformance
):
    """No token is decided by less than rounding moves it."""


class TestPartsOfGlm53InBfloat16(  # type: ignore[misc]
    rounded(RoundedGlm, "bfloat16", "cpu"), HistoryConformance, TerminationConformance, PoisonConformance
):
    """Some requests part from plain decoding at near ties."""


for facts in (RoundedQwen, RoundedGlm, RoundedDeepseek):
    for dtype in ("float32", "bfloat16"):
        name = f"Test{facts.__name__.removeprefix('Rounded')}{dtype.title()}"
        bases = (rounded(facts, dtype, "cpu"), RoundConformance)
        globals()[name] = pytest.mark.slow(type(name, bases, {"__module__": __name__}))
