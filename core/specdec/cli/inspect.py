"""``specdec inspect DIR``: check a checkpoint's headers against the tensors a recipe declares."""

import argparse
from typing import Any

from attrs import asdict

from specdec.checkpoint.accepted import open_checkpoint
from specdec.checkpoint.inspect import Inspection, inspect_checkpoint, recipe_for
from specdec.checkpoint.reader import Checkpoint
from specdec.cli.output import write
from specdec.cli.tables import json_text
from specdec.errors import ExitCode
from specdec.recipes import recipe_book

_DESCRIPTION = """\
Compare the safetensors headers of a checkpoint directory with the tensors that a recipe declares for target and drafter:
names, shapes, dtypes, counts and bytes. The prefixes and storage formats of other releases that 'specdec run' reads are as
good as those declared. No weights are read, so a checkpoint of any size takes seconds. Exit code 4 if anything is missing,
mismatched or unexpected."""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the ``inspect`` command to the parser's subcommands."""
    parser = subparsers.add_parser(
        "inspect",
        help="check a checkpoint's headers against a recipe",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("directory", metavar="DIR", help="directory with config.json and safetensors files")
    parser.add_argument(
        "--recipe", metavar="NAME", help="recipe to check against (default: by the config's model_type)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def run(args: argparse.Namespace) -> int:
    """Inspect ``args.directory`` and print the result to stdout; returns the exit code.

    Raises:
        CheckpointError: if the directory or a header cannot be read, or no recipe accepts its model type.
        RecipeError: if ``--recipe`` names no recipe.
    """
    book = recipe_book()
    chosen = book.recipe(args.recipe) if args.recipe else None
    with open_checkpoint(chosen, args.directory) if chosen else Checkpoint.open(args.directory) as checkpoint:
        result = inspect_checkpoint(checkpoint, chosen or recipe_for(checkpoint, book.discovery.recipes))
    if args.json:
        write(json_text(_as_data(result)))
    else:
        write(_as_text(result))
    return ExitCode.OK if result.ok else ExitCode.CHECKPOINT


def _as_data(result: Inspection) -> dict[str, Any]:
    return {
        "directory": str(result.directory),
        "recipe": result.recipe,
        "ok": result.ok,
        "parts": {part.name: {"ok": part.validation.ok, **asdict(part.validation)} for part in result.parts},
        "other": {"count": result.other_count, "bytes": result.other_bytes},
    }


def _as_text(result: Inspection) -> str:
    lines = [f"{result.directory} against recipe {result.recipe}", ""]
    lines.append(f"{'part':<9}{'tensors':>10}{'expected':>10}{'bytes':>19}{'expected':>19}  result")
    for part in result.parts:
        found = part.validation
        lines.append(
            f"{part.name:<9}{found.found_count:>10,}{found.expected_count:>10,}{found.found_bytes:>19,}"
            f"{found.expected_bytes:>19,}  {'ok' if found.ok else 'DIFFERS'}"
        )
    if result.other_count:
        lines.append(f"{'other':<9}{result.other_count:>10,}{'':>10}{result.other_bytes:>19,}{'':>19}  not checked")
    for part in result.parts:
        found = part.validation
        for kind, count, names in (
            ("missing", found.missing_count, found.missing),
            ("mismatched", found.mismatched_count, found.mismatched),
            ("unexpected", found.unexpected_count, found.unexpected),
        ):
            if count:
                lines += ["", f"{part.name}: {count:,} {kind}"]
                lines += [f"  {name}" for name in names]
                lines += [f"  … and {count - len(names):,} more"] if count > len(names) else []
    return "\n".join(lines)
