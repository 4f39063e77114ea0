"""Renders the checkpoint's card (README.md) from results.json."""


def render(results: dict) -> str:
    """Returns the card's Markdown; sections whose numbers are missing are left out."""
    corpus, counts = results["corpus"], results["corpus"]["counts"]
    lines = [
        "# Small trained checkpoint of the Qwen3.8-Flash architecture",
        "",
        "A language model of source code and prose with every feature of the architecture on, made for demonstrations and",
        "end-to-end tests of speculative decoding. It is not derived from any released weights and knows nothing beyond its",
        "small corpus; do not rely on what it writes.",
        "",
        f"- parameters: target {results['parameters']['target']:,}, MTP drafter {results['parameters']['mtp']:,}",
        f"- hardware: {results['hardware']}, torch {results['torch']}",
        f"- command: `{results['command']}`",
    ]
    for earlier in results.get("earlier_runs", []):
        lines.append(
            f"- continued from: `{earlier['command']}` ({earlier['steps']} steps, {earlier['tokens']} tokens by phase)"
        )
    for phase, steps in results["steps"].items():
        lines.append(f"- {phase} phase: {steps:,} steps, {results['tokens'][phase]:,} tokens read")
    joint = [h for h in results["history"] if h["phase"] == "joint" and "loss" in h]
    if joint:
        tail = joint[-10:]
        lines.append(
            f"- training loss (mean of the last logged steps): {sum(h['loss'] for h in tail) / len(tail):.3f} nats a token"
        )
    if "heldout_loss" in results:
        lines += [
            "",
            "## Held-out loss",
            "",
            "| stored form | loss (nats a token) | perplexity |",
            "| --- | --- | --- |",
        ]
        names = {
            "bfloat16": "BF16, nothing quantised",
            "nvfp4_weights": "NVFP4 expert weights, FP8 n-gram table",
            "nvfp4_weights_and_activations": "the same with NVFP4 activations in the target's experts (as run)",
        }
        for key, label in names.items():
            lines.append(f"| {label} | {results['heldout_loss'][key]} | {results['heldout_perplexity'][key]} |")
    if "acceptance" in results:
        found = results["acceptance"]
        lines += [
            "",
            "## Expected acceptance by draft depth",
            "",
            "Teacher-forced on held-out text at temperature 1, top-k 20, top-p 0.95: mean of Σ min(p, q) over "
            f"{found['rows']:,} rows; conditional values weight a row by the probability that the chain reaches the depth.",
            "",
            "| depth | mean | conditional |",
            "| --- | --- | --- |",
        ]
        for depth, (mean, conditional) in enumerate(zip(found["by_depth"], found["conditional"]), start=1):
            lines.append(f"| {depth} | {mean} | {conditional} |")
        lines += ["", f"Expected tokens a round with five drafts: {found['tokens_per_round']}."]
    if "long_context" in results:
        found = results["long_context"]
        lines += [
            "",
            "## Sparse selection",
            "",
            f"At {found['tokens']} tokens of context: loss {found['loss_dense']} with dense attention, {found['loss_selected']} "
            f"with the selection active; the selected tokens hold {100 * found['attention_mass_selected']:.1f} % of the "
            "attention mass.",
        ]
    lines += [
        "",
        "## Corpus",
        "",
        f"{counts['train']['tokens']:,} training tokens of {counts['train']['files']:,} files; "
        f"{counts['heldout']['tokens']:,} tokens of {counts['heldout']['files']:,} whole files held out. Built by "
        "`python plugins/qwen38/training/corpus.py --out DIR` from:",
        "",
        "| source | version | licence (as its metadata states) | files | characters |",
        "| --- | --- | --- | --- | --- |",
    ]
    for s in corpus["sources"]:
        terms = s["licence"].split(";")[0].strip().replace("|", "/")
        lines.append(f"| {s['name']} | {s['version']} | {terms} | {s['files']:,} | {s['characters']:,} |")
    return "\n".join(lines) + "\n"
