"""Every error message that the core raises on purpose, read from its source: class, template, and what to do about it.

A message is the text given to an error of the ``SpecdecError`` family wherever one is made, and the reasons that
``specdec plugins`` shows. Expressions in it are shortened to a name in braces.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from attrs import frozen

from doc_pages.docstrings import code, inline, table
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
    found = [message for path in sorted(CORE.rglob("*.py")) for message in _of_module(path, family)]
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


def number_table() -> str:
    """What ``require_integer`` checks: option, range and reason of every call with a name of its own."""
    rows = {}
    for path in sorted(CORE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _name(node.func) == "require_integer" and len(node.args) == 5:
                option, _, least, most, why = node.args
                if isinstance(option, ast.Constant):
                    span = (
                        f"{_shown(least)} or more" if _shown(most) == "None" else f"{_shown(least)} to {_shown(most)}"
                    )
                    rows[str(option.value)] = [
                        code(str(option.value)),
                        _marked(span),
                        _marked(_template(why, {}) or "–"),
                    ]
    return table([["option", "allowed", "why"], *(rows[name] for name in sorted(rows))])


def _marked(text: str) -> str:
    """Text with its names in braces as code."""
    return re.sub(r"(\{[^{}]*\})", r"`\1`", inline(text))


# --- reading the source ---------------------------------------------------------------------------------------------------


def _family() -> set[str]:
    """Names of all classes of the core that derive from ``SpecdecError``."""
    bases = {
        node.name: {_name(base) for base in node.bases}
        for path in CORE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    family = {"SpecdecError"}
    while more := {name for name, above in bases.items() if above & family} - family:
        family |= more
    return family


def _of_module(path: Path, family: set[str]) -> Iterator[Message]:
    module = path.relative_to(CORE).with_suffix("").as_posix()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    writers = _WRITERS.get(module, {})
    outside = _texts(tree)
    for function in [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))]:
        names = outside | _texts(function)
        given = _error_argument(function)
        for node in _own(function):
            error = _name(node.func) if isinstance(node, ast.Call) else ""
            error = given.get(error, error)
            if isinstance(node, ast.Call) and error in family and node.args:
                text = _template(node.args[0], names)
                if text and re.search("[a-z]{2} ", text):
                    yield _message(error, module, node.lineno, text)
        if isinstance(function, ast.FunctionDef) and function.name in writers:
            for line, text in _written(function, names):
                yield _message(writers[function.name], module, line, text)


def _own(function: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a function, those of functions inside it left out."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from _own(child)


def _written(function: ast.FunctionDef, names: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """Texts that a writer returns, names ``reason`` or raises."""
    for node in _own(function):
        values: list[ast.expr | None] = []
        if isinstance(node, ast.Return):
            values = [node.value]
        elif (
            isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and _name(node.exc.func) != "AssertionError"
        ):
            values = list(node.exc.args)
        elif isinstance(node, ast.keyword) and node.arg in ("reason", "error"):
            values = [node.value]
        elif isinstance(node, ast.Call) and _name(node.func) == "_record":
            values = list(node.args[2:3])
        elif isinstance(node, ast.Assign) and _name(node.targets[0]) in ("reason", "text"):
            values = [node.value]
        for value in values:
            if isinstance(value, ast.Constant | ast.JoinedStr):
                text = _template(value, names)
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
    return dict(zip(named, (_name(value) for value in reversed(defaults)), strict=False))


def _texts(function: ast.AST) -> dict[str, str]:
    """Names of a function, or of a module's top, that hold a text, the first one given to each."""
    found: dict[str, str] = {}
    for node in function.body if isinstance(function, ast.Module) else _own(function):
        if not isinstance(node, ast.Assign):
            continue
        if isinstance(node.value, ast.IfExp):
            ways = [_template(way, found) for way in (node.value.body, node.value.orelse)]
            text: str | None = " | ".join(way for way in ways if way)
        else:
            text = _template(node.value, found)
        if text and " " in text and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, text)
    return found


def _template(node: ast.expr, names: Mapping[str, str]) -> str | None:
    """A message with its expressions in braces; None if it is not written out where it is used."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if not isinstance(node, ast.JoinedStr):
        return None
    parts = []
    for value in node.values:
        if isinstance(value, ast.Constant):
            parts.append(str(value.value))
        elif isinstance(value, ast.FormattedValue):
            held = names.get(value.value.id) if isinstance(value.value, ast.Name) else None
            parts.append(held or _shown(value.value))
    return "".join(parts)


def _shown(node: ast.expr) -> str:
    """An expression as a reader of messages takes it: a number as it is, anything else as one word in braces."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    word = _word(node)
    return word if word in ("--mtp-draft-tokens",) else "{" + word + "}"


def _word(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id.strip("_").lower()
    if isinstance(node, ast.Attribute):
        return {"strerror": "reason", "name": f"{_word(node.value)} name"}.get(node.attr, node.attr.strip("_").lower())
    if isinstance(node, ast.Call):
        name = _name(node.func)
        if name == "len" and node.args:
            return f"number of {_word(node.args[0])}"
        inner = [*node.args, *(node.func.value for _ in [0] if isinstance(node.func, ast.Attribute))]
        inner = [one for one in inner if not isinstance(one, ast.Constant)]
        return _word(inner[0]) if inner else name.strip("_")
    if isinstance(node, ast.BoolOp):
        return _word(node.values[0])
    if isinstance(node, ast.Subscript | ast.Starred | ast.Await):
        return _word(node.value)
    if isinstance(node, ast.IfExp):
        return _word(node.test) if isinstance(node.body, ast.Constant) else _word(node.body)
    if isinstance(node, ast.BinOp):
        return f"{_word(node.left)} {_SIGNS.get(type(node.op), '·')} {_word(node.right)}"
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.GeneratorExp | ast.ListComp | ast.SetComp):
        return _word(node.generators[0].iter)
    return "values"


_SIGNS: Mapping[type, str] = {ast.Add: "+", ast.Sub: "−", ast.Mult: "×", ast.Div: "/"}


def _message(error: str, module: str, line: int, text: str) -> Message:
    text = " ".join(text.split())
    wrong, parted, cure = text.partition("; ")
    if not parted:
        turn = _TURN.search(text)
        at = turn.start() if turn and turn.start() > 3 else len(text)
        wrong, cure = text[:at].rstrip(), text[at:].lstrip(" ,:")
    return Message(error=error, module=module, line=line, text=text, wrong=wrong, cure=cure)


def _class(name: str) -> type[SpecdecError]:
    found = getattr(errors, name, SpecdecError)
    return found if isinstance(found, type) and issubclass(found, SpecdecError) else SpecdecError


def _summary(error: str) -> str:
    return (_class(error).__doc__ or "").strip().partition("\n")[0]


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
