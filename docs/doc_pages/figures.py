"""Tables of measured numbers, each computed from the raw result that the repository keeps, with the command that made it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from doc_pages.docstrings import code, table

ROOT = Path(__file__).parents[2]
RESULTS = "tests/benchmarks/results"
#: Recipes in the order of the tables, with a short name for heads of columns.
RECIPES = {"qwen3.8-flash": "Qwen", "glm-5.3-flash": "GLM", "deepseek-v4.1-flash": "DeepSeek"}
ROUNDS_COMMAND = "specdec bench rounds RECIPE --device cuda --rounds 48 --passes 3 --out FILE --plot FILE"


def result(name: str) -> dict[str, Any]:
    """A raw result by its file name."""
    data: dict[str, Any] = json.loads((ROOT / RESULTS / name).read_text(encoding="utf-8"))
    return data


def raw(name: str) -> str:
    """The path of a raw result, as text that a test looks up."""
    return code(f"{RESULTS}/{name}")


def source(names: Iterable[str], command: str | None = None) -> str:
    """The line below a table: command and raw files."""
    names = list(names)
    said = command or result(names[0])["command"].replace(f"{RESULTS}/{names[0]}", "FILE")
    return f"Command: {code(said)}. Raw: {', '.join(raw(name) for name in names)}."


# --- the small checkpoints on a CPU -----------------------------------------------------------------------------------


def cpu_tables() -> str:
    """Every draft count of every recipe on one CPU thread."""
    parts = []
    for recipe in RECIPES:
        name = f"{recipe}_cpu.json"
        data = result(name)
        passes = "one pass" if data["passes"] == 1 else f"{data['passes']} passes"
        parts += [
            f"### {recipe}",
            f"{data['requests']} texts, {data['new_tokens']} new tokens each, {passes}; {data['processor']}, "
            f"{data['threads']} thread, torch {data['versions']['torch']}.",
            _arms(data["arms"]),
            source([name]),
        ]
    return "\n\n".join(parts)


def _arms(arms: Sequence[Mapping[str, Any]]) -> str:
    rows = [["drafts", "tokens per round", "acceptance by depth", "tokens/s", "against plain"]]
    for arm in arms:
        rows.append(
            [
                str(arm["name"]),
                f"{arm['tokens_per_round']:.2f}",
                " ".join(f"{rate:.2f}" for rate in arm["acceptance_by_depth"]) or "–",
                f"{arm['tokens_per_second']:.0f}",
                f"{arm['speed_ratio']:.2f} ×",
            ]
        )
    return table(rows)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def gpu_table() -> str:
    """Captured plain decoding, the best draft count and adaptive widths, by how many requests run at once."""
    results = {recipe: result(f"{recipe}_h200.json") for recipe in RECIPES}
    head = ["requests at once"]
    for short in RECIPES.values():
        head += [f"{short} plain", "best", "adaptive"]
    rows = [head]
    for batch in (1, *(part["batch"] for part in results["qwen3.8-flash"]["batches"])):
        row = [str(batch)]
        for data in results.values():
            arms = data["arms"] if batch == 1 else next(p["arms"] for p in data["batches"] if p["batch"] == batch)
            plain, best, adaptive = _three(arms)
            row += [
                f"{plain['tokens_per_second']:.0f}",
                f"{best['speed_ratio']:.2f} × ({best['draft_tokens']})",
                f"{adaptive['speed_ratio']:.2f} ×",
            ]
        rows.append(row)
    one = results["qwen3.8-flash"]
    more = [
        f"{b['requests']} requests at {b['batch']} at once" for b in one["batches"] if b["requests"] > one["requests"]
    ]
    made = (
        f"{one['device']}, {one['dtype']}, torch {one['versions']['torch']}; {one['requests']} held-out texts, "
        f"{', '.join(more)}; {one['new_tokens']} new tokens each, {one['passes']} passes."
    )
    return "\n\n".join([made, table(rows), source([f"{recipe}_h200.json" for recipe in RECIPES], _gpu_command())])


def _gpu_command() -> str:
    own = "qwen3.8-flash"
    command: str = result(f"{own}_h200.json")["command"]
    return command.replace(f"{RESULTS}/{own}_h200.json", "FILE").replace(own, "RECIPE")


def _three(arms: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]:
    plain = next(arm for arm in arms if arm["name"] == "plain")
    adaptive = next(arm for arm in arms if arm["name"] == "adaptive")
    drafting = [arm for arm in arms if arm["draft_tokens"] is not None and arm is not adaptive]
    return plain, max(drafting, key=lambda arm: arm["speed_ratio"]), adaptive


def captured_table() -> str:
    """Captured rounds against eager ones."""
    rows = [["recipe", "drafts", "captured / eager with drafts", "captured / eager plain"]]
    for recipe in RECIPES:
        data = result(f"{recipe}_h200.json")["captured_over_eager"]
        rows.append([code(recipe), str(data["draft_tokens"]), f"{data['ratio']:.1f} ×", f"{data['plain_ratio']:.1f} ×"])
    return "\n\n".join([table(rows), source([f"{recipe}_h200.json" for recipe in RECIPES], _gpu_command())])


def overhead_table() -> str:
    """The engine's time per round over bare replays, adaptive widths."""
    results = {recipe: result(f"{recipe}_rounds_h200.json") for recipe in RECIPES}
    head = ["requests at once"]
    for short in RECIPES.values():
        head += [f"{short} replay", "engine"]
    rows = [head]
    for at, first in enumerate(results["qwen3.8-flash"]["adaptive"]):
        row = [str(first["batch"])]
        for data in results.values():
            part = data["adaptive"][at]
            row += [f"{part['floor'] * 1000:.3f} ms", f"{part['ratio']:.3f} ×"]
        rows.append(row)
    return "\n\n".join([table(rows), source([f"{recipe}_rounds_h200.json" for recipe in RECIPES], ROUNDS_COMMAND)])


def phase_table() -> str:
    """Device time of the phases of a round of one request, at width one and at the widest."""
    rows = [["recipe", "width", "draft", "verify", "accept", "commit", "replay"]]
    for recipe in RECIPES:
        shapes = [shape for shape in result(f"{recipe}_rounds_h200.json")["shapes"] if shape["batch"] == 1]
        for shape in (shapes[0], shapes[-1]):
            times = [shape["phases"][name] for name in ("draft", "verify", "accept", "commit")]
            rows.append(
                [
                    code(recipe),
                    str(shape["width"]),
                    *(f"{seconds * 1000:.3f} ms" for seconds in (*times, shape["floor"])),
                ]
            )
    return "\n\n".join([table(rows), source([f"{recipe}_rounds_h200.json" for recipe in RECIPES], ROUNDS_COMMAND)])


def conformance_table() -> str:
    """What the conformance suite said on the GPU, class by class."""
    path = ROOT / "tests/gpu/results/conformance_h200.txt"
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [["class", "result"]]
    rows += [
        [code(name), text.partition(" in ")[0]]
        for name, _, text in (line.partition(": ") for line in lines[2:])
        if text
    ]
    where, command = (line.removeprefix("# ") for line in lines[:2])
    named = code(str(path.relative_to(ROOT)))
    return "\n\n".join([f"{where.rstrip(':')}.", table(rows), f"Command: {code(command)}. Raw: {named}."])


def plan_table() -> str:
    """Planned against allocated bytes on the GPU."""
    path = ROOT / "tests/gpu/results/suite_h200.jsonl"
    rows = [["recipe", "dtype", "captured", "planned bytes", "allocated bytes", "difference"]]
    for line in path.read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        if one.get("test") != "plan_memory":
            continue
        planned, allocated = one["planned_bytes"], one["allocated_bytes"]
        rows.append(
            [
                code(one["recipe"]),
                one["dtype"],
                "yes" if one["captured"] else "no",
                f"{planned:,}",
                f"{allocated:,}",
                f"{(allocated - planned) / planned:.3%}",
            ]
        )
    named = code(str(path.relative_to(ROOT)))
    command = code("pytest -q -m gpu tests/gpu/test_plan_memory.py")
    return "\n\n".join([table(rows), f"Command: {command}, one run after the other. Raw: {named}."])


# --- the host, history, forecasts -------------------------------------------------------------------------------------


def host_table() -> str:
    """Microseconds of the host per round."""
    host, control = result("host_time.json"), result("control.json")
    rows = [["what", "lanes", "microseconds a round"]]
    for policy, figures in host["policies"].items():
        rows.append(
            [f"scheduler and policy {code(policy)}", str(host["lanes"]), f"{figures['median_microseconds']:.1f}"]
        )
    for part, value in control["median_microseconds"].items():
        rows.append([f"width controller, {code(part)}", str(control["lanes"]), f"{value:.1f}"])
    sources = [source(["host_time.json"]), source(["control.json"])]
    return "\n\n".join([table(rows), *sources])


def history_table() -> str:
    """How often decoded history would have copied the right tokens."""
    data = result("history.json")
    rows = [
        ["matches", "tokens per round", "rounds with a proposal", "offered tokens accepted", "accepted per proposal"]
    ]
    for row in data["rows"]:
        rows.append(
            [
                row["variant"],
                f"{row['tokens_per_round']:.2f}",
                f"{row['rounds_with_proposal']:.1%}",
                f"{row['offered_accepted']:.1%}",
                f"{row['accepted_per_proposal']:.2f}",
            ]
        )
    return "\n\n".join([table(rows), source(["history.json"])])


def edit_table() -> str:
    """Code edits by a model on weights of another format: drafts looked up in the prompt, and copied from history."""
    name = "smollm2-135m_cpu.json"
    data = result(name)
    rows = [["", "tokens per round", "tokens/s", "ended by the model: tokens per round", "tokens/s"]]
    for arm in data["arms"]:
        row = [arm["arm"]]
        for part in (arm["all"], arm["ended"]):
            row += [f"{part['tokens_per_round']:.2f}", f"{part['tokens_per_second']:.0f}"]
        rows.append(row)
    whole, ended = (data["arms"][0][part]["requests"] // data["passes"] for part in ("all", "ended"))
    made = (
        f"{whole} requests, of which the model ended {ended} itself; {data['new_tokens']} new tokens at most, "
        f"{data['passes']} passes; up to {data['draft_tokens']} drafts; texts equal plain decoding's: "
        f"{'yes' if data['texts_equal'] else 'no'}; {data['processor']}, {data['threads']} thread, "
        f"torch {data['versions']['torch']}."
    )
    return "\n\n".join([made, table(rows), source([name])])


def forecast_table() -> str:
    """Calibration error of a drafter's forecasts by depth, before and after fitting."""
    name = "deepseek-v4.1-flash_calibration.json"
    data = result(name)
    rows = [["", *(f"depth {depth + 1}" for depth in range(len(data["error_before"])))]]
    for label, values in (("before fitting", data["error_before"]), ("after", data["error_after"])):
        rows.append([label, *(f"{value:.1%}" for value in values)])
    return "\n\n".join([f"{data['judged']:,} rounds that were not fitted judge.", table(rows), source([name])])


def summary_table() -> str:
    """The README's table: what the best draft count makes of plain decoding, on a CPU and on a GPU."""
    rows = [["recipe", "tokens per round", "one CPU thread, tokens/s", "H200, tokens/s", "H200, 16 requests at once"]]
    for recipe in RECIPES:
        cpu, gpu = result(f"{recipe}_cpu.json"), result(f"{recipe}_h200.json")
        plain, best, _ = _three([*cpu["arms"], {"name": "adaptive", "draft_tokens": None}])
        sixteen = next(part["arms"] for part in gpu["batches"] if part["batch"] == 16)
        rows.append(
            [code(recipe), f"{best['tokens_per_round']:.2f}", _gain(plain, best), *map(_gained, (gpu["arms"], sixteen))]
        )
    return table(rows)


def _gained(arms: Sequence[Mapping[str, Any]]) -> str:
    plain, best, _ = _three(arms)
    return _gain(plain, best)


def _gain(plain: Mapping[str, Any], best: Mapping[str, Any]) -> str:
    return f"{plain['tokens_per_second']:.0f} → {best['tokens_per_second']:.0f} ({best['speed_ratio']:.2f} ×)"
