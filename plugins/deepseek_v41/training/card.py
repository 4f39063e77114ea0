"""The checkpoint's card (README.md)."""

from training import card

FORMS = {
    "bfloat16": "BF16, nothing quantised",
    "weights": "FP8 dense and FP4 expert weights",
    "weights_and_caches": "the same with quantised caches",
    "weights_caches_and_inputs": "the same with FP8 inputs of quantised weights (as run)",
}


def render(results: dict) -> str:
    """Returns the card's Markdown from results.json."""
    return card.render(
        results,
        architecture="DeepSeek-V4.1-Flash",
        law="temperature 1, without top-p",
        forms=FORMS,
        drafter="DSpark drafter",
        further=_calibration(results),
    )


def _calibration(results: dict) -> list[str]:
    if "calibration" not in results:
        return []
    found = results["calibration"]
    lines = [
        "",
        "## Acceptance forecasts",
        "",
        "Expected calibration error of the forecast that a block's first drafts are all accepted, as stored and with the "
        "temperatures of `draft_calibration_7.json` (fitted on the same held-out text).",
        "",
        "| drafts | uncalibrated | calibrated | temperature |",
        "| --- | --- | --- | --- |",
    ]
    rows = zip(found["error_uncalibrated"], found["error"], found["temperatures"], strict=True)
    return lines + [f"| {k} | {before} | {after} | {t:.3g} |" for k, (before, after, t) in enumerate(rows, start=1)]
