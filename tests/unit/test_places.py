"""Where something is written, and which line of running code is an author's own."""

from __future__ import annotations

import functools
import json
import re
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen

import specdec.catalog
from specdec.catalog import require_integer
from specdec.errors import UsageError
from specdec.places import at, blamed, depth, place, raised, running

HERE = Path(__file__)


def line(text: str) -> str:
    (number,) = (n for n, one in enumerate(HERE.read_text(encoding="utf-8").splitlines(), 1) if one.startswith(text))
    return f"{__file__}:{number}"


def passing(function: Any) -> Any:
    @functools.wraps(function)
    def inner(*arguments: Any) -> Any:
        return function(*arguments)

    return inner


@passing
@passing
def decorated() -> None:
    """Two decorators above its name."""


@frozen
class Example:
    value: int

    def method(self) -> int:
        return self.value

    @property
    def double(self) -> int:
        return 2 * self.value


def test_functions_methods_classes_and_objects() -> None:
    assert place(decorated) == line("def decorated")
    assert place(Example.method) == place(Example(1).method) == line("    def method")
    assert place(Example.double) == line("    def double")
    assert place(Example) == place(Example(1)) == line("class Example")
    assert place(lambda: 1).startswith(f"{__file__}:")


def test_what_has_no_source() -> None:
    assert place(len) == place(3) == place(None) == at(len) == ""
    assert at(Example) == f" ({line('class Example')})"


def error_of(function: Any) -> Exception:
    with pytest.raises((UsageError, RuntimeError, json.JSONDecodeError)) as caught:
        function()
    return caught.value


@pytest.mark.parametrize(
    "function",
    [
        lambda: require_integer("n", 0, 1, None, "reason"),
        lambda: torch.zeros(2) @ torch.zeros(3),
        lambda: json.loads("{"),
        lambda: torch.nn.functional.linear(torch.zeros(2), torch.zeros(3, 4)),
    ],
)
def test_errors_are_blamed_on_the_line_that_called_a_library(function: Any) -> None:
    error = error_of(function)
    called = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name == "<lambda>"]
    assert blamed(error) == f"{__file__}:{called[0].lineno}"
    assert raised(error) == f"{__file__}:{called[0].lineno} in <lambda>"


def test_an_error_that_never_ran_is_nobodys() -> None:
    assert blamed(ValueError()) == raised(ValueError()) == ""


def test_an_error_of_the_core_alone_is_the_cores() -> None:
    error = error_of(lambda: require_integer("n", 0, 1, None, "reason"))
    # without the frames of this file, as in a thread of the core's own
    while error.__traceback__ is not None and error.__traceback__.tb_frame.f_code.co_filename == __file__:
        error.__traceback__ = error.__traceback__.tb_next
    assert blamed(error) == ""
    assert re.fullmatch(rf"{re.escape(specdec.catalog.__file__)}:\d+ in require_integer", raised(error))


def test_running_code_is_the_innermost_of_ones_own() -> None:
    def own() -> str:
        return running()

    assert running().startswith(f"{__file__}:")
    assert running().endswith(" in test_running_code_is_the_innermost_of_ones_own")
    assert own().endswith(" in own")


def test_who_began_is_the_outermost_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Called from the core with nothing of one's own in between, the core's line is named and not the caller's."""
    found: list[str] = []

    def run() -> None:
        since = depth()
        # a function of the core, as far as its file says
        code = compile("def inside():\n    return ask(since)\n", specdec.catalog.__file__, "exec")
        names: dict[str, Any] = {"ask": running, "since": since + 1}
        exec(code, names)
        found.append(names["inside"]())
        names["since"] = since
        found.append(names["inside"]())

    run()
    assert found[0] == f"{specdec.catalog.__file__}:2 in inside"
    # the one who began is looked at too, but no one above
    assert found[1].endswith(" in run")
