"""Figures as Prometheus text, through prometheus-client, which is imported when it is asked for. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from specdec.errors import UsageError
from specdec.serving.metrics import Metrics

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_DRAFT_COUNTS = {
    "offered": "Drafts that the target could use.",
    "verified": "Drafts that the target judged.",
    "judged": "Drafts judged with every draft before them accepted.",
    "accepted": "Drafts in accepted prefixes.",
    "emitted": "Drafts delivered as tokens.",
}


def prometheus_text(figures: Metrics | Mapping[str, Any]) -> str:
    """The text exposition format, version 0.0.4. figures: the metrics, or a snapshot of them; requests are not listed one by one.

    Raises UsageError if prometheus-client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.registry import Collector
    except ImportError as error:
        raise UsageError(
            "Prometheus text needs prometheus-client, which is not installed; run pip install 'specdec-core[metrics]'"
        ) from error
    snapshot = figures.snapshot() if isinstance(figures, Metrics) else figures

    class Snapshot(Collector):
        def collect(self) -> Iterable[Metric]:
            return families(snapshot)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Snapshot())
    return generate_latest(registry).decode("utf-8")


def families(snapshot: Mapping[str, Any]) -> list[Metric]:
    """The metric families of a snapshot, for a collector of one's own. Counters end in ``_total`` in the text.

    Raises ImportError without prometheus-client.
    """
    requests, queue, prefix, output = (snapshot[name] for name in ("requests", "queue", "prefix", "output"))
    hits = {"full": prefix["full_hits"], "partial": prefix["partial_hits"], "none": prefix["misses"]}
    made: list[Metric] = [
        _counter("requests_submitted", "Requests queued.", requests["submitted"]),
        _counter("admissions", "Requests given a slot and pages, again after a preemption.", requests["admissions"]),
        _counter("preemptions", "Running requests that had to wait again.", requests["preemptions"]),
        _labelled("requests_finished", "Requests ended, by reason.", "reason", requests["finished"]),
        _gauge("requests_waiting", "Requests that wait now.", queue["waiting"]),
        _gauge("requests_running", "Requests that run now.", queue["running"]),
        _histogram("wait_seconds", "Seconds before each admission.", queue["wait_seconds"]),
        _histogram("first_token_seconds", "Seconds to the first token.", queue["first_token_seconds"]),
        _histogram("request_seconds", "Seconds to the end of a request.", queue["request_seconds"]),
        _labelled("prefix_lookups", "Prompts looked up, by how much a checkpoint had of them.", "hit", hits),
        _counter("prefix_prompt_tokens", "Tokens of prompts looked up.", prefix["prompt_tokens"]),
        _counter("prefix_reused_tokens", "Tokens that checkpoints had.", prefix["reused_tokens"]),
        _labelled("prefix_lost_tokens", "Known tokens consumed again, by reason.", "reason", prefix["lost_tokens"]),
        _counter("prefix_checkpoints_published", "Prefix checkpoints made.", prefix["published"]),
        _counter("prefix_checkpoints_evicted", "Prefix checkpoints evicted.", prefix["evicted"]),
        *_rounds(snapshot["rounds"]),
        _labelled("tokens", "Tokens delivered, by where they came from.", "source", output["tokens_by_source"]),
        _counter("cut_tokens", "Tokens of records behind the end of an output.", output["cut_tokens"]),
        *_drafts(output["drafts"]),
        _counter("proposed_copies", "Drafts given to copy.", snapshot["proposed_copies"]),
        _counter("grammar_rejections", "Drafts that a grammar forbade.", snapshot["grammar_rejections"]),
        _counter(
            "inconsistent_records", "Records that contradicted themselves, a bug.", output["inconsistent_records"]
        ),
    ]
    return made


def _counter(name: str, text: str, value: int) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    return CounterMetricFamily(f"specdec_{name}", text, value=value)


def _gauge(name: str, text: str, value: int) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    return GaugeMetricFamily(f"specdec_{name}", text, value=value)


def _labelled(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(f"specdec_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _histogram(name: str, text: str, data: Mapping[str, Any]) -> Metric:
    from prometheus_client.core import HistogramMetricFamily

    buckets = [(str(bound), count) for bound, count in data["buckets"]]
    return HistogramMetricFamily(
        f"specdec_{name}", text, buckets=[*buckets, ("+Inf", data["count"])], sum_value=data["sum"]
    )


def _rounds(shapes: Iterable[Mapping[str, Any]]) -> list[Metric]:
    from prometheus_client.core import CounterMetricFamily, SummaryMetricFamily

    labels = ["batch", "width"]
    seconds = SummaryMetricFamily("specdec_round_seconds", "Seconds of whole rounds, by shape.", labels=labels)
    lanes = CounterMetricFamily("specdec_round_lanes", "Live lanes of rounds, by shape.", labels=labels)
    tokens = CounterMetricFamily("specdec_round_tokens", "Tokens that rounds delivered, by shape.", labels=labels)
    for shape in shapes:
        values = [str(shape["batch"]), str(shape["width"])]
        seconds.add_metric(values, count_value=shape["rounds"], sum_value=shape["seconds"])
        lanes.add_metric(values, shape["lanes"])
        tokens.add_metric(values, shape["tokens"])
    return [seconds, lanes, tokens]


def _drafts(rows: Iterable[Mapping[str, Any]]) -> list[Metric]:
    from prometheus_client.core import CounterMetricFamily

    rows = list(rows)
    made: list[Metric] = []
    for name, text in _DRAFT_COUNTS.items():
        family = CounterMetricFamily(f"specdec_drafts_{name}", text, labels=["source", "depth"])
        for row in rows:
            family.add_metric([row["source"], str(row["depth"])], row[name])
        made.append(family)
    return made
