"""Renders a checkpoint's card (README.md) from results.json."""

import re
from collections.abc import Sequence

# SPDX licence identifiers of the corpus's sources.
SPDX = {"0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "ISC", "MIT", "PSF-2.0", "Zlib"}
# Statements of package metadata that mean one of them beyond doubt. "BSD" alone does not: there are several.
STATEMENTS = {
    "Apache 2.0 License": "Apache-2.0",
    "Apache License, Version 2.0": "Apache-2.0",
    "MIT License": "MIT",
    "License :: OSI Approved :: MIT License": "MIT",
}
# Read from the licence text in the package, because the metadata leaves it open.
FROM_TEXT = {"jinja2": "BSD-3-Clause", "scipy": "BSD-3-Clause", "sympy": "BSD-3-Clause"}


def licence_of(source: dict) -> str:
    """Returns the SPDX expression of a corpus source, or what its metadata states, in quotes, where that names none.

    ``source``: its record in the manifest, with ``name`` and ``licence``: statements of the metadata joined by ``"; "``.
    """
    for statement in source["licence"].split("; "):
        named = STATEMENTS.get(statement, statement)
        if set(re.split(r" AND | OR ", named)) <= SPDX:
            return named
    return FROM_TEXT.get(source["name"]) or f'"{source["licence"]}"'


def render(
    results: dict,
    *,
    architecture: str,
    law: str,
    forms: dict[str, str],
    drafter: str = "MTP drafter",
    further: Sequence[str] = (),
) -> str:
    """Returns the card's Markdown; sections whose numbers are missing are left out.

    ``architecture``, ``drafter``: their names; ``law``: the sampling defaults in words; ``forms``: label of each held-out
    loss; ``further``: lines of the plugin's own sections, before the corpus.
    """
    lines = [*_head(results, architecture, drafter), *_losses(results, forms), *_acceptance(results, law)]
    return "\n".join([*lines, *_selection(results), *further, *_corpus(results["corpus"])]) + "\n"


def _head(results: dict, architecture: str, drafter: str) -> list[str]:
    lines = [
        f"# Small trained checkpoint of the {architecture} architecture",
        "",
        "A language model of source code and prose with every feature of the architecture on, made for demonstrations and",
        "end-to-end tests of speculative decoding. It is not derived from any released weights and knows nothing beyond its",
        "small corpus; do not rely on what it writes.",
        "",
        f"- parameters: target {results['parameters']['target']:,}, {drafter} {results['parameters']['mtp']:,}",
        f"- hardware: {results['hardware']}, torch {results['torch']}",
        f"- command: `{results['command']}`",
    ]
    for earlier in results.get("earlier_runs", []):
        lines.append(f"- continued from: `{earlier['command']}` ({'; '.join(_phases(earlier))})")
    lines += [f"- {phase}" for phase in _phases(results)]
    joint = [h["loss"] for h in results["history"] if h["phase"] == "joint" and "loss" in h][-10:]
    if joint:
        lines.append(f"- training loss (mean of the last logged steps): {sum(joint) / len(joint):.3f} nats a token")
    return lines


def _phases(run: dict) -> list[str]:
    return [
        f"{phase} phase: {steps:,} steps, {run['tokens'][phase]:,} tokens read" for phase, steps in run["steps"].items()
    ]


def _losses(results: dict, forms: dict[str, str]) -> list[str]:
    if "heldout_loss" not in results:
        return []
    lines = ["", "## Held-out loss", "", "| stored form | loss (nats a token) | perplexity |", "| --- | --- | --- |"]
    for key, label in forms.items():
        lines.append(f"| {label} | {results['heldout_loss'][key]} | {results['heldout_perplexity'][key]} |")
    return lines


def _acceptance(results: dict, law: str) -> list[str]:
    if "acceptance" not in results:
        return []
    found = results["acceptance"]
    lines = [
        "",
        "## Expected acceptance by draft depth",
        "",
        f"Teacher-forced on held-out text at {law}: mean of Σ min(p, q) over "
        f"{found['rows']:,} rows; conditional values weight a row by the probability that the chain reaches the depth.",
        "",
        "| depth | mean | conditional |",
        "| --- | --- | --- |",
    ]
    for depth, (mean, conditional) in enumerate(zip(found["by_depth"], found["conditional"]), start=1):
        lines.append(f"| {depth} | {mean} | {conditional} |")
    drafts = {5: "five", 7: "seven"}.get(len(found["by_depth"]), len(found["by_depth"]))
    return [*lines, "", f"Expected tokens a round with {drafts} drafts: {found['tokens_per_round']}."]


def _selection(results: dict) -> list[str]:
    if "long_context" not in results:
        return []
    found = results["long_context"]
    return [
        "",
        "## Sparse selection",
        "",
        f"At {found['tokens']} tokens of context: loss {found['loss_dense']} with dense attention, {found['loss_selected']} "
        f"with the selection active; the selected tokens hold {100 * found['attention_mass_selected']:.1f} % of the "
        "attention mass.",
    ]


def _corpus(corpus: dict) -> list[str]:
    counts = corpus["counts"]
    lines = [
        "",
        "## Corpus",
        "",
        f"{counts['train']['tokens']:,} training tokens of {counts['train']['files']:,} files; "
        f"{counts['heldout']['tokens']:,} tokens of {counts['heldout']['files']:,} whole files held out. Built by "
        "`python training/corpus.py --out DIR` from:",
        "",
        "| source | version | licence (SPDX; in quotes as the metadata states it) | files | characters |",
        "| --- | --- | --- | --- | --- |",
    ]
    for s in corpus["sources"]:
        terms = licence_of(s).replace("|", "/")
        lines.append(f"| {s['name']} | {s['version']} | {terms} | {s['files']:,} | {s['characters']:,} |")
    return lines
