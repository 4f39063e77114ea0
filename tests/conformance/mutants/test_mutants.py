"""The conformance suite proves itself: every deliberate fault is caught by the standard test that is named for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mutants import Mutant, Run, broken_suite, caught
from qwen_conformance import GEOMETRY, SEED
from qwen_models import write_random_checkpoint
from qwen_mutants import MUTANTS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("mutants"), SEED, GEOMETRY)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = caught(mutant, folder, monkeypatch)
    assert error is not None, f"{mutant.name} passes {mutant.test}"


@pytest.fixture(scope="module")
def sound(folder: Path) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        return Run(broken_suite(None, patch), folder)


@pytest.mark.parametrize("test", sorted({mutant.test for mutant in MUTANTS}))
@torch.inference_mode()
def test_without_a_fault_the_same_run_passes(test: str, sound: Run) -> None:
    """The way of running is not what fails: the first and the last case of every named test."""
    cases = list(sound.cases(test))
    for case in {0: cases[0], len(cases) - 1: cases[-1]}.values():
        sound.call(test, case)


def test_names_are_distinct_and_enough() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 15
