"""*Writing a drafter plugin* as its reader works through it: files written, commands typed in order, outputs compared.

The ordinary test types the page's commands literally, with these substitutions, none of which the reader needs:

* ``export SPECDEC=…`` names a copy of this checkout;
* what ``python3 -m venv`` made is then given the third-party packages of the development environment, in place of its own
  setuptools, so that pip finds every requirement installed;
* pip is told by its variables to ask no index and to build with the backend of that environment.

The slow one makes only the first: everything comes from the package index.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from attrs import field, frozen
from example_env import EXAMPLES, IGNORED
from tutorial import Command, File, Shell, shows, steps
from wheels import ROOT, isolated, link_third_party, run

PAGE = ROOT / "docs" / "writing-a-drafter.md"
EXAMPLE = EXAMPLES / "specdec_ngram"
TEXT = PAGE.read_text(encoding="utf-8")
#: Seconds that a reader's machine may work.
LIMIT = 15 * 60
#: Seconds after which a command is taken to hang, on a machine that runs other tests as well.
PATIENCE = 4 * LIMIT
#: ``no`` is how pip's variable for --no-build-isolation says that builds are not isolated.
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "no"}


def files_of(folder: Path) -> dict[str, str]:
    """Texts of a folder by path, without what working in it leaves behind."""
    ignored = IGNORED("", [path.name for path in folder.rglob("*")])
    return {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8")
        for path in folder.rglob("*")
        if path.is_file() and not ignored.intersection(path.relative_to(folder).parts)
    }


@frozen(kw_only=True)
class Walk:
    """One reader. printed: of every command, in order; folder: where the last one ran; seconds: from the first to the last, and
    worked: those of them that a processor worked."""

    folder: Path
    seconds: float
    worked: float
    printed: list[tuple[Command, str]] = field(repr=False)

    def last(self, start: str) -> str:
        """What the last command that starts so printed."""
        return next(text for command, text in reversed(self.printed) if command.line.startswith(start))


def walk(folder: Path, variables: Mapping[str, str], *, linked: bool) -> Walk:
    """Works through the page in ``folder``. linked: see the module. Raises AssertionError at the first command that fails or
    prints something else than the page shows."""
    checkout, programs, work = folder / "checkout", folder / "bin", folder / "work"
    ignored = shutil.ignore_patterns("__pycache__", "training")
    for part in ("core", "plugins/qwen38"):
        shutil.copytree(ROOT / part, checkout / part, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout / name)
    for made in (programs, work):
        made.mkdir()
    # a clean machine's python3, whatever environment the tests run in
    (programs / "python3").symlink_to(Path(sys.executable).resolve())
    environ = {**isolated(), "PATH": f"{programs}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", **variables}
    environ.pop("VIRTUAL_ENV", None)
    printed = []
    start, before = time.monotonic(), processor_seconds()
    with Shell(work, environ, deadline=PATIENCE) as shell:
        for step in steps(TEXT):
            if isinstance(step, File):
                path = shell.folder / step.path
                path.parent.mkdir(exist_ok=True)
                path.write_text(step.text, encoding="utf-8")
                continue
            code, text = shell.type(re.sub(r"^(export SPECDEC=).*", rf"\g<1>{checkout}", step.line))
            assert code == 0, f"exit code {code} after {time.monotonic() - start:.0f} s: $ {step.line}\n{text}"
            assert not step.shown or shows(step.shown, text), (
                f"$ {step.line}\n--- shown\n{step.shown}\n--- printed\n{text}"
            )
            printed.append((step, text))
            if linked and step.line.startswith("python3 -m venv "):
                made = work / step.line.split()[-1]
                run(made / "bin" / "python", "-m", "pip", "uninstall", "-y", "setuptools")
                link_third_party(made)
    return Walk(
        folder=shell.folder,
        seconds=time.monotonic() - start,
        worked=processor_seconds() - before,
        printed=printed,
    )


def processor_seconds() -> float:
    """Processor time of all programs that this process started and that ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def check(done: Walk) -> None:
    """What the page promises of numbers and of the end. Raises AssertionError."""
    gains = [
        float(found)
        for command, text in done.printed
        if command.line.startswith("specdec run qwen3.8-ngram")
        for found in re.findall(r"^tokens per round +([\d.]+)", text, re.MULTILINE)
    ]
    repeated, looked_up, plain = gains
    assert plain == 1.0 and repeated < 1.2 and looked_up > 2.0, gains
    suite = done.last("python -m pytest").splitlines()[-1]
    assert re.match(r"\d{3} passed, \d+ skipped(, \d+ warnings?)? in ", suite), suite
    assert files_of(done.folder) == files_of(EXAMPLE)
    # time that other tests took meanwhile is not the tutorial's
    assert done.worked < LIMIT, f"{done.worked:.0f} s"


def test_the_tutorial_ends_with_the_suite_green(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    check(walk(tmp_path, OFFLINE, linked=True))


@pytest.mark.slow
def test_the_tutorial_on_a_clean_machine(tmp_path: Path) -> None:
    """Fetches torch and everything else from the package index that pip is configured for."""
    done = walk(tmp_path, {name: value for name, value in os.environ.items() if name == "PIP_CERT"}, linked=False)
    check(done)
    assert done.seconds < LIMIT, f"{done.seconds:.0f} s"


# --- the page itself ----------------------------------------------------------------------------------------------------


def test_the_finished_files_are_the_example() -> None:
    written = {step.path: step.text for step in steps(TEXT) if isinstance(step, File)}
    # copied by a command of the page
    written["LICENSE"] = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert written == files_of(EXAMPLE)


def test_every_step_ends_with_what_it_promises() -> None:
    """Visible, listed, running, faster, proven: the last command of each step."""
    parts = [part for part in re.split(r"^## ", TEXT, flags=re.MULTILINE) if re.match(r"\d\. ", part)]
    ends = [[step.line for step in steps(part) if isinstance(step, Command)][-1] for part in parts]
    assert [" ".join(end.split()[:3]) for end in ends] == [
        "specdec plugins",
        "specdec recipes",
        "specdec run qwen3.8-ngram",
        "specdec run qwen3.8-ngram",
        "python -m pytest",
    ]
    assert all(step.shown for part in parts for step in list(steps(part))[-1:] if isinstance(step, Command))


def test_torch_is_the_version_that_the_project_pins() -> None:
    pinned = re.findall(r"^torch==.*", (ROOT / "requirements-dev.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert [step.line for step in steps(TEXT) if isinstance(step, Command) and " torch" in step.line] == [
        f"pip install {pinned[0]}"
    ]


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("rounds  3\n", "rounds      12\n", True),
        ("rounds  3 with drafts\n", "rounds  3\n", False),
        ("…\nspeed  1.5 tokens/s\n…\n", "text\n\nspeed  210.0 tokens/s\nend\n", True),
        ("…\nspeed  1.5 tokens/s\n", "text\nspeed  1.5 tokens/s\nend\n", False),
        ("0.90  0.96\n", "0.90\n", False),
        ("…\n9 passed… in 3.1s (0:00:03)\n", "....\n295 passed, 1 warning in 35.2s (0:05:52)\n", True),
        ("…\n9 passed… in 3.1s (0:00:03)\n", "....\n1 failed, 294 passed in 35.2s (0:05:52)\n", False),
        ("failed  … (…/a.py:6) no recipe\n", "failed  ValueError (/x/a.py:7) no recipe\n", True),
        ("recipe\n", "", False),
    ],
)
def test_what_is_shown_is_compared(shown: str, printed: str, same: bool) -> None:
    assert shows(shown, printed) == same


def test_a_shell_keeps_its_folder_and_reports_failures(tmp_path: Path) -> None:
    with Shell(tmp_path, os.environ, deadline=20) as shell:
        assert shell.type("mkdir a && cd a && name=1") == (0, "")
        assert shell.folder == tmp_path / "a"
        assert shell.type("echo $name; echo wrong >&2; false") == (1, "1\nwrong\n")
        assert shell.type("cat") == (0, "")
        assert shell.type("exit 3")[0] == -1
