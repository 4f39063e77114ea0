"""Names, kinds and help of the metrics that ``specdec.serving.prometheus`` exports."""

from __future__ import annotations

from typing import Any

from doc_pages.docstrings import code, inline, table
from specdec.serving.metrics import Metrics
from specdec.serving.prometheus import families

_SUFFIX = {"counter": "_total"}


def metric_table() -> str:
    """One row per family, its labels with it."""
    rows = [["metric", "kind", "labels", "meaning"]]
    for family in families(_one_of_each(Metrics().snapshot())):
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        name = family.name + _SUFFIX.get(family.type, "")
        rows.append([code(name), family.type, ", ".join(map(code, labels)) or "–", inline(family.documentation)])
    return table(rows)


def _one_of_each(snapshot: dict[str, Any]) -> dict[str, Any]:
    """A snapshot with one row where an engine that has run nothing has none, so that labels show."""
    snapshot["rounds"] = [{"batch": 1, "width": 1, "rounds": 0, "seconds": 0.0, "lanes": 0, "tokens": 0}]
    counts = ("offered", "verified", "judged", "accepted", "emitted")
    snapshot["output"]["drafts"] = [{"source": "learned", "depth": 1, **dict.fromkeys(counts, 0)}]
    snapshot["output"]["tokens_by_source"] = snapshot["output"]["tokens_by_source"] or {"target": 0}
    snapshot["prefix"]["lost_tokens"] = snapshot["prefix"]["lost_tokens"] or {"evicted": 0}
    return snapshot
