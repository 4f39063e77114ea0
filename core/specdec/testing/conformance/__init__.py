"""Conformance suite: tests that a plugin's own tests inherit by naming its recipe. Needs pytest (``specdec-core[testing]``).

Example::

    from specdec.testing.conformance import RoundConformance


    class TestExample(RoundConformance):
        recipe = "example-1b"

The suite drives real rounds made by the recipe's hooks and compares them with plain decoding and with prompt passes of
the same model: in float64 on the CPU, or where and in what precision the class says (``device``, ``dtype``, ``near_tie``; see
``Conformance``). Each test names the class of fault that it catches.
"""

import pytest

# before the modules are imported, so that their assertions explain themselves
_PARTS = (
    "allocation base batching bench copies draws driver emitted_law explanations greedy history invariants near_ties options "
    "oracles poisoning precision prompt_scores prompts randomness states suite termination transaction"
)
pytest.register_assert_rewrite(*(f"{__name__}.{part}" for part in _PARTS.split()))

from specdec.testing.conformance.base import Conformance, DraftStep  # noqa: E402
from specdec.testing.conformance.bench import Bench, replaced  # noqa: E402
from specdec.testing.conformance.driver import Driver  # noqa: E402
from specdec.testing.conformance.precision import Precision  # noqa: E402
from specdec.testing.conformance.suite import RoundConformance  # noqa: E402

__all__ = ["Bench", "Conformance", "DraftStep", "Driver", "Precision", "RoundConformance", "replaced"]
