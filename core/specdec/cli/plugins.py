"""``specdec plugins``: every installed plugin, its status, and why one is not loaded. Never imports torch."""

from __future__ import annotations

import argparse
from typing import Any

from specdec.cli.output import say, write
from specdec.cli.tables import columns, json_text
from specdec.entry_points import SELECTION_VARIABLE
from specdec.recipes import recipe_book

__all__ = ["add_parser", "run"]

_DESCRIPTION = "Lists installed plugins with distribution, version and status, and the reason where one is not loaded."
_EPILOG = f"{SELECTION_VARIABLE} restricts loading: unset loads all, empty loads none, otherwise a comma list of plugin names."


def add_parser(subparsers: Any) -> None:
    """Adds ``plugins`` to the command line."""
    parser = subparsers.add_parser("plugins", description=_DESCRIPTION, epilog=_EPILOG, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print data instead of text")


def run(args: argparse.Namespace) -> int:
    """Prints one row per plugin. A plugin that could not be loaded is an answer here, so the exit code stays 0."""
    discovery = recipe_book().discovery
    for notice in discovery.notices:
        say(f"specdec: {notice}")
    if args.json:
        write(
            json_text(
                [
                    {
                        "name": record.name,
                        "distribution": record.distribution,
                        "version": record.version,
                        "status": record.status,
                        "reason": record.reason,
                        "recipes": list(record.recipes),
                    }
                    for record in discovery.plugins
                ]
            )
        )
        return 0
    if not discovery.plugins:
        say("no plugins are installed")
        return 0
    rows: list[tuple[str, ...]] = [("plugin", "distribution", "status", "recipes or reason")]
    for record in discovery.plugins:
        names = ", ".join(record.recipes)
        detail = f"{names} ({record.reason})" if record.status == "loaded" and record.reason else record.reason or names
        rows.append((record.name, f"{record.distribution} {record.version}", record.status, detail))
    write(columns(rows))
    return 0
