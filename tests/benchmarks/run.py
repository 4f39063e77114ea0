"""Every draft count against plain decoding on held-out text: acceptance, tokens per round, tokens per second.

    make bench
    python tests/benchmarks/run.py [--files N] [--new-tokens N] [--passes N] [--out FILE]
    python tests/benchmarks/run.py --device cuda [--dtype T] [--batch N] [--eager N]

All arms run in one process on the same requests, in alternating order; speeds compare within this run only. Exit code 1 if
the best of them misses the bound. ``--out`` keeps the raw result, as in ``tests/benchmarks/results/``.

On a CUDA device rounds are captured as graphs, those of plain decoding too. There the bound holds for one request at a time;
``--batch`` runs several, whose figures are reported as they are. ``--eager N`` also compares captured with eager rounds on the
first N requests.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from heldout import heldout_requests

from specdec import __version__
from specdec.cli.tables import arms_table
from specdec.declaration import Recipe
from specdec.preparation import PreparationConfig
from specdec.recipes import recipe_book
from specdec.serving.compare import Arm, adaptive_arm, arms_for, compare
from specdec.serving.model import LoadedModel
from specdec.serving.request import Request

# What the best draft count must gain over plain decoding on the same requests: on a CPU, and with captured rounds.
SPEED_RATIO = 1.25
CAPTURED_SPEED_RATIO = 1.5
# What captured rounds must gain over eager ones, with drafts.
CAPTURE_RATIO = 3.0


def processor() -> str:
    """The processor's own name where the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def prepare(args: argparse.Namespace, recipe: Recipe, *, captured: bool) -> tuple[LoadedModel, LoadedModel]:
    """The model with every draft count, and the one that decodes plainly."""
    options = {
        "concurrency": max(args.batch, *args.batches),
        "context": args.prompt_tokens + args.new_tokens,
        "adaptive_verification": False,
        "cuda_graphs": captured,
    }
    widths = range(1, recipe.max_draft_tokens + 2)
    configs = (
        PreparationConfig.for_recipe(recipe, speculative_widths=widths, **options),
        PreparationConfig.for_recipe(recipe, speculative=False, **options),
    )
    speculative, plain = (
        LoadedModel.prepare(recipe, config, device=args.device, dtype=args.dtype) for config in configs
    )
    return speculative, plain


def captured_over_eager(
    args: argparse.Namespace,
    recipe: Recipe,
    captured: tuple[LoadedModel, LoadedModel],
    requests: Sequence[Request],
    drafts: int,
) -> dict[str, Any]:
    """Plain decoding and one draft count, captured and eager, on the same few requests."""
    arms: list[Arm] = []
    for models, name in ((captured, "captured"), (prepare(args, recipe, captured=False), "eager")):
        for arm in arms_for(*models, [None, drafts]):
            arm.name = f"{name} {arm.name}"
            arms.append(arm)
    compare(arms, requests, passes=args.passes, batch=args.batch)
    plain, drafted, eager_plain, eager_drafted = arms
    return {
        "requests": len(requests),
        "draft_tokens": drafts,
        "arms": [arm.as_data(eager_plain.tokens_per_second) for arm in arms],
        "plain_ratio": plain.tokens_per_second / eager_plain.tokens_per_second,
        "ratio": drafted.tokens_per_second / eager_drafted.tokens_per_second,
    }


def larger(args: argparse.Namespace, models: tuple[LoadedModel, LoadedModel], batch: int) -> dict[str, Any]:
    """Plain decoding, some draft counts and adaptive widths with so many requests at once.

    Four times as many requests follow each other into the lanes, so that most rounds are full.
    """
    speculative, plain = models
    requests = heldout_requests(
        speculative, files=max(args.files, 4 * batch), prompt_tokens=args.prompt_tokens, new_tokens=args.new_tokens
    )
    maximum = speculative.config.max_draft_tokens
    counts = sorted({1, 3, maximum} & {width - 1 for width in speculative.config.speculative_widths} | {0, maximum})
    arms = [*arms_for(speculative, plain, [None, *counts]), adaptive_arm(speculative)]
    compare(arms, requests, passes=args.passes, batch=batch)
    data = [arm.as_data(arms[0].tokens_per_second) for arm in arms]
    best = max(data[1:], key=lambda arm: arm["speed_ratio"])
    return {
        "batch": batch,
        "requests": len(requests),
        "arms": data,
        "best": best["name"],
        "speed_ratio": best["speed_ratio"],
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="qwen3.8-flash")
    parser.add_argument("--files", type=int, default=12, help="held-out texts to continue")
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default=None, help="activations (default: float32 on a CPU, bfloat16 elsewhere)")
    parser.add_argument("--batch", type=int, default=1, help="requests at once")
    parser.add_argument(
        "--batches",
        type=int,
        nargs="+",
        default=[1],
        metavar="N",
        help="more numbers of requests at once, with fewer arms",
    )
    parser.add_argument("--eager", type=int, default=0, metavar="N", help="requests to compare with eager rounds on")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    if args.eager and not args.device.startswith("cuda"):
        parser.error("--eager compares captured rounds, which need --device cuda")
    return args


def main() -> int:
    args = arguments()
    cuda = args.device.startswith("cuda")
    torch.set_num_threads(args.threads)
    recipe = recipe_book().recipe(args.recipe)
    models = prepare(args, recipe, captured=cuda)
    speculative, plain = models
    requests = heldout_requests(
        speculative, files=max(args.files, args.batch), prompt_tokens=args.prompt_tokens, new_tokens=args.new_tokens
    )
    arms = [*arms_for(speculative, plain, [None, *range(recipe.max_draft_tokens + 1)]), adaptive_arm(speculative)]
    compare(arms, requests, passes=args.passes, batch=args.batch)
    baseline = arms[0].tokens_per_second
    data = [arm.as_data(baseline) for arm in arms]
    best = max(data[1:], key=lambda arm: arm["speed_ratio"])
    result = {
        "command": "python tests/benchmarks/run.py " + " ".join(sys.argv[1:]),
        "recipe": recipe.name,
        "checkpoint": "embedded",
        "requests": len(requests),
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "passes": args.passes,
        "batch": args.batch,
        "sampling": "checkpoint defaults",
        "processor": processor(),
        "device": torch.cuda.get_device_name(speculative.device) if cuda else "cpu",
        "dtype": speculative.capacities.dtype,
        "captured": speculative.graphs is not None,
        "threads": args.threads,
        "versions": {"specdec": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "arms": data,
        "best": {"name": best["name"], "draft_tokens": best["draft_tokens"], "speed_ratio": best["speed_ratio"]},
    }
    result["batches"] = [larger(args, models, size) for size in args.batches if size != args.batch]
    if args.eager:
        fixed = max(arms[2:-1], key=lambda arm: arm.tokens_per_second)
        result["captured_over_eager"] = captured_over_eager(
            args, recipe, models, requests[: args.eager], fixed.draft_tokens or 0
        )
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if reported(args, result, bound=CAPTURED_SPEED_RATIO if cuda else SPEED_RATIO) else 1


def reported(args: argparse.Namespace, result: dict[str, Any], *, bound: float) -> bool:
    """Prints tables and bounds; whether all bounds hold."""
    print(arms_table(result["arms"]))
    best = result["best"]
    line = f"best: {best['name']}, {best['speed_ratio']:.2f} times plain decoding"
    holds = args.batch > 1 or best["speed_ratio"] >= bound
    print(line if args.batch > 1 else f"{line}; bound {bound}: {'holds' if holds else 'MISSED'}")
    for one in result["batches"]:
        print(f"{one['batch']} requests at once:")
        print(arms_table(one["arms"]))
    eager = result.get("captured_over_eager")
    if eager is not None:
        fast = eager["ratio"] >= CAPTURE_RATIO
        holds = holds and fast
        print(arms_table(eager["arms"]))
        print(
            f"captured over eager: {eager['ratio']:.2f} with {eager['draft_tokens']} drafts, {eager['plain_ratio']:.2f} plain; "
            f"bound {CAPTURE_RATIO}: {'holds' if fast else 'MISSED'}"
        )
    if args.out is not None:
        print(f"raw result: {args.out}")
    return holds


if __name__ == "__main__":
    sys.exit(main())
