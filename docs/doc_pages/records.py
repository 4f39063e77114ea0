"""Recipes and state layouts as tables, from the records that the plugins of this repository declare."""

from __future__ import annotations

import contextlib
import io
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import NOTHING, fields

from doc_pages.docstrings import code, inline, table
from specdec.cli.main import main
from specdec.declaration import SOURCED_FIELDS, DrafterRecipe, Recipe, StateField, StateKind, StateLayout
from specdec.memory import KINDS
from specdec.recipes import recipe_book

ROOT = Path(__file__).parents[2]


def recipes() -> list[Recipe]:
    """The recipes of the plugins in this repository, whatever else is installed."""
    shipped = {
        tomllib.loads(path.read_text(encoding="utf-8"))["project"]["name"]
        for path in ROOT.glob("plugins/*/pyproject.toml")
    }
    discovery = recipe_book().discovery
    owned = [plugin for plugin in discovery.loaded if plugin.record.distribution in shipped]
    missing = shipped - {plugin.record.distribution for plugin in owned}
    if missing:
        raise LookupError(f"the site lists all recipes of this repository; install {', '.join(sorted(missing))}")
    return sorted((recipe for plugin in owned for recipe in plugin.recipes), key=lambda recipe: recipe.name)


def recipe_list() -> str:
    """One row per recipe: the README's table."""
    rows = [["distribution", "recipe", "drafter", "default / maximum draft tokens"]]
    for recipe in recipes():
        details = recipe_json(recipe.name)
        drafts = f"{recipe.default_draft_tokens} / {recipe.max_draft_tokens}"
        rows.append([code(details["plugin"]["distribution"]), code(recipe.name), code(recipe.drafter_method), drafts])
    return table(rows)


def recipe_pages() -> str:
    """Every recipe with every number and its source, as ``specdec recipes NAME --json`` prints them."""
    parts = []
    for recipe in recipes():
        details = recipe_json(recipe.name)
        sources = details.pop("sources")
        rows = [["field", "value", "source"]]
        for key, value in details.items():
            if key != "name":
                rows.append([code(key), inline(_text(value)), inline(sources.get(key, "–"))])
        parts.append(f"### {recipe.name}\n\n{table(rows)}")
    return "\n\n".join(parts)


def recipe_json(name: str) -> dict[str, Any]:
    """What ``specdec recipes NAME --json`` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(["recipes", name, "--json"])
    if code:
        raise RuntimeError(f"specdec recipes {name} --json left with exit code {code}")
    data: dict[str, Any] = json.loads(printed.getvalue())
    return data


def layouts() -> str:
    """State of target and drafter of every recipe, field by field."""
    parts = []
    for recipe in recipes():
        parts.append(f"### {recipe.name}")
        for layout in (recipe.target_layout, recipe.drafter_layout):
            parts += [f"#### {layout.owner.capitalize()} of {recipe.name}", _sizes(layout), _fields(layout)]
    return "\n\n".join(parts)


def kinds_in_use() -> str:
    """Which fields of the shipped recipes have which kind."""
    rows = [["kind", *(code(recipe.name) for recipe in recipes())]]
    for kind in StateKind:
        cells = []
        for recipe in recipes():
            names = [
                f"{code(item.name)}{'' if layout.owner == 'target' else ' (drafter)'}"
                for layout in (recipe.target_layout, recipe.drafter_layout)
                for item in layout.fields
                if item.kind is kind
            ]
            cells.append(", ".join(names) or "–")
        rows.append([code(kind.value), *cells])
    return table(rows)


def sourced_fields() -> str:
    """Which fields of a recipe must name the source of their number, with their defaults."""
    rows = [["field", "default", "of a `DrafterRecipe` too"]]
    own = {one.name for one in fields(DrafterRecipe)}
    for name in SOURCED_FIELDS:
        default = getattr(fields(Recipe), name).default
        rows.append([code(name), "none" if default is NOTHING else f"{default}", "yes" if name in own else "no"])
    return table(rows)


def memory_kinds() -> str:
    """What the items of a memory plan are."""
    return table([["kind", "what it is"], *([code(name), inline(text)] for name, text in KINDS.items())])


def _sizes(layout: StateLayout) -> str:
    parts = [f"{layout.bytes(slots=1, pages=0):,} bytes a slot"]
    if layout.paged:
        parts.append(f"{layout.bytes_per_token:,.0f} bytes a token in pages of {layout.page_tokens} tokens")
    parts.append(f"horizon of {layout.max_draft_tokens} drafts")
    if layout.ring_history:
        parts.append(f"rings hold {layout.ring_history} committed entries beside a round's candidates")
    return ", ".join(parts) + "."


def _fields(layout: StateLayout) -> str:
    head = ["field", "kind", "layers", "extent", "one entry", "begins as", "bytes", "what it is"]
    return table([head, *_rows(layout)])


def _rows(layout: StateLayout) -> Iterator[list[str]]:
    for item in layout.fields:
        shape = "×".join(map(str, item.shape)) or "1"
        fill = "0" if not item.fill else f"{item.fill:g}"
        yield [
            code(item.name),
            code(item.kind.value),
            str(item.layers),
            str(item.extent),
            f"{shape} {item.dtype}",
            fill,
            _bytes(item, layout),
            inline(item.source),
        ]


def _bytes(item: StateField, layout: StateLayout) -> str:
    if item.kind is StateKind.PAGED:
        return f"{item.layers * item.entry_bytes / item.extent:,.0f} a token"
    return f"{item.bytes(1, 0, layout.max_draft_tokens, layout.page_tokens):,} a slot"


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,}" if value >= 1_000_000 else f"{value:g}"
    return "none" if value is None else str(value)
