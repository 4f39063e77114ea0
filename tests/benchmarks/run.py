"""Every draft count against plain decoding on held-out text: acceptance, tokens per round, tokens per second.

    make bench
    python tests/benchmarks/run.py [--files N] [--new-tokens N] [--passes N] [--out FILE]

All arms run in one process on the same requests, in alternating order; speeds compare within this run only. Exit code 1 if
the best of them misses the bound. ``--out`` keeps the raw result, as in ``tests/benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from heldout import heldout_requests

from specdec import __version__
from specdec.cli.tables import arms_table
from specdec.preparation import PreparationConfig
from specdec.recipes import recipe_book
from specdec.serving.compare import adaptive_arm, arms_for, compare
from specdec.serving.model import LoadedModel

# What the best fixed draft count must gain over plain decoding on the same requests.
SPEED_RATIO = 1.25


def processor() -> str:
    """The processor's own name where the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="qwen3.8-flash")
    parser.add_argument("--files", type=int, default=12, help="held-out texts to continue")
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    recipe = recipe_book().recipe(args.recipe)
    context = args.prompt_tokens + args.new_tokens
    options = {"concurrency": 1, "context": context, "adaptive_verification": False}
    maximum = recipe.max_draft_tokens
    widths = range(1, maximum + 2)
    speculative = LoadedModel.prepare(
        recipe, PreparationConfig.for_recipe(recipe, speculative_widths=widths, **options)
    )
    plain = LoadedModel.prepare(recipe, PreparationConfig.for_recipe(recipe, speculative=False, **options))
    requests = heldout_requests(
        speculative, files=args.files, prompt_tokens=args.prompt_tokens, new_tokens=args.new_tokens
    )
    arms = [*arms_for(speculative, plain, [None, *range(maximum + 1)]), adaptive_arm(speculative)]
    compare(arms, requests, passes=args.passes)
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
        "sampling": "checkpoint defaults",
        "processor": processor(),
        "threads": args.threads,
        "versions": {"specdec": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "arms": data,
        "best": {"name": best["name"], "draft_tokens": best["draft_tokens"], "speed_ratio": best["speed_ratio"]},
    }
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(arms_table(data))
    holds = best["speed_ratio"] >= SPEED_RATIO
    print(
        f"best: {best['name']}, {best['speed_ratio']:.2f} times plain decoding; bound {SPEED_RATIO}: "
        f"{'holds' if holds else 'MISSED'}"
    )
    if args.out is not None:
        print(f"raw result: {args.out}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
