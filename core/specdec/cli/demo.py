"""``specdec demo``: the same requests with and without drafts, in one table.

Prompts are the beginnings of modules of this package, so the demo needs nothing but the installation.
"""

from __future__ import annotations

import argparse
import sys
from importlib import resources
from typing import Any

from specdec.cli.run import add_model_options, add_sampling_options, prepared_model
from specdec.cli.tables import columns, json_text
from specdec.errors import UsageError

__all__ = ["add_parser", "run"]

_DESCRIPTION = """Continues the beginnings of a few source files of this package, without drafts and with several draft counts,
and compares speed and acceptance on the same requests."""

# Text the small checkpoints have not been trained on: this package's own source.
SOURCES = ("state/pages.py", "round/transaction.py", "checkpoint/tokenizer.py", "serving/generate.py")
PROMPT_TOKENS = 160


def add_parser(subparsers: Any) -> None:
    """Adds ``demo`` to the command line."""
    parser = subparsers.add_parser("demo", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", default="qwen3.8-flash", help="recipe name")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="tokens per request (default: 128)")
    parser.add_argument("--draft-counts", default="1,2,3,5", metavar="LIST", help="draft counts to compare (default: 1,2,3,5)")
    add_model_options(parser)
    add_sampling_options(parser)
    parser.add_argument("--json", action="store_true", help="print data instead of text and table")


def run(args: argparse.Namespace) -> int:
    """Runs the comparison; one request's text and the table go to stdout, progress to stderr."""
    from specdec.cli.run import _sampling_options
    from specdec.recipes import recipe_book

    recipe = recipe_book().recipe(args.recipe)
    counts = _counts(args.draft_counts, recipe.max_draft_tokens)
    if args.max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens is {args.max_new_tokens}; allowed: 1 or more")
    if args.mtp_draft_tokens is not None or args.no_mtp:
        raise UsageError("demo compares draft counts itself; choose them with --draft-counts")
    context = args.context or PROMPT_TOKENS + args.max_new_tokens
    args.mtp_draft_tokens = max(counts)
    speculative = prepared_model(args, concurrency=1, context=context, speculative=True)
    plain = prepared_model(args, concurrency=1, context=context, speculative=False)

    from specdec.serving.compare import arms_for, compare
    from specdec.serving.request import Request

    requests = []
    for number, source in enumerate(SOURCES):
        text = resources.files("specdec").joinpath(source).read_text(encoding="utf-8")
        prompt = speculative.tokenizer.encode(text)[:PROMPT_TOKENS]
        options = {**_sampling_options(args), "seed": args.seed + number}
        requests.append(
            Request(
                prompt=tuple(prompt),
                sampling=speculative.defaults.sampling(**options),
                max_new_tokens=args.max_new_tokens,
            )
        )
    arms = arms_for(speculative, plain, [None, *counts])
    print(f"specdec: {len(requests)} requests, {args.max_new_tokens} new tokens each, {len(arms)} ways", file=sys.stderr)
    compare(arms, requests)
    baseline = arms[0].tokens_per_second
    data = [arm.as_data(baseline) for arm in arms]
    shown = arms[-1].outputs[0]
    text = speculative.tokenizer.decode(shown)
    if args.json:
        print(json_text({"recipe": recipe.name, "arms": data, "text": text}))
        return 0
    start = speculative.tokenizer.decode(list(requests[0].prompt))
    print(f"--- {SOURCES[0]}, continued by {recipe.name} with {arms[-1].name} after its first {PROMPT_TOKENS} tokens\n")
    print(start + "⏵" + text + "\n")
    head = ("", "tokens", "rounds", "tokens/round", "acceptance by depth", "tokens/s", "speed")
    rows = [
        (
            arm["name"],
            arm["tokens"],
            arm["rounds"],
            f"{arm['tokens_per_round']:.2f}",
            " ".join(f"{rate:.2f}" for rate in arm["acceptance_by_depth"]) or "-",
            f"{arm['tokens_per_second']:.1f}",
            f"{arm['speed_ratio']:.2f}x",
        )
        for arm in data
    ]
    print(columns([head, *rows]))
    return 0


def _counts(text: str, maximum: int) -> list[int]:
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UsageError(f"--draft-counts is {text!r}; give whole numbers separated by commas, like 1,3,5") from None
    if not counts or counts[0] < 0 or counts[-1] > maximum:
        raise UsageError(f"--draft-counts is {text!r}; allowed: numbers from 0 to {maximum}")
    return counts
