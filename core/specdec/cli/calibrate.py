"""``specdec calibrate``: fits the temperatures of a drafter's acceptance forecasts to rounds of the loaded checkpoint.

Torch is imported inside ``run`` only. The table goes to stdout, progress to stderr, temperatures to a file.
"""

from __future__ import annotations

import argparse
from importlib import resources
from itertools import cycle, islice
from pathlib import Path
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
from specdec.cli.output import say, write
from specdec.cli.refusals import names_options
from specdec.cli.tables import columns, json_text
from specdec.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from specdec.control.calibration import Outcome
    from specdec.declaration import Recipe
    from specdec.serving.model import LoadedModel
    from specdec.serving.request import Request

__all__ = ["add_parser", "run"]

_DESCRIPTION = """Generates continuations of texts and fits, for each draft depth, the temperature that makes the drafter's
forecasts of acceptance match what happens. Half of the rounds are fitted, the other half judges the fit. The file is used where
it lies in the checkpoint folder as draft_calibration_N.json, N being the number of drafts."""
PROMPT_TOKENS = 64
# Continuations in a row without a whole block verified, after which none is expected any more.
_PATIENCE = 64


def add_parser(subparsers: Any) -> None:
    """Adds ``calibrate`` to the command line."""
    parser = subparsers.add_parser("calibrate", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("recipe", metavar="RECIPE", help="recipe name, see 'specdec recipes'")
    parser.add_argument("--out", metavar="FILE", required=True, help="where to write the list of temperatures, as JSON")
    parser.add_argument(
        "--text",
        action="append",
        metavar="FILE",
        help="UTF-8 text to continue; repeatable (default: this package's source)",
    )
    parser.add_argument(
        "--rounds", type=int, default=1000, metavar="N", help="rounds to collect, at least 30 (default: 1000)"
    )
    parser.add_argument("--mtp-draft-tokens", type=int, metavar="N", help="drafts of a block (default: the recipe's)")
    parser.add_argument(
        "--max-new-tokens", type=int, default=96, metavar="N", help="tokens per continuation (default: 96)"
    )
    add_model_options(parser)
    add_sampling_options(parser)
    parser.add_argument("--json", action="store_true", help="print data instead of a table")


@names_options
def run(args: argparse.Namespace) -> int:
    """Collects, fits, writes and reports.

    Raises UsageError for a recipe without forecasts, an option out of range, texts without a prompt, and continuations or
    forecasts for which no round verifies a whole block.
    """
    from attrs import evolve

    from specdec.recipes import recipe_book

    book = recipe_book()
    recipe = book.recipe(args.recipe)
    _require_forecasts(recipe, book.discovery.recipes)
    if args.rounds < 30:
        raise UsageError(f"--rounds is {args.rounds}; allowed: 30 or more")
    if args.mtp_draft_tokens == 0:
        raise UsageError("--mtp-draft-tokens 0 drafts nothing, so there is nothing to calibrate; give 1 or more")
    out = Path(args.out)
    if not out.parent.is_dir() or out.is_dir():
        raise UsageError(f"--out {args.out!r}: not a file in a folder that exists; name another")
    config = preparation(args, recipe, speculative=True, draft_tokens=args.mtp_draft_tokens)
    options = sampling_options(args)
    texts = _texts(args.text)
    tokenizer, limit = checkpoint_basics(args, recipe)
    encoded = [tokenizer.encode(text) for text in texts]
    prompts = [tokens[at : at + PROMPT_TOKENS] for tokens in encoded for at in _starts(tokens)]
    if not prompts:
        raise UsageError(f"the texts hold no prompt of {PROMPT_TOKENS} tokens; give longer ones with --text")
    config = evolve(config, context=context_for(args, PROMPT_TOKENS, limit))
    # the first token comes without drafts, and the last one of a round is no draft
    room, needed = min(args.max_new_tokens, config.context - PROMPT_TOKENS), config.max_draft_tokens + 2
    if room < needed:
        raise UsageError(
            f"a continuation has {room} tokens, and a round that verifies all {config.max_draft_tokens} drafts needs {needed}; "
            "raise --max-new-tokens or --context"
        )
    model = prepared_model(args, recipe, config)
    return _calibrate(args, model, prompts, options, out)


def _require_forecasts(recipe: Recipe, known: Sequence[Recipe]) -> None:
    if recipe.confidence_width:
        return
    others = ", ".join(other.name for other in known if other.confidence_width) or "none installed"
    raise UsageError(
        f"recipe {recipe.name!r} forecasts no acceptance, so there is nothing to calibrate; recipes that do: {others}"
    )


def _texts(files: Sequence[str] | None) -> list[str]:
    if files is None:
        package = Path(str(resources.files("specdec")))
        return [path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))]
    try:
        return [Path(name).read_bytes().decode("utf-8") for name in files]
    except OSError as error:
        raise UsageError(f"--text: {error.filename}: {error.strerror or error}; give readable UTF-8 files") from error
    except UnicodeError as error:
        raise UsageError("--text: not UTF-8 text; convert it to UTF-8") from error


def _starts(tokens: Sequence[int]) -> range:
    """Where prompts of one text begin."""
    return range(0, len(tokens) - PROMPT_TOKENS + 1, 4 * PROMPT_TOKENS)


def _requests(
    args: argparse.Namespace,
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    options: dict[str, Any],
    found: Sequence[Outcome],
) -> Iterator[Request]:
    """Every prompt in turn, and all again with other seeds; stop ids end nothing, for a calibration has use for every round.

    found: what the requests have brought so far. Raises UsageError if many in a row bring nothing.
    """
    from specdec.serving.request import Request

    known = 0
    for number, prompt in enumerate(cycle(prompts)):
        if number and number % _PATIENCE == 0:
            if len(found) == known:
                raise UsageError(
                    f"{_PATIENCE} continuations without a round that verified all {model.config.max_draft_tokens} drafts: "
                    "forecasts of this drafter are too low at this depth; calibrate fewer drafts with --mtp-draft-tokens"
                )
            known = len(found)
        sampling = model.defaults.sampling(**{**options, "seed": options["seed"] + number})
        yield Request(prompt=tuple(prompt), sampling=sampling, max_new_tokens=args.max_new_tokens, ignore_eos=True)


def _calibrate(
    args: argparse.Namespace,
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    options: dict[str, Any],
    out: Path,
) -> int:
    from specdec.control.calibration import fit_temperatures, survival_errors, write_temperatures
    from specdec.serving.calibration import forget_temperatures, outcomes

    forget_temperatures(model)
    found: list[Outcome] = []
    for outcome in islice(outcomes(model, _requests(args, model, prompts, options, found)), args.rounds):
        found.append(outcome)
        if len(found) % 200 == 0:
            say(f"specdec: {len(found)} of {args.rounds} rounds")
    fitted, judged = found[0::2], found[1::2]
    temperatures = fit_temperatures(fitted)
    before, after = survival_errors(judged, (1.0,) * len(temperatures)), survival_errors(judged, temperatures)
    write_temperatures(out, temperatures)
    data = {
        "recipe": model.recipe.name,
        "rounds": len(found),
        "judged": len(judged),
        "file": str(out),
        "temperatures": list(temperatures),
        "error_before": list(before),
        "error_after": list(after),
    }
    if args.json:
        write(json_text(data))
        return int(ExitCode.OK)
    head = ("depth", "temperature", "error before", "error after")
    rows = [
        (depth, f"{temperature:.3f}", f"{old:.2%}", f"{new:.2%}")
        for depth, (temperature, old, new) in enumerate(zip(temperatures, before, after, strict=True), start=1)
    ]
    write(columns([head, *rows]))
    say(f"specdec: temperatures of {len(found)} rounds written to {out}")
    return int(ExitCode.OK)
