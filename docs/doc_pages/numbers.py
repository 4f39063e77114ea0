"""What numbers may be: the range and reason of every call of ``require_integer``, which writes the message of one outside."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from attrs import frozen

from doc_pages import commands
from doc_pages.docstrings import code, inline, table
from doc_pages.expressions import constants_of, own_nodes, shown, template, texts_of
from specdec.cli.main import COMMANDS
from specdec.cli.refusals import spelled

CORE = Path(__file__).parents[2] / "core" / "specdec"
#: Whose fields are options of a command.
_FROM_OPTIONS = ("PreparationConfig", "Request")


@frozen(kw_only=True)
class Number:
    """One checked number. owner: the class or function that checks it; name: of its field or argument."""

    module: str
    owner: str
    name: str
    allowed: str
    why: str

    def option(self, known: set[str]) -> str:
        """The option that gives it, empty if none does."""
        name = spelled(f"{self.name} ", (self.name,), ()).strip()
        return name if name in known and self.owner in _FROM_OPTIONS else ""


def number_tables() -> str:
    """One table of what commands have options for, one of everything else that is given in Python."""
    known = {word for name in COMMANDS for word in commands.parser_of(name)._option_string_actions}
    options = [["option", "in Python", "allowed", "why"]]
    python = [["class or function", "argument", "allowed", "why"]]
    for number in numbers():
        option = number.option(known)
        said = [_marked(number.allowed), _marked(number.why) or "–"]
        if option:
            options.append([code(option), f"{code(number.name)} of {code(number.owner)}", *said])
        else:
            python.append([code(f"specdec.{number.module}.{number.owner}"), code(number.name), *said])
    return f"{table(options)}\n\nWhat is given in Python only:\n\n{table(python)}"


def numbers() -> list[Number]:
    """All checked numbers with a name of their own, by name, each range of one owner once."""
    constants = constants_of(CORE)
    found = [number for path in sorted(CORE.rglob("*.py")) for number in _of_module(path, constants)]
    unique: dict[tuple[str, str, str], Number] = {}
    for one in found:
        unique.setdefault((one.owner, one.name, one.allowed), one)
    return sorted(unique.values(), key=lambda one: (one.name, one.module, one.owner))


def _of_module(path: Path, constants: Mapping[str, str]) -> Iterator[Number]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    module = path.relative_to(CORE).with_suffix("").as_posix().replace("/", ".")
    for owner in tree.body:
        functions = [owner] if isinstance(owner, ast.FunctionDef) else []
        if isinstance(owner, ast.ClassDef):
            functions = [node for node in owner.body if isinstance(node, ast.FunctionDef)]
        for function in functions:
            texts = {**constants, **texts_of(function, constants)}
            for names, call in _calls(function):
                _, _, least, most, why = call.args
                low, high = shown(least, texts), shown(most, texts)
                for name in names:
                    yield Number(
                        module=module,
                        owner=owner.name,  # type: ignore[attr-defined]
                        name=name,
                        allowed=f"{low} or more" if high == "None" else f"{low} to {high}",
                        why=template(why, texts) or "",
                    )


def _calls(function: ast.FunctionDef) -> Iterator[tuple[list[str], ast.Call]]:
    """Calls of ``require_integer`` with the names that each checks, which a loop may list."""
    loops = {
        node.target.id: [str(item.value) for item in node.iter.elts if isinstance(item, ast.Constant)]
        for node in own_nodes(function)
        if isinstance(node, ast.For) and isinstance(node.target, ast.Name) and isinstance(node.iter, ast.Tuple)
    }
    for node in own_nodes(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "require_integer" and len(node.args) == 5:
            option = node.args[0]
            names = [str(option.value)] if isinstance(option, ast.Constant) else []
            if isinstance(option, ast.Name):
                names = loops.get(option.id, [])
            yield names, node


def _marked(text: str) -> str:
    """Text with its names in braces as code."""
    return re.sub(r"(\{[^{}]*\})", r"`\1`", inline(text))
