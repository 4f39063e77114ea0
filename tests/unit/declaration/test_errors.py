"""Errors are one line, and the exit codes are the documented ones."""

import pytest

from specdec import errors
from specdec.errors import ExitCode, SpecdecError


def test_message_is_one_line() -> None:
    assert str(SpecdecError("first\n  second\n\n third ")) == "first / second / third"


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("SpecdecError", 1),
        ("UsageError", 2),
        ("RecipeError", 2),
        ("PluginError", 3),
        ("DeclarationError", 3),
        ("CheckpointError", 4),
        ("CapacityError", 5),
    ],
)
def test_exit_code(name: str, code: int) -> None:
    assert getattr(errors, name)("x").exit_code == code


def test_every_code_is_documented() -> None:
    documentation = ExitCode.__doc__ or ""
    for code in ExitCode:
        assert any(line.split()[:2] == [str(int(code)), code.name] for line in documentation.splitlines())


def test_declaration_error_is_a_value_error() -> None:
    # attrs validators raise it, and structuring code collects ValueError
    assert issubclass(errors.DeclarationError, ValueError)
