"""Every block of commands and of Python in README, CONTRIBUTING and the pages is run, or checked where a marker says so.

The tutorial's blocks are run in order by ``test_tutorial.py``, the README's Python by ``tests/packaging/test_readme.py``.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from doc_blocks import PAGES, ROOT, TUTORIAL, Block, blocks
from doc_pages import commands

from specdec.errors import UsageError

ALL = [block for page in PAGES if page not in TUTORIAL for block in blocks(page)]
RUN = [block for block in ALL if block.language in ("sh", "console") and not block.marker]
CHECKED = [block for block in ALL if block.language in ("sh", "console") and block.marker]
PYTHON_PAGES = [page for page in PAGES[1:] if any(block.page == page and block.language == "python" for block in ALL)]


def test_markers_are_known() -> None:
    wrong = [str(block) for block in ALL if block.marker not in ("", "parse")]
    assert not wrong
    assert RUN and CHECKED and PYTHON_PAGES


# --- Python -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=lambda page: page.stem)
def test_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": page.stem}
    for block in ALL:
        if block.page == page and block.language == "python":
            exec(compile(block.body, str(block), "exec"), names)


# --- commands that are run ----------------------------------------------------------------------------------------------


def shell(script: str, folder: Path) -> tuple[int, str]:
    """Exit code and everything that was written, with the commands of this environment first on the path."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SPECDEC_", "PYTEST_"))}
    environ |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout


def session(body: str) -> list[tuple[str, str]]:
    """Commands of a console block, each with what it shows to be printed, empty for nothing shown."""
    found: list[tuple[str, str]] = []
    for line in body.splitlines(keepends=True):
        if line.startswith("$ "):
            found.append((line[2:].strip(), ""))
        else:
            assert found, f"a console block begins with a command, not {line!r}"
            command, shown = found.pop()
            found.append((command, shown + line))
    return found


def shows(shown: str, printed: str) -> bool:
    """Whether what was printed is what is shown; … stands for any text, on a line of its own for any lines."""
    lines = []
    for line in shown.splitlines():
        lines.append(r"(?:.*\n)*" if line.strip() == "…" else ".*".join(map(re.escape, line.split("…"))) + "\n")
    return (
        re.fullmatch("".join(lines), printed if printed.endswith("\n") or not printed else printed + "\n") is not None
    )


@pytest.mark.parametrize("block", RUN, ids=str)
def test_commands_run(block: Block, tmp_path: Path) -> None:
    if block.language == "sh":
        code, printed = shell(block.body, tmp_path)
        assert code == 0, printed
        return
    for command, shown in session(block.body):
        code, printed = shell(command, tmp_path)
        assert code == 0, f"$ {command}\n{printed}"
        assert not shown or shows(shown, printed), f"$ {command}\nshown:\n{shown}\nprinted:\n{printed}"


def test_text_stops_at_a_line_break_as_typed(tmp_path: Path) -> None:
    (block,) = (block for block in RUN if "--stop" in block.body)
    finishes = {}
    for script in (block.body, re.sub(r"--stop \S+", "", block.body)):
        code, printed = shell(script, tmp_path)
        assert code == 0, printed
        out = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
        finishes["\n" in out["text"]] = out["summary"]["finish"]
    assert finishes[False] == "stop"
    assert True in finishes, "the same text goes on behind the line break"


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a\nb\n", "a\nb\n", True),
        ("a\n", "a\nb\n", False),
        ("a\n…\nd\n", "a\nb\nc\nd\n", True),
        ("a … c\n", "a and b and c\n", True),
        ("…\n", "", True),
        ("…\nb\n", "a\n", False),
    ],
)
def test_what_is_shown_is_compared(shown: str, printed: str, same: bool) -> None:
    assert shows(shown, printed) == same


# --- commands that are checked ------------------------------------------------------------------------------------------


def distributions() -> dict[str, set[str]]:
    """Distributions of this repository, examples included, with their extras."""
    found = {}
    for pattern in ("pyproject.toml", "plugins/*/pyproject.toml", "docs/examples/*/pyproject.toml"):
        for path in ROOT.glob(pattern):
            project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
            found[project["name"]] = set(project.get("optional-dependencies", {}))
    return found


def simple_commands(body: str) -> list[list[str]]:
    """Words of each command of a script without redirections, assignments and comments."""
    found: list[list[str]] = []
    for line in body.replace("\\\n", " ").splitlines():
        line = line.removeprefix("$ ")
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words = list(lexer)
        current: list[str] = []
        skip = False
        for word in words:
            if word in ("<", ">", ">>"):
                skip = True
            elif word in ("|", "&&", "||", ";"):
                found.append(current)
                current = []
            elif skip:
                skip = False
            elif current or not re.match(r"[A-Z_]+=", word):
                current.append(word)
        found.append(current)
    return [command for command in found if command]


def check(words: list[str]) -> None:
    """Whether a command could run: its options, targets, names and paths exist. Raises or asserts if not."""
    program, rest = words[0].removeprefix(".venv/bin/"), words[1:]
    if program == "specdec":
        commands.check(rest)
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert set(rest) <= set(targets), f"make {' '.join(rest)}"
    elif program == "pip":
        assert rest[0] == "install"
        check_install(rest[1:])
    elif program in ("python", "pytest", "ruff", "mypy"):
        if rest[:2] == ["-m", "pip"]:
            check(["pip", *rest[2:]])
        for word in rest:
            path = word.partition("::")[0]
            if path.endswith(".py") or path.startswith("tests/"):
                folder = ROOT / path
                assert folder.exists() or "/results/" in path, f"{path}: no such file"
    else:
        assert program in ("cd", "printf", "cmp", "git"), f"nothing is known of the command {program!r}"


def check_install(words: list[str]) -> None:
    known = distributions()
    editable = False
    for word in words:
        if word == "-e":
            editable = True
        elif editable:
            editable = False
            assert (ROOT / word / "pyproject.toml").is_file(), f"pip install -e {word}: nothing to install"
        elif not word.startswith("-"):
            name, _, extras = word.rstrip("]").partition("[")
            assert name in known, f"pip install {word}: no distribution of this repository"
            wanted = set(extras.split(",")) - {""}
            assert wanted <= known[name], f"pip install {word}: no such extra"


@pytest.mark.parametrize("block", CHECKED, ids=str)
def test_commands_exist(block: Block) -> None:
    for words in simple_commands(block.body):
        check(words)


@pytest.mark.parametrize(
    "line",
    [
        "specdec rum qwen3.8-flash",
        "specdec run qwen3.8-flash --prompt x --temprature 1",
        "specdec run",
        "make everything",
        "pip install specdec",
        "pip install 'specdec-core[gpu]'",
        "pip install -e plugins/nothing",
        "python tests/benchmarks/nothing.py",
        "curl example.org",
    ],
)
def test_wrong_commands_are_noticed(line: str) -> None:
    (words,) = simple_commands(line)
    with pytest.raises((AssertionError, UsageError)):
        check(words)
