"""``specdec run``: generates text from one prompt and says what speculation gained.

Torch is imported inside ``run`` only. Text goes to stdout as it is generated; progress and the summary go to stderr.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.cli.options import (
    add_grammar_options,
    add_model_options,
    add_request_options,
    add_sampling_options,
    checkpoint_basics,
    context_for,
    grammar_option,
    preparation,
    prepared_model,
    request_options,
    sampling_options,
)
from specdec.cli.output import check_writable, replace_unwritable, say, write, write_file
from specdec.cli.refusals import names_options
from specdec.cli.tables import acceptances, json_text
from specdec.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from specdec.cli.generation import Answer
    from specdec.declaration import Recipe
    from specdec.preparation import PreparationConfig
    from specdec.serving.model import LoadedModel
    from specdec.serving.request import Request
    from specdec.serving.statistics import DraftStatistics

__all__ = ["add_parser", "drafting_of", "finished", "read_prompt", "run", "summary_of", "summary_text"]

_DESCRIPTION = """Generates text from a prompt, drafting and verifying several tokens a round. Without a prompt option the prompt
is what standard input has. Text goes to stdout as it is generated, a summary to stderr; on a terminal there, a line tells of
tokens, acceptance and speed meanwhile. With --chat, each line of standard input is a turn, until it ends. Ctrl-C ends a turn
that is being answered, and at the next one the chat, with exit code 130; a chat that fills the context ends with exit code 5."""


def add_parser(subparsers: Any) -> None:
    """Adds ``run`` to the command line."""
    parser = subparsers.add_parser("run", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("recipe", metavar="RECIPE", help="recipe name, see 'specdec recipes'")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt", metavar="TEXT", help="prompt text; - reads standard input (default: what is piped in)"
    )
    prompt.add_argument("--prompt-file", metavar="FILE", help="file with the prompt text, UTF-8")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="go on after the answer: each line of standard input is a turn, a prompt option the first one; with the "
        "checkpoint's chat template where it has one, else the texts follow each other (default --context: 4096 or the "
        "checkpoint's limit)",
    )
    parser.add_argument("--system", metavar="TEXT", help="with --chat, the system's message before the first turn")
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=256,
        metavar="N",
        help="output budget (default: 256); with --chat, of each turn",
    )
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
    parser.add_argument(
        "--json",
        action="store_true",
        help="print text and summary as one JSON object instead; with --chat, one in a line for each turn",
    )
    parser.add_argument("--metrics", metavar="FILE", help="write counts and times to FILE at the end, as JSON")
    parser.add_argument("--trace", metavar="FILE", help="write a JSON line per round to FILE: what was chosen and why")


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt's text, unchanged.

    Raises UsageError if the file is missing, the text is not UTF-8, or it is empty, and if nothing gives one.
    """
    source, text = "--prompt", args.prompt
    try:
        if args.prompt is None and args.prompt_file is None:
            source = "standard input"
            if sys.stdin is None or sys.stdin.isatty():
                raise UsageError("no prompt; give --prompt TEXT or --prompt-file FILE, pipe it in, or add --chat")
            text = sys.stdin.buffer.read().decode("utf-8")
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
    if args.chat:
        from specdec.cli.chat import chat

        return chat(args, recipe, config, options, others)
    if args.system is not None:
        raise UsageError("--system is the first message of a chat; add --chat, or put its text into the prompt")
    return _run_once(args, recipe, config, options, others)


def _run_once(
    args: argparse.Namespace,
    recipe: Recipe,
    config: PreparationConfig,
    options: dict[str, Any],
    others: dict[str, Any],
) -> int:
    from attrs import evolve

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
    from specdec.cli.generation import answer_to
    from specdec.serving.engine import Engine

    # one request: nothing is gained by a round that is queued behind another
    with Engine(model, history_drafts=args.history_drafts, queue_depth=1, trace=args.trace) as engine:
        answer = answer_to(args, engine, request)
    summary = {
        **drafting_of(args, model, request),
        "prompt_tokens": len(request.prompt),
        **summary_of(engine.metrics.totals(), answer.seconds),
        "prompt_seconds": answer.prompt_seconds,
        "finish": answer.finish.name.lower(),
    }
    if args.json:
        write(json_text(answer.as_data(request, summary)))
    else:
        write("")
        say(summary_text(summary))
    if args.metrics is not None:
        write_file("--metrics", args.metrics, json_text(engine.metrics.snapshot()))
    return finished(answer)


def finished(answer: Answer) -> int:
    """The exit code that an answer leaves, with a line on stderr if it ended with a fault."""
    from specdec.round.completion import Finish

    if answer.finish is Finish.FAULT:
        count = len(answer.tokens)
        say(f"specdec: error: {answer.error}; the output ends after {count} token{'' if count == 1 else 's'}")
        return int(ExitCode.FAILURE)
    return int(ExitCode.OK)


def drafting_of(args: argparse.Namespace, model: LoadedModel, request: Request) -> dict[str, Any]:
    """What a summary says first: the recipe, the most drafts of a round and whether their number is chosen."""
    undrafted = request.stop or (request.grammar and not args.history_drafts)
    return {
        "recipe": model.recipe.name,
        "draft_tokens": 0 if undrafted else model.config.max_draft_tokens,
        "adaptive": model.config.adaptive_verification and model.config.max_draft_tokens > 0,
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
    """The summary as aligned lines for people; of a chat if it has ``turns``."""
    drafts = f"with up to {summary['draft_tokens']} drafts each" if summary["draft_tokens"] else "without drafts"
    acceptance = "  ".join(acceptances(summary)) or "no drafts"
    speed, prompt = f"{summary['tokens_per_second']:.1f} tokens/s", f"{summary['prompt_seconds']:.2f} s"
    tokens, ended = f"{summary['tokens']} after a prompt of {summary['prompt_tokens']}", summary.get("finish")
    if "turns" in summary:
        read = summary["prompt_tokens"] - summary["reused_tokens"]
        tokens = f"{summary['tokens']} in {summary['turns']} turns, which had {read} to read"
    rows = (
        ("tokens", tokens),
        ("rounds", f"{summary['rounds']} {drafts}"),
        ("tokens per round", f"{summary['tokens_per_round']:.2f}"),
        ("acceptance by depth", acceptance),
        ("speed", f"{speed}, {'prompts' if 'turns' in summary else 'prompt'} in {prompt}"),
        *((("finished by", ended),) if ended else ()),
    )
    return "\n".join(f"{name:<20} {value}" for name, value in rows)
