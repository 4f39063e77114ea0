"""The lists, refusals and exit codes of the command."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from specdec import __version__
from specdec.cli import main as entry
from specdec.cli.tables import columns
from specdec.errors import CapacityError


def test_the_package_is_the_command(site: Any) -> None:
    assert site.python("-m", "specdec", "--version").stdout == f"specdec {__version__}\n"
    wrong = site.python("-m", "specdec", "rnu")
    assert (wrong.code, wrong.stderr) == (2, "specdec: error: unknown command 'rnu'; did you mean run?\n")


def test_version(site: Any) -> None:
    for option in ("--version", "-V"):
        result = site.specdec(option)
        assert (result.code, result.stdout, result.stderr) == (0, f"specdec {__version__}\n", "")


def test_help_lists_every_command(site: Any) -> None:
    result = site.specdec("--help")
    assert result.code == 0, result
    for command in entry.COMMANDS:
        assert f"\n    {command} " in result.stdout, result


def test_no_command_is_a_usage_error_with_the_help_text(site: Any) -> None:
    result = site.specdec()
    assert (result.code, result.stdout) == (2, ""), result
    assert "commands:" in result.stderr, result


def test_recipes_table_is_aligned(site: Any) -> None:
    result = site.specdec("recipes", SPECDEC_PLUGINS="qwen38")
    head, row = result.stdout.splitlines()
    assert row.split()[:4] == ["qwen3.8-flash", "mtp", "5", "7"]
    assert head.index("default drafts") + len("default drafts") == row.index(" 5") + 2
    assert head.index("maximum drafts") + len("maximum drafts") == row.index(" 7") + 2
    assert "\x1b" not in result.stdout


def test_help_shows_default_and_maximum_of_each_recipe(site: Any) -> None:
    site.healthy("healthy_plugin", "healthy-toy")
    site.distribution("specdec-healthy", plugins={"healthy": "healthy_plugin"})
    result = site.specdec("recipes", "--help", SPECDEC_PLUGINS="qwen38,healthy")
    assert (result.code, result.stderr) == (0, ""), result
    rows = [line.split()[:4] for line in result.stdout.splitlines() if line.startswith(("  qwen3.8", "  healthy"))]
    assert rows == [["healthy-toy", "mtp", "3", "4"], ["qwen3.8-flash", "mtp", "5", "7"]], result
    assert "not loaded" not in result.stdout, result


def test_one_recipe_with_sources(site: Any) -> None:
    result = site.specdec("recipes", "qwen3.8-flash")
    assert result.code == 0, result
    lines = [line.split("  ", 1) for line in result.stdout.splitlines()]
    values = {pair[0]: pair[1].strip() for pair in lines if pair[0]}
    assert values["max draft tokens"] == "7"
    assert values["drafter inventory"] == "tensors 4637, bytes 1,596,720,640"
    assert result.stdout.count("source: ") >= 5, result


def test_one_recipe_as_data(site: Any) -> None:
    data = json.loads(site.specdec("recipes", "qwen3.8-flash", "--json").stdout)
    assert data["name"] == "qwen3.8-flash"
    assert data["checkpoint"] == "nvidia/Qwen3.8-Flash-Next-FP4-Local"
    assert data["widths"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert data["sampling"] == {"temperature": 1.0, "top_k": 20, "top_p": 0.95, "min_p": 0.0}
    assert data["eos_token_ids"] == [248046, 248044]
    assert data["drafter_inventory"] == {"tensors": 4637, "bytes": 1596720640}
    assert data["plugin"] == {"name": "qwen38", "distribution": "specdec-qwen38", "version": "0.1.0"}
    assert set(data["sources"]) >= {"default_draft_tokens", "max_draft_tokens", "sampling", "eos_token_ids"}


def test_nothing_installed(site: Any) -> None:
    result = site.specdec("recipes", SPECDEC_PLUGINS="")
    assert (result.code, result.stdout) == (0, "none: no installed plugin declares a recipe\n"), result
    assert json.loads(site.specdec("recipes", "--json", SPECDEC_PLUGINS="").stdout) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("recpies",), "unknown command 'recpies'; did you mean recipes?"),
        (("elephant",), "unknown command 'elephant'; commands: recipes, plugins"),
        (("recipes", "qwen3.8-fash"), "unknown recipe 'qwen3.8-fash'; did you mean qwen3.8-flash?"),
        (("recipes", "--jsn"), "unknown argument '--jsn'; did you mean --json? see 'specdec recipes --help'"),
        (("recipes", "a", "b"), "unknown argument 'b'; see 'specdec recipes --help'"),
        (("--colour",), "unrecognized arguments: --colour"),
        (("plugins", "--js"), "unknown argument '--js'"),
        (("completion", "tcsh"), "SHELL is 'tcsh'; allowed: bash, zsh, fish"),
        (("run",), "RECIPE is missing; see 'specdec run --help'"),
        (("run", "x", "--mtp-draft-tokens", "abc"), "--mtp-draft-tokens is 'abc'; give a whole number"),
        (("run", "x", "--mtp-draft-tokens"), "--mtp-draft-tokens has no value; give one"),
        (("run", "x", "--no-mtp=1"), "--no-mtp takes no value, but has '1'; drop the value"),
    ],
)
def test_usage_errors(site: Any, one_line: Callable[[Any], str], arguments: tuple[str, ...], words: str) -> None:
    result = site.specdec(*arguments, SPECDEC_PLUGINS="qwen38")
    assert result.code == 2, result
    assert words in one_line(result)


def fake(monkeypatch: pytest.MonkeyPatch, run: Callable[[argparse.Namespace], int]) -> None:
    module = ModuleType("specdec_fake_command")
    module.add_parser = lambda subparsers: subparsers.add_parser("fake")  # type: ignore[attr-defined]
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(entry.COMMANDS, "fake", (module.__name__, "fake"))
    monkeypatch.delenv("SPECDEC_TRACEBACK", raising=False)


def raising(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (CapacityError("too big\nby far"), 5, "specdec: error: too big / by far\n"),
        (KeyboardInterrupt(), 130, "specdec: interrupted\n"),
        (
            KeyError("x"),
            1,
            f"specdec: internal error: KeyError: 'x' ({__file__}:{raising.__code__.co_firstlineno + 2} in run); "
            "set SPECDEC_TRACEBACK=1 to see the way there\n",
        ),
    ],
)
def test_errors_are_one_line_and_a_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, line: str
) -> None:
    fake(monkeypatch, raising(error))
    assert entry.main(["fake"]) == code
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", line)


def test_traceback_of_an_internal_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake(monkeypatch, raising(KeyError("x")))
    monkeypatch.setenv("SPECDEC_TRACEBACK", "1")
    assert entry.main(["fake"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_the_commands_own_code_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, lambda args: 4)
    assert entry.main(["fake"]) == 4


def test_a_closed_pipe_is_quiet(site: Any) -> None:
    # the child writes only when the reading end is already closed
    program = "import sys; sys.stdin.read(); from specdec.cli.main import main; sys.exit(main(['recipes', '--json']))"
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env=site.environment,
        cwd=site.path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stdin.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 0


def test_columns() -> None:
    assert columns([("name", "drafts"), ("a", 5), ("long", 12)]) == "name  drafts\na          5\nlong      12"
    assert columns([("key", 7), ("other", "x")], indent=" ") == " key    7\n other  x"
    assert columns([]) == ""
