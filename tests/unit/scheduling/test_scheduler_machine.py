"""The scheduler over a device that refuses misuse: requests come, are cancelled, preempted and fail at random; nothing is lost.

After each step slots, pages, frames and order agree between the two; at the end every output is its request's own, nothing is
held and the figures add up. See ``SchedulerBench``.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from scheduler_bench import GONE, IMPOSSIBLE, Fault, SchedulerBench, grammar

from specdec.errors import CapacityError

#: Pages of eight tokens for four slots: enough for all, for two that grow, for one.
PAGES = {"roomy": None, "tight": 14, "one": 7}
CONTEXT, PAGE = 48, 8

SHAPES = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from([1, 2, 5, 8, 9, 17, 30]),
        "output": st.sampled_from([1, 2, 3, 7, 12, 20]),
        "budget": st.sampled_from([None, 1, 4, 11, 60]),
        "draft_tokens": st.sampled_from([None, None, 0, 2]),
    }
)
#: What makes the host decide: stop strings that come and that do not, grammars that end, break off or are none.
DECIDED = st.one_of(
    st.sampled_from([{"stop": ("ab",)}, {"stop": ("c", "da")}, {"stop": ("zz",)}]),
    st.sampled_from([{"grammar": grammar()}, {"grammar": grammar(complete=5)}, {"grammar": grammar(dead=4)}]),
    st.just({"grammar": IMPOSSIBLE}),
    st.just({"stop": ("ab",), "grammar": grammar(complete=6)}),
)
ERRORS = st.sampled_from([GONE, KeyboardInterrupt()])


class SchedulerMachine(RuleBasedStateMachine):
    """Rules are what callers and devices do; every one ends with the checks of the bench."""

    @initialize(
        queue_depth=st.sampled_from([1, 2]),
        chunks_per_step=st.sampled_from([1, 1, 2, None]),
        reserved_output=st.sampled_from([None, 1, 8]),
        pages=st.sampled_from(sorted(PAGES)),
        isolate=st.booleans(),
        copying=st.booleans(),
        policy=st.sampled_from(["adaptive", "fixed:5", "fixed:3", "plain"]),
        concurrency=st.sampled_from([1, 3, 4]),
    )
    def build(self, pages: str, **options: Any) -> None:
        if options["policy"] == "plain":
            options["copying"] = False
        self.bench = SchedulerBench(context=CONTEXT, page_tokens=PAGE, pages=PAGES[pages], prefill_tokens=8, **options)
        self.isolate = options["isolate"]

    @rule(shape=SHAPES)
    def submit(self, shape: dict[str, Any]) -> None:
        self._submit(**shape)

    @rule(shape=SHAPES, decided=DECIDED)
    def submit_decided(self, shape: dict[str, Any], decided: dict[str, Any]) -> None:
        if not self.isolate and decided.get("grammar") == IMPOSSIBLE:
            return  # raised out of a step, when the request has ended
        self._submit(**shape, **decided)

    def _submit(self, **shape: Any) -> None:
        with suppress(CapacityError):  # more than all pages together
            self.bench.submit(**shape)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    @rule(events=st.integers(1, 4))
    def leave_a_step(self, events: int) -> None:
        self._step(events)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.bench.seen:
            self.bench.cancel(data.draw(st.sampled_from(sorted(self.bench.seen))))
        assert not self.bench.cancel(10**6)

    @rule(data=st.data(), after=st.integers(0, 3))
    def cancel_inside_a_step(self, data: st.DataObject, after: int) -> None:
        """At any event of it, somebody who may just have been told something."""
        if not self.bench.seen:
            return
        doomed, events = data.draw(st.sampled_from(sorted(self.bench.seen))), 0

        def between() -> None:
            nonlocal events
            events += 1
            if events == after + 1:
                self.bench.cancel(doomed)

        self._step(between=between)

    @rule(data=st.data(), fails=st.booleans(), done=st.booleans())
    def cancel_inside_a_submission(self, data: st.DataObject, fails: bool, done: bool) -> None:
        """Of a request that is in it or not; the submission may fail all the same."""
        if not self.bench.seen:
            return
        doomed, told = data.draw(st.sampled_from(sorted(self.bench.seen))), self.bench.seen
        if fails:
            self.bench.device.faults["submit"] = Fault("submit", GONE, done)

        def cancel() -> None:
            told[doomed].cancelled |= self.bench.scheduler.cancel(doomed)

        self.bench.device.inside = cancel
        self._step()

    @rule(operation=st.sampled_from(["prefill", "submit", "collect"]), error=ERRORS, done=st.booleans())
    def fail(self, operation: str, error: BaseException, done: bool) -> None:
        """The next such operation fails; an interruption is nobody's error and is raised."""
        self.bench.device.faults[operation] = Fault(operation, error, done)
        self._step()

    def _step(self, *arguments: Any, **options: Any) -> None:
        told = self.bench.step(*arguments, **options)
        if told is not None:
            assert not self.isolate or not isinstance(told, Exception), told

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.bench.finish()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=int(__import__("os").environ.get("N", "200")),
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    # a failing script of fifty steps takes minutes to shrink
    phases=[Phase.explicit, Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],
)
