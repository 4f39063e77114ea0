"""Sums of metrics against a model that remembers every draft and every token: random lives of requests, random records."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from threading import Thread
from typing import Any, ClassVar

import pytest
from attrs import define, field
from completion_records import completion
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from specdec.round.completion import Completion, Finish
from specdec.serving.metrics import LaneRecord, Metrics
from specdec.state.prefix_records import Lost

DRAFTS = 7
SHAPES = st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, DRAFTS + 1))
DRAFT_COLUMNS = ("offered", "verified", "judged", "accepted", "emitted")
#: Whole seconds, so that sums of them are exact in any order.
STEPS = st.integers(0, 3)


@define
class Life:
    """What the model remembers of one request. tokens: where each delivered token came from, in order. drafts: of each draft
    that was offered its source, its depth, and the columns it belongs to."""

    submitted: int
    state: str = "waiting"
    since: int = 0
    waited: int = 0
    first: int | None = None
    finish: str | None = None
    records: int = 0
    tokens: list[str] = field(factory=list)
    drafts: list[tuple[str, int, tuple[str, ...]]] = field(factory=list)
    cut: int = 0


@st.composite
def lanes(draw: Any, width: int) -> dict[str, Any]:
    """The story of one lane: verdicts on its verified drafts, one by one, and where its output ended."""
    offered = draw(st.integers(0, width - 1))
    verdicts = draw(st.lists(st.booleans(), max_size=offered))
    accepted = verdicts.index(False) if False in verdicts else len(verdicts)
    emitted = draw(st.integers(0, accepted + 1))
    copied = draw(st.integers(0, DRAFTS))
    return {
        "offered": offered,
        "verdicts": verdicts,
        "accepted": accepted,
        "emitted": emitted,
        "copied": copied,
        "match": draw(st.sampled_from([4, 8])) if copied else None,
        "delivered": draw(st.one_of(st.none(), st.integers(0, emitted))),
        "width": width,
    }


class MetricsMachine(RuleBasedStateMachine):
    """Reports what happens to some metrics and remembers it by itself."""

    make: ClassVar[type[Metrics]] = Metrics

    def __init__(self) -> None:
        super().__init__()
        self.metrics = self.make(kept_requests=2)
        self.now = 0
        self.lives: dict[int, Life] = {}
        self.ended: list[int] = []
        self.strangers = Life(submitted=0)
        self.rounds: list[tuple[tuple[int, int], int, list[int]]] = []
        self.waits: list[int] = []
        self.lookups: list[tuple[int, int]] = []
        self.lost: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()

    def of(self, state: str) -> list[int]:
        return [number for number, life in self.lives.items() if life.state == state]

    # --- what happens ----------------------------------------------------------------------------------------------

    @rule(step=STEPS)
    def submit(self, step: int) -> None:
        self.now += step
        number = len(self.lives)
        self.metrics.submitted(number, self.now)
        self.lives[number] = Life(submitted=self.now, since=self.now)

    @rule(step=STEPS, prompt=st.integers(1, 9), reused=st.one_of(st.none(), st.integers(0, 9)))
    def admit(self, step: int, prompt: int, reused: int | None) -> None:
        self.now += step
        for number in self.of("waiting")[:1]:
            found = None if reused is None else min(reused, prompt)
            self.metrics.admitted(number, self.now, found, prompt)
            life = self.lives[number]
            self.waits.append(self.now - life.since)
            life.waited += self.now - life.since
            life.state = "running"
            self.counts["admissions"] += 1
            if found is not None:
                self.lookups.append((found, prompt))

    @rule(step=STEPS, in_round=st.booleans())
    def first_token(self, step: int, in_round: bool) -> None:
        self.now += step
        for number in self.of("running")[:1]:
            life = self.lives[number]
            if life.first is None:
                self.metrics.first_token(number, self.now, *([0] if in_round else []))
                life.first = self.now - life.submitted
                life.tokens += [] if in_round else ["first"]

    @rule(data=st.data(), shape=SHAPES, seconds=STEPS)
    def round(self, data: Any, shape: tuple[int, int], seconds: int) -> None:
        batch, width = shape
        late = [*self.ended[-4:], 10**6]
        chosen = [(number, False) for number in self.of("running")]
        chosen += [(number, True) for number in data.draw(st.lists(st.sampled_from(late), max_size=1))]
        records, delivered = [], []
        for number, ended in chosen[:batch]:
            lane = data.draw(lanes(width))
            if ended:
                lane["delivered"] = 0
            records.append(record_of(number, lane))
            delivered.append(self.remember(self.lives.get(number, self.strangers), lane))
            self.counts["copies"] += lane["copied"]
        self.metrics.round(batch, width, float(seconds), records)
        self.rounds.append((shape, seconds, delivered))

    def remember(self, life: Life, lane: dict[str, Any]) -> int:
        """Goes through the drafts and tokens of a lane one by one, and returns how many tokens were delivered."""
        tokens = lane["emitted"] if lane["delivered"] is None else lane["delivered"]
        for place in range(lane["offered"]):
            source = f"copied_{lane['match']}" if place < lane["copied"] else "learned"
            columns = ["offered"]
            if place < len(lane["verdicts"]):
                columns.append("verified")
                if all(lane["verdicts"][:place]):
                    columns.append("judged")
                if all(lane["verdicts"][: place + 1]):
                    columns.append("accepted")
                    if place < tokens:
                        columns.append("emitted")
                        life.tokens.append(source)
            life.drafts.append((source, place + 1, tuple(columns)))
        life.tokens += ["target"] * (tokens - lane["accepted"])
        life.cut += lane["emitted"] - tokens
        life.records += 1
        return tokens

    @rule(step=STEPS)
    def preempt(self, step: int) -> None:
        self.now += step
        for number in self.of("running")[-1:]:
            self.metrics.preempted(number, self.now)
            life = self.lives[number]
            life.state, life.since = "waiting", self.now
            self.counts["preemptions"] += 1

    @rule(
        step=STEPS,
        state=st.sampled_from(["waiting", "running"]),
        reason=st.sampled_from([*list(Finish)[1:], "error"]),
        twice=st.booleans(),
    )
    def end(self, step: int, state: str, reason: Finish | str, twice: bool) -> None:
        self.now += step
        for number in self.of(state)[:1]:
            for _ in range(1 + twice):
                if reason is Finish.CANCELLED:
                    self.metrics.cancelled(number, self.now)
                else:
                    self.metrics.finished(number, reason, self.now)
            life = self.lives[number]
            life.state = "ended"
            life.finish = reason.name.lower() if isinstance(reason, Finish) else reason
            self.ended.append(number)

    @rule(reason=st.sampled_from(list(Lost)), tokens=st.integers(1, 9))
    def lose(self, reason: Lost, tokens: int) -> None:
        self.metrics.prefix_lost(reason, tokens)
        self.lost[reason.value] += tokens

    @rule(drafts=st.integers(1, 3))
    def forbid(self, drafts: int) -> None:
        for number in self.of("running")[:1]:
            self.metrics.grammar_rejected(number, drafts)
            self.counts["forbidden"] += drafts

    # --- what must be so -------------------------------------------------------------------------------------------

    @invariant()
    def output_is_what_was_delivered(self) -> None:
        snapshot = self.metrics.snapshot()
        assert_output(snapshot["output"], [*self.lives.values(), self.strangers])
        own = {one["request"]: one for one in snapshot["by_request"]}
        assert set(own) == set(self.lives) - set(self.ended[:-2])
        for number, data in own.items():
            life = self.lives[number]
            assert (data["state"], data["finish"]) == (life.state, life.finish)
            assert (data["wait_seconds"], data["first_token_seconds"]) == (life.waited, life.first)
            assert_output(data["output"], [life])
            assert self.metrics.request(number) == data

    @invariant()
    def everything_else_adds_up(self) -> None:
        snapshot = self.metrics.snapshot()
        assert json.loads(json.dumps(snapshot, allow_nan=False)) == snapshot
        for shape in snapshot["rounds"]:
            rounds = [one for one in self.rounds if one[0] == (shape["batch"], shape["width"])]
            assert shape["rounds"] == len(rounds) > 0
            assert shape["seconds"] == sum(seconds for _, seconds, _ in rounds)
            assert shape["lanes"] == sum(len(delivered) for _, _, delivered in rounds)
            assert shape["tokens"] == sum(sum(delivered) for _, _, delivered in rounds)
        assert sum(shape["rounds"] for shape in snapshot["rounds"]) == len(self.rounds)
        requests, prefix, queue = snapshot["requests"], snapshot["prefix"], snapshot["queue"]
        assert requests["submitted"] == len(self.lives)
        assert {k: v for k, v in requests["finished"].items() if v} == Counter(
            life.finish for life in self.lives.values() if life.finish
        )
        for name in ("admissions", "preemptions"):
            assert requests[name] == self.counts[name]
        assert snapshot["proposed_copies"] == self.counts["copies"]
        assert snapshot["grammar_rejections"] == self.counts["forbidden"]
        assert {k: v for k, v in prefix["lost_tokens"].items() if v} == self.lost
        assert prefix["lookups"] == len(self.lookups)
        assert prefix["full_hits"] == sum(found == prompt for found, prompt in self.lookups)
        assert prefix["misses"] == sum(found == 0 for found, _ in self.lookups)
        assert prefix["full_hits"] + prefix["partial_hits"] + prefix["misses"] == prefix["lookups"]
        assert prefix["reused_tokens"] == sum(found for found, _ in self.lookups)
        assert prefix["prompt_tokens"] == sum(prompt for _, prompt in self.lookups)
        assert_durations(queue["wait_seconds"], self.waits)
        assert_durations(
            queue["first_token_seconds"], [life.first for life in self.lives.values() if life.first is not None]
        )
        assert queue["request_seconds"]["count"] == len(self.ended)


def record_of(number: int, lane: dict[str, Any]) -> LaneRecord | tuple[Any, ...]:
    made = completion(
        request=number,
        emitted=lane["emitted"],
        offered=lane["offered"],
        verified=len(lane["verdicts"]),
        accepted=lane["accepted"],
        # as the device writes it: of the copies that the lane had room for, or of all
        copies=(1 << lane["copied"]) - 1,
        width=lane["width"],
    )
    return made, lane["copied"], lane["match"], lane["delivered"]


def assert_output(data: dict[str, Any], lives: Iterable[Life]) -> None:
    """An ``output`` of the snapshot against tokens and drafts counted one by one."""
    lives = list(lives)
    tokens = Counter(source for life in lives for source in life.tokens)
    assert data["tokens"] == tokens.total() == sum(data["tokens_by_source"].values())
    assert {source: count for source, count in data["tokens_by_source"].items() if count} == tokens
    assert data["cut_tokens"] == sum(life.cut for life in lives)
    assert data["lane_rounds"] == sum(life.records for life in lives)
    assert data["inconsistent_records"] == 0
    expected = Counter(
        (source, depth, column) for life in lives for source, depth, columns in life.drafts for column in columns
    )
    found = Counter(
        {(row["source"], row["depth"], column): row[column] for row in data["drafts"] for column in DRAFT_COLUMNS}
    )
    assert found == expected
    for column in ("offered", "verified", "accepted"):
        assert data[column] == sum(count for key, count in expected.items() if key[2] == column)


def assert_durations(data: dict[str, Any], seconds: Sequence[int]) -> None:
    assert (data["count"], data["sum"]) == (len(seconds), sum(seconds))
    for bound, count in data["buckets"]:
        assert count == sum(one <= bound for one in seconds)


TestMetrics = MetricsMachine.TestCase
TestMetrics.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


# --- the model notices wrong counting --------------------------------------------------------------------------------


class CountsWhatWasCut(Metrics):
    """Tokens behind a stop string or a cancellation are taken for output."""

    def round(self, batch: int, width: int, seconds: float, records: Iterable[Any]) -> None:
        super().round(batch, width, seconds, [(record, copied, match, None) for record, copied, match, _ in records])


class CountsThePendingToken(Metrics):
    """The pending token is taken for a draft that is always right."""

    def round(self, batch: int, width: int, seconds: float, records: Iterable[Any]) -> None:
        def more(record: Completion) -> Completion:
            changes = {name: getattr(record, name) + 1 for name in ("offered", "verified", "accepted")}
            return record._replace(**changes)

        super().round(batch, width, seconds, [(more(record), *rest) for record, *rest in records])


class CountsTheWidth(Metrics):
    """Every round is taken to offer as many drafts as its width has room for."""

    def round(self, batch: int, width: int, seconds: float, records: Iterable[Any]) -> None:
        wide = [(record._replace(offered=record.verify_width - 1), *rest) for record, *rest in records]
        super().round(batch, width, seconds, wide)


class ForgetsSources(Metrics):
    """Copied drafts are taken for learned ones."""

    def round(self, batch: int, width: int, seconds: float, records: Iterable[Any]) -> None:
        super().round(batch, width, seconds, [(record._replace(copy_sources=0), *rest) for record, *rest in records])


class ForgetsRequests(Metrics):
    """What an ended request counted is gone with it."""

    def _forget(self, number: int) -> None:
        self._ended.pop(number, None)


class CountsFirstTokensTwice(Metrics):
    """A first token that a round delivered is counted beside its record."""

    def first_token(self, number: int, now: float, delivered: int = 1) -> None:
        super().first_token(number, now, 1)


@pytest.mark.parametrize(
    "mutant",
    [
        CountsWhatWasCut,
        CountsThePendingToken,
        CountsTheWidth,
        ForgetsSources,
        ForgetsRequests,
        CountsFirstTokensTwice,
    ],
)
def test_wrong_counting_is_noticed(mutant: type[Metrics]) -> None:
    class Machine(MetricsMachine):
        make = mutant

    search = settings(
        max_examples=300,
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Machine, settings=search)


# --- threads ---------------------------------------------------------------------------------------------------------


def test_requests_may_come_and_go_while_others_read() -> None:
    metrics = Metrics(kept_requests=3)
    failures: list[BaseException] = []

    def serve(first: int) -> None:
        try:
            for number in range(first, first + 150):
                metrics.submitted(number, 0.0)
                metrics.round(
                    1, 2, 0.0, [(completion(request=number, emitted=2, offered=1, accepted=1), 0, None, None)]
                )
                metrics.cancelled(number, 1.0)
                assert metrics.snapshot()["output"]["tokens"] > 0
        except BaseException as error:
            failures.append(error)

    threads = [Thread(target=serve, args=(first,)) for first in (0, 1000, 2000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    snapshot = metrics.snapshot()
    assert (snapshot["output"]["tokens"], snapshot["requests"]["finished"]["cancelled"]) == (900, 450)
