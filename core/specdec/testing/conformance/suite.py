"""The class that a plugin's tests inherit."""

from __future__ import annotations

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


class RoundConformance(
    GreedyConformance,
    TransactionConformance,
    HistoryConformance,
    TerminationConformance,
    RandomnessConformance,
    EmittedLawConformance,
    CopyConformance,
    OptionsConformance,
    PromptScoreConformance,
    BatchingConformance,
    RecordConformance,
    PoisonConformance,
    AllocationConformance,
):
    """Everything that must hold of a recipe's rounds.

    Name the recipe, and a small checkpoint if the shipped one is slow::

        class TestExample(RoundConformance):
            recipe = "example-1b"

            @classmethod
            def checkpoint(cls, tmp_path_factory):
                return write_random_checkpoint(tmp_path_factory.mktemp("example"))

    Facts and overridable methods are those of ``Conformance``. A standard test may be replaced only by one that is
    marked ``@pytest.mark.xfail(reason=...)``; ``test_standard_tests_are_not_weakened`` checks that.
    """
