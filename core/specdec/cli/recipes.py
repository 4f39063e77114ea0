"""``specdec recipes``: every recipe that installed plugins declare, or one recipe with the source of each number.

Never imports torch. Plugins that could not be loaded are named on stderr, in the help text below the table.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from specdec.cli.output import say, write
from specdec.cli.tables import columns, json_text
from specdec.declaration import Recipe, StateLayout, TensorInventory
from specdec.plugins import Discovery
from specdec.recipes import RecipeBook, recipe_book

__all__ = ["add_parser", "run"]

_DESCRIPTION = "Lists the recipes of installed plugins, or every number of one recipe with its source."


class _HelpWithTable(argparse.Action):
    """``--help`` that ends with the recipes of this installation; discovery runs only when it is asked for."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        discovery = recipe_book().discovery
        parts = [parser.format_help(), "recipes:", _table(discovery.recipes, indent="  ")]
        trouble = trouble_lines(discovery)
        if trouble:
            parts += ["", "not loaded:", *(f"  {line}" for line in trouble)]
        write("\n".join(parts))
        parser.exit()


def add_parser(subparsers: Any) -> None:
    """Adds ``recipes`` to the command line."""
    parser = subparsers.add_parser("recipes", description=_DESCRIPTION, allow_abbrev=False, add_help=False)
    parser.add_argument("name", metavar="NAME", nargs="?", help="one recipe in full")
    parser.add_argument("--json", action="store_true", help="print data instead of text")
    parser.add_argument(
        "-h", "--help", action=_HelpWithTable, nargs=0, help="show this text and the recipes, then leave"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the list, or one recipe; troubled plugins go to stderr and do not change the exit code.

    Raises:
        RecipeError, PluginError: if the named recipe is unknown or its plugin could not be loaded.
    """
    book = recipe_book()
    if args.name is not None:
        return _show(book, args.name, as_json=args.json)
    for line in trouble_lines(book.discovery):
        say(f"specdec: not loaded: {line}")
    if args.json:
        write(json_text([_summary(book, recipe) for recipe in book.discovery.recipes]))
    else:
        write(_table(book.discovery.recipes))
    return 0


def trouble_lines(discovery: Discovery) -> list[str]:
    """One line for each plugin that could not be loaded, and each notice of discovery."""
    return [*discovery.notices, *(f"{record.label}: {record.reason}" for record in discovery.troubled)]


def _table(recipes: Sequence[Recipe], *, indent: str = "") -> str:
    if not recipes:
        return indent + "none: no installed plugin declares a recipe"
    head = ("recipe", "drafter", "default drafts", "maximum drafts", "summary")
    rows = [(r.name, r.drafter_method, r.default_draft_tokens, r.max_draft_tokens, r.summary) for r in recipes]
    return columns([head, *rows], indent=indent)


def _show(book: RecipeBook, name: str, *, as_json: bool) -> int:
    recipe = book.recipe(name)
    if as_json:
        write(json_text(_details(book, recipe)))
        return 0
    rows: list[tuple[str, str]] = []
    for key, value in _details(book, recipe).items():
        if key == "sources":
            continue
        rows.append((key.replace("_", " "), _as_text(value)))
        source = recipe.source_of(key)
        if source:
            rows.append(("", f"  source: {source}"))
    write(columns(rows))
    return 0


def _as_text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('_', ' ')} {_as_text(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(str(item) for item in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if value >= 1_000_000 else str(value)
    return "none" if value is None else str(value)


def _summary(book: RecipeBook, recipe: Recipe) -> dict[str, Any]:
    owner = book.hooks_for(recipe).plugin.record
    return {
        "name": recipe.name,
        "summary": recipe.summary,
        "drafter_method": recipe.drafter_method,
        "default_draft_tokens": recipe.default_draft_tokens,
        "max_draft_tokens": recipe.max_draft_tokens,
        "plugin": {"name": owner.name, "distribution": owner.distribution, "version": owner.version},
    }


def _details(book: RecipeBook, recipe: Recipe) -> dict[str, Any]:
    return {
        **_summary(book, recipe),
        "target_recipe": recipe.target_recipe,
        "checkpoint": recipe.checkpoint,
        "embedded_checkpoint": recipe.embedded_checkpoint,
        "opener": recipe.opener,
        "profiles": recipe.profiles,
        "model_types": list(recipe.model_types),
        "widths": list(recipe.widths.widths),
        "speculative_token_capacity": recipe.speculative_token_capacity,
        "draft_source": recipe.draft_source,
        "confidence_width": recipe.confidence_width,
        "sampling": {
            "temperature": recipe.sampling.temperature,
            "top_k": recipe.sampling.top_k,
            "top_p": recipe.sampling.top_p,
            "min_p": recipe.sampling.min_p,
        },
        "eos_token_ids": list(recipe.eos_token_ids),
        "supports_history_drafts": recipe.supports_history_drafts,
        "tensor_parallel_sizes": list(recipe.tensor_parallel_sizes),
        "unsupported_options": list(recipe.unsupported_options),
        "target_inventory": _inventory(recipe.target_inventory),
        # the checkpoint's own drafter is not this one
        "drafter_inventory": None if recipe.target_recipe else _inventory(recipe.drafter_inventory),
        "target_layout": _layout(recipe.target_layout),
        "drafter_layout": _layout(recipe.drafter_layout),
        "sources": dict(recipe.sources),
    }


def _inventory(inventory: TensorInventory) -> dict[str, int]:
    return {"tensors": inventory.count, "bytes": inventory.bytes}


def _layout(layout: StateLayout) -> dict[str, Any]:
    return {
        "fields": len(layout.fields),
        "bytes_per_slot": layout.bytes(slots=1, pages=0),
        "bytes_per_token": layout.bytes_per_token,
    }
