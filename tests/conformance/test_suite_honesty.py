"""The conformance suite cannot be weakened in silence."""

from __future__ import annotations

import pytest
from qwen_conformance import QwenConformance

from specdec.testing.conformance import RoundConformance


class Inherits(QwenConformance, RoundConformance):
    pass


def check(suite: type[RoundConformance]) -> None:
    suite().test_standard_tests_are_not_weakened()


def test_an_inherited_suite_is_accepted() -> None:
    check(Inherits)
    assert len(Inherits.standard_tests()) > 40


def test_an_override_needs_xfail_with_a_reason() -> None:
    class Weakened(Inherits):
        def test_context_end(self) -> None:
            pass

    class Silent(Inherits):
        @pytest.mark.xfail
        def test_context_end(self) -> None:
            pass

    class Skipped(Inherits):
        @pytest.mark.skip(reason="slow")
        def test_context_end(self) -> None:
            pass

    for suite in (Weakened, Silent, Skipped):
        with pytest.raises(AssertionError, match="test_context_end was overridden without"):
            check(suite)

    class Explained(Inherits):
        @pytest.mark.xfail(reason="the context of this recipe is open")
        def test_context_end(self) -> None:
            pass

    check(Explained)


def test_a_test_that_was_removed_or_hidden_is_noticed() -> None:
    class Removed(Inherits):
        test_context_end = None

    with pytest.raises(AssertionError, match="test_context_end was removed"):
        check(Removed)

    class Hides:
        test_context_end = None

    class Hidden(Hides, Inherits):
        pass

    with pytest.raises(AssertionError, match="test_context_end was removed"):
        check(Hidden)


def test_the_check_itself_and_its_list_stay() -> None:
    for name in ("test_standard_tests_are_not_weakened", "standard_tests"):
        with pytest.raises(TypeError, match=f"replaces {name}"):
            type("Replaced", (Inherits,), {name: lambda self: None})


def test_fewer_cases_are_noticed() -> None:
    class Narrow(Inherits):
        @classmethod
        def parameters(cls):
            return {**super().parameters(), "drafts": [1]}

    with pytest.raises(AssertionError, match="drafts"):
        check(Narrow)


def test_every_standard_test_says_what_it_catches() -> None:
    for name, test in Inherits.standard_tests().items():
        assert test.__doc__, f"{name} has no docstring"
