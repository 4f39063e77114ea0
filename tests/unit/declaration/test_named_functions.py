"""Functions that recipes name: whatever goes wrong with one names the recipe, the field and the place."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from attrs import evolve

from specdec.declaration import Recipe
from specdec.errors import CheckpointError, PluginError
from specdec.named_functions import call_named

MODULE = """
import sys
from specdec.errors import CheckpointError


def right(number):
    return number + 1


def forgets(number):
    number + 1


def fails(number):
    return {}["key"]


def leaves(number):
    sys.exit(3)


def refuses(number):
    raise CheckpointError("not this one")
"""


@pytest.fixture
def named(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Recipe]]:
    (tmp_path / "toy_functions.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield lambda name: evolve(recipe, memory=f"toy_functions:{name}")
    sys.modules.pop("toy_functions", None)


def test_what_it_returns(named: Callable[[str], Recipe]) -> None:
    assert call_named(named("right"), "memory", 4, returns=int) == 5


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("forgets", r"recipe 'toy': memory toy_functions:forgets returned NoneType, needs a int$"),
        (
            "fails",
            r"recipe 'toy': memory toy_functions:fails failed with KeyError: 'key' \(.*toy_functions\.py:15.*\); correct",
        ),
        ("leaves", r"memory toy_functions:leaves failed with SystemExit: 3"),
        ("absent", r"memory toy_functions:absent failed with AttributeError: .*has no attribute 'absent'"),
    ],
)
def test_mistakes(named: Callable[[str], Recipe], name: str, words: str) -> None:
    with pytest.raises(PluginError, match=words):
        call_named(named(name), "memory", 4, returns=int)


def test_what_it_works_on_and_its_own_refusals(named: Callable[[str], Recipe]) -> None:
    with pytest.raises(PluginError, match=r"memory toy_functions:fails failed on a/b with KeyError"):
        call_named(named("fails"), "memory", 4, returns=int, on="a/b")
    with pytest.raises(CheckpointError, match=r"^not this one$"):
        call_named(named("refuses"), "memory", 4, returns=int)
