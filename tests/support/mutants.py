"""Running one standard test of the conformance suite in-process against a model that was broken on purpose."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen
from qwen_conformance import QwenConformance

from specdec.errors import SpecdecError
from specdec.testing.conformance import Bench, Conformance, RoundConformance

#: Breaks a bench, or the core for as long as the patch lasts.
Breaking = Callable[[Bench, pytest.MonkeyPatch], None]


@frozen(kw_only=True, eq=False)
class Mutant:
    """One deliberate fault and the standard test that must notice it."""

    name: str
    test: str
    breaks: Breaking


MUTANTS: list[Mutant] = []


def mutant(test: str) -> Callable[[Breaking], Breaking]:
    """Registers a fault under its function's name."""

    def register(breaks: Breaking) -> Breaking:
        MUTANTS.append(Mutant(name=breaks.__name__, test=test, breaks=breaks))
        return breaks

    return register


def override(patch: pytest.MonkeyPatch, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replaces a function of a class or module: ``make(original)`` gives the broken one. A second bench finds it replaced."""
    original = getattr(owner, name)
    if not hasattr(original, "broken"):
        changed = make(original)
        changed.broken = True
        patch.setattr(owner, name, changed)


class Run:
    """Fixtures of one class, built when a test asks for them."""

    def __init__(self, suite: type[RoundConformance], folder: Path) -> None:
        self.suite = suite
        self.built: dict[str, Any] = {"folder": folder}

    def fixture(self, name: str) -> Any:
        """The suite's own fixture of that name."""
        builders: dict[str, Callable[[], Any]] = {
            "bench": lambda: self.suite.build(self.fixture("folder")),
            "reference": lambda: self.suite.build(self.fixture("folder"), slots=1),
            "plain": lambda: self.suite.plain_outputs(self.fixture("reference")),
            "narrow": lambda: self.suite.build(self.fixture("folder"), slots=1, dtype="bfloat16"),
            "crowd": lambda: self.suite.build_crowd(self.fixture("folder")),
        }
        if name not in self.built:
            self.built[name] = builders[name]()
        return self.built[name]

    def cases(self, test: str) -> Iterator[dict[str, Any]]:
        """Arguments of every case of a test: fixtures, the suite's parameters, and its own parametrisation."""
        method = getattr(self.suite, test)
        values = dict(self.suite.parameters())
        for mark in getattr(method, "pytestmark", ()):
            if mark.name == "parametrize":
                values[mark.args[0]] = mark.args[1]
        names = [name for name in inspect.signature(method).parameters if name != "self"]
        parametrised = [name for name in names if name in values]
        for chosen in product(*(values[name] for name in parametrised)):
            yield {**dict(zip(parametrised, chosen, strict=True))}

    def call(self, test: str, case: dict[str, Any]) -> None:
        """Runs one case."""
        method = getattr(self.suite, test)
        names = [name for name in inspect.signature(method).parameters if name != "self"]
        fixtures = {name: self.fixture(name) for name in names if name not in case}
        method(self.suite(), **fixtures, **case)


def broken_suite(
    breaks: Breaking | None, patch: pytest.MonkeyPatch, facts: type[Conformance] = QwenConformance
) -> type[RoundConformance]:
    """The suite on Qwen with every bench broken."""

    class Broken(facts, RoundConformance):  # type: ignore[misc, valid-type]
        @classmethod
        def prepared(cls, bench: Bench) -> Bench:
            if breaks is not None:
                breaks(bench, patch)
            return bench

    return Broken


@torch.inference_mode()
def caught(
    mutant: Mutant, folder: Path, patch: pytest.MonkeyPatch, facts: type[Conformance] = QwenConformance
) -> BaseException | None:
    """What the named test raises first over all of its cases; None if the fault passes unnoticed."""
    torch.set_num_threads(1)
    run = Run(broken_suite(mutant.breaks, patch, facts), folder)
    for case in run.cases(mutant.test):
        try:
            run.call(mutant.test, case)
        except (AssertionError, SpecdecError) as error:
            return error
    return None
