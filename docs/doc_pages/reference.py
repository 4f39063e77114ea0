"""Classes and functions of a module as a reference: signature, then the docstring. Read from the source; nothing is imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from doc_pages.docstrings import code, explanations, inline, markdown, table

CORE = Path(__file__).parents[2] / "core" / "specdec"


def module_reference(name: str, names: tuple[str, ...] = (), *, fields: bool = True) -> str:
    """Reference of a module of the core, like ``interfaces``: the given names in their order, else all public ones as the file
    has them. One heading of level 3 for each, of level 4 for methods. fields: with a table of each class's fields."""
    tree = _tree(CORE / f"{name}.py")
    found = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    chosen = names or tuple(name for name in found if not name.startswith("_"))
    missing = [name for name in chosen if name not in found]
    if missing:
        raise LookupError(f"{name}.py has no {', '.join(missing)}")
    return "\n\n".join(_entry(found[name], fields) for name in chosen)


def module_introduction(name: str) -> str:
    """The docstring of a module of the core, but for its first line, which the page's title says."""
    text = ast.get_docstring(_tree(CORE / f"{name}.py")) or ""
    return markdown(text.partition("\n")[2])


def class_docstring(name: str, cls: str, method: str = "") -> str:
    """The docstring of a class of a module, or of one of its methods, as Markdown."""
    node = _found(name, cls, method)
    return markdown(ast.get_docstring(node), _explained(node))


def field_table(name: str, cls: str) -> str:
    """Fields of a class of a module: type with what a string below a field says, default."""
    return table([["field", "type", "default"], *_fields(_found(name, cls))])


def methods(name: str, cls: str, *chosen: str) -> str:
    """Methods of a class of a module, one heading of level 4 for each."""
    return "\n\n".join(_method(cls, _found(name, cls, method)) for method in chosen)


def argument_table(name: str, cls: str, method: str, *elsewhere: tuple[str, str, str], **spelled: str) -> str:
    """Arguments of a method with type, default and what its docstring says of them, or else those of other methods, (module,
    class, method), to which it passes them on. spelled: what such a method calls an argument, where it has another name."""
    node = _found(name, cls, method)
    given = node.args.args[1:] + node.args.kwonlyargs
    defaults = [None] * (len(node.args.args) - 1 - len(node.args.defaults)) + node.args.defaults + node.args.kw_defaults
    rest = [node.args.kwarg] if node.args.kwarg else []
    known: dict[str, str] = {}
    for place in ((name, cls, method), *elsewhere):
        text = ast.get_docstring(_found(*place))
        names = [*_explained(_found(*place)), *(argument.arg for argument in rest)]
        known = {**explanations(text, names), **known}
    rows = [["argument", "type", "default", "what it is"]]
    for argument, default in zip([*given, *rest], [*defaults, *(None for _ in rest)], strict=True):
        shown = ("**" if argument in rest else "") + argument.arg
        kind = code(ast.unparse(argument.annotation)) if argument.annotation else "–"
        said = known.get(spelled.get(argument.arg, argument.arg), "–")
        rows.append([code(shown), kind, code(ast.unparse(default)) if default else "–", said.removesuffix(".")])
    return table(rows)


def _found(name: str, cls: str, method: str = "") -> Any:
    """The class of a module, or one of its methods. Raises LookupError if it is not there."""
    found: list[Any] = [node for node in _tree(CORE / f"{name}.py").body if getattr(node, "name", "") == cls]
    if method:
        found = [node for owner in found for node in owner.body if getattr(node, "name", "") == method]
    if not found:
        raise LookupError(f"{name}.py has no {cls}{'.' * bool(method)}{method}")
    return found[0]


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _entry(node: ast.ClassDef | ast.FunctionDef, with_fields: bool) -> str:
    if isinstance(node, ast.FunctionDef):
        return f"### {node.name}\n\n{_signature(node)}\n\n{markdown(ast.get_docstring(node), _explained(node))}"
    parts = [f"### {node.name}", markdown(ast.get_docstring(node), _explained(node))]
    parts += [_signature(made) for made in node.body if isinstance(made, ast.FunctionDef) and made.name == "__init__"]
    fields = list(_fields(node)) if with_fields else []
    if fields:
        parts.append(table([["field", "type", "default"], *fields]))
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef) and not item.name.startswith("_")]
    parts += [_method(node.name, one) for one in methods if ast.get_docstring(one) and not _validates(one)]
    return "\n\n".join(part for part in parts if part)


def _method(cls: str, method: ast.FunctionDef) -> str:
    shown = "" if _is_property(method) else _signature(method) + "\n\n"
    kind = " (property)" if _is_property(method) else ""
    return f"#### {cls}.{method.name}{kind}\n\n{shown}{markdown(ast.get_docstring(method), _explained(method))}"


def _explained(node: ast.ClassDef | ast.FunctionDef) -> list[str]:
    """What a docstring may explain one after the other: arguments of a function, fields of a class."""
    if isinstance(node, ast.ClassDef):
        inside = [item for item in node.body if isinstance(item, ast.AnnAssign)]
        names = [item.target.id for item in inside if isinstance(item.target, ast.Name)]
        names += [item.name for item in node.body if isinstance(item, ast.FunctionDef) and _is_property(item)]
        made = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
        # what is set in there, public or not: a docstring explains public ones
        given = [item for one in made for item in ast.walk(one) if isinstance(item, ast.Attribute)]
        return [*names, *(item.attr for item in given if isinstance(item.ctx, ast.Store))]
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return [argument.arg for argument in every if argument.arg != "self"]


def _fields(node: ast.ClassDef) -> Iterator[list[str]]:
    """Annotated names of a class body: name, type, default; a string below one explains it."""
    for at, item in enumerate(node.body):
        if (
            not isinstance(item, ast.AnnAssign)
            or not isinstance(item.target, ast.Name)
            or item.target.id.startswith("_")
        ):
            continue
        following = node.body[at + 1] if at + 1 < len(node.body) else None
        said = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            said = ". " + inline(" ".join(str(following.value.value).split()))
        yield [code(item.target.id), code(ast.unparse(item.annotation)) + said, _default(item.value)]


def _default(value: ast.expr | None) -> str:
    if isinstance(value, ast.Call):
        given = {word.arg: word.value for word in value.keywords}
        if "factory" in given:
            return code(f"{ast.unparse(given['factory'])}()")
        value = given.get("default")
    if value is None:
        return "–"
    if isinstance(value, ast.Call):  # computed from other fields
        return "computed"
    return code(ast.unparse(value))


def _signature(node: ast.FunctionDef) -> str:
    """The ``def`` line without its body, an argument a line if it is long."""
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    arguments = [_spaced(argument) for argument in _split(ast.unparse(node.args))]
    line = f"def {node.name}({', '.join(arguments)}){returns}"
    if len(line) > 100:
        line = f"def {node.name}(\n    " + ",\n    ".join(arguments) + f",\n){returns}"
    made = "".join(f"@{ast.unparse(one)}\n" for one in node.decorator_list if ast.unparse(one) == "classmethod")
    return f"```python\n{made}{line}\n```"


def _split(arguments: str) -> list[str]:
    """Arguments at the commas that no bracket holds."""
    parts, depth, begin = [], 0, 0
    for at, letter in enumerate(arguments):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append(arguments[begin:at].strip())
            begin = at + 1
    return [*parts, arguments[begin:].strip()]


def _spaced(argument: str) -> str:
    """An annotated argument with spaces around its default's sign, as the source has them."""
    return re.sub(r"(: [^=]+)=", r"\1 = ", argument, count=1)


def _is_property(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(one) == "property" for one in node.decorator_list)


def _validates(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(one).endswith(".validator") for one in node.decorator_list)
