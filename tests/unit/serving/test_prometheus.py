"""Prometheus text read back by prometheus-client's own parser: every number of the snapshot, and no other."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from completion_records import completion
from prometheus_client.parser import text_string_to_metric_families

from specdec.errors import UsageError
from specdec.round.completion import Finish
from specdec.serving.metrics import Metrics
from specdec.serving.prometheus import families, prometheus_text
from specdec.state.prefix_records import Lost

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def busy() -> Metrics:
    """Something of everything, and a reason with characters that the text must escape."""
    metrics = Metrics()
    for number in range(5):
        metrics.submitted(number, 0.5 * number)
        metrics.admitted(number, 3.0 + number / 300, (0, 3, 5, None, 0)[number], 5)
        metrics.first_token(number, 4.0 + number)
    metrics.preempted(4, 9.0)
    records = [
        (completion(request=0, emitted=3, offered=4, accepted=2, copies=0b1), 1, 4, None),
        (completion(request=1, emitted=5, offered=4, accepted=4, copies=0b111), 7, 8, 2),
        (completion(request=2, emitted=1, offered=2, accepted=0), 0, None, None),
        (completion(request=3, emitted=9, offered=2, accepted=0), 0, None, 1),
    ]
    metrics.round(4, 5, 0.0625, records)
    metrics.round(4, 5, 0.125, records[:2])
    metrics.round(1, 1, 0.01, [(completion(request=2, emitted=1, offered=0, accepted=0), 0, None, None)])
    metrics.finished(0, Finish.STOP, 10.0)
    metrics.finished(1, 'said "no"\n\\', 500.0)
    metrics.cancelled(2, 12.0)
    metrics.grammar_rejected(3, 2)
    metrics.prefix_lost(Lost.EVICTED, 17)
    metrics.prefix_checkpoints(published=9, evicted=4)
    metrics.queue(1, 1)
    return metrics


def parsed(text: str) -> Samples:
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in samples, f"{key} twice"
            samples[key] = sample.value
    return samples


def expected(snapshot: dict[str, Any]) -> Samples:
    """Every number of the snapshot under the name and labels it is documented to have."""
    samples: Samples = {}

    def put(name: str, value: float, **labels: object) -> None:
        samples[f"specdec_{name}", frozenset((key, str(label)) for key, label in labels.items())] = value

    requests, queue, prefix, output = (snapshot[name] for name in ("requests", "queue", "prefix", "output"))
    put("requests_submitted_total", requests["submitted"])
    put("admissions_total", requests["admissions"])
    put("preemptions_total", requests["preemptions"])
    for reason, count in requests["finished"].items():
        put("requests_finished_total", count, reason=reason)
    put("requests_waiting", queue["waiting"])
    put("requests_running", queue["running"])
    for name in ("wait_seconds", "first_token_seconds", "request_seconds"):
        for bound, count in [*queue[name]["buckets"], ("+Inf", queue[name]["count"])]:
            put(f"{name}_bucket", count, le=bound)
        put(f"{name}_count", queue[name]["count"])
        put(f"{name}_sum", queue[name]["sum"])
    for hit, key in (("full", "full_hits"), ("partial", "partial_hits"), ("none", "misses")):
        put("prefix_lookups_total", prefix[key], hit=hit)
    put("prefix_prompt_tokens_total", prefix["prompt_tokens"])
    put("prefix_reused_tokens_total", prefix["reused_tokens"])
    for reason, count in prefix["lost_tokens"].items():
        put("prefix_lost_tokens_total", count, reason=reason)
    put("prefix_checkpoints_published_total", prefix["published"])
    put("prefix_checkpoints_evicted_total", prefix["evicted"])
    for shape in snapshot["rounds"]:
        where = {"batch": shape["batch"], "width": shape["width"]}
        put("round_seconds_count", shape["rounds"], **where)
        put("round_seconds_sum", shape["seconds"], **where)
        put("round_lanes_total", shape["lanes"], **where)
        put("round_tokens_total", shape["tokens"], **where)
    for source, count in output["tokens_by_source"].items():
        put("tokens_total", count, source=source)
    put("cut_tokens_total", output["cut_tokens"])
    for row in output["drafts"]:
        for name in ("offered", "verified", "judged", "accepted", "emitted"):
            put(f"drafts_{name}_total", row[name], source=row["source"], depth=row["depth"])
    put("proposed_copies_total", snapshot["proposed_copies"])
    put("grammar_rejections_total", snapshot["grammar_rejections"])
    put("inconsistent_records_total", output["inconsistent_records"])
    return samples


def test_the_text_says_what_the_snapshot_says() -> None:
    metrics = busy()
    snapshot = metrics.snapshot()
    text = prometheus_text(metrics)
    assert parsed(text) == expected(snapshot)
    assert prometheus_text(snapshot) == text
    assert ("specdec_tokens_total", frozenset({("source", "copied_8")})) in parsed(text)


def test_fresh_metrics_have_text_too() -> None:
    assert parsed(prometheus_text(Metrics())) == expected(Metrics().snapshot())


def test_a_wrong_number_is_noticed() -> None:
    snapshot = busy().snapshot()
    text = prometheus_text(snapshot)
    snapshot["output"]["drafts"][-1]["accepted"] += 1
    assert parsed(text) != expected(snapshot)


def test_all_tokens_of_the_text_are_those_delivered() -> None:
    metrics = busy()
    samples = parsed(prometheus_text(metrics))
    tokens = sum(value for (name, _), value in samples.items() if name == "specdec_tokens_total")
    # five first tokens; rounds of 3 + 2 + 1 + 1, of 3 + 2 and of 1
    assert tokens == 5 + 7 + 5 + 1 == metrics.totals().tokens


def test_a_scrape_may_read_the_families_itself() -> None:
    names = [family.name for family in families(busy().snapshot())]
    assert len(names) == len(set(names))
    assert all(name.startswith("specdec_") for name in names)


def test_without_the_extra_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UsageError, match=r"pip install 'specdec-core\[metrics\]'$") as refused:
        prometheus_text(Metrics())
    assert "\n" not in str(refused.value)


def test_counting_needs_neither_torch_nor_the_extra() -> None:
    code = (
        "import sys\nimport specdec.serving.metrics, specdec.serving.prometheus\n"
        "specdec.serving.metrics.Metrics().snapshot()\n"
        "assert not {'torch', 'numpy', 'prometheus_client'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
