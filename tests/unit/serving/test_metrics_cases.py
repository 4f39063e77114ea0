"""What others counted wrongly: clips, width one, ends inside a record, empty and late records, preemption, losses."""

from __future__ import annotations

import math
from typing import Any

import pytest
from completion_records import completion

from specdec.round.completion import Completion, Finish
from specdec.serving.metrics import Metrics
from specdec.serving.statistics import DraftStatistics
from specdec.state.prefix_records import Lost


def running(*numbers: int) -> Metrics:
    """Metrics with requests that were submitted at 0 and admitted at 1."""
    metrics = Metrics()
    for number in numbers or (0,):
        metrics.submitted(number, 0.0)
        metrics.admitted(number, 1.0, 0, 5)
    return metrics


def one(metrics: Metrics, record: Completion, delivered: int | None = None, *, match_length: int | None = None) -> None:
    metrics.round(1, record.verify_width, 0.5, [(record, 0, match_length, delivered)])


def rows(metrics: Metrics, name: str, source: str = "learned") -> list[int]:
    """One column of the drafts of a source, depth 1 first."""
    return [row[name] for row in metrics.snapshot()["output"]["drafts"] if row["source"] == source]


# --- rates use drafts that were offered ------------------------------------------------------------------------------


@pytest.mark.parametrize("width", range(1, 9))
def test_rates_use_offered_drafts_whatever_the_width(width: int) -> None:
    """A perfect drafter to the end of a budget of 20: the clips near the limit offer less than the width has room for, the
    pending token is no draft, and the rate is 1 all along."""
    metrics, left, offered = running(), 19, 0
    metrics.first_token(0, 2.0)
    while left:
        drafts = min(width - 1, left - 1)
        one(metrics, completion(emitted=drafts + 1, offered=drafts, accepted=drafts, width=width))
        left, offered = left - drafts - 1, offered + drafts
    output = metrics.snapshot()["output"]
    assert output["tokens"] == 20
    assert output["offered"] == output["verified"] == output["accepted"] == offered
    assert output["acceptance_rate"] == (1 if width > 1 else 0)
    assert rows(metrics, "offered") == rows(metrics, "accepted")
    assert len(rows(metrics, "offered")) == width - 1


def test_width_one_rounds_add_nothing_to_the_denominator() -> None:
    metrics = running()
    one(metrics, completion(emitted=2, offered=2, accepted=1, width=3))
    before = metrics.snapshot()["output"]
    for _ in range(50):
        one(metrics, completion(emitted=1, offered=0, accepted=0, width=1))
    after = metrics.snapshot()["output"]
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {"tokens", "tokens_by_source", "lane_rounds", "tokens_per_round"}
    assert after["acceptance_rate"] == 1 / 2


def test_a_skipped_drafter_offers_nothing_at_any_width() -> None:
    """Near the context limit the record says that nothing was offered, though the round was wide and drafts lay in a buffer."""
    metrics = running()
    one(metrics, completion(emitted=1, offered=0, accepted=0, width=6, copies=0b11111))
    output = metrics.snapshot()["output"]
    assert (output["offered"], output["drafts"], output["tokens_by_source"]["target"]) == (0, [], 1)


def test_counters_are_those_of_each_round() -> None:
    """Lanes with 0 … K valid drafts in one batch: nothing accumulates from lane to lane or from round to round."""
    metrics = running(*range(8))
    batch = [(completion(request=n, emitted=n + 1, offered=n, accepted=n), 0, None, None) for n in range(8)]
    for _ in range(3):
        metrics.round(8, 8, 1.0, batch)
    for data in metrics.snapshot()["by_request"]:
        number, output = data["request"], data["output"]
        assert output["tokens"] == 3 * (number + 1) <= output["offered"] + output["lane_rounds"]
        assert (output["offered"], output["lane_rounds"]) == (3 * number, 3)


def test_acceptance_by_position_is_flat_for_a_constant_drafter() -> None:
    """Each draft is right two times in three given those before it: every position reads 2/3, not the joint survival."""
    metrics, kept = running(), 3**4
    for accepted in range(5):
        times = kept if accepted == 4 else kept // 3
        kept -= times
        for _ in range(times):
            one(metrics, completion(emitted=accepted + 1, offered=4, accepted=accepted, width=5))
    judged, accepted_rows = rows(metrics, "judged"), rows(metrics, "accepted")
    assert [a / j for a, j in zip(accepted_rows, judged, strict=True)] == [2 / 3] * 4
    assert metrics.totals().acceptance_by_depth == [2 / 3] * 4
    assert rows(metrics, "verified") == [81] * 4


def test_drafts_that_an_allocated_round_left_out_are_no_rejections() -> None:
    metrics = running()
    one(metrics, completion(emitted=3, offered=5, verified=2, accepted=2, width=6))
    assert (rows(metrics, "offered"), rows(metrics, "verified")) == ([1] * 5, [1, 1, 0, 0, 0])
    assert metrics.snapshot()["output"]["acceptance_rate"] == 1


# --- ends inside a record --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("accepted", "delivered"), [(a, d) for a in range(8) for d in range(1, a + 2)])
def test_tokens_behind_an_end_are_not_delivered(accepted: int, delivered: int) -> None:
    """An end at every place of a record, found by the device (the record is clipped) or by the host (it is not): text, tokens
    and usage are the same, and no token behind the end is one of a draft or of the target."""
    device, host = running(), running()
    one(device, completion(emitted=delivered, offered=7, accepted=accepted))
    one(host, completion(emitted=accepted + 1, offered=7, accepted=accepted), delivered)
    for metrics in (device, host):
        output = metrics.snapshot()["output"]
        assert output["tokens"] == delivered
        assert sum(rows(metrics, "emitted")) == output["tokens_by_source"]["learned"] == min(delivered, accepted)
        assert output["tokens_by_source"]["target"] == delivered - min(delivered, accepted)
        # what the target judged it judged, wherever the output ended
        assert sum(rows(metrics, "accepted")) == accepted
    assert device.snapshot()["output"]["cut_tokens"] == 0
    assert host.snapshot()["output"]["cut_tokens"] == accepted + 1 - delivered


def test_shapes_and_requests_agree_about_a_cut() -> None:
    metrics = running(0, 1)
    records = [completion(request=number, emitted=5, offered=4, accepted=4, width=5) for number in (0, 1)]
    metrics.round(2, 5, 0.25, [(records[0], 0, None, 2), (records[1], 0, None, None)])
    snapshot = metrics.snapshot()
    assert [data["output"]["tokens"] for data in snapshot["by_request"]] == [2, 5]
    assert snapshot["output"]["tokens"] == snapshot["rounds"][0]["tokens"] == 7
    assert snapshot["rounds"] == [{"batch": 2, "width": 5, "rounds": 1, "seconds": 0.25, "lanes": 2, "tokens": 7}]


def test_sources_of_a_round_that_mixes_copies_and_drafts() -> None:
    """Two copies found by eight tokens, then learned drafts; the third draft is wrong."""
    metrics = running()
    one(metrics, completion(emitted=3, offered=5, accepted=2, width=6, copies=0b11), match_length=8)
    one(metrics, completion(emitted=1, offered=2, accepted=0, width=6, copies=0b1111), match_length=4)
    assert (rows(metrics, "offered", "copied_8"), rows(metrics, "accepted", "copied_8")) == ([1, 1], [1, 1])
    assert (rows(metrics, "offered", "copied_4"), rows(metrics, "judged", "copied_4")) == ([1, 1], [1, 0])
    assert (rows(metrics, "offered"), rows(metrics, "judged")) == ([1, 1, 1], [1, 0, 0])
    assert metrics.snapshot()["output"]["tokens_by_source"] == {
        "first": 0,
        "target": 2,
        "learned": 0,
        "copied_8": 2,
        "copied_4": 0,
    }


def test_forbidden_drafts_are_told_apart_and_are_ordinary_rejections() -> None:
    metrics = running()
    for _ in range(3):
        one(metrics, completion(emitted=2, offered=3, accepted=1, width=4))
        metrics.grammar_rejected(0)
    snapshot = metrics.snapshot()
    assert snapshot["grammar_rejections"] == snapshot["by_request"][0]["grammar_rejections"] == 3
    assert (snapshot["output"]["accepted"], snapshot["output"]["tokens"]) == (3, 6)


# --- nothing emitted, nothing known ----------------------------------------------------------------------------------


def test_a_record_without_tokens_is_legal() -> None:
    """An abort in any phase leaves scheduled drafts with no output."""
    metrics = running()
    one(metrics, completion(emitted=0, offered=0, accepted=0))
    one(metrics, completion(emitted=0, offered=4, accepted=0))
    one(metrics, completion(emitted=3, offered=4, accepted=2), 0)
    metrics.cancelled(0, 2.0)
    output = metrics.snapshot()["output"]
    assert (output["tokens"], output["lane_rounds"], output["cut_tokens"]) == (0, 3, 3)
    assert (output["offered"], output["accepted"], output["inconsistent_records"]) == (8, 2, 0)


BROKEN: list[dict[str, int]] = [
    {"accepted": -1, "emitted": 0},
    {"accepted": 5},
    {"verified": 5},
    {"offered": -1},
    {"emitted": 4},
    {"emitted": -1},
]


@pytest.mark.parametrize("changes", BROKEN, ids=str)
def test_a_record_that_contradicts_itself_spoils_no_sum(changes: dict[str, int]) -> None:
    metrics = running()
    record = completion(emitted=3, offered=4, accepted=2)._replace(**changes)
    one(metrics, record)
    one(metrics, completion(emitted=3, offered=4, accepted=2))
    output = metrics.snapshot()["output"]
    assert output["inconsistent_records"] == 1
    assert output["tokens"] == sum(output["tokens_by_source"].values()) == max(record.emitted, 0) + 3
    assert (output["offered"], output["verified"], output["accepted"]) == (4, 4, 2)


def test_delivering_more_than_a_record_has_is_a_contradiction() -> None:
    metrics = running()
    one(metrics, completion(emitted=2, offered=4, accepted=2), 3)
    output = metrics.snapshot()["output"]
    assert (output["tokens"], output["cut_tokens"], output["inconsistent_records"]) == (3, 0, 1)


@pytest.mark.parametrize("number", [0, 7], ids=["ended", "unknown"])
def test_reports_about_requests_that_are_not_there(number: int) -> None:
    """A round in flight returns after its request ended: the work is counted, nothing comes back to life."""
    metrics = running(0)
    metrics.finished(0, Finish.STOP, 3.0)
    before = metrics.snapshot()
    one(metrics, completion(request=number, emitted=2, offered=3, accepted=1), 0)
    metrics.preempted(number, 4.0)
    metrics.grammar_rejected(number)
    metrics.first_token(number, 4.0, 0)
    metrics.finished(number, Finish.LENGTH, 5.0)
    metrics.cancelled(number, 5.0)
    after = metrics.snapshot()
    assert after["requests"]["finished"] == before["requests"]["finished"]
    assert [data["state"] for data in after["by_request"]] == ["ended"]
    assert (after["output"]["tokens"], after["output"]["offered"]) == (0, 3)
    assert metrics.request(7) is None


def test_a_record_that_was_dropped_is_not_counted() -> None:
    """Preempted between submission and completion: the late record is not reported, the request goes on as before."""
    metrics = running()
    metrics.first_token(0, 2.0)
    for start in (2.0, 6.0):
        metrics.preempted(0, start)
        metrics.admitted(0, start + 3, 4, 6)
        metrics.first_token(0, start + 3, 0)
        one(metrics, completion(emitted=2, offered=3, accepted=1))
    (data,) = metrics.snapshot()["by_request"]
    assert (data["preemptions"], data["admissions"], data["wait_seconds"]) == (2, 3, 1 + 3 + 3)
    # the first token was the first one, however often the request began again
    assert (data["first_token_seconds"], data["output"]["tokens"]) == (2, 5)
    assert (data["prompt_tokens"], data["reused_tokens"]) == (5 + 6 + 6, 4 + 4)


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_a_broken_clock_spoils_nothing(seconds: float) -> None:
    metrics = running()
    metrics.round(1, 1, seconds, [])
    metrics.round(1, 1, 2.0, [])
    metrics.first_token(0, seconds)
    metrics.finished(0, Finish.STOP, seconds)
    snapshot = metrics.snapshot()
    assert snapshot["rounds"][0]["seconds"] == 2
    assert snapshot["queue"]["request_seconds"]["sum"] == 0


# --- prefixes and queue ----------------------------------------------------------------------------------------------


def test_lost_tokens_have_a_reason() -> None:
    """The same prompt twice: the second reuses to the largest common boundary, and what is lost is said with its reason."""
    metrics = Metrics()
    for number, reused in enumerate((0, 64, 70)):
        metrics.submitted(number, 0.0)
        metrics.admitted(number, 0.0, reused, 70)
    metrics.prefix_lost(Lost.NO_CHECKPOINT, 6)
    metrics.prefix_lost("page_boundary", 2)
    metrics.prefix_checkpoints(published=5, evicted=1)
    assert metrics.snapshot()["prefix"] == {
        "lookups": 3,
        "full_hits": 1,
        "partial_hits": 1,
        "misses": 1,
        "prompt_tokens": 210,
        "reused_tokens": 134,
        "lost_tokens": {"no_checkpoint": 6, "evicted": 0, "budget": 0, "pages": 0, "page_boundary": 2},
        "published": 5,
        "evicted": 1,
    }


def test_a_request_that_looks_for_no_checkpoint_is_no_miss() -> None:
    metrics = Metrics()
    metrics.submitted(0, 0.0)
    metrics.admitted(0, 0.0, None, 70)
    assert metrics.snapshot()["prefix"]["lookups"] == 0
    assert metrics.snapshot()["by_request"][0]["prompt_tokens"] == 70


def test_the_queue_is_what_was_last_said() -> None:
    metrics = Metrics()
    metrics.queue(3, 4)
    metrics.queue(2, 1)
    queue = metrics.snapshot()["queue"]
    assert (queue["waiting"], queue["running"]) == (2, 1)


def test_a_number_that_comes_again_is_another_request_once_it_has_ended() -> None:
    metrics = running(0)
    one(metrics, completion(emitted=2, offered=1, accepted=1, width=2))
    metrics.submitted(0, 5.0)  # still there: no other request
    metrics.finished(0, Finish.STOP, 6.0)
    metrics.submitted(0, 7.0)
    snapshot = metrics.snapshot()
    assert snapshot["requests"]["submitted"] == 2
    assert [(data["state"], data["output"]["tokens"]) for data in snapshot["by_request"]] == [("waiting", 0)]
    assert snapshot["output"]["tokens"] == 2


def test_keys_do_not_depend_on_what_happened() -> None:
    def keys(data: Any) -> Any:
        return {key: keys(value) for key, value in data.items()} if isinstance(data, dict) else None

    fresh, used = Metrics().snapshot(), running()
    one(used, completion(emitted=2, offered=1, accepted=1, width=2))
    used.finished(0, Finish.FAULT, 2.0)
    assert keys(fresh) == keys(used.snapshot())
    assert set(fresh["requests"]["finished"]) == {"stop", "length", "context", "fault", "cancelled"}


def test_totals_are_a_copy() -> None:
    metrics = running()
    one(metrics, completion(emitted=2, offered=1, accepted=1, width=2))
    totals = metrics.totals()
    assert totals == DraftStatistics.of([(completion(emitted=2, offered=1, accepted=1), True)])
    one(metrics, completion(emitted=2, offered=1, accepted=1, width=2))
    assert totals.tokens == 2
