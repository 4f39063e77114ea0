"""Expressions in messages as a reader takes them: constants by their value, anything else as a word or two in braces.

What may be missing stands in square brackets, alternatives have a bar between them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

#: Names of a module that hold a text, or values that messages list.
Texts = Mapping[str, str]

_SIGNS: Mapping[type, str] = {ast.Add: "+", ast.Sub: "−", ast.Mult: "×", ast.Div: "/"}
#: Names that say nothing by themselves where a message shows one of their values.
_WORDS: Mapping[str, str] = {"by_shard": "tensor", "why": "reason", "able": "profiles", "unread": "unreadable profiles"}
#: Functions that only change how a value is written.
_WRAPPERS = ("map", "str", "repr", "sorted", "list", "tuple", "set")


def constants_of(core: Path) -> dict[str, str]:
    """Names in capitals of all modules with what a message shows of them: a number or string, or what a collection lists. A name
    that two modules give different values is left out."""
    found: dict[str, set[str]] = {}
    for path in sorted(core.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            value = _constant(getattr(node, "value", None))
            if isinstance(target, ast.Name) and target.id.isupper():
                found.setdefault(target.id, set()).add(value)
    return {name: next(iter(values)) for name, values in found.items() if len(values) == 1 and values != {""}}


def _constant(node: ast.AST | None) -> str:
    """A constant as a message shows it, empty for what is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | str):
        return str(node.value)
    parts: list[ast.expr | None] = []
    if isinstance(node, ast.Tuple):
        parts = [*node.elts]
    elif isinstance(node, ast.Dict):
        parts = [*node.keys]
    listed = [str(part.value) for part in parts if isinstance(part, ast.Constant)]
    return ", ".join(listed) if len(listed) == len(parts) else ""


def texts_of(function: ast.AST, texts: Texts) -> dict[str, str]:
    """Names of a function, or of a module's top, that hold a text, the first one given to each. texts: known ones."""
    found = dict(texts)
    own: dict[str, str] = {}
    for node in function.body if isinstance(function, ast.Module) else own_nodes(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            text = template(node.value, {**found, **own})
            if isinstance(node.value, ast.IfExp) and text is None:
                ways = [template(way, {**found, **own}) for way in (node.value.body, node.value.orelse)]
                text = alternatives(ways)
            if text and " " in text:
                own.setdefault(node.targets[0].id, text)
    return own


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a function, those of functions inside it left out."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from own_nodes(child)


def helpers_of(tree: ast.Module, texts: Texts) -> dict[str, str]:
    """Functions of a module, private ones, that return nothing but written texts: their name with those texts."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("_"):
            known = {**texts, **texts_of(node, texts)}
            returned = [template(one.value, known) for one in own_nodes(node) if isinstance(one, ast.Return)]
            if returned and all(text and " " in text for text in returned):
                found[f"{node.name}()"] = " | ".join(text for text in returned if text)
    return found


def template(node: ast.expr | None, texts: Texts) -> str | None:
    """A text with its expressions in braces; None if it is not written out where it is used."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.Name):
        return texts.get(node.id)
    if isinstance(node, ast.IfExp):
        ways = [template(way, texts) for way in (node.body, node.orelse)]
        return alternatives(ways) if None not in ways else None
    if not isinstance(node, ast.JoinedStr):
        return None
    return "".join(
        shown(value.value, texts) if isinstance(value, ast.FormattedValue) else str(value.value)
        for value in node.values
        if isinstance(value, ast.FormattedValue | ast.Constant)
    )


def alternatives(ways: list[str | None]) -> str:
    """Texts of which one is there; in brackets if the other way says nothing."""
    said = [way for way in ways if way]
    return " | ".join(said) if len(said) == len(ways) or None in ways else f"[{said[0]}]" if said else ""


def shown(node: ast.expr, texts: Texts) -> str:
    """An expression in a message: its text or value where that is known, otherwise a word in braces."""
    if isinstance(node, ast.Name) and node.id in texts:
        return texts[node.id]
    if isinstance(node, ast.Call) and f"{name_of(node.func)}()" in texts:
        return texts[f"{name_of(node.func)}()"]
    if isinstance(node, ast.Call) and name_of(node.func) == "method_of":
        return "{class}." + shown(node.args[1], texts)
    if isinstance(node, ast.Call) and name_of(node.func) in ("join", "listed") and node.args:
        listed = _unwrapped(node.args[0])
        if isinstance(listed, ast.Name) and listed.id in texts:
            return texts[listed.id]
        if isinstance(listed, ast.List | ast.Tuple):
            return ", ".join(shown(item, texts) for item in listed.elts)
    if isinstance(node, ast.IfExp):
        written = template(node, texts)
        ways = [template(way, texts) for way in (node.body, node.orelse)]
        if written is not None:
            return written
        if any(ways):
            return alternatives([shown(way, texts) for way in (node.body, node.orelse)])
    if isinstance(node, ast.Constant):
        return str(node.value)
    said = word(node)
    # an option that is what it is called
    return said if said.startswith("--") else "{" + said + "}"


def word(node: ast.expr) -> str:
    """What an expression is called."""
    node = _unwrapped(node)
    if isinstance(node, ast.Name):
        said = node.id.strip("_").lower()
        return _WORDS.get(said, said)
    if isinstance(node, ast.Attribute):
        return _attribute(node)
    if isinstance(node, ast.Call):
        return _call(node)
    if isinstance(node, ast.BoolOp):
        return word(node.values[0])
    if isinstance(node, ast.Subscript):
        last = isinstance(node.slice, ast.UnaryOp) and ast.unparse(node.slice) == "-1"
        inner = word(node.value)
        return ("widest width" if inner.endswith("widths") else f"last of {inner}") if last else inner
    if isinstance(node, ast.Starred | ast.Await):
        return word(node.value)
    if isinstance(node, ast.IfExp):
        return word(node.test) if isinstance(node.body, ast.Constant) else word(node.body)
    if isinstance(node, ast.BinOp):
        return f"{word(node.left)} {_SIGNS.get(type(node.op), '·')} {word(node.right)}"
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.List | ast.Tuple):
        return ", ".join(word(item) for item in node.elts)
    if isinstance(node, ast.GeneratorExp | ast.ListComp | ast.SetComp):
        return word(node.generators[0].iter)
    return "values"


def _unwrapped(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _WRAPPERS and node.args:
        node = node.args[-1] if node.func.id == "map" else node.args[0]
    return node


def _attribute(node: ast.Attribute) -> str:
    owner = node.value
    if node.attr == "strerror":
        return "reason"
    if node.attr == "__name__":
        return f"type of {word(owner.args[0])}" if isinstance(owner, ast.Call) and owner.args else word(owner)
    if node.attr == "name":
        return "name" if isinstance(owner, ast.Name) and owner.id == "self" else f"{word(owner)} name"
    return node.attr.strip("_").lower()


def _call(node: ast.Call) -> str:
    name = name_of(node.func)
    if name == "len" and node.args:
        return f"number of {word(node.args[0])}"
    inner = [*node.args, *_owner(node.func)]
    inner = [one for one in inner if not isinstance(one, ast.Constant)]
    return word(inner[0]) if inner else name.strip("_")


def _owner(function: ast.expr) -> Iterator[ast.expr]:
    """What a method is called on, but for ``self``, which no message is about."""
    if isinstance(function, ast.Attribute) and ast.unparse(function.value) != "self":
        yield function.value


def name_of(node: ast.expr) -> str:
    """The last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
