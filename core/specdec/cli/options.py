"""Options that commands which load a model share: what they mean, and what is refused before anything is loaded.

Torch is imported inside the functions that load something, never with this module.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.cli.output import say
from specdec.cli.refusals import option, spelled
from specdec.errors import UsageError
from specdec.preparation import ACTIVATION_DTYPES, PreparationConfig

if TYPE_CHECKING:
    from specdec.checkpoint.tokenizer import Tokenizer
    from specdec.declaration import Recipe
    from specdec.serving.grammar import Grammar
    from specdec.serving.model import LoadedModel

__all__ = [
    "PREFILL_ROWS",
    "add_grammar_options",
    "add_model_options",
    "add_request_options",
    "add_sampling_options",
    "checkpoint_basics",
    "context_for",
    "grammar_option",
    "grammar_options",
    "preparation",
    "prepared_model",
    "request_options",
    "sampling_options",
]

# Rows of one prompt chunk: small enough that a long prompt shows progress, large enough that chunking costs little.
PREFILL_ROWS = 128
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
# No machine has more to offer, and starting them would take all of its memory.
MAX_THREADS = 1024


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Options that decide what is prepared, the draft count excepted."""
    parser.add_argument(
        "--checkpoint", metavar="DIR", help="checkpoint folder (default: the small one the plugin ships)"
    )
    parser.add_argument(
        "--speculative-token-capacity",
        type=int,
        metavar="N",
        help="most target rows of one round (default: the recipe's)",
    )
    parser.add_argument("--context", type=int, metavar="N", help="most tokens, prompt and output (default: as needed)")
    parser.add_argument("--device", default="cpu", metavar="DEVICE", help="torch device (default: cpu)")
    parser.add_argument(
        "--dtype",
        choices=ACTIVATION_DTYPES,
        help="activations (default: float32 on a CPU, bfloat16 elsewhere)",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of one operator (default: 1)")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Options of the sampling law; what is not given comes from the checkpoint."""
    group = parser.add_argument_group(
        "sampling", "What is not given comes from the checkpoint's generation_config.json, else from the recipe."
    )
    group.add_argument("--temperature", type=float, metavar="T", help="divisor of the logits, above 0")
    group.add_argument("--top-k", type=int, metavar="K", help="keep the K most probable tokens, 0 turns it off")
    group.add_argument("--top-p", type=float, metavar="P", help="keep the smallest set of mass P, 1 turns it off")
    group.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help="keep tokens of at least P times the largest probability, 0 turns it off",
    )
    group.add_argument(
        "--greedy", action="store_true", help="always the most probable token, instead of the four options above"
    )
    group.add_argument("--seed", type=int, metavar="N", help="key of the random stream (default: 0)")


def add_request_options(parser: argparse.ArgumentParser) -> None:
    """Options of one request beside the sampling law: penalties, biases, where it may end, what it reports."""
    group = parser.add_argument_group(
        "request", "Penalties and biases apply before the sampling options, also to --greedy."
    )
    group.add_argument(
        "--presence-penalty", type=float, metavar="X", help="taken off the logits of tokens in the output, -2 to 2"
    )
    group.add_argument(
        "--frequency-penalty", type=float, metavar="X", help="taken off once for each time a token was emitted, -2 to 2"
    )
    group.add_argument(
        "--repetition-penalty",
        type=float,
        metavar="X",
        help="divides positive logits of tokens in prompt or output, multiplies negative ones, 0.01 to 100",
    )
    group.add_argument(
        "--logit-bias", action="append", metavar="ID:VALUE", help="added to a token's logit, -100 to 100; repeatable"
    )
    group.add_argument(
        "--min-new-tokens", type=int, default=0, metavar="N", help="no end of text before N tokens (default: 0)"
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="the checkpoint's end-of-text tokens do not end the output"
    )
    group.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        help="with --json, log-probabilities of each token and of the N most probable ones, 0 to 20",
    )
    group.add_argument(
        "--prompt-logprobs",
        type=int,
        metavar="N",
        help="with --json, the same of each prompt token but the first",
    )
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end before this text, decoding without drafts; repeatable, up to 16",
    )


def add_grammar_options(parser: argparse.ArgumentParser) -> None:
    """Options that constrain the output's text; at most one of them."""
    group = parser.add_argument_group(
        "grammar", "The output's text satisfies it; decoded without the drafter's drafts. Needs the extra 'grammar'."
    ).add_mutually_exclusive_group()
    group.add_argument("--json-object", action="store_true", help="any JSON object")
    group.add_argument("--json-schema", metavar="FILE", help="a JSON value that this JSON schema admits")
    group.add_argument("--regex", metavar="PATTERN", help="a text that this regular expression matches as a whole")
    group.add_argument("--ebnf", metavar="FILE", help="a text of the rule 'root' of this grammar, name ::= …")


def grammar_options(args: argparse.Namespace) -> list[str]:
    """The grammar options that were given, as they are typed."""
    return [option(name) for name in ("json_object", "json_schema", "regex", "ebnf") if getattr(args, name)]


def grammar_option(args: argparse.Namespace, recipe: Recipe) -> Grammar | None:
    """The grammar that the options ask for, None for none.

    Raises UsageError for a file that cannot be read, or if the recipe cannot honour grammars.
    """
    from specdec.sampling.options import refuse_unsupported
    from specdec.serving.grammar import Grammar

    grammar = None
    if args.json_object:
        grammar = Grammar(kind="json")
    elif args.regex is not None:
        grammar = Grammar(kind="regex", text=args.regex)
    for kind in ("json_schema", "ebnf"):
        path = getattr(args, kind)
        if path is not None:
            try:
                text = Path(path).read_bytes().decode("utf-8")
            except (OSError, UnicodeError) as error:
                why = getattr(error, "strerror", None) or "not UTF-8 text"
                raise UsageError(f"{option(kind)} {path!r}: {why}; give a readable UTF-8 file") from error
            grammar = Grammar(kind=kind, text=text)
    if grammar is not None:
        refuse_unsupported(recipe, {"grammar": grammar})
    return grammar


def preparation(
    args: argparse.Namespace,
    recipe: Recipe,
    *,
    speculative: bool,
    draft_tokens: int | None = None,
    adaptive: bool = False,
    concurrency: int = 1,
) -> PreparationConfig:
    """What the options ask to prepare; the context is the caller's to set where none was given.

    speculative: whether the drafter is prepared. draft_tokens: None takes the recipe's default. adaptive: whether the drafts of
    each round are chosen or always the most. concurrency: requests at once.
    Loads nothing. Raises UsageError if an option is out of range for the recipe or contradicts another.
    """
    for name, value, minimum, maximum in (
        ("--max-new-tokens", getattr(args, "max_new_tokens", None), 1, None),
        ("--concurrency", concurrency, 1, None),
        ("--context", args.context, 2, None),
        ("--threads", args.threads, 1, MAX_THREADS),
    ):
        if value is not None and (value < minimum or (maximum is not None and value > maximum)):
            allowed = f"{minimum} or more" if maximum is None else f"{minimum} to {maximum}"
            raise UsageError(f"{name} is {value}; allowed: {allowed}")
    return PreparationConfig.for_recipe(
        recipe,
        concurrency=concurrency,
        speculative=speculative,
        max_draft_tokens=draft_tokens,
        speculative_token_capacity=args.speculative_token_capacity,
        context=2 if args.context is None else args.context,
        prefill_tokens=(PREFILL_ROWS,),
        adaptive_verification=adaptive,
    )


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling options that were given, by the names of ``SamplingParams``; the seed is always among them.

    Raises UsageError if one is out of range, or if ``--greedy`` comes with an option that it leaves without effect.
    """
    from specdec.sampling.params import SamplingParams

    filters = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    filters = {name: value for name, value in filters.items() if value is not None}
    penalties = {name: getattr(args, name, None) for name in _PENALTIES}
    penalties = {name: value for name, value in penalties.items() if value is not None}
    if getattr(args, "logit_bias", None):
        penalties["logit_bias"] = tuple(_bias(text) for text in args.logit_bias)
    options = {**filters, "seed": 0 if args.seed is None else args.seed, **penalties}
    for name, value in options.items():
        SamplingParams(**{name: value})
    if args.greedy and filters:
        given = ", ".join(f"{option(name)} {value}" for name, value in filters.items())
        raise UsageError(
            f"--greedy takes the most probable token, so {given} would have no effect; drop one of the two"
        )
    return {**options, "greedy": True} if args.greedy else options


def request_options(args: argparse.Namespace, recipe: Recipe, sampling: dict[str, Any]) -> dict[str, Any]:
    """Options of ``Request`` from ``add_request_options``; sampling: what ``sampling_options`` gave, checked with them.

    Raises UsageError if one is out of range, would have no effect, or is none that the recipe can honour.
    """
    from specdec.sampling.options import options_in_use, refuse_unsupported
    from specdec.sampling.params import SamplingParams
    from specdec.serving.request import Request

    options = {name: getattr(args, name) for name in ("min_new_tokens", "ignore_eos", "logprobs", "prompt_logprobs")}
    options["stop"] = tuple(args.stop or ())
    for name, value in options.items():
        Request(prompt=(0,), max_new_tokens=args.max_new_tokens, **{name: value})
    for name in ("logprobs", "prompt_logprobs"):
        if options[name] is not None and not args.json:
            raise UsageError(f"{option(name)} {options[name]} shows with --json only; add --json or drop it")
    used = options_in_use(SamplingParams(**sampling), **options)
    try:
        refuse_unsupported(recipe, used)
    except UsageError as error:
        raise UsageError(spelled(str(error), (), used)) from error
    return options


def _bias(text: str) -> tuple[int, float]:
    token, colon, value = text.partition(":")
    try:
        if colon:
            return int(token), float(value)
    except ValueError:
        pass
    raise UsageError(f"--logit-bias is {text!r}; give a token id and a number separated by a colon, like 17:-2.5")


def prepared_model(args: argparse.Namespace, recipe: Recipe, config: PreparationConfig) -> LoadedModel:
    """Loads what ``config`` asks for on the device, in the dtype and with the threads of the options.

    Raises UsageError, CheckpointError, CapacityError or PluginError with one line.
    """
    import torch

    from specdec.serving.model import LoadedModel

    # One thread unless asked: the operators of a small model are shorter than handing them to a pool.
    torch.set_num_threads(args.threads or 1)
    model = LoadedModel.prepare(recipe, config, directory=args.checkpoint, device=args.device, dtype=args.dtype)
    for note in model.notes:
        say(f"specdec: {note}")
    return model


def checkpoint_basics(args: argparse.Namespace, recipe: Recipe) -> tuple[Tokenizer, int | None]:
    """Tokenizer of the checkpoint that the options name, and the most tokens that it can hold; reads no weights.

    Prompts are encoded before weights are loaded, so that one that does not fit is refused at once.
    Raises CheckpointError.
    """
    from specdec.checkpoint.accepted import check_model_type, context_limit, open_checkpoint

    with open_checkpoint(recipe, args.checkpoint) as checkpoint:
        check_model_type(checkpoint, recipe)
        return checkpoint.tokenizer(), context_limit(checkpoint)


def context_for(args: argparse.Namespace, prompt: int, limit: int | None) -> int:
    """Tokens to prepare for: what was asked, or prompt and output budget within the checkpoint's limit.

    Raises UsageError if a prompt of ``prompt`` tokens leaves no room for one more.
    """
    needed = prompt + args.max_new_tokens
    context = args.context if args.context is not None else min(limit or needed, needed)
    if prompt >= context:
        source = f"--context {args.context}" if args.context is not None else f"the checkpoint's context of {limit}"
        cure = " or raise --context" if args.context is not None else ""
        raise UsageError(
            f"the prompt has {prompt} tokens; {source} leaves room for at most {context - 1}; shorten the prompt{cure}"
        )
    return context
