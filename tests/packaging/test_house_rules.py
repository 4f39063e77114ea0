"""Rules of the house that a reader cannot see in one file: layers, public names, sizes, and what no file may say."""

import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.recipes import recipe_book

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "specdec"
PLUGINS = sorted(path.parent for path in (ROOT / "plugins").glob("*/specdec_*/plugin.py"))

DECLARATION = [
    "__init__",
    "errors",
    "validators",
    "tensors",
    "layout",
    "declaration",
    "hookspecs",
    "entry_points",
    "places",
    "failures",
    "named_functions",
    "hook_checks",
    "plugin_objects",
    "plugins",
    "recipes",
    "catalog",
    "preparation",
    "manifest",
    "converters",
    "config_fields",
    "context_fields",
    "tensor_names",
    "hash_tables",
    "interfaces",
    "held",
    "snapshot_sizes",
    "memory",
    "memory_plan",
    "memory_remedies",
]
#: Modules of a plugin that are imported while plugins are discovered.
DISCOVERED = ["__init__", "plugin", "recipe", "geometry", "inventory", "state"]

THIRD_PARTY = {"pluggy", "attr", "attrs", "cattrs"}
#: Inside functions, where it is needed: version ranges are compared only for plugins that state one.
LATE_THIRD_PARTY = {"packaging"}

SKIPPED_FOLDERS = {"__pycache__", "build", "dist"}


def files(*suffixes: str) -> Iterator[Path]:
    """Files of the repository, caches and environments left out."""
    for folder, folders, names in os.walk(ROOT):
        # Hidden folders are environments, caches and scratch, except the one with the continuous-integration script.
        folders[:] = [
            name
            for name in folders
            if name == ".ci" or not (name in SKIPPED_FOLDERS or name.startswith(".") or name.endswith(".egg-info"))
        ]
        yield from (Path(folder, name) for name in sorted(names) if not suffixes or name.endswith(suffixes))


def imports(path: Path) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    """(module, imported names, whether it runs at import) of each import; blocks under TYPE_CHECKING never run."""

    def walk(node: ast.AST, early: bool) -> Iterator[tuple[str, tuple[str, ...], bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield alias.name, (), early
            elif isinstance(child, ast.ImportFrom):
                names = tuple(alias.name for alias in child.names)
                yield "." * child.level + (child.module or ""), names, early
            else:
                inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from walk(child, early and not inside)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), True)


def is_declaration(module: str, names: tuple[str, ...]) -> bool:
    """Whether an import from the core stays in the declaration layer."""
    if module == "specdec":
        return all(name in {*DECLARATION, "PROJECT", "__version__", "hookimpl", "hookspec"} for name in names)
    first = module.removeprefix("specdec.").split(".")[0]
    return first in {*DECLARATION, "cli"}


@pytest.mark.parametrize("name", DECLARATION)
def test_declaration_modules_import_only_the_declaration_layer(name: str) -> None:
    for module, names, early in imports(CORE / f"{name}.py"):
        root = module.split(".")[0]
        allowed = THIRD_PARTY if early else THIRD_PARTY | LATE_THIRD_PARTY
        if root == "specdec":
            assert is_declaration(module, names), f"{name}.py imports {module} {names}"
        else:
            assert root in allowed or root in sys.stdlib_module_names, f"{name}.py imports {module}"


@pytest.mark.parametrize("path", sorted((CORE / "cli").glob("*.py")), ids=lambda path: path.stem)
def test_commands_import_only_the_declaration_layer_at_import(path: Path) -> None:
    for module, names, early in imports(path):
        root = module.split(".")[0]
        if not early or root in sys.stdlib_module_names | THIRD_PARTY:
            continue
        # checkpoint headers are read without torch; the test of what is loaded proves it for each command
        assert root == "specdec", f"{path.name} imports {module}"
        assert is_declaration(module, names) or module.startswith("specdec.checkpoint"), f"{path.name} imports {module}"


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_what_discovery_imports_of_a_plugin_is_light(plugin: Path) -> None:
    for name in DISCOVERED:
        for module, names, early in imports(plugin / f"{name}.py"):
            root = module.split(".")[0]
            if not early or not root or root in sys.stdlib_module_names | THIRD_PARTY:
                continue  # relative imports stay within the package and are walked there
            assert root == "specdec", f"{plugin.name}/{name}.py imports {module}"
            assert is_declaration(module, names), f"{plugin.name}/{name}.py imports {module}"


def test_discovered_modules_are_listed() -> None:
    """Relative imports at import time of a discovered module lead only to modules checked above."""
    for plugin in PLUGINS:
        for name in DISCOVERED:
            for module, names, early in imports(plugin / f"{name}.py"):
                if early and module.startswith("."):
                    targets = {module.lstrip(".")} if module.lstrip(".") else set(names)
                    light = {*DISCOVERED, "ngram_hash", "engram_hash"}
                    assert targets <= light, f"{plugin.name}/{name}.py imports {module} {names}"


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_plugins_use_public_names_of_the_core(plugin: Path) -> None:
    for path in sorted(plugin.rglob("*.py")):
        for module, names, _ in imports(path):
            if module.split(".")[0] != "specdec":
                continue
            private = [part for part in (*module.split("."), *names) if part.startswith("_") and part != "__version__"]
            assert not private, f"{path.relative_to(ROOT)} imports private {private} from {module}"


def test_the_core_never_imports_a_plugin() -> None:
    for path in sorted(CORE.rglob("*.py")):
        for module, _, _ in imports(path):
            assert not module.startswith("specdec_"), f"{path.relative_to(ROOT)} imports {module}"


#: Options that every recipe has, named for the method that the first drafters had. Their names are an interface.
METHOD_OPTIONS = re.compile(r"mtp[-_](draft[-_]tokens|adaptive[-_]verification|only)|no[-_]mtp")
#: Who reported something may be named: an address, or the title of a report up to its number.
CITATION = re.compile(r"https?://[^\s\"'<>]+|Source: [^.;]*\(arXiv:\d{4}\.\d{4,5}\)")


def models_and_drafters() -> re.Pattern[str]:
    """What installed plugins are called and serve: families (``example`` of ``example-7b``), packages, distributions, methods."""
    loaded = recipe_book().discovery.loaded
    assert {plugin.record.name for plugin in loaded} >= {path.parent.name for path in PLUGINS}
    names = {path.name for path in PLUGINS}
    for plugin in loaded:
        names |= {plugin.record.name, plugin.record.distribution}
        for recipe in plugin.recipes:
            names |= {recipe.name, recipe.drafter_method, re.split(r"[^a-z]", recipe.name)[0]} - {""}
    return re.compile(rf"(?<![a-z])({'|'.join(sorted(map(re.escape, names)))})", re.IGNORECASE)


def named_in(text: str, names: re.Pattern[str]) -> list[tuple[int, str]]:
    """(line, name) of each name outside citations and options."""
    return [
        (number, found[1])
        for number, line in enumerate(text.splitlines(), start=1)
        for found in names.finditer(METHOD_OPTIONS.sub("", CITATION.sub("", line)))
    ]


def test_the_core_names_no_model_and_no_drafter() -> None:
    names = models_and_drafters()
    found = [
        f"{path.relative_to(ROOT)}:{number}: {name}"
        for path in sorted(CORE.rglob("*"))
        if path.suffix in (".py", ".json")
        for number, name in named_in(path.read_text(encoding="utf-8"), names)
    ]
    assert not found, "what is known of one model belongs to its plugin:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("line", "caught"),
    [
        ('DEFAULT = "qwen3.8-flash"', True),
        ('"note": "Qwen3-Next, 3 drafts"', True),
        ("from specdec_glm53 import recipe", True),
        ('{"mtp8-gsm8k": 1.0}', True),
        ("its MTP layer", True),
        ("a DSpark block, see https://github.com/vllm-project/vllm", True),
        ("as DeepSeek-V3 does", True),
        ('"source": "https://huggingface.co/x/GLM-5.2-speculator.dspark-preview"', False),
        ("Source: DeepSeek-V3 technical report (arXiv:2412.19437), section 2.1.2.", False),
        ("--mtp-draft-tokens 0 contradicts --no-mtp; args.mtp_draft_tokens, config.mtp_only", False),
    ],
)
def test_names_are_recognised(line: str, caught: bool) -> None:
    assert bool(named_in(line, models_and_drafters())) == caught


def test_no_file_holds_too_much() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for path in files(".py")
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > 500
    }
    assert not long, f"split these files, each holds more than one idea: {long}"


#: Put together here so that this file does not contain them itself.
FORBIDDEN = [
    "/wo" + "rk/",
    "/tm" + "p/w/",
    "../sha" + "red",
    "/opt/py" + "pi",
    "/opt/whe" + "els",
    "py" + "pi.org",
    "python" + "hosted",
]


def test_no_file_names_a_workplace_or_a_registry() -> None:
    found = []
    for path in files():
        if path.is_symlink() or path.stat().st_size > 2_000_000:
            continue
        content = path.read_bytes()
        if b"\0" in content:
            continue
        for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), start=1):
            found += [f"{path.relative_to(ROOT)}:{number}: {text}" for text in FORBIDDEN if text in line]
    assert not found, "\n".join(found)
