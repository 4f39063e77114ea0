"""Environments with the examples of the docs, which are not installed in the development environment.

An environment holds wheels of the core, of some examples (``docs/examples/NAME``) and of some plugins (``plugins/NAME``), and
sees the third-party packages of the development environment, pytest among them. Nothing is fetched.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from wheels import ROOT, build_wheels, install_wheels, isolated, run

EXAMPLES = ROOT / "docs" / "examples"
#: What lies in a folder that was worked in and is no part of an example.
IGNORED = shutil.ignore_patterns("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", "dist")


def example_env(folder: Path, examples: Iterable[str] = (), plugins: Iterable[str] = ()) -> Path:
    """A new environment in ``folder``/environment with the core, ``examples`` and ``plugins``; returns its folder.

    ``folder``: empty or absent; wheels stay in ``folder``/built/wheels, those of examples in ``folder``/examples.
    """
    wheels = build_wheels(folder / "built", plugins)
    wheels.update(example_wheels(folder / "examples", examples))
    return install_wheels(folder / "environment", wheels.values())


def example_wheels(folder: Path, examples: Iterable[str]) -> dict[str, Path]:
    """Wheel files of examples by distribution, built from copies of their folders with this environment's build backend."""
    for name in examples:
        shutil.copytree(EXAMPLES / name, folder / "source" / name, ignore=IGNORED)
        pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
        run(*pip, "-w", folder, folder / "source" / name)
    return {path.name.split("-")[0].replace("_", "-"): path for path in folder.glob("*.whl")}


def run_pytest(environment: Path, *arguments: object, cwd: Path, timeout: float = 900) -> str:
    """What pytest prints when run in the environment, from ``cwd``, with nothing of the repository's configuration.

    Raises AssertionError, with all that was printed, unless every test that ran passed and one ran.
    """
    command = [
        environment / "bin" / "python",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        cwd,
        *arguments,
    ]
    done = execute(command, cwd=cwd, timeout=timeout)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def execute(
    command: Sequence[object], *, cwd: Path, timeout: float = 300, **variables: str
) -> "subprocess.CompletedProcess[str]":
    """Runs a command whatever its exit code, without variables that could change its imports; one thread for torch."""
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**isolated(), "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
