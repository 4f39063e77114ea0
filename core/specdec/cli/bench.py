"""``specdec bench``: measurements of an installed recipe on this machine. ``rounds``: what each round costs, and its overhead.

Torch is imported inside ``run`` only. The table goes to stdout, progress to stderr, every observation to a file.
"""

from __future__ import annotations

import argparse
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.cli.options import add_model_options, checkpoint_basics, preparation, prepared_model
from specdec.cli.output import check_writable, say, write, write_file
from specdec.cli.refusals import names_options
from specdec.cli.tables import columns, json_text
from specdec.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.checkpoint.tokenizer import Tokenizer
    from specdec.preparation import PreparationConfig
    from specdec.serving.model import LoadedModel

__all__ = ["add_parser", "run"]

_DESCRIPTION = """Measures an installed recipe on this machine."""
_ROUNDS = """Measures every prepared round shape: its replay back to back, which is the least that it can take; the engine's time
per round with two rounds in flight; and the device's time in draft, verify, accept and commit. Then the engine with adaptive
widths, beside the replays of the rounds that it chose. The order turns round from pass to pass. On a CPU nothing is captured, and
replays are eager rounds."""
PROMPT_TOKENS = 64
#: More would keep the machine for hours.
MOST_ROUNDS, MOST_PASSES = 100_000, 1000


def add_parser(subparsers: Any) -> None:
    """Adds ``bench`` to the command line."""
    group = subparsers.add_parser("bench", description=_DESCRIPTION, allow_abbrev=False)
    benchmarks = group.add_subparsers(title="benchmarks", metavar="BENCHMARK", dest="benchmark", required=True)
    parser = benchmarks.add_parser(
        "rounds", help="every round shape: replay, engine, overhead, phases", description=_ROUNDS, allow_abbrev=False
    )
    parser.add_argument("recipe", metavar="RECIPE", help="recipe name, see 'specdec recipes'")
    parser.add_argument("--concurrency", type=int, default=4, metavar="N", help="most requests at once (default: 4)")
    parser.add_argument(
        "--mtp-draft-tokens", type=int, metavar="N", help="most drafts of a round (default: the recipe's)"
    )
    parser.add_argument("--rounds", type=int, default=64, metavar="N", help="rounds of one run (default: 64)")
    parser.add_argument("--passes", type=int, default=4, metavar="N", help="runs of everything (default: 4)")
    add_model_options(parser)
    parser.add_argument("--out", metavar="FILE", help="write figures and every observation, as JSON")
    parser.add_argument("--plot", metavar="FILE", help="write the comparison as an SVG image")
    parser.add_argument("--json", action="store_true", help="print what --out writes instead of tables")


@names_options
def run(args: argparse.Namespace) -> int:
    """Measures and reports.

    Raises UsageError for an option out of range, a file that cannot be written, or more rounds than the context has room for,
    and SpecdecError if a request ends before its rounds are measured.
    """
    from attrs import evolve

    from specdec.recipes import recipe_book

    recipe = recipe_book().recipe(args.recipe)
    for option, value, most in (("--rounds", args.rounds, MOST_ROUNDS), ("--passes", args.passes, MOST_PASSES)):
        if not 1 <= value <= most:
            raise UsageError(f"{option} is {value}; allowed: 1 to {most}")
    for option, path in (("--out", args.out), ("--plot", args.plot)):
        if path is not None:
            check_writable(option, path)
    config = preparation(
        args,
        recipe,
        speculative=True,
        draft_tokens=args.mtp_draft_tokens,
        adaptive=True,
        concurrency=args.concurrency,
    )
    tokenizer, limit = checkpoint_basics(args, recipe)
    config = evolve(config, context=_context(args, config, limit))
    prompts = _prompts(tokenizer, args.concurrency)
    model = prepared_model(args, recipe, config)
    data = _measured(args, model, prompts)
    text = json_text(data)
    if args.out is not None:
        write_file("--out", args.out, text)
    if args.plot is not None:
        from specdec.serving.round_plot import svg

        write_file(
            "--plot", args.plot, svg(data, f"specdec bench rounds: {recipe.name}, {data['device']}").rstrip("\n")
        )
    write(text if args.json else _tables(data))
    return int(ExitCode.OK)


def _context(args: argparse.Namespace, config: PreparationConfig, limit: int | None) -> int:
    """Tokens that no request of the benchmark comes to the end of."""
    from specdec.serving.round_times import output_tokens

    needed = PROMPT_TOKENS + output_tokens(args.rounds, config.speculative_widths[-1], config.concurrency)
    why = f"--rounds {args.rounds} with {args.concurrency} requests needs a context of {needed} tokens"
    if args.context is not None and args.context < needed:
        raise UsageError(f"{why}; --context is {args.context}; raise it or lower --rounds")
    if limit is not None and needed > limit:
        raise UsageError(f"{why}; the checkpoint has {limit}; lower --rounds or --concurrency")
    return needed if args.context is None else args.context


def _prompts(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Beginnings of this package's modules."""
    found: list[list[int]] = []
    for path in sorted(Path(str(resources.files("specdec"))).rglob("*.py")):
        tokens = tokenizer.encode(path.read_text(encoding="utf-8"))[:PROMPT_TOKENS]
        if len(tokens) == PROMPT_TOKENS:
            found.append(list(tokens))
        if len(found) == count:
            break
    return found


def _measured(args: argparse.Namespace, model: LoadedModel, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    import platform

    import torch

    from specdec import __version__
    from specdec.ops.select import active_operators
    from specdec.serving.round_bench import QUEUE_DEPTH, RoundBench

    bench = RoundBench(model, prompts, rounds=args.rounds)
    captured = any(one.program.captured for one in model.rounds.values())
    cuda = model.device.type == "cuda"
    how = "captured" if captured else "eager"
    say(f"specdec: {len(bench.shapes)} shapes, {args.passes} passes of {args.rounds} {how} rounds")
    bench.run(args.passes, lambda done: say(f"specdec: {done}"))
    floors = {(one.batch, one.width): one.floor for one in bench.shapes}
    return {
        "recipe": model.recipe.name,
        "checkpoint": args.checkpoint or "embedded",
        "device": torch.cuda.get_device_name(model.device) if cuda else platform.processor() or platform.machine(),
        "dtype": model.capacities.dtype,
        "captured": captured,
        "sampler": model.arena.sampler.name,
        "operators": active_operators(model.device),
        "concurrency": model.config.concurrency,
        "widths": list(model.config.speculative_widths),
        "context": model.config.context,
        "prompt_tokens": PROMPT_TOKENS,
        "rounds": args.rounds,
        "passes": args.passes,
        "queue_depth": QUEUE_DEPTH,
        "threads": torch.get_num_threads(),
        "versions": {"specdec": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "shapes": [one.as_data() for one in bench.shapes],
        "adaptive": [
            one.as_data({width: floor for (batch, width), floor in floors.items() if batch == one.batch})
            for one in bench.adaptive
        ],
    }


def _tables(data: dict[str, Any]) -> str:
    """Milliseconds of each shape, then of the adaptive policy at each batch capacity."""
    phases = list(data["shapes"][0]["phases"])
    head = ("batch", "width", "rows", "replay ms", "engine ms", "ratio", *(f"{phase} ms" for phase in phases))
    rows = [
        (
            one["batch"],
            one["width"],
            one["target_rows"],
            _ms(one["floor"]),
            _ms(one["engine"]),
            f"{one['ratio']:.3f}",
            *(_ms(one["phases"][phase]) for phase in phases),
        )
        for one in data["shapes"]
    ]
    text = columns([head, *rows])
    if not data["adaptive"]:
        return text
    head = ("adaptive batch", "replay ms", "engine ms", "ratio", "by pass", "rounds by width")
    chosen = [
        (
            one["batch"],
            _ms(one["floor"]),
            _ms(one["engine"]),
            f"{one['ratio']:.3f}",
            " ".join(f"{ratio:.3f}" for ratio in one["ratio_by_pass"]),
            " ".join(f"{width}:{count}" for width, count in one["rounds_by_width"].items()),
        )
        for one in data["adaptive"]
    ]
    return f"{text}\n\n{columns([head, *chosen])}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3f}"
