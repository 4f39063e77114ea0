"""Entry of the ``specdec`` command: finds the subcommand, imports its module alone, and turns errors into exit codes.

Each subcommand is a module with ``add_parser(subparsers)`` and ``run(args) -> int``. Only the one that is called is
imported, so a help text never waits for torch.
"""

import argparse
import difflib
import os
import re
import sys
import warnings
from collections.abc import Container, Sequence
from importlib import import_module
from typing import Any, NoReturn

from specdec import __version__
from specdec.cli.output import discard, say, write
from specdec.cli.refusals import translated
from specdec.errors import ExitCode, SpecdecError, UsageError
from specdec.failures import TRACEBACK_VARIABLE, error_line, show_traceback

__all__ = ["COMMANDS", "main"]

#: Subcommand → (module, one line for the help text).
COMMANDS: dict[str, tuple[str, str]] = {
    "recipes": ("specdec.cli.recipes", "list recipes, or every number of one with its source"),
    "plugins": ("specdec.cli.plugins", "list installed plugins and why one is not loaded"),
    "run": ("specdec.cli.run", "generate text speculatively and say what it gained"),
    "demo": ("specdec.cli.demo", "generate with and without drafts and compare both"),
    "calibrate": ("specdec.cli.calibrate", "fit a drafter's acceptance forecasts to what happens"),
    "simulate": ("specdec.cli.simulate", "compare width policies on a simulated device, without a model"),
    "bench": ("specdec.cli.bench", "measure every round shape: replay, engine, overhead, phases"),
    "plan": ("specdec.cli.plan", "what a preparation would hold, byte by byte, without weights or a device"),
    "qualify": ("specdec.cli.qualify", "compare what a GPU samples with the CPU reference"),
    "inspect": ("specdec.cli.inspect", "compare a checkpoint folder with a recipe, without reading weights"),
    "doctor": ("specdec.cli.doctor", "what is installed, what works, and which recipes can run here"),
    "completion": ("specdec.cli.completion", "print a shell's completion of commands, options and recipe names"),
}

#: Set by a shell that asks what a word of the command line may become.
COMPLETION_VARIABLE = "_ARGCOMPLETE"


class _Parser(argparse.ArgumentParser):
    """Reports a wrong option as one line, like every other refusal, instead of a usage text and a line."""

    def error(self, message: str) -> NoReturn:
        said = translated(message)
        raise UsageError(said if "; " in said else f"{said}; see '{self.prog} --help'")

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is sys.stdout:
            write(message, end="")
        else:
            super()._print_message(message, file)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code (``specdec.errors.ExitCode``). ``argv`` excludes the program name."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None and COMPLETION_VARIABLE in os.environ:
        from specdec.cli.completion import complete

        return complete(_parser)
    # torch says so when it is first imported without NumPy, which nothing here uses
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
    try:
        # Before anything else: this must work whatever is installed.
        if arguments[:1] in (["--version"], ["-V"]):
            write(f"specdec {__version__}")
            code = int(ExitCode.OK)
        else:
            code = _dispatch(arguments)
        if sys.stdout is not None:
            # What a plugin printed: here and not at exit, where a failure could not be reported as it should.
            write("", end="")
        return code
    except SystemExit as leaving:  # argparse leaves this way after a help text
        return leaving.code if isinstance(leaving.code, int) else int(ExitCode.OK)
    except KeyboardInterrupt:
        say("specdec: interrupted")
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # The reader has what it wanted.
        discard(sys.stdout)
        return int(ExitCode.OK)
    except SpecdecError as error:
        show_traceback(error)
        say(f"specdec: error: {error}")
        return int(error.exit_code)
    except Exception as error:
        if not show_traceback(error):
            say(f"specdec: internal error: {error_line(error)}; set {TRACEBACK_VARIABLE}=1 to see the way there")
        return int(ExitCode.FAILURE)


def _dispatch(arguments: list[str]) -> int:
    command = arguments[0] if arguments else None
    if command is not None and not command.startswith("-") and command not in COMMANDS:
        raise UsageError(f"unknown command {command!r}; {_suggestion(command)}")
    if command not in COMMANDS:
        parser, _ = _parser(())
        if command is None:
            parser.print_help(sys.stderr)
            return int(ExitCode.USAGE)
        parser.parse_args(arguments)
        raise UsageError(f"no command given; commands: {', '.join(COMMANDS)}")
    parser, subparsers = _parser((command,), alone=True)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        asked = _innermost(subparsers.choices[command], arguments[1:])
        options = re.findall(r"--[a-z][a-z0-9-]*", asked.format_usage())
        close = difflib.get_close_matches(unknown[0].partition("=")[0], options, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UsageError(f"unknown argument {unknown[0]!r}; {hint}see '{asked.prog} --help'")
    return int(import_module(COMMANDS[command][0]).run(args))


def _parser(
    imported: Container[str], *, alone: bool = False
) -> tuple[argparse.ArgumentParser, "argparse._SubParsersAction[Any]"]:
    """The command line and its commands: those ``imported`` with their options, others by name unless these stand ``alone``."""
    parser = _Parser(
        prog="specdec",
        description="Speculative decoding with models as plugins.",
        epilog="'specdec COMMAND --help' explains a command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", "-V", action="version", version=f"specdec {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, (module, summary) in COMMANDS.items():
        if name in imported:
            import_module(module).add_parser(subparsers)
        elif not alone:
            subparsers.add_parser(name, help=summary)
    return parser, subparsers


def _innermost(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the last command among the words, where commands have commands of their own."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            chosen = next((word for word in words if word in action.choices), None)
            return parser if chosen is None else _innermost(action.choices[chosen], words)
    return parser


def _suggestion(command: str) -> str:
    close = difflib.get_close_matches(command, COMMANDS, n=3)
    return f"did you mean {' or '.join(close)}?" if close else f"commands: {', '.join(COMMANDS)}"


if __name__ == "__main__":
    sys.exit(main())
