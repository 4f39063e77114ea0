"""Figures of a run against hand-made ones, and an image that any reader of SVG can open."""

from __future__ import annotations

import json
import statistics
from random import Random
from xml.etree import ElementTree

import pytest
from simulated_fleet import arrival, run

from specdec.simulation.costs import CostModel
from specdec.simulation.plot import svg
from specdec.simulation.summary import Summary, percentile, summarise


def test_percentiles_are_those_of_the_standard_library() -> None:
    random = Random(3)
    for count in (2, 5, 100, 1001):
        values = [random.random() for _ in range(count)]
        cuts = statistics.quantiles(values, n=100, method="inclusive")
        for percent in (1, 50, 95, 99):
            assert percentile(values, percent) == pytest.approx(cuts[percent - 1])
    assert percentile([4.0], 99) == 4.0


def test_a_summary_by_hand() -> None:
    """Two requests one after another on one slot, one token a round of 1.0 s, first tokens free, prompts 2.0 s."""
    arrivals = [arrival(0, 5.0, output=3, prompt=1), arrival(1, 5.5, output=5, prompt=1)]
    found = summarise("fixed:1", run(arrivals, "fixed:1", CostModel(base=1.0, chunk=2.0), concurrency=1))
    # 5.0: prompt to 7.0, rounds to 9.0; then prompt to 11.0, rounds to 15.0
    assert found.seconds == 10.0 and found.tokens == 8
    assert (found.tokens_per_second, found.requests_per_second) == (0.8, 0.2)
    assert found.time_to_first_token == pytest.approx({50: 3.75, 95: 2 + 0.95 * 3.5, 99: 2 + 0.99 * 3.5})
    assert found.latency == pytest.approx({50: 6.75, 95: 4 + 0.95 * 5.5, 99: 4 + 0.99 * 5.5})
    assert (found.widths, found.tokens_per_round, found.acceptance) == ({1: 1.0}, 1.0, 0.0)
    assert found.busy == 1.0 and found.preemptions == 0
    data = found.as_data()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["latency"]["p50"] == pytest.approx(6.75) and data["widths"] == {"1": 1.0}


def test_widths_are_shares_of_rounds() -> None:
    arrivals = [arrival(0, output=30, draft_tokens=0), arrival(1, time=200.0, output=30)]
    found = summarise("fixed:3", run(arrivals, "fixed:3", concurrency=1))
    assert sum(found.widths.values()) == pytest.approx(1.0)
    # 29 rounds without drafts, and fewer with
    assert found.widths[1] > 0.5 > found.widths[3] > 0.2


def test_outputs_of_one_token_have_no_rounds() -> None:
    found = summarise("x", run([arrival(0, output=1)]))
    assert (found.widths, found.tokens_per_round, found.tokens) == ({}, 0.0, 1)


def summary(policy: str, scale: float) -> Summary:
    return Summary(
        policy=policy,
        requests=10,
        tokens=1000,
        seconds=10.0 / scale,
        time_to_first_token={50: 1.0 / scale, 95: 2.0 / scale, 99: 3.0 / scale},
        latency={50: 10.0 / scale, 95: 20.0 / scale, 99: 30.0 / scale},
        widths={1: 0.25, 4: 0.75} if scale > 1 else {1: 1.0},
        tokens_per_round=scale,
        acceptance=0.5,
        busy=1.0,
        preemptions=0,
    )


def test_the_image_is_drawn_to_scale() -> None:
    text = svg([summary("plain", 1.0), summary("a<b & c", 2.0)], "two & more")
    root = ElementTree.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    words = [element.text for element in root.iter(f"{space}text")]
    assert {"two & more", "plain", "a<b & c", "tokens per second", "latency", "rounds by verification width"} <= set(
        words
    )
    assert "100 tokens/s" in words and "200 tokens/s" in words and "30 s" in words
    bars = [float(bar.get("width", "0")) for bar in root.iter(f"{space}rect") if bar.get("height") == "14"]
    assert bars[1] == pytest.approx(2 * bars[0], abs=0.1)
    # shares of both policies have the same full length
    assert bars[14] == pytest.approx(bars[15] + bars[16], abs=0.2)
    high = float(root.get("height", "0"))
    assert all(float(bar.get("y", "0")) + 14 <= high for bar in root.iter(f"{space}rect") if bar.get("y"))


def test_an_image_of_nothing_that_ran() -> None:
    found = summarise("x", run([arrival(0, output=1)]))
    ElementTree.fromstring(svg([found], "empty"))
