"""What README, CONTRIBUTING and the pages name exists: files, paths, modules, options, variables."""

from __future__ import annotations

import argparse
import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_blocks import DOCS, PAGES, ROOT, blocks, links, prose, spans
from doc_pages import commands

from specdec.cli.main import COMMANDS

#: First parts of paths of this repository.
_TOP = ("core", "plugins", "tests", "docs", "training", ".ci")
_FILES = ("Makefile", "mkdocs.yml", "pyproject.toml", "requirements-dev.txt", "requirements-oracle.txt", "CHANGELOG.md")
_NAMES = re.compile(r"^specdec(?:\.\w+)+$")


def ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


def slug(heading: str) -> str:
    """The anchor of a heading, as the site and forges make it."""
    text = re.sub(r"[`*]|\(.*?\)$", "", heading).strip().lower()
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", text))


def anchors(page: Path) -> set[str]:
    text = page.read_text(encoding="utf-8")
    return {slug(found[1]) for found in re.finditer(r"^#+ (.+)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_between_files_lead_somewhere(page: Path) -> None:
    wrong = []
    for link in links(page):
        name, _, anchor = link.partition("#")
        if "://" in link:
            assert link.startswith("https://"), link
            continue
        if DOCS in page.parents and name.startswith("figures/"):
            continue  # added by the build; the test of the site looks them up
        target = (page.parent / name).resolve() if name else page
        if not target.exists():
            wrong.append(f"{link}: no such file")
        # anchors of generated headings are checked in the built site
        elif anchor and "<!-- generated:" not in target.read_text(encoding="utf-8") and anchor not in anchors(target):
            wrong.append(f"{link}: no such heading")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_paths_of_the_repository_exist(page: Path) -> None:
    missing = []
    for span in spans(page):
        for word in span.split():
            path = word.partition("::")[0].rstrip(",;")
            named = path in _FILES or ("/" in path and path.split("/")[0] in _TOP) or path in _TOP
            if not named or re.search(r"\b(?:NAME|FILE|RECIPE|CHECKPOINT)\b", path):
                continue
            if not any(True for _ in ROOT.glob(path.rstrip("/"))):
                missing.append(path)
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_names_of_the_core_exist(page: Path) -> None:
    unknown = [span for span in spans(page) if _NAMES.match(span) and not exists(span)]
    assert not unknown


def exists(dotted: str) -> bool:
    """Whether a dotted name is a module of the core or a name at the top of one."""
    parts = dotted.split(".")[1:]
    folder = ROOT / "core" / "specdec"
    while parts and (folder / parts[0]).is_dir():
        folder /= parts.pop(0)
    if not parts:
        return True
    module = folder / f"{parts[0]}.py"
    if module.is_file():
        parts.pop(0)
    else:
        module = folder / "__init__.py"
    return not parts or parts[0] in top_names(module)


def top_names(module: Path) -> set[str]:
    """Names that a module defines or imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)  # the lazy names of a package
    return names


def options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from options_of(child)


OPTIONS = {name: set(options_of(commands.parser_of(name))) for name in COMMANDS}
#: Of every command, and of the benchmarks.
_FOREIGN = {"--version", "--help", "--files"}


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_commands_and_options_in_prose_exist(page: Path) -> None:
    wrong = []
    for span in spans(page):
        words = span.split()
        if words[0] == "specdec" and len(words) > 1:
            known = OPTIONS.get(words[1], set()) | _FOREIGN
            if words[1] not in (*COMMANDS, "COMMAND", "--version") or any(
                word.startswith("--") and word not in known for word in words[2:]
            ):
                wrong.append(span)
        elif words[0].startswith("--") and words[0] not in _FOREIGN.union(*OPTIONS.values()):
            wrong.append(span)
    assert not wrong


def test_every_variable_of_the_core_is_described() -> None:
    """Each environment variable that the core reads is in the table of the operations page, and no other."""
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "core" / "specdec").rglob("*.py"))
    read = set(re.findall(r"\"(SPECDEC_[A-Z_]+)\"", source))
    described = set(re.findall(r"`(SPECDEC_[A-Z_]+)`", prose(DOCS / "operations.md")))
    assert read and described == read


def test_every_extra_is_described() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    described = set(re.findall(r"^\| `([a-z]+)` \|", prose(DOCS / "operations.md"), re.MULTILINE))
    assert described == set(project["optional-dependencies"])


def test_every_command_is_in_the_changelog() -> None:
    assert set(COMMANDS) <= set(spans(ROOT / "CHANGELOG.md"))


def test_pages_say_nothing_of_a_block_without_a_language() -> None:
    known = {"sh", "console", "python", "text", "mermaid", "toml", "json", "markdown"}
    wrong = [f"{block}: {block.language!r}" for page in PAGES for block in blocks(page) if block.language not in known]
    assert not wrong
