"""``specdec doctor``: what is installed, what of it works, and which recipes can run on this machine.

Nothing that is broken ends it: each finding is made by itself, and what goes wrong is the finding. Torch is imported inside
``run`` only, and may be missing.
"""

from __future__ import annotations

import argparse
from typing import Any

from specdec.cli.output import say, write
from specdec.cli.tables import columns, json_text
from specdec.entry_points import SELECTION_VARIABLE
from specdec.memory import sized

__all__ = ["add_parser", "run"]

_DESCRIPTION = f"""\
Says what is installed and works: core, torch and devices; extras; plugins, with the reason where one is not loaded; recipes,
with the memory that their checkpoints need as 'specdec plan RECIPE' (with --embedded --device cpu for the shipped one) counts it,
and whether this machine has it. Exit code 3 if a plugin that is to be loaded ({SELECTION_VARIABLE}, default: all) could not be,
else 6 if torch cannot be imported, else 0; a missing extra, device or checkpoint is an answer."""


def add_parser(subparsers: Any) -> None:
    """Adds ``doctor`` to the command line."""
    parser = subparsers.add_parser(
        "doctor",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print data instead of text")


def run(args: argparse.Namespace) -> int:
    """Prints the findings; returns OK, PLUGIN or DEVICE, with a line on stderr for each reason that it is not OK."""
    from specdec.cli.findings import findings

    found = findings()
    write(json_text(found) if args.json else _as_text(found))
    for problem in found["problems"]:
        say(f"specdec: {problem}")
    return int(found["exit_code"])


def _as_text(found: dict[str, Any]) -> str:
    sections: dict[str, list[tuple[str, ...]]] = {
        "installed": _installed(found),
        "devices": [(one["name"], _device(one)) for one in found["devices"]],
        "extras": [(one["name"], one["state"], _packages(one), one["cure"] or one["what"]) for one in found["extras"]],
        "plugins": [
            (one["name"], one["status"], f"{one['distribution']} {one['version']}", _plugin(one))
            for one in found["plugins"]
        ],
        "recipes": [row for one in found["recipes"] for row in _recipe(one)],
    }
    return "\n\n".join(f"{title}\n{columns(rows or [('none',)], indent='  ')}" for title, rows in sections.items())


def _installed(found: dict[str, Any]) -> list[tuple[str, ...]]:
    python, torch = found["python"], found["torch"]
    built = f"for CUDA {torch['cuda']}" if torch["cuda"] else "without CUDA"
    return [
        ("specdec-core", found["core"]["version"], found["core"]["path"]),
        ("Python", python["version"], f"{python['executable']}, {python['platform']}"),
        ("torch", torch["version"] or "-", torch["reason"] or f"works, built {built}"),
    ]


def _device(one: dict[str, Any]) -> str:
    if not one["found"]:
        return f"not found: {one['reason']}"
    free = "memory not known" if one["free_bytes"] is None else f"{sized(one['free_bytes'])} free"
    return f"{one['kind']}, {free}"


def _packages(one: dict[str, Any]) -> str:
    return ", ".join(
        f"{package['name']} {package['version'] or 'missing'}"
        + (f" ({package['reason']})" if package["reason"] else "")
        for package in one["packages"]
    )


def _plugin(one: dict[str, Any]) -> str:
    return "; ".join(part for part in (", ".join(one["recipes"]), one["reason"]) if part)


def _recipe(one: dict[str, Any]) -> list[tuple[str, ...]]:
    """The checkpoint that the plugin ships in one line, the recipe's own in another."""
    return [
        (one["name"] if number == 0 else "", title, _verdict(part), part["where"])
        for number, (title, part) in enumerate(
            (("embedded checkpoint", one["embedded"]), ("own checkpoint", one["own"]))
        )
    ]


def _verdict(part: dict[str, Any]) -> str:
    size = (
        "" if part["bytes"] is None else f"{sized(part['bytes'])}{', weights alone' if part['weights_alone'] else ''}"
    )
    if part["runs_on"]:
        return f"runs on {', '.join(part['runs_on'])}: {size or 'memory not declared'}"
    return "; ".join(text for text in (f"needs {size}" if size else "", part["reason"]) if text)
