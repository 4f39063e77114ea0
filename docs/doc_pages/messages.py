"""Every error message that the core raises on purpose, read from its source: class, template, and what to do about it.

A message is the text given to an error of the ``SpecdecError`` family wherever one is made, and the reasons that
``specdec plugins`` shows. ``expressions`` says how what differs is shown.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from attrs import frozen

from doc_pages.docstrings import code, inline, table
from doc_pages.expressions import constants_of, helpers_of, name_of, own_nodes, template, texts_of
from specdec import errors
from specdec.errors import ExitCode, SpecdecError

CORE = Path(__file__).parents[2] / "core" / "specdec"

#: Functions that put a message together for somebody else to raise: module → function → class it is raised as.
_WRITERS: Mapping[str, Mapping[str, str]] = {
    "scheduling/emissions": {"fault_text": "SpecdecError"},
    "serving/ranks": {"first_difference": "DesynchronisationError", "_difference": "DesynchronisationError"},
    "plugins": dict.fromkeys(
        ("inspect_plugin", "missing_target", "_declared", "_name_clash", "_recipe_clashes", "_reason", "discover"),
        "PluginError",
    ),
    "entry_points": {"core_mismatch": "PluginError"},
}
#: Where a message says what is allowed, if no semicolon parts what is wrong from what to do.
_TURN = re.compile(
    r"(?:, |: )?\b(?:must |needs |need |expected |allowed: |allowed |known: |usable: |accepts |name one with |name a |name an? |"
    r"looked for |takes? |choose with |use |has no |only )|, but |: (?=plain decoding|it begins)| \(source: "
)
#: What to do about messages of a class that say only what is wrong and where.
_GENERAL = {
    "CheckpointError": "the file is damaged, incomplete or of another recipe: get it again, then `specdec inspect DIR`",
    "DeclarationError": "correct the field that the message names, in the plugin that declares it",
    "DesynchronisationError": "end the run on all ranks and start it again; look first for a rank that failed",
    "PluginError": "fix or uninstall the plugin that the message names; `SPECDEC_PLUGINS` leaves one out",
}
#: The same for messages whose reason comes from elsewhere and says by itself what to change: class and module.
_BY_REASON = {
    ("UsageError", "serving/grammar"): "correct the grammar where the reason says",
    ("UsageError", "checkpoint/chat"): "change the messages as the template's own refusal says",
}


@frozen(kw_only=True)
class Message:
    """One message. module: where it is made, like ``serving/request``; wrong and cure together are the whole text, cure empty
    if the text says only what is wrong."""

    error: str
    module: str
    line: int
    text: str
    wrong: str
    cure: str

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of a command that ends with it."""
        return _class(self.error).exit_code


def messages() -> list[Message]:
    """All messages, by exit code, class and module, in the order of the source."""
    family = _family()
    constants = constants_of(CORE)
    found = [message for path in sorted(CORE.rglob("*.py")) for message in _of_module(path, family, constants)]
    unique = {(one.error, one.module, one.text): one for one in reversed(found)}
    return sorted(unique.values(), key=lambda one: (one.exit_code, one.error, one.module, one.line))


def general_cure(message: Message) -> str:
    """What to do about a message that does not say it by itself; empty if nothing general is known."""
    return _BY_REASON.get((message.error, message.module)) or _GENERAL.get(message.error, "")


def message_tables() -> str:
    """One heading of level 3 for each class, one table for each module."""
    parts, listed = [], messages()
    for error in dict.fromkeys(message.error for message in listed):
        of_class = [message for message in listed if message.error == error]
        number = int(of_class[0].exit_code)
        parts += [f"### {error} (exit code {number})", inline(_summary(error))]
        for module in dict.fromkeys(message.module for message in of_class):
            rows = [
                [code(message.wrong), code(message.cure) if message.cure else f"*{general_cure(message)}*"]
                for message in of_class
                if message.module == module
            ]
            parts.append(table([[f"`specdec.{module.replace('/', '.')}`", "what is allowed, or what to do"], *rows]))
    return "\n\n".join(parts)


# --- reading the source ---------------------------------------------------------------------------------------------------


def _family() -> set[str]:
    """Names of all classes of the core that derive from ``SpecdecError``."""
    bases = {
        node.name: {name_of(base) for base in node.bases}
        for path in CORE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    family = {"SpecdecError"}
    while more := {name for name, above in bases.items() if above & family} - family:
        family |= more
    return family


def _of_module(path: Path, family: set[str], constants: Mapping[str, str]) -> Iterator[Message]:
    module = path.relative_to(CORE).with_suffix("").as_posix()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    writers = _WRITERS.get(module, {})
    outside = {**constants, **texts_of(tree, constants)}
    outside |= helpers_of(tree, outside)
    for function in [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))]:
        names = outside | texts_of(function, outside)
        given = _error_argument(function)
        for node in own_nodes(function):
            error = name_of(node.func) if isinstance(node, ast.Call) else ""
            error = given.get(error, error)
            if isinstance(node, ast.Call) and error in family and node.args:
                text = template(node.args[0], names)
                if text and re.search("[a-z]{2} ", text):
                    yield _message(error, module, node.lineno, text)
        if isinstance(function, ast.FunctionDef) and function.name in writers:
            for line, text in _written(function, names):
                yield _message(writers[function.name], module, line, text)


def _written(function: ast.FunctionDef, names: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """Texts that a writer returns, names ``reason`` or raises."""
    for node in own_nodes(function):
        values: list[ast.expr | None] = []
        if isinstance(node, ast.Return):
            values = [node.value]
        elif (
            isinstance(node, ast.Raise)
            and isinstance(node.exc, ast.Call)
            and name_of(node.exc.func) != "AssertionError"
        ):
            values = list(node.exc.args)
        elif isinstance(node, ast.keyword) and node.arg in ("reason", "error"):
            values = [node.value]
        elif isinstance(node, ast.Call) and name_of(node.func) == "_record":
            values = list(node.args[2:3])
        elif isinstance(node, ast.Assign) and name_of(node.targets[0]) in ("reason", "text"):
            values = [node.value]
        for value in values:
            if isinstance(value, ast.Constant | ast.JoinedStr):
                text = template(value, names)
                if text and " " in text:
                    yield value.lineno, text


def _error_argument(function: ast.AST) -> dict[str, str]:
    """Arguments that hold the class to raise, with the class that is their default."""
    if not isinstance(function, ast.FunctionDef):
        return {}
    every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    defaults = [*function.args.defaults, *(value for value in function.args.kw_defaults if value is not None)]
    named = [
        argument.arg for argument in every if argument.annotation and "type[Spec" in ast.unparse(argument.annotation)
    ]
    return dict(zip(named, (name_of(value) for value in reversed(defaults)), strict=False))


def _message(error: str, module: str, line: int, text: str) -> Message:
    text = " ".join(text.split())
    wrong, parted, cure = text.partition("; ")
    if wrong.endswith("["):  # all that may be missing is the cure
        wrong, cure = wrong[:-1], f"[{cure}"
    if not parted:
        turn = _TURN.search(text)
        at = turn.start() if turn and turn.start() > 3 else len(text)
        wrong, cure = text[:at].rstrip(), text[at:].lstrip(" ,:")
    return Message(error=error, module=module, line=line, text=text, wrong=wrong, cure=cure)


def _class(name: str) -> type[SpecdecError]:
    """The class of that name, or the one it derives from if a module of its own has it."""
    found = getattr(errors, name, None)
    if isinstance(found, type) and issubclass(found, SpecdecError):
        return found
    bases = [name_of(base) for base in _defined()[name].bases] if name in _defined() else []
    return _class(bases[0]) if bases else SpecdecError


def _summary(error: str) -> str:
    """The first paragraph of a class's own docstring."""
    return " ".join((ast.get_docstring(_defined()[error]) or "").partition("\n\n")[0].split())


@cache
def _defined() -> dict[str, ast.ClassDef]:
    """Classes of the core by name."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(CORE.rglob("*.py"))]
    return {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}
