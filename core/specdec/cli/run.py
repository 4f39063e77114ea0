"""``specdec run``: generates text from one prompt and says what speculation gained.

Torch is imported inside ``run`` only. Text goes to stdout as it is generated; progress and the summary go to stderr.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.cli.tables import json_text
from specdec.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from specdec.serving.model import LoadedModel
    from specdec.serving.request import Request
    from specdec.serving.statistics import DraftStatistics

__all__ = ["add_model_options", "add_parser", "add_sampling_options", "prepared_model", "run"]

_DESCRIPTION = """Generates text from a prompt, drafting and verifying several tokens a round.
Text goes to stdout as it is generated, a summary to stderr."""

# Rows of one prompt chunk: small enough that a long prompt shows progress, large enough that chunking costs little.
PREFILL_ROWS = 128


def add_parser(subparsers: Any) -> None:
    """Adds ``run`` to the command line."""
    parser = subparsers.add_parser("run", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("recipe", metavar="RECIPE", help="recipe name, see 'specdec recipes'")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="prompt text; - reads standard input")
    prompt.add_argument("--prompt-file", metavar="FILE", help="file with the prompt text, UTF-8")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="output budget (default: 256)")
    add_model_options(parser)
    add_sampling_options(parser)
    parser.add_argument("--json", action="store_true", help="print text and summary as one JSON object instead")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Options that decide what is prepared."""
    parser.add_argument("--checkpoint", metavar="DIR", help="checkpoint folder (default: the small one the plugin ships)")
    parser.add_argument(
        "--mtp-draft-tokens",
        type=int,
        metavar="N",
        help="draft tokens per round (default and maximum: 'specdec recipes'); 0 runs ordinary decoding",
    )
    parser.add_argument("--no-mtp", action="store_true", help="do not prepare the drafter at all")
    parser.add_argument(
        "--speculative-token-capacity", type=int, metavar="N", help="most target rows of one round (default: the recipe's)"
    )
    parser.add_argument("--context", type=int, metavar="N", help="most tokens, prompt and output (default: as needed)")
    parser.add_argument("--device", default="cpu", metavar="DEVICE", help="torch device (default: cpu)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "float64", "bfloat16"),
        help="activations (default: float32 on a CPU, bfloat16 elsewhere)",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of one operator (default: 1)")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Options of the sampling law; what is not given comes from the checkpoint."""
    parser.add_argument("--temperature", type=float, metavar="T", help="divisor of the logits, above 0")
    parser.add_argument("--top-k", type=int, metavar="K", help="keep the K most probable tokens, 0 turns it off")
    parser.add_argument("--top-p", type=float, metavar="P", help="keep the smallest set of mass P, 1 turns it off")
    parser.add_argument("--min-p", type=float, metavar="P", help="keep tokens of at least P times the largest probability")
    parser.add_argument("--greedy", action="store_true", help="always the most probable token, without randomness")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="key of the random stream (default: 0)")


def prepared_model(args: argparse.Namespace, *, concurrency: int, context: int, speculative: bool) -> LoadedModel:
    """Loads what the options ask for.

    Raises RecipeError, UsageError, CheckpointError or PluginError with one line.
    """
    from specdec.preparation import PreparationConfig
    from specdec.recipes import recipe_book

    recipe = recipe_book().recipe(args.recipe)
    config = PreparationConfig.for_recipe(
        recipe,
        concurrency=concurrency,
        speculative=speculative,
        max_draft_tokens=args.mtp_draft_tokens if speculative else None,
        speculative_token_capacity=args.speculative_token_capacity,
        context=context,
        prefill_tokens=(PREFILL_ROWS,),
        adaptive_verification=False,
    )
    _set_threads(args.threads)
    from specdec.serving.model import LoadedModel

    return LoadedModel.prepare(
        recipe, config, directory=args.checkpoint, device=_device(args.device), dtype=args.dtype
    )


def _set_threads(threads: int | None) -> None:
    """One thread unless asked: the operators of a small model are shorter than handing them to a pool."""
    import torch

    if threads is not None and threads < 1:
        raise UsageError(f"--threads is {threads}; allowed: 1 or more")
    torch.set_num_threads(threads or 1)


def _device(name: str) -> str:
    import torch

    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"--device {name!r} is not usable here: {reason}") from error
    return str(device)


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt's text.

    Raises UsageError if the file is missing or not UTF-8, or the text is empty.
    """
    source = "--prompt"
    if args.prompt_file is not None:
        source = f"--prompt-file {args.prompt_file}"
        try:
            text = Path(args.prompt_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise UsageError(f"{source}: {reason}; give a readable UTF-8 text file") from error
    elif args.prompt == "-":
        source = "--prompt -"
        text = sys.stdin.read()
    else:
        text = args.prompt
    if not text:
        raise UsageError(f"{source}: the prompt is empty; give at least one character of text")
    return text


def run(args: argparse.Namespace) -> int:
    """Generates and prints; returns OK, or FAILURE if the request ended with a numeric fault."""
    from specdec.recipes import recipe_book

    recipe = recipe_book().recipe(args.recipe)
    if args.mtp_draft_tokens is not None and args.no_mtp and args.mtp_draft_tokens:
        raise UsageError(f"--no-mtp and --mtp-draft-tokens {args.mtp_draft_tokens} contradict each other; drop one")
    if args.max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens is {args.max_new_tokens}; allowed: 1 or more")
    text = read_prompt(args)
    speculative = not args.no_mtp and args.mtp_draft_tokens != 0
    # wrong sampling options are refused before anything is loaded
    options = _sampling_options(args)
    from specdec.sampling.params import SamplingParams

    SamplingParams(**{name: value for name, value in options.items() if value is not None})

    from specdec.checkpoint.reader import Checkpoint
    from specdec.checkpoint.tokenizer import Tokenizer
    from specdec.serving.model import check_model_type, embedded_checkpoint

    directory = Path(args.checkpoint) if args.checkpoint else embedded_checkpoint(recipe)
    with Checkpoint.open(directory) as checkpoint:
        check_model_type(checkpoint, recipe)
        limit = checkpoint.config.get("text_config", checkpoint.config).get("max_position_embeddings")
    prompt = Tokenizer.load(directory).encode(text)
    if not prompt:
        raise UsageError("the prompt has no tokens; give at least one character of text")
    context = _context(args, len(prompt), limit)
    model = prepared_model(args, concurrency=1, context=context, speculative=speculative)

    from specdec.serving.request import Request

    request = Request(prompt=tuple(prompt), sampling=model.defaults.sampling(**options), max_new_tokens=args.max_new_tokens)
    return _generate(args, model, request)


def _sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "greedy": args.greedy,
        "seed": args.seed,
    }


def _context(args: argparse.Namespace, prompt: int, limit: int | None) -> int:
    """Tokens to prepare for: what was asked, or prompt and budget within the checkpoint's limit."""
    limit = limit or prompt + args.max_new_tokens
    context = args.context if args.context is not None else min(limit, prompt + args.max_new_tokens)
    if prompt >= context:
        option = f"--context {args.context}" if args.context is not None else f"the checkpoint's context of {limit}"
        raise UsageError(
            f"the prompt has {prompt} tokens; {option} leaves room for at most {context - 1}; shorten the prompt"
            + (" or raise --context" if args.context is not None else "")
        )
    return context


def _generate(args: argparse.Namespace, model: LoadedModel, request: Request) -> int:
    from specdec.round.completion import Finish
    from specdec.serving.generate import Generator
    from specdec.serving.request import Progress
    from specdec.serving.statistics import DraftStatistics

    statistics = DraftStatistics()
    stream = model.tokenizer.stream()
    pieces: list[str] = []
    tokens: list[int] = []
    finish = Finish.NONE
    generator = Generator(model)
    generator.submit(request)
    started = time.perf_counter()
    first_token = None
    while not finish:
        for event in generator.step():
            if isinstance(event, Progress):
                _progress(event.consumed, event.total)
                continue
            statistics.add(event.completion, in_round=first_token is not None)
            first_token = first_token or time.perf_counter()
            tokens.extend(event.tokens)
            finish = event.finish
            piece = stream.push(event.tokens)
            pieces.append(piece)
            if not args.json:
                print(piece, end="", flush=True)
    finished = time.perf_counter()
    pieces.append(stream.finish())
    first_token = first_token or finished
    summary = {
        "recipe": model.recipe.name,
        "draft_tokens": generator.width - 1,
        "prompt_tokens": len(request.prompt),
        **summary_of(statistics, finished - first_token),
        "prompt_seconds": first_token - started,
        "finish": finish.name.lower(),
    }
    if args.json:
        print(json_text({"text": "".join(pieces), "tokens": tokens, "summary": summary}))
    else:
        print(pieces[-1], flush=True)
        print(summary_text(summary), file=sys.stderr)
    if finish is Finish.FAULT:
        print("specdec: error: the model's logits were not a distribution (NaN or infinite); output is cut", file=sys.stderr)
        return int(ExitCode.FAILURE)
    return int(ExitCode.OK)


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
    acceptance = "  ".join(f"{rate:.2f}" for rate in summary["acceptance_by_depth"]) or "no drafts"
    rows = (
        ("tokens", f"{summary['tokens']} after a prompt of {summary['prompt_tokens']}"),
        ("rounds", f"{summary['rounds']} with {summary['draft_tokens']} drafts each"),
        ("tokens per round", f"{summary['tokens_per_round']:.2f}"),
        ("acceptance by depth", acceptance),
        ("speed", f"{summary['tokens_per_second']:.1f} tokens/s, prompt in {summary['prompt_seconds']:.2f} s"),
        ("finished by", summary["finish"]),
    )
    return "\n".join(f"{name:<20} {value}" for name, value in rows)


def _progress(consumed: int, total: int) -> None:
    """One line on a terminal that rewrites itself; elsewhere one line per chunk of a prompt with several."""
    if sys.stderr.isatty():
        end = "\r" if consumed < total else "\r\x1b[K"
        print(f"prompt {consumed}/{total} tokens", end=end, file=sys.stderr, flush=True)
    elif total > PREFILL_ROWS:
        print(f"specdec: prompt {consumed}/{total} tokens", file=sys.stderr)
