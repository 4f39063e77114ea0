"""``specdec completion``: the script with which a shell completes commands, options, recipe names and files.

The script asks this command for each word (``complete``), through argcomplete (extra ``completion``). Never imports torch.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

from specdec.cli.output import write
from specdec.errors import ExitCode, UsageError

__all__ = ["add_parser", "complete", "run"]

_DESCRIPTION = "Prints the script with which a shell completes commands, options, recipe names and files."
_EPILOG = """\
To have it in every new shell, write it to a file that the shell reads:
  bash  specdec completion bash > ~/.local/share/bash-completion/completions/specdec
  zsh   specdec completion zsh > ~/.zfunc/_specdec, with ~/.zfunc in fpath before compinit
  fish  specdec completion fish > ~/.config/fish/completions/specdec.fish
Needs the extra 'completion': pip install 'specdec-core[completion]'"""
_DEVICES = {"cpu": "the processor", "cuda": "a GPU; cuda:N is the Nth"}


def add_parser(subparsers: Any) -> None:
    """Adds ``completion`` to the command line."""
    parser = subparsers.add_parser(
        "completion",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "fish"), help="bash, zsh or fish")


def run(args: argparse.Namespace) -> int:
    """Prints the script. Raises UsageError if argcomplete is not installed."""
    try:
        from argcomplete import shellcode
    except ImportError as error:
        raise UsageError("completion needs argcomplete; install it: pip install 'specdec-core[completion]'") from error
    write(shellcode(["specdec"], shell=args.shell).rstrip("\n"))
    return int(ExitCode.OK)


def complete(parser_with: Callable[[set[str]], tuple[argparse.ArgumentParser, Any]]) -> int:
    """Answers a shell that completes a word, and ends the process; returns FAILURE where argcomplete is not installed any more.

    parser_with: the command line, given the commands whose options it must know.
    """
    try:
        import argcomplete
        from argcomplete.completers import SuppressCompleter
    except ImportError:
        return int(ExitCode.FAILURE)
    from specdec.cli.main import COMMANDS

    parser, _ = parser_with(COMMANDS.keys() & os.environ.get("COMP_LINE", "").split())
    _add_completers(parser)
    argcomplete.autocomplete(parser, always_complete_options=False, default_completer=SuppressCompleter())
    return int(ExitCode.FAILURE)


def _add_completers(parser: argparse.ArgumentParser) -> None:
    """Says for each argument what its values are, where they are no fixed choices."""
    from argcomplete.completers import ChoicesCompleter, DirectoriesCompleter, FilesCompleter

    for action in parser._actions:
        completer: Any = None
        if isinstance(action, argparse._SubParsersAction):
            for inner in set(action.choices.values()):
                _add_completers(inner)
        elif action.dest == "recipe" or (parser.prog == "specdec recipes" and action.dest == "name"):
            completer = _recipes
        elif action.metavar == "FILE":
            completer = FilesCompleter()
        elif action.metavar == "DIR":
            completer = DirectoriesCompleter()
        elif action.dest == "device" and action.choices is None:
            completer = ChoicesCompleter(_DEVICES)
        if completer is not None:
            action.completer = completer  # type: ignore[attr-defined]


def _recipes(**_: Any) -> dict[str, str]:
    """Names of the recipes that are installed, with their summaries. What plugins print is no business of the shell's."""
    from specdec.recipes import recipe_book

    with redirect_stderr(StringIO()):
        return {recipe.name: recipe.summary for recipe in recipe_book().discovery.recipes}
