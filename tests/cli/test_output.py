"""What happens to commands whose output nobody can take: one line and the documented exit code, never a traceback."""

from __future__ import annotations

import errno
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_checkpoint import write_small_checkpoint

import specdec_qwen38
from specdec.cli import output
from specdec.cli.main import main
from specdec.cli.output import OutputError, clear_progress, progress, say, write
from specdec.cli.refusals import spelled, translated
from specdec.errors import ExitCode

TINY = Path(specdec_qwen38.__file__).parent / "tiny"
FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")

LIGHT = [
    ("--version",),
    ("--help",),
    ("recipes",),
    ("recipes", "--help"),
    ("recipes", "qwen3.8-flash", "--json"),
    ("plugins",),
    ("plugins", "--json"),
    ("inspect", str(TINY)),
    ("inspect", str(TINY), "--json"),
    ("run", "--help"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_checkpoint(tmp_path_factory.mktemp("output") / "checkpoint")


def generating(checkpoint: Path) -> list[tuple[str, ...]]:
    options = ("qwen3.8-flash", "--checkpoint", str(checkpoint), "--max-new-tokens", "8")
    return [
        ("run", *options, "--prompt", "def f("),
        # more than one buffer at once
        ("run", *options, "--prompt", "def f(", "--json", "--logprobs", "20"),
        ("demo", *options, "--draft-counts", "1"),
    ]


def shell(site: Any, redirection: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command with its streams redirected by a shell."""
    script = f'exec "$@" {redirection}'
    command = ["sh", "-c", script, "sh", sys.executable, "-m", "specdec.cli.main", *arguments]
    return subprocess.run(
        command, env=site.environment, cwd=site.path, capture_output=True, text=True, timeout=120, check=False
    )


def check_full(done: subprocess.CompletedProcess[str]) -> None:
    line = done.stderr.splitlines()[-1]
    assert done.returncode == ExitCode.FAILURE == 1, done
    assert line.startswith("specdec: error: standard output cannot be written: No space left on device; "), done
    assert all(line.startswith("specdec: ") for line in done.stderr.splitlines()), done


@needs_full
@pytest.mark.parametrize("arguments", LIGHT, ids=" ".join)
def test_a_full_device(site: Any, arguments: tuple[str, ...]) -> None:
    done = shell(site, ">/dev/full", *arguments)
    check_full(done)
    assert done.stderr.count("\n") == 1, done


@needs_full
@pytest.mark.parametrize("number", range(3), ids=["run", "run --json", "demo"])
def test_a_full_device_while_generating(site: Any, checkpoint: Path, number: int) -> None:
    check_full(shell(site, ">/dev/full", *generating(checkpoint)[number]))


@pytest.mark.parametrize("arguments", LIGHT, ids=" ".join)
def test_a_closed_standard_output(site: Any, arguments: tuple[str, ...]) -> None:
    done = shell(site, ">&-", *arguments)
    assert done.returncode == ExitCode.FAILURE, done
    assert done.stderr.startswith("specdec: error: standard output is closed; ") and done.stderr.count("\n") == 1, done


@pytest.mark.parametrize("arguments", LIGHT, ids=" ".join)
def test_a_reader_that_leaves_has_what_it_wanted(site: Any, arguments: tuple[str, ...]) -> None:
    """As every command before a ``head`` does: the reader is gone before anything is written, on both streams in turn."""
    program = f"import sys; sys.stdin.read(); from specdec.cli.main import main; sys.exit(main({list(arguments)!r}))"
    for merged in (False, True):
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            env=site.environment,
            cwd=site.path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merged else subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.close()
        process.stdin.close()
        if process.stderr is not None:
            assert process.stderr.read() == b""
        assert process.wait(timeout=60) == ExitCode.OK == 0


@needs_full
@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-"])
def test_messages_that_cannot_be_written_change_no_exit_code(site: Any, redirection: str) -> None:
    done = shell(site, redirection, "recipes", "no-such-recipe")
    assert (done.returncode, done.stdout, done.stderr) == (ExitCode.USAGE, "", ""), done
    done = shell(site, redirection, "recipes")
    assert done.returncode == 0 and "qwen3.8-flash" in done.stdout, done


def test_a_closed_standard_input(site: Any, checkpoint: Path) -> None:
    done = shell(site, "<&-", "run", "qwen3.8-flash", "--checkpoint", str(checkpoint), "--prompt", "-")
    assert done.returncode == ExitCode.USAGE and done.stderr.count("\n") == 1, done
    assert "--prompt -: standard input is closed" in done.stderr, done


# --- the writer itself -----------------------------------------------------------------------------------------------


class FullDevice(io.RawIOBase):
    """Takes nothing, like a device without room."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("size", [1, 100_000])
def test_a_write_that_fails_is_an_output_error(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Whether or not the text fits into the buffer."""
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BufferedWriter(FullDevice()), encoding="utf-8"))
    with pytest.raises(OutputError, match="No space left on device"):
        write("x" * size)


def test_a_message_begins_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    write("text", end="")
    say("one")
    say("two")
    write("more", end="\n")
    say("three")
    assert capsys.readouterr() == ("text\nmore\n", "one\ntwo\nthree\n")


def test_a_message_on_another_stream_adds_no_line_to_a_new_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write("text", end="")
    monkeypatch.setattr("sys.stdout", io.StringIO())
    say("one")
    assert sys.stdout.getvalue() == ""  # type: ignore[attr-defined]


def test_a_message_takes_the_place_of_a_progress_line(capsys: pytest.CaptureFixture[str]) -> None:
    progress("half done")
    say("interrupted")
    progress("again")
    clear_progress()
    clear_progress()
    assert capsys.readouterr().err == "half done\r\x1b[Kinterrupted\nagain\r\x1b[K"


def test_an_error_in_the_middle_of_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: list[str]) -> int:
        output.write("some tex", end="")
        raise KeyboardInterrupt

    monkeypatch.setattr("specdec.cli.main._dispatch", interrupted)
    assert main(["run"]) == ExitCode.INTERRUPTED == 130
    assert capsys.readouterr() == ("some tex\n", "specdec: interrupted\n")


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("argument --top-k: invalid int value: 'x'", "--top-k is 'x'; give a whole number"),
        ("argument SHELL: invalid choice: 'tcsh' (choose from 'bash', 'zsh')", "SHELL is 'tcsh'; allowed: bash, zsh"),
        ("argument SHELL: invalid choice: 'tcsh' (choose from bash, zsh)", "SHELL is 'tcsh'; allowed: bash, zsh"),
        (
            "argument --mtp/--no-mtp: ignored explicit argument 'x'",
            "--no-mtp takes no value, but has 'x'; drop the value",
        ),
        (
            "argument -n/--number: expected one argument",
            "--number has no value; give one, as --number=VALUE if it begins with a dash",
        ),
        ("the following arguments are required: RECIPE", "RECIPE is missing"),
        ("the following arguments are required: RECIPE, --out", "RECIPE, --out are missing"),
        ("something of a later version", "something of a later version"),
    ],
)
def test_what_argparse_says(message: str, line: str) -> None:
    assert translated(message) == line


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("top_p is 2.0; it must be at most 1", "--top-p is 2.0; it must be at most 1"),
        ("temperature is 0; for this use greedy=True (--greedy)", "--temperature is 0; for this use --greedy"),
        ("stop holds 'top_p', which is no text", "--stop holds 'top_p', which is no text"),
        ("min_k 3 must be below 2: the budget is top_p 4", "min_k 3 must be below 2: the budget is --top-p 4"),
        ("the stop ends it; lower --top-p", "the stop ends it; lower --top-p"),
        ("the model's temperature and top_p's range", "the model's temperature and --top-p's range"),
        ("my_top_p, top_p=3 and top_pile", "my_top_p, top_p=3 and top_pile"),
        ("stop: nothing", "--stop: nothing"),
        ("max_draft_tokens 9 must be 0 to 7", "--mtp-draft-tokens 9 must be 0 to 7"),
        (
            "max_draft_tokens 2 contradicts speculative=False; drop one",
            "--mtp-draft-tokens 2 contradicts --no-mtp; drop one",
        ),
        ("it needs adaptive_verification=False", "it needs --no-mtp-adaptive-verification"),
        (
            "set adaptive_verification=Falsehood, my.max_draft_tokens",
            "set adaptive_verification=Falsehood, my.max_draft_tokens",
        ),
        ("a model named 'max_draft_tokens'", "a model named 'max_draft_tokens'"),
        ("", ""),
    ],
)
def test_messages_in_the_words_of_the_command_line(message: str, line: str) -> None:
    assert spelled(message, {"temperature", "stop", "top_p"}, ["top_p"]) == line
    assert spelled(line, {"temperature", "stop", "top_p"}, ["top_p"]) == line
