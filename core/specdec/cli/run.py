"""``specdec run``: generates text from one prompt and says what speculation gained.

Torch is imported inside ``run`` only. Text goes to stdout as it is generated; progress and the summary go to stderr.
"""

from __future__ import annotations

import argparse
import sys
import time
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.cli.options import (
    PREFILL_ROWS,
    add_grammar_options,
    add_model_options,
    add_request_options,
    add_sampling_options,
    checkpoint_basics,
    context_for,
    grammar_option,
    grammar_options,
    preparation,
    prepared_model,
    request_options,
    sampling_options,
)
from specdec.cli.output import check_writable, clear_progress, progress, replace_unwritable, say, write, write_file
from specdec.cli.refusals import names_options
from specdec.cli.tables import json_text
from specdec.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from specdec.serving.model import LoadedModel
    from specdec.serving.request import Request, TokenLogprobs
    from specdec.serving.statistics import DraftStatistics

__all__ = ["add_parser", "read_prompt", "run", "summary_of", "summary_text"]

_DESCRIPTION = """Generates text from a prompt, drafting and verifying several tokens a round.
Text goes to stdout as it is generated, a summary to stderr."""


def add_parser(subparsers: Any) -> None:
    """Adds ``run`` to the command line."""
    parser = subparsers.add_parser("run", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("recipe", metavar="RECIPE", help="recipe name, see 'specdec recipes'")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="prompt text; - reads standard input")
    prompt.add_argument("--prompt-file", metavar="FILE", help="file with the prompt text, UTF-8")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="output budget (default: 256)")
    parser.add_argument(
        "--mtp-draft-tokens",
        type=int,
        metavar="N",
        help="draft tokens per round (default and maximum: 'specdec recipes'); 0 runs ordinary decoding",
    )
    parser.add_argument("--no-mtp", action="store_true", help="do not prepare the drafter at all")
    parser.add_argument(
        "--mtp-adaptive-verification",
        action=argparse.BooleanOptionalAction,
        help="choose the drafts of every round by what they bring and cost, or always take the most (default: choose, unless "
        "--seed asks for a text that repeats)",
    )
    parser.add_argument(
        "--history-drafts",
        action="store_true",
        help="also copy drafts from what was generated before, for recipes that offer it",
    )
    add_model_options(parser)
    add_sampling_options(parser)
    add_request_options(parser)
    add_grammar_options(parser)
    parser.add_argument("--json", action="store_true", help="print text and summary as one JSON object instead")
    parser.add_argument("--metrics", metavar="FILE", help="write counts and times to FILE at the end, as JSON")
    parser.add_argument("--trace", metavar="FILE", help="write a JSON line per round to FILE: what was chosen and why")


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt's text, unchanged.

    Raises UsageError if the file is missing, the text is not UTF-8, or it is empty.
    """
    source, text = "--prompt", args.prompt
    try:
        if args.prompt_file is not None:
            source = f"--prompt-file {args.prompt_file!r}"  # quoted, so that its words are not taken for options
            text = Path(args.prompt_file).read_bytes().decode("utf-8")
        elif args.prompt == "-":
            source = "--prompt -"
            if sys.stdin is None:
                raise UsageError(f"{source}: standard input is closed; send the prompt there")
            text = sys.stdin.buffer.read().decode("utf-8")
        text.encode("utf-8")  # an argument that is not UTF-8 arrives with surrogates
    except OSError as error:
        raise UsageError(f"{source}: {error.strerror or error}; give a readable UTF-8 text file") from error
    except UnicodeError as error:
        raise UsageError(f"{source}: not UTF-8 text; convert it to UTF-8") from error
    if not text:
        raise UsageError(f"{source}: the prompt is empty; give at least one character of text")
    return text


@names_options
def run(args: argparse.Namespace) -> int:
    """Generates and prints; returns OK, or FAILURE if the request ended with a fault."""
    from attrs import evolve

    from specdec.recipes import recipe_book

    # Everything that can be refused without the checkpoint is refused before it is opened.
    recipe = recipe_book().recipe(args.recipe)
    for name in ("metrics", "trace"):
        if getattr(args, name) is not None:
            check_writable(f"--{name}", getattr(args, name))
    drafts = args.mtp_draft_tokens
    if args.no_mtp and drafts:
        raise UsageError(f"--no-mtp and --mtp-draft-tokens {drafts} contradict each other; drop one")
    # no drafts: ordinary decoding, which needs no drafter
    speculative = not args.no_mtp and drafts != 0
    if args.history_drafts and not (speculative and recipe.supports_history_drafts):
        why = f"recipe {recipe.name!r} offers none" if speculative else "nothing is drafted"
        raise UsageError(f"--history-drafts has no effect: {why}; leave it out")
    adaptive = args.mtp_adaptive_verification
    # which drafts a round has decides which words its tokens are drawn with, and measured times decide the drafts
    adaptive = args.seed is None if adaptive is None else adaptive
    config = preparation(args, recipe, speculative=speculative, draft_tokens=drafts, adaptive=adaptive)
    options = sampling_options(args)
    others = {**request_options(args, recipe, options), "grammar": grammar_option(args, recipe)}
    text = read_prompt(args)
    tokenizer, limit = checkpoint_basics(args, recipe)
    prompt = tokenizer.encode(text)
    if not prompt:
        raise UsageError("the prompt has no tokens; give at least one character of text")
    replace_unwritable()
    context = context_for(args, len(prompt), limit)

    from specdec.sampling.params import SamplingParams
    from specdec.serving.request import Request

    request = Request(prompt=prompt, sampling=SamplingParams(**options), max_new_tokens=args.max_new_tokens, **others)
    config = evolve(config, context=context, extended_sampling=request.extended, grammar=request.grammar is not None)
    model = prepared_model(args, recipe, config)
    request = evolve(request, sampling=model.defaults.sampling(**options))
    return _generate(args, model, request)


def _generate(args: argparse.Namespace, model: LoadedModel, request: Request) -> int:
    from specdec.round.completion import Finish
    from specdec.serving.engine import Engine
    from specdec.serving.request import Progress

    pieces: list[str] = []
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    finish, error = Finish.NONE, None
    first_token = None
    # one request: nothing is gained by a round that is queued behind another
    with Engine(model, history_drafts=args.history_drafts, queue_depth=1, trace=args.trace) as engine:
        try:
            stream = engine.submit(request)
        except UsageError as refusal:
            given = grammar_options(args)
            if not given:
                raise
            raise UsageError(f"{given[0]}: {refusal}") from refusal
        started = time.perf_counter()
        for event in stream:
            if isinstance(event, Progress):
                prompt_logprobs.extend(event.logprobs or ())
                _progress(event.consumed, event.total)
                continue
            first_token = first_token or time.perf_counter()
            tokens.extend(event.tokens)
            logprobs.extend(event.logprobs or ())
            finish, error = event.finish, event.error
            pieces.append(stream.piece(event))
            if not args.json:
                write(pieces[-1], end="")
    finished = time.perf_counter()
    first_token = first_token or finished
    undrafted = request.stop or (request.grammar and not args.history_drafts)
    summary = {
        "recipe": model.recipe.name,
        "draft_tokens": 0 if undrafted else model.config.max_draft_tokens,
        "adaptive": model.config.adaptive_verification and model.config.max_draft_tokens > 0,
        "prompt_tokens": len(request.prompt),
        **summary_of(engine.metrics.totals(), finished - first_token),
        "prompt_seconds": first_token - started,
        "finish": finish.name.lower(),
    }
    if args.json:
        data = {"text": "".join(pieces), "tokens": tokens, "summary": summary}
        if request.logprobs is not None:
            data["logprobs"] = [_logprobs_data(one) for one in logprobs]
        if request.prompt_logprobs is not None:
            data["prompt_logprobs"] = [_logprobs_data(one) for one in prompt_logprobs]
        write(json_text(data))
    else:
        write("")
        say(summary_text(summary))
    if args.metrics is not None:
        write_file("--metrics", args.metrics, json_text(engine.metrics.snapshot()))
    if finish is Finish.FAULT:
        say(f"specdec: error: {error}; the output ends after {len(tokens)} tokens")
        return int(ExitCode.FAILURE)
    return int(ExitCode.OK)


def _logprobs_data(one: TokenLogprobs) -> dict[str, Any]:
    """Plain types for JSON, which has no infinity: a token that the target excludes has null."""

    def number(value: float) -> float | None:
        return value if isfinite(value) else None

    return {
        "token": one.token,
        "logprob": number(one.logprob),
        "top": [{"token": token, "logprob": number(value)} for token, value in one.top],
    }


def summary_of(statistics: DraftStatistics, seconds: float) -> dict[str, Any]:
    """Counts and rates of one run. seconds: time spent in rounds; the first token belongs to the prompt's time."""
    return {
        "tokens": statistics.tokens,
        "rounds": statistics.rounds,
        "tokens_per_round": statistics.tokens_per_round,
        "offered": statistics.offered,
        "accepted": statistics.accepted,
        "judged_by_depth": statistics.judged_by_depth,
        "accepted_by_depth": statistics.accepted_by_depth,
        "acceptance_by_depth": statistics.acceptance_by_depth,
        "seconds": seconds,
        "tokens_per_second": statistics.tokens_in_rounds / seconds if seconds else 0.0,
    }


def summary_text(summary: dict[str, Any]) -> str:
    """The summary as aligned lines for people."""
    drafts = f"with up to {summary['draft_tokens']} drafts each" if summary["draft_tokens"] else "without drafts"
    acceptance = "  ".join(f"{rate:.2f}" for rate in summary["acceptance_by_depth"]) or "no drafts"
    rows = (
        ("tokens", f"{summary['tokens']} after a prompt of {summary['prompt_tokens']}"),
        ("rounds", f"{summary['rounds']} {drafts}"),
        ("tokens per round", f"{summary['tokens_per_round']:.2f}"),
        ("acceptance by depth", acceptance),
        ("speed", f"{summary['tokens_per_second']:.1f} tokens/s, prompt in {summary['prompt_seconds']:.2f} s"),
        ("finished by", summary["finish"]),
    )
    return "\n".join(f"{name:<20} {value}" for name, value in rows)


def _progress(consumed: int, total: int) -> None:
    """One line on a terminal that rewrites itself; elsewhere one line per chunk of a prompt with several."""
    if sys.stderr is not None and sys.stderr.isatty():
        progress(f"prompt {consumed}/{total} tokens")
        if consumed == total:
            clear_progress()
    elif total > PREFILL_ROWS:
        say(f"specdec: prompt {consumed}/{total} tokens")
