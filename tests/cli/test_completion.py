"""Completion in a shell: what words become, that torch stays away, and that the printed script works in bash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.cli.main import COMMANDS

RECIPES = {"deepseek-v4.1-flash", "glm-5.3-flash", "qwen3.8-flash"}


@pytest.fixture
def complete(site: Any) -> Callable[[str], set[str]]:
    """Asks as a shell does, in a process where a heavy import leaves a trace."""
    for name in ("torch", "tokenizers", "safetensors"):
        site.module(name, f"open({str(site.path / 'heavy')!r}, 'a').write('{name} ')\nraise ImportError('{name}')\n")

    def run(line: str) -> set[str]:
        answer = site.path / "answer"
        answer.unlink(missing_ok=True)
        result = site.specdec(
            COMP_LINE=line,
            COMP_POINT=str(len(line.encode())),
            _ARGCOMPLETE="1",
            _ARGCOMPLETE_IFS="\n",
            _ARGCOMPLETE_STDOUT_FILENAME=str(answer),
        )
        assert (result.code, result.stdout, result.stderr) == (0, "", ""), result
        assert not (site.path / "heavy").exists(), (site.path / "heavy").read_text()
        return {word.strip() for word in answer.read_text(encoding="utf-8").split("\n") if word}

    return run


def test_commands(complete: Callable[[str], set[str]]) -> None:
    assert complete("specdec ") == set(COMMANDS)
    assert complete("specdec c") == {"calibrate", "completion"}
    assert complete("specdec x") == set()


@pytest.mark.parametrize("command", ["run", "demo", "plan", "calibrate", "bench rounds", "recipes"])
def test_recipe_names(complete: Callable[[str], set[str]], command: str) -> None:
    assert complete(f"specdec {command} ") == RECIPES
    assert complete(f"specdec {command} g") == {"glm-5.3-flash"}


@pytest.mark.parametrize("command", ["simulate", "inspect folder"])
def test_recipe_names_behind_an_option(complete: Callable[[str], set[str]], command: str) -> None:
    assert complete(f"specdec {command} --recipe d") == {"deepseek-v4.1-flash"}


def test_names_of_new_plugins_and_not_of_broken_ones(site: Any, complete: Callable[[str], set[str]]) -> None:
    site.healthy("healthy_plugin", "healthy-toy")
    site.distribution("specdec-healthy", plugins={"healthy": "healthy_plugin"})
    site.module("loud_plugin", "print('loud')\nraise RuntimeError('broken')\n")
    site.distribution("specdec-loud", plugins={"loud": "loud_plugin"})
    assert complete("specdec run ") == {*RECIPES, "healthy-toy"}
    site.variables["SPECDEC_PLUGINS"] = "healthy"
    assert complete("specdec run ") == {"healthy-toy"}


def test_options_and_their_values(complete: Callable[[str], set[str]]) -> None:
    assert complete("specdec run qwen3.8-flash --max") == {"--max-new-tokens"}
    assert complete("specdec run qwen3.8-flash --device ") == {"cpu", "cuda"}
    assert complete("specdec run qwen3.8-flash --dtype fl") == {"float32", "float64"}
    assert complete("specdec run qwen3.8-flash --context ") == set()
    assert complete("specdec completion ") == {"bash", "zsh", "fish"}
    assert complete("specdec bench ") == {"rounds"}


def test_files_and_folders(site: Any, complete: Callable[[str], set[str]]) -> None:
    (site.path / "words").mkdir()
    (site.path / "words.txt").write_text("x")
    assert complete("specdec run qwen3.8-flash --prompt-file wo") == {"words/", "words.txt"}
    assert complete("specdec run qwen3.8-flash --checkpoint wo") == {"words/"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_data(site: Any, shell: str) -> None:
    result = site.specdec("completion", shell)
    assert (result.code, result.stderr) == (0, "") and "specdec" in result.stdout and "complet" in result.stdout


def without_argcomplete(site: Any) -> None:
    site.module("argcomplete", "raise ImportError('no argcomplete')\n")


def test_without_argcomplete_one_line_says_what_to_install(site: Any, one_line: Callable[[Any], str]) -> None:
    without_argcomplete(site)
    result = site.specdec("completion", "bash")
    assert result.code == 2
    assert "completion needs argcomplete; install it: pip install 'specdec-core[completion]'" in one_line(result)


def test_a_script_that_outlives_argcomplete_runs_no_command(site: Any) -> None:
    without_argcomplete(site)
    result = site.specdec("recipes", _ARGCOMPLETE="1", COMP_LINE="specdec recipes", COMP_POINT="15")
    assert (result.code, result.stdout, result.stderr) == (1, "", ""), result


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_the_script_works_in_bash(site: Any, tmp_path: Path) -> None:
    script = tmp_path / "specdec.bash"
    script.write_text(site.specdec("completion", "bash").stdout, encoding="utf-8")
    program = tmp_path / "specdec"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m specdec.cli.main "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    commands = (
        f"source {script}; COMP_LINE='specdec run q'; COMP_POINT=${{#COMP_LINE}}; COMP_WORDS=(specdec run q); COMP_CWORD=2; "
        "_python_argcomplete specdec q run; printf '%s\\n' \"${COMPREPLY[@]}\"; complete -p specdec"
    )
    environment = {**site.environment, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "--norc", "-c", commands], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines()[0].strip() == "qwen3.8-flash", done
    assert "-F _python_argcomplete specdec" in done.stdout, done
