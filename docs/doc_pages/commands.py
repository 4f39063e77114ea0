"""Options of every command, from the parser that the command itself uses."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from importlib import import_module

from doc_pages.docstrings import code, inline, table
from specdec.cli.main import COMMANDS
from specdec.errors import UsageError


class _Parser(argparse.ArgumentParser):
    """Raises what the command line would print."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(f"{message}; see '{self.prog} --help'")


def parser_of(command: str) -> argparse.ArgumentParser:
    """The parser of one command, as ``specdec COMMAND`` builds it."""
    subparsers = _Parser(prog="specdec", allow_abbrev=False).add_subparsers()
    import_module(COMMANDS[command][0]).add_parser(subparsers)
    parser: argparse.ArgumentParser = subparsers.choices[command]
    return parser


def check(words: Sequence[str]) -> None:
    """Whether ``specdec WORDS`` is a command with options that exist. Raises UsageError if it is not."""
    if list(words) in (["--version"], ["--help"]):
        return
    if not words or words[0] not in COMMANDS:
        raise UsageError(f"no command: specdec {' '.join(words)}")
    if "--help" in words or "-h" in words:
        words = [word for word in words if word not in ("--help", "-h")]
        if len(words) == 1:
            return
    _, unknown = parser_of(words[0]).parse_known_args(list(words[1:]))
    if unknown:
        raise UsageError(f"specdec {' '.join(words)}: unknown argument {unknown[0]!r}")


def command_list() -> str:
    """One row per command."""
    rows = [[f"[`specdec {name}`](#specdec-{name})", inline(summary)] for name, (_, summary) in COMMANDS.items()]
    return table([["command", "what it does"], *rows])


def option_tables() -> str:
    """All arguments and options of all commands, one heading of level 3 for each command."""
    return "\n\n".join(part for name in COMMANDS for part in _command(parser_of(name)))


def _command(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield f"### {parser.prog}"
    if parser.description:
        yield inline(" ".join(parser.description.split()))
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        below = [action for action in actions if isinstance(action, argparse._SubParsersAction)]
        shown = [action for action in actions if not isinstance(action, argparse._HelpAction) and action not in below]
        shown = [action for action in shown if action.option_strings != ["-h", "--help"]]
        if shown:
            if group.title not in ("positional arguments", "options"):
                description = f": {inline(' '.join(group.description.split()))}" if group.description else ""
                yield f"*{group.title}*{description}"
            yield table([["argument", "meaning"], *([_spelled(action), _meaning(parser, action)] for action in shown)])
        for action in below:
            for child in action.choices.values():
                yield from _command(child)
    if parser.epilog and parser.formatter_class is argparse.RawDescriptionHelpFormatter:
        yield f"```text\n{parser.epilog}\n```"
    elif parser.epilog:
        yield inline(" ".join(parser.epilog.split()))


def _spelled(action: argparse.Action) -> str:
    value = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else None)
    if not action.option_strings:
        name = str(value or action.dest)
        return code(f"[{name}]" if action.nargs in ("?", "*") else name)
    names = ", ".join(code(name) for name in action.option_strings)
    return names if action.nargs == 0 or value is None else f"{names} {code(str(value))}"


def _meaning(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    text = (action.help or "") % {**vars(action), "prog": parser.prog}
    text = re.sub(r"(?<![\w`])(--[a-z][a-z-]+)", r"`\1`", inline(" ".join(text.split())))
    return text + (" (required)" if action.required and action.option_strings else "")
