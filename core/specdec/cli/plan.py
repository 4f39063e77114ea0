"""``specdec plan``: what a preparation would hold, byte by byte, from declarations alone.

Never imports torch, reads no weights and needs no device.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.cli.output import write
from specdec.cli.refusals import names_options
from specdec.cli.tables import columns, json_text
from specdec.errors import CheckpointError, ExitCode, UsageError
from specdec.preparation import ACTIVATION_DTYPES, PreparationConfig

if TYPE_CHECKING:
    from specdec.checkpoint.reader import Checkpoint
    from specdec.declaration import Recipe
    from specdec.memory import MemoryPlan

__all__ = ["add_parser", "run"]

_DESCRIPTION = """Computes what preparing a recipe would hold, from declarations alone: weights as they are kept after loading,
state by field, pages, buffers of rounds, every shape of the catalog. No weights are read and no device is needed. Exit code 5 if
it exceeds --memory-bytes; the options that would make it fit are named."""
_UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def add_parser(subparsers: Any) -> None:
    """Adds ``plan`` to the command line."""
    parser = subparsers.add_parser("plan", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("recipe", metavar="RECIPE", help="recipe name, see 'specdec recipes'")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="sizes of this folder's config.json, storage as in its headers if it has weights (default: the recipe's own)",
    )
    source.add_argument("--embedded", action="store_true", help="the small checkpoint that the plugin ships")
    parser.add_argument("--concurrency", type=int, default=4, metavar="N", help="requests in a batch (default: 4)")
    parser.add_argument(
        "--mtp-draft-tokens", type=int, metavar="N", help="most draft tokens of a round (default: the recipe's)"
    )
    parser.add_argument("--no-mtp", action="store_true", help="do not prepare the drafter at all")
    parser.add_argument(
        "--speculative-token-capacity",
        type=int,
        metavar="N",
        help="most target rows of one round (default: the recipe's)",
    )
    parser.add_argument(
        "--context", type=int, default=4096, metavar="N", help="most tokens of a request (default: 4096)"
    )
    parser.add_argument(
        "--pages", type=int, metavar="N", help="pages that requests share (default: enough for all at full context)"
    )
    parser.add_argument(
        "--prefill-tokens", type=int, default=512, metavar="N", help="rows of the longest prompt chunk (default: 512)"
    )
    parser.add_argument("--extended-sampling", action="store_true", help="with penalties, biases and log-probabilities")
    parser.add_argument("--grammar", action="store_true", help="with grammar masks")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda", help="kind of device that is planned for (default: cuda)"
    )
    parser.add_argument("--no-cuda-graphs", action="store_true", help="rounds run eagerly on a CUDA device")
    parser.add_argument(
        "--dtype", choices=ACTIVATION_DTYPES, help="activations (default: float32 on a CPU, bfloat16 elsewhere)"
    )
    parser.add_argument("--memory-bytes", metavar="BYTES", help="all that may be used, like 141GiB (default: no limit)")
    parser.add_argument("--headroom-bytes", default="0", metavar="BYTES", help="what must stay free of it (default: 0)")
    parser.add_argument(
        "--snapshot-bytes", default="0", metavar="BYTES", help="what prefix checkpoints may hold (default: 0)"
    )
    parser.add_argument("--json", action="store_true", help="print data instead of text")


@names_options
def run(args: argparse.Namespace) -> int:
    """Prints the plan; returns OK.

    Raises RecipeError or PluginError for a recipe that is unknown or not loaded, UsageError for an option out of range,
    CheckpointError for a folder that is no checkpoint of the recipe, CapacityError, after printing, if the plan does not fit.
    """
    from specdec.recipes import recipe_book

    recipe = recipe_book().recipe(args.recipe)
    plan = _plan(args, recipe, _config(args, recipe))
    write(json_text(plan.as_data()) if args.json else _as_text(plan))
    plan.check()
    return int(ExitCode.OK)


def _config(args: argparse.Namespace, recipe: Recipe) -> PreparationConfig:
    budgets = {name: _bytes(name, getattr(args, name)) for name in ("memory_bytes", "headroom_bytes", "snapshot_bytes")}
    return PreparationConfig.for_recipe(
        recipe,
        concurrency=args.concurrency,
        speculative=not args.no_mtp,
        max_draft_tokens=args.mtp_draft_tokens,
        speculative_token_capacity=args.speculative_token_capacity,
        context=args.context,
        pages=args.pages,
        prefill_tokens=(args.prefill_tokens,),
        extended_sampling=args.extended_sampling,
        grammar=args.grammar,
        cuda_graphs=not args.no_cuda_graphs,
        memory_bytes=budgets["memory_bytes"],
        headroom_bytes=budgets["headroom_bytes"] or 0,
        snapshot_bytes=budgets["snapshot_bytes"] or 0,
    )


def _bytes(name: str, given: str | None) -> int | None:
    if given is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", given.strip().lower())
    unit = None if found is None else _UNITS.get(found[2].removesuffix("b") if found[2] == "b" else found[2])
    if found is None or unit is None or (unit == 1 and "." in found[1]):
        raise UsageError(f"{name} is {given!r}; give bytes, or a number with KiB, MiB, GiB or TiB, like 1.5GiB")
    return int(float(found[1]) * unit) if "." in found[1] else int(found[1]) * unit


def _plan(args: argparse.Namespace, recipe: Recipe, config: PreparationConfig) -> MemoryPlan:
    from specdec.checkpoint.accepted import check_settings, embedded_checkpoint, open_checkpoint
    from specdec.memory_plan import plan_memory

    def made(settings: Mapping[str, Any] | None, checkpoint: Checkpoint | None, subject: str | None) -> MemoryPlan:
        dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
        return plan_memory(
            recipe, config, settings=settings, checkpoint=checkpoint, dtype=dtype, device=args.device, subject=subject
        )

    if args.checkpoint is None and not args.embedded:
        return made(None, None, None)
    folder = embedded_checkpoint(recipe) if args.embedded else Path(args.checkpoint)
    if recipe.opener is None and folder.is_dir() and not any(folder.glob("*.safetensors*")):
        # sizes alone: stored as the recipe's own checkpoint
        settings = _settings(folder / "config.json")
        check_settings(settings, folder, recipe)
        return made(settings, None, f"{folder}, stored as {recipe.checkpoint}")
    with open_checkpoint(recipe, folder) as checkpoint:
        check_settings(checkpoint.config, folder, recipe)
        return made(checkpoint.config, checkpoint, str(folder))


def _settings(path: Path) -> Mapping[str, Any]:
    try:
        settings = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or f"not readable as JSON: {error}"
        raise CheckpointError(f"{path}: {reason}; name a folder with a config.json") from error
    if not isinstance(settings, dict):
        raise CheckpointError(f"{path}: needs a JSON object")
    return settings


def _as_text(plan: MemoryPlan) -> str:
    from specdec.memory import KINDS, sized

    lines = [f"{plan.recipe} ({plan.subject}) on {plan.device}, {plan.dtype} activations", "", "shapes of the catalog"]
    head = ("lanes", "drafts", "width", "rows", "staging", "constants", "scratch", "boundary", "work (estimated)")
    rows = [
        (
            shape.batch,
            shape.draft_tokens,
            shape.verify_width,
            shape.target_rows,
            shape.staging,
            shape.constants,
            shape.scratch,
            shape.boundary,
            shape.work,
        )
        for shape in plan.shapes
    ]
    lines.append(columns([head, *rows], indent="  "))
    for kind, total in plan.totals().items():
        lines += ["", f"{kind}: {total:,} bytes ({sized(total)}), {KINDS[kind]}"]
        items = [item for item in plan.items if item.kind == kind]
        lines.append(columns([(f"{item.bytes:>17,}", item.name, item.detail) for item in items], indent="  "))
    lines += ["", *_sums(plan)]
    return "\n".join(lines)


def _sums(plan: MemoryPlan) -> list[str]:
    from specdec.memory import sized

    estimated = sum(item.bytes for item in plan.items if item.estimated)
    rows = [("allocated at preparation", plan.allocated), ("estimated", estimated), ("in all", plan.total)]
    if plan.budget is not None:
        rows.append((f"budget ({plan.budget_source})", plan.budget))
        rows.append(("short by", plan.shortage) if plan.shortage else ("left", plan.budget - plan.total))
    return [columns([(name, f"{count:>20,}", sized(count)) for name, count in rows])]
