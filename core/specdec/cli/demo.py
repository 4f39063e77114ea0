"""``specdec demo``: the same requests with and without drafts, in one table.

Prompts are the beginnings of modules of this package, so the demo needs nothing but the installation.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from specdec.cli.options import (
    add_model_options,
    add_sampling_options,
    checkpoint_basics,
    context_for,
    preparation,
    prepared_model,
    sampling_options,
)
from specdec.cli.output import replace_unwritable, say, write
from specdec.cli.refusals import names_options
from specdec.cli.tables import arms_table, json_text
from specdec.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from specdec.declaration import Recipe

__all__ = ["add_parser", "run"]

_DESCRIPTION = """Continues the beginnings of a few source files of this package, without drafts and with several draft counts,
and compares speed and acceptance on the same requests."""

# Text the small checkpoints have not been trained on: this package's own source.
SOURCES = ("state/pages.py", "round/transaction.py", "checkpoint/tokenizer.py", "serving/generate.py")
PROMPT_TOKENS = 160


def add_parser(subparsers: Any) -> None:
    """Adds ``demo`` to the command line."""
    parser = subparsers.add_parser("demo", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        nargs="?",
        help="recipe name (default: by the checkpoint, or the one that ships one)",
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=128, metavar="N", help="tokens per request (default: 128)"
    )
    parser.add_argument(
        "--draft-counts", default="1,2,3,5", metavar="LIST", help="draft counts to compare (default: 1,2,3,5)"
    )
    add_model_options(parser)
    add_sampling_options(parser)
    parser.add_argument("--json", action="store_true", help="print data instead of text and table")


@names_options
def run(args: argparse.Namespace) -> int:
    """Runs the comparison; one request's text and the table go to stdout, progress to stderr.

    Returns OK, or FAILURE if a request ended with a fault.
    """
    from attrs import evolve

    from specdec.recipes import recipe_book

    book = recipe_book()
    recipe = book.recipe(args.recipe) if args.recipe else _unnamed(args.checkpoint, book.discovery.recipes)
    counts = _counts(args.draft_counts, recipe)
    drafting = preparation(args, recipe, speculative=True, draft_tokens=max(counts))
    ordinary = preparation(args, recipe, speculative=False)
    options = sampling_options(args)
    tokenizer, limit = checkpoint_basics(args, recipe)
    texts = [resources.files("specdec").joinpath(source).read_text(encoding="utf-8") for source in SOURCES]
    prompts = [tokenizer.encode(text)[:PROMPT_TOKENS] for text in texts]
    replace_unwritable()
    context = context_for(args, max(map(len, prompts)), limit)
    speculative = prepared_model(args, recipe, evolve(drafting, context=context))
    plain = prepared_model(args, recipe, evolve(ordinary, context=context))

    from specdec.sampling.params import INT64_LIMIT
    from specdec.scheduling.emissions import fault_text
    from specdec.serving.compare import arms_for, compare
    from specdec.serving.request import Request

    requests = [
        Request(
            prompt=prompt,
            sampling=speculative.defaults.sampling(**{**options, "seed": (options["seed"] + number) % INT64_LIMIT}),
            max_new_tokens=args.max_new_tokens,
        )
        for number, prompt in enumerate(prompts)
    ]
    arms = arms_for(speculative, plain, [None, *counts])
    say(f"specdec: {len(requests)} requests, {args.max_new_tokens} new tokens each, {len(arms)} ways")
    compare(arms, requests)
    baseline = arms[0].tokens_per_second
    data = [arm.as_data(baseline) for arm in arms]
    start, text = tokenizer.decode(prompts[0]), tokenizer.decode(arms[-1].outputs[0])
    if args.json:
        write(
            json_text({"recipe": recipe.name, "requests": len(requests), "arms": data, "prompt": start, "text": text})
        )
    else:
        title = f"--- {SOURCES[0]}, continued by {recipe.name} with {arms[-1].name} after its first {len(prompts[0])} tokens"
        write(f"{title}\n\n{start}⏵{text}\n\n{arms_table(data)}")
    faults = [(arm.name, arm.fault) for arm in arms if arm.fault is not None]
    for name, fault in faults[:1]:
        say(f"specdec: error: {name}: {fault_text(fault.faults)}")
    return int(ExitCode.FAILURE if faults else ExitCode.OK)


def _unnamed(checkpoint: str | None, recipes: Sequence[Recipe]) -> Recipe:
    """The recipe to show when none is named: the one that accepts ``checkpoint``, or the only one that ships its own."""
    if checkpoint is not None:
        from specdec.checkpoint.inspect import recipe_for
        from specdec.checkpoint.reader import Checkpoint

        with Checkpoint.open(checkpoint) as opened:
            return recipe_for(opened, recipes)
    shipped = [recipe for recipe in recipes if recipe.embedded_checkpoint is not None and recipe.target_recipe is None]
    if len(shipped) == 1:
        return shipped[0]
    if shipped:
        names = ", ".join(recipe.name for recipe in shipped)
        raise UsageError(f"several recipes ship a checkpoint; name one of {names}")
    raise UsageError(
        "no installed recipe ships a checkpoint; install a plugin that does, or name a recipe and --checkpoint DIR"
    )


def _counts(text: str, recipe: Recipe) -> list[int]:
    maximum = recipe.max_draft_tokens
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UsageError(f"--draft-counts is {text!r}; give whole numbers separated by commas, like 1,3,5") from None
    if not counts or counts[0] < 0 or counts[-1] > maximum:
        source = recipe.source_of("max_draft_tokens")
        raise UsageError(
            f"--draft-counts is {text!r}; allowed: numbers from 0 to {maximum}, the most that recipe {recipe.name!r} drafts "
            f"(source: {source})"
        )
    return counts
