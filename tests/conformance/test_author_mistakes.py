"""The mistakes that an author of a plugin makes most: each ends in one message with the mistake, its place and the cure.

Every case is a copy of a small sound plugin with a line changed, loaded as a real module and prepared by its hooks. What runs
is what the author would run: discovery, preparation, and single tests of the conformance suite.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from author_mistakes import DISCOVERY, RETURNED, STATE, Case
from author_mistakes_in_rounds import FORGOTTEN, OFF_BY_ONE, PAIR, SYNCHRONISED
from authored_plugins import RecurrentConformance, book_of, inspected, line_of, write_small_checkpoint, written
from mutants import Run

from specdec.errors import SpecdecError
from specdec.plugins import Plugin
from specdec.testing.conformance import RoundConformance

CASES = [*RETURNED, *OFF_BY_ONE, *FORGOTTEN, *SYNCHRONISED]


class Suite(RecurrentConformance, RoundConformance):
    """The suite on the small plugin, for tests that call its tests."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_checkpoint(tmp_path_factory.mktemp("weights"))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@torch.inference_mode()
def outcome(package: Path, test: str, checkpoint: Path, patch: pytest.MonkeyPatch) -> str:
    """What the first failing case of a standard test says; empty if all pass."""
    book_of(package, patch)
    run = Run(Suite, checkpoint)
    for case in run.cases(test):
        try:
            run.call(test, case)
        except (AssertionError, SpecdecError) as error:
            # pytest adds the values of its rewritten assertion behind
            return str(error).splitlines()[0]
    return ""


def check(message: str, said: tuple[str, ...], package: Path) -> None:
    """All words are there, in order, in one line."""
    assert message, "the mistake passes unnoticed"
    assert "\n" not in message
    rest = message
    for words in said:
        if words.startswith("{"):
            file, _, text = words.strip("{}").partition("|")
            words = line_of(package / file, text)
        assert words in rest, f"{words!r} is not said, or not in this place: {message}"
        rest = rest.split(words, 1)[1]


@pytest.mark.parametrize("case", DISCOVERY, ids=lambda case: case.name)
def test_what_discovery_says(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = written(tmp_path, *case.changes)
    record = inspected(package, monkeypatch)
    assert not isinstance(record, Plugin)
    assert record.status == "failed"
    check(record.reason, case.said, package)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_preparation_and_the_suite_say(
    case: Case, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = written(tmp_path, *case.changes)
    check(outcome(package, case.test, checkpoint, monkeypatch), case.said, package)


# --- the other way round -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("test", sorted({case.test for case in CASES}))
def test_the_sound_plugin_passes(test: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(written(tmp_path), test, checkpoint, monkeypatch) == ""


def test_what_fits_no_usual_mistake_is_not_explained(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of noise are no shift of anything: the field is named and no reason is made up."""
    noise = ("drafter.py", PAIR, "rows = self.row(feedback, tokens[:, :count].clamp(min=0)) * 0.9\n")
    message = outcome(written(tmp_path, noise), STATE, checkpoint, monkeypatch)
    assert message.startswith("drafter history:")
    assert not any(words in message for words in ("later", "earlier", "committed", "restored", ";"))
