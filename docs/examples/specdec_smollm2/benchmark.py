"""Code edits by SmolLM2-135M-Instruct: plain decoding, prompt lookup, and prompt lookup with history drafts.

    python docs/examples/specdec_smollm2/benchmark.py [--out FILE] [--new-tokens N] [--passes N]

Each request gives a function and asks for a change to it (``edits.json``), in the checkpoint's chat template, greedy, one at a
time. All arms run in one process and answer each request in turn; speeds compare within this run only. History begins empty in
every pass and holds what the requests before answered. Exit code 1 if a text differs from plain decoding's, or the arm with
history drafts emits fewer than 1.5 tokens a round.

A model of this size often loses its thread and repeats itself up to the limit, which is easy to draft; so every figure is given
twice, for all requests and for those that the model ended itself.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specdec import __version__
from specdec.checkpoint.accepted import open_checkpoint
from specdec.checkpoint.chat import ChatTemplate
from specdec.declaration import Recipe
from specdec.drafting.history import HistoryRing
from specdec.preparation import PreparationConfig
from specdec.recipes import recipe_book
from specdec.scheduling.policy import FixedWidth, width_policy
from specdec.scheduling.scheduler import Scheduler
from specdec.serving.device import ModelDevice
from specdec.serving.model import LoadedModel
from specdec.serving.request import Emission, Progress, Request

RECIPE = "smollm2-135m"
EDITS = Path(__file__).parent / "edits.json"
TOKENS_PER_ROUND = 1.5
CONTEXT = 512
FINISHED = "stop"


def processor() -> str:
    """The processor's own name where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def edit_prompts(recipe: Recipe) -> tuple[list[str], list[list[int]]]:
    """What is asked, and the prompts as token ids: one message in the chat template."""
    edits = json.loads(EDITS.read_text(encoding="utf-8"))
    with open_checkpoint(recipe) as checkpoint:
        template, tokenizer = ChatTemplate.of(checkpoint.tokenizer_config()), checkpoint.tokenizer()
    assert template is not None
    asked, prompts = [], []
    for name, edit in edits["edits"]:
        text = f"{edit} Give the whole function.\n\n```python\n{edits['functions'][name]}```"
        asked.append(f"{name}: {edit}")
        prompts.append(tokenizer.encode(template.render([{"role": "user", "content": text}])))
    return asked, prompts


def prepare(recipe: Recipe, *, speculative: bool) -> LoadedModel:
    """The model with every draft count, or without a drafter."""
    widths = range(1, recipe.max_draft_tokens + 2) if speculative else (1,)
    config = PreparationConfig.for_recipe(
        recipe, concurrency=1, context=CONTEXT, speculative=speculative, speculative_widths=widths
    )
    return LoadedModel.prepare(recipe, config)


def requests_for(model: LoadedModel, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Request]:
    """Greedy requests."""
    greedy = model.defaults.sampling(greedy=True)
    return [Request(prompt=prompt, sampling=greedy, max_new_tokens=new_tokens) for prompt in prompts]


def scheduler(model: LoadedModel, *, width: int | None = None, history: bool = False) -> Scheduler:
    """Runs requests one round after the other. width: of every round; None chooses by measured cost and acceptance."""
    policy = width_policy(model.config) if width is None else FixedWidth(width)
    return Scheduler(ModelDevice(model), policy, history=HistoryRing() if history else None)


def run(one: Scheduler, requests: Sequence[Request]) -> list[dict[str, Any]]:
    """Each request by itself: its tokens, rounds, seconds in steps that ran a round alone, and how it ended."""
    found = []
    for request in requests:
        one.submit(request)
        record: dict[str, Any] = {"output": [], "rounds": 0, "seconds": 0.0, "finish": ""}
        while one.busy:
            started = time.perf_counter()
            events = list(one.step())
            elapsed = time.perf_counter() - started
            for event in events:
                if isinstance(event, Emission):
                    record["output"] += event.tokens
                    record["finish"] = event.finish.name.lower() if event.finish else record["finish"]
                    # the first token comes without a round
                    record["rounds"] += event.completion.generated > 1
            if not any(isinstance(event, Progress) or event.completion.generated == 1 for event in events):
                record["seconds"] += elapsed
        found.append(record)
    return found


def figures(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums over requests. Tokens per round and seconds leave out the first token, which no round emits."""
    tokens = sum(len(record["output"]) - 1 for record in records)
    rounds, seconds = (sum(record[name] for record in records) for name in ("rounds", "seconds"))
    return {
        "requests": len(records),
        "tokens": tokens,
        "rounds": rounds,
        "tokens_per_round": tokens / rounds if rounds else 0.0,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else 0.0,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new-tokens", type=int, default=160)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)

    recipe = recipe_book().recipe(RECIPE)
    asked, prompts = edit_prompts(recipe)
    drafting, plain = prepare(recipe, speculative=True), prepare(recipe, speculative=False)
    widest = recipe.max_draft_tokens + 1
    arms = {
        "plain": lambda: scheduler(plain),
        "n-gram": lambda: scheduler(drafting, width=widest),
        "n-gram and history": lambda: scheduler(drafting, width=widest, history=True),
        "n-gram and history, adaptive": lambda: scheduler(drafting, history=True),
    }
    requests = requests_for(drafting, prompts, args.new_tokens)
    passes: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in arms}
    for make in arms.values():
        run(make(), requests_for(drafting, prompts[-1:], 16))
    order = 0
    for _ in range(args.passes):
        made = {name: make() for name, make in arms.items()}
        for done in passes.values():
            done.append([])
        for request in requests:
            # arms alternate from request to request, so that other work of the machine meets all of them
            for name in list(arms) if order % 2 == 0 else reversed(arms):
                passes[name][-1] += run(made[name], [request])
            order += 1
    texts = [record["output"] for record in passes["plain"][0]]
    ended = [record["finish"] == FINISHED for record in passes["plain"][0]]
    rows, equal = [], True
    print(f"{'':<30}{'all requests':>26}{'ended by the model':>26}")
    print(f"{'':<30}{'tokens/round':>14}{'tokens/s':>12}{'tokens/round':>14}{'tokens/s':>12}")
    for name, done in passes.items():
        equal = equal and all([record["output"] for record in one] == texts for one in done)
        whole = figures([record for one in done for record in one])
        own = figures([record for one in done for record, end in zip(one, ended) if end])
        by_request = [figures([record])["tokens_per_round"] for record in done[0]]
        by_pass = [figures(one)["tokens_per_second"] for one in done]
        rows.append(
            {
                "arm": name,
                "all": whole,
                "ended": own,
                "tokens_per_round_by_request": by_request,
                "tokens_per_second_by_pass": by_pass,
            }
        )
        print(
            f"{name:<30}"
            + "".join(f"{x['tokens_per_round']:>14.2f}{x['tokens_per_second']:>12.1f}" for x in (whole, own))
        )
    tokenizer = drafting.tokenizer
    reached = next(row for row in rows if row["arm"] == "n-gram and history")
    least = min(reached["all"]["tokens_per_round"], reached["ended"]["tokens_per_round"])
    print(f"texts equal plain decoding's: {'yes' if equal else 'NO'}")
    result = {
        "command": "python docs/examples/specdec_smollm2/benchmark.py " + " ".join(sys.argv[1:]),
        "what": "code edits, greedy, one at a time; history empty at the beginning of every pass",
        "checkpoint": recipe.checkpoint,
        "new_tokens": args.new_tokens,
        "passes": args.passes,
        "draft_tokens": recipe.max_draft_tokens,
        "edits": [
            {"asked": text, "finish": record["finish"], "answer": tokenizer.decode(record["output"])}
            for text, record in zip(asked, passes["plain"][0])
        ],
        "arms": rows,
        "texts_equal": equal,
        "bound": TOKENS_PER_ROUND,
        "threads": 1,
        "processor": processor(),
        "versions": {"specdec": __version__, "python": platform.python_version(), "torch": torch.__version__},
    }
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"raw result: {args.out}")
    holds = equal and least >= TOKENS_PER_ROUND
    print("holds" if holds else "MISSED")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
