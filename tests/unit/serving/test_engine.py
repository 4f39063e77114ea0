"""The engine: threads, two rounds in flight, page pressure, cancellation, errors of one request, closing."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from serving_runs import run_all, tokens_of

import specdec
from specdec.errors import CapacityError, SpecdecError, UsageError
from specdec.round.completion import Finish
from specdec.sampling.params import SamplingParams
from specdec.serving.engine import Engine, Output
from specdec.serving.generate import Generator
from specdec.serving.model import LoadedModel
from specdec.serving.request import Emission, Request

GREEDY = SamplingParams(greedy=True)


def request(number: int, **changes: Any) -> Request:
    """A greedy request of its own prompt; budgets from 1 to 40."""
    draw = random.Random(number)
    values: dict[str, Any] = {
        "prompt": [draw.randrange(6) for _ in range(draw.choice((1, 5, 17, 30, 50)))],
        "max_new_tokens": draw.choice((1, 7, 20, 40)),
        "sampling": GREEDY,
        "stop_ids": None if number % 3 == 2 else (),
    }
    return Request(**{**values, **changes})


class Solo:
    """Plain runs of single requests, each once."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self._known: dict[Request, Output] = {}

    def __call__(self, wanted: Request) -> tuple[tuple[int, ...], Finish]:
        if wanted not in self._known:
            (emissions,) = run_all(Generator(self.model), [wanted]).values()
            self._known[wanted] = Output(
                tokens=tuple(tokens_of(emissions)), text="", finish=emissions[-1].finish, error=None
            )
        found = self._known[wanted]
        return found.tokens, found.finish


@pytest.fixture(scope="module")
def solo(prepared: Any) -> Solo:
    return Solo(prepared(drafts=None))


def assert_nothing_leaked(engine: Engine) -> None:
    """Every slot and page of a closed engine is free, and the request table is as it was."""
    model, queue = engine.model, engine._scheduler.admission
    engine._device.prefixes.cache.clear()
    assert sorted(queue.free_slots) == list(range(model.config.concurrency))
    assert not queue.residents and not queue.waiting and not engine._scheduler.flights
    assert [pool.free for pool in model.pools] == [pool.pages for pool in model.pools]
    table = model.arena.requests
    assert torch.equal(table.integers, table.integers[table.spare].expand_as(table.integers))


ADAPTIVE = {"adaptive_verification": True}
#: Enough for one request at full context and a half.
FEW_PAGES = {"pages": 3}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("options", [{}, ADAPTIVE, {**ADAPTIVE, **FEW_PAGES}], ids=["fixed", "adaptive", "few pages"])
def test_many_requests_from_many_threads_equal_plain_decoding(
    prepared: Any, solo: Solo, depth: int, options: dict[str, Any]
) -> None:
    wanted = [request(number) for number in range(24)]
    outputs: dict[int, Output] = {}
    with Engine(prepared(concurrency=4, **options), queue_depth=depth, reserved_output=8) as engine:

        def caller(first: int) -> None:
            for number in range(first, len(wanted), 3):
                outputs[number] = engine.submit(wanted[number]).result()

        threads = [threading.Thread(target=caller, args=(first,)) for first in range(3)]
        threads += [threading.Thread(target=caller, args=(first,)) for first in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number, one in enumerate(wanted):
        assert (outputs[number].tokens, outputs[number].finish) == solo(one), number
        assert outputs[number].error is None
    assert_nothing_leaked(engine)


def test_page_pressure_preempts_and_changes_nothing(prepared: Any, solo: Solo) -> None:
    """Three pages for four requests that grow over a page boundary: the youngest steps back and goes on later."""
    wanted = [request(number, prompt=[number % 6] * 40, max_new_tokens=50, stop_ids=()) for number in range(6)]
    model = prepared(concurrency=4, pages=4)
    engine = Engine(model, reserved_output=4, prefixes=False)
    outputs = engine.generate(wanted)
    engine.close()
    assert engine._scheduler.admission.preemptions > 0
    assert [(one.tokens, one.finish) for one in outputs] == [solo(one) for one in wanted]
    assert engine.metrics.snapshot()["requests"]["preemptions"] == engine._scheduler.admission.preemptions
    assert_nothing_leaked(engine)


def test_sampled_output_survives_preemption(prepared: Any) -> None:
    """The words of a round depend on the position alone, so what was preempted goes on as if nothing had happened."""
    wanted = [
        request(number, prompt=[number % 6] * 40, max_new_tokens=50, stop_ids=(), sampling=SamplingParams(seed=number))
        for number in range(4)
    ]
    with Engine(prepared(concurrency=4), queue_depth=1) as roomy:
        expected = [one.tokens for one in roomy.generate(wanted)]
    with Engine(prepared(concurrency=4, pages=4), queue_depth=1, reserved_output=4) as engine:
        found = [one.tokens for one in engine.generate(wanted)]
        assert engine._scheduler.admission.preemptions > 0
    assert found == expected


def test_two_rounds_are_in_flight(prepared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the tests here would say little about a queue of two."""
    most = 0
    with Engine(prepared(concurrency=2), queue_depth=2) as engine:
        collect = engine._scheduler._collect

        def counted() -> list[Emission]:
            nonlocal most
            most = max(most, len(engine._scheduler.flights))
            return collect()

        monkeypatch.setattr(engine._scheduler, "_collect", counted)
        engine.generate([request(3, max_new_tokens=40, stop_ids=()), request(4, max_new_tokens=40, stop_ids=())])
    assert most == 2


@pytest.mark.parametrize("depth", [1, 2])
def test_cancellation_in_every_phase_leaks_nothing(prepared: Any, solo: Solo, depth: int) -> None:
    """Some requests are cancelled after each number of events, others go on and are as they would be alone."""
    draw = random.Random(3)
    model = prepared(concurrency=3, pages=6, **ADAPTIVE)
    for _ in range(4):
        with Engine(model, queue_depth=depth, reserved_output=8) as engine:
            wanted = [request(draw.randrange(200)) for _ in range(10)]
            streams = [engine.submit(one) for one in wanted]
            doomed = {number: draw.randrange(6) for number in draw.sample(range(10), 5)}
            for number, patience in doomed.items():
                if patience == 0:
                    streams[number].cancel()
            for number, stream in enumerate(streams):
                tokens: list[int] = []
                finish = Finish.NONE
                for count, event in enumerate(stream):
                    if count + 1 == doomed.get(number):
                        stream.cancel()
                        stream.cancel()
                    if isinstance(event, Emission):
                        tokens.extend(event.tokens)
                        finish = event.finish
                expected, natural = solo(wanted[number])
                if finish is Finish.CANCELLED:
                    assert number in doomed and tuple(tokens) == expected[: len(tokens)]
                else:
                    assert (tuple(tokens), finish) == (expected, natural)
        assert_nothing_leaked(engine)


def test_prefix_checkpoints_are_shared_by_requests(prepared: Any, solo: Solo) -> None:
    model = prepared(concurrency=2, snapshot_bytes=1 << 22)
    stem = [1, 2, 3, 4, 5, 0] * 11
    wanted = [request(number, prompt=[*stem, number], max_new_tokens=20, stop_ids=()) for number in range(5)]
    with Engine(model) as engine:
        for _ in range(2):
            outputs = engine.generate(wanted)
            assert [(one.tokens, one.finish) for one in outputs] == [solo(one) for one in wanted]
    figures = engine.metrics.snapshot()["prefix"]
    assert figures["reused_tokens"] >= 5 * 64 and figures["published"] > 0
    assert_nothing_leaked(engine)


def test_stop_strings_and_drafts_share_a_batch(prepared: Any, solo: Solo) -> None:
    """A request whose rounds the host must read keeps nobody from having two in flight."""
    plain = [request(number, max_new_tokens=30, stop_ids=()) for number in range(3)]
    stopping = evolve(plain[0], stop=("\x03",))
    with Engine(prepared(concurrency=4), queue_depth=2) as engine:
        outputs = engine.generate([stopping, *plain])
    expected = solo(plain[0])[0]
    assert outputs[0].tokens == expected[: len(outputs[0].tokens)]
    assert [(one.tokens, one.finish) for one in outputs[1:]] == [solo(one) for one in plain]
    assert_nothing_leaked(engine)


# --- errors --------------------------------------------------------------------------------------------------------------


def line(message: str) -> int:
    """The line of this file that raises an error with the message."""
    source = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = (n for n, text in enumerate(source, 1) if re.search(rf'raise \w+\("{message}"', text))
    return number


class _Failing:
    """A device that fails in the work of one request number."""

    def __init__(
        self, inner: Any, *, prefill: int | None = None, admit: int | None = None, publishing: bool = True
    ) -> None:
        self._inner, self._prefill, self._admit, self._publishing = inner, prefill, admit, publishing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def prefill(self, resident: Any, end: int) -> Any:
        if resident.number == self._prefill:
            raise RuntimeError("no such expert")
        return self._inner.prefill(resident, end)

    def admit(self, resident: Any, reach: int) -> int:
        if resident.number == self._admit:
            raise RuntimeError("no such slot")
        return self._inner.admit(resident, reach)

    def publish(self, resident: Any, length: int, **options: Any) -> None:
        if not self._publishing:
            raise RuntimeError("no room for a checkpoint")
        self._inner.publish(resident, length, **options)


def _with_device(engine: Engine, device: Any) -> None:
    engine._scheduler.device = engine._scheduler.admission.device = device


def test_an_error_of_one_request_ends_that_request_and_no_other(prepared: Any, solo: Solo) -> None:
    wanted = [request(number) for number in range(6)]
    engine = Engine(prepared(concurrency=2))
    _with_device(engine, _Failing(engine._device, prefill=2))
    outputs = engine.generate(wanted)
    engine.close()
    for number, (output, one) in enumerate(zip(outputs, wanted, strict=True)):
        if number == 2:
            assert (output.tokens, output.finish) == ((), Finish.FAULT)
            assert output.error == f"RuntimeError: no such expert ({__file__}:{line('no such expert')} in prefill)"
        else:
            assert (output.tokens, output.finish, output.error) == (*solo(one), None)
    assert_nothing_leaked(engine)


def test_an_error_on_admission_ends_that_request_and_no_other(prepared: Any, solo: Solo) -> None:
    wanted = [request(number) for number in range(4)]
    engine = Engine(prepared(concurrency=2))
    _with_device(engine, _Failing(engine._device, admit=1))
    outputs = engine.generate(wanted)
    engine.close()
    where = f"{__file__}:{line('no such slot')} in admit"
    assert (outputs[1].tokens, outputs[1].error) == ((), f"RuntimeError: no such slot ({where})")
    for number in (0, 2, 3):
        assert (outputs[number].tokens, outputs[number].finish) == solo(wanted[number])
    assert_nothing_leaked(engine)


def test_checkpoints_that_cannot_be_made_cost_no_request(
    prepared: Any, solo: Solo, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = [request(number, prompt=[number] * 70, max_new_tokens=9, stop_ids=()) for number in range(3)]
    engine = Engine(prepared(concurrency=2, snapshot_bytes=1 << 22))
    _with_device(engine, _Failing(engine._device, publishing=False))
    outputs = engine.generate(wanted)
    engine.close()
    assert [(one.tokens, one.finish) for one in outputs] == [solo(one) for one in wanted]
    assert any("no room for a checkpoint" in record.getMessage() for record in caplog.records)
    assert_nothing_leaked(engine)


def test_a_round_that_fails_ends_its_requests_and_the_engine_goes_on(
    prepared: Any, solo: Solo, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = prepared(concurrency=2)
    engine = Engine(model)
    inner, failures = model.rounds[1, 8], iter([True])

    class Once:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def submit(self, *arguments: Any, **options: Any) -> None:
            if next(failures, False):
                raise RuntimeError("the device is gone")
            inner.submit(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setitem(model.rounds, (1, 8), Once())
        broken = engine.submit(request(3, max_new_tokens=20, stop_ids=())).result()
        where = f"{__file__}:{line('the device is gone')} in submit"
        assert (broken.finish, broken.error) == (Finish.FAULT, f"RuntimeError: the device is gone ({where})")
        fine = request(6)
        assert (engine.submit(fine).result().tokens, Finish.NONE)[0] == solo(fine)[0]
    engine.close()
    assert_nothing_leaked(engine)


def test_the_iterators_raise_what_ended_the_request(prepared: Any) -> None:
    engine = Engine(prepared(concurrency=2))
    _with_device(engine, _Failing(engine._device, prefill=0))
    with engine, pytest.raises(SpecdecError, match="no such expert"):
        list(engine.submit(request(0)).tokens())


def test_logits_that_are_no_law_are_an_error_of_the_request(prepared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device finds it, and the caller is not left with a text that merely stops."""
    model = prepared(concurrency=1)
    bad = torch.full((1, model.target.vocab_size), torch.nan, dtype=torch.float64)
    monkeypatch.setattr(model.target, "first_logits", lambda slots: bad.expand(len(slots), -1))
    with Engine(model) as engine, pytest.raises(SpecdecError, match="the model's logits were not a distribution"):
        list(engine.submit(request(0)).text())


def test_requests_that_can_never_run_are_refused_at_once(prepared: Any) -> None:
    with Engine(prepared(concurrency=2, pages=1)) as engine:
        with pytest.raises(CapacityError, match="there are 1 in all"):
            engine.submit(request(0, prompt=[1] * 60, max_new_tokens=30))
        with pytest.raises(UsageError, match="outside the vocabulary"):
            engine.submit(request(0, prompt=[9]))
        with pytest.raises(UsageError, match="prepared without masks"):
            engine.submit(request(0, grammar=specdec.Grammar(kind="json")))


def test_worker_that_dies_tells_every_caller(prepared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(prepared(concurrency=1))

    def broken() -> Iterator[Any]:
        raise AssertionError("scheduler bug")
        yield

    monkeypatch.setattr(engine._scheduler, "step", broken)
    stream = engine.submit(request(0))
    assert stream.result().error == f"AssertionError: scheduler bug ({__file__}:{line('scheduler bug')} in broken)"
    engine.close()
    with pytest.raises(UsageError, match=r"the engine is closed: AssertionError: scheduler bug .* make another one"):
        engine.submit(request(1))


# --- closing -------------------------------------------------------------------------------------------------------------


def test_closing_cancels_what_runs_and_drains_if_asked(prepared: Any, solo: Solo) -> None:
    wanted = [request(number, max_new_tokens=40, stop_ids=()) for number in range(5)]
    engine = Engine(prepared(concurrency=2))
    streams = [engine.submit(one) for one in wanted]
    engine.close(drain=True)
    assert [stream.result().tokens for stream in streams] == [solo(one)[0] for one in wanted]
    assert_nothing_leaked(engine)
    engine = Engine(prepared(concurrency=2))
    streams = [engine.submit(one) for one in wanted]
    engine.close()
    engine.close()
    finishes = {stream.result().finish for stream in streams}
    assert finishes <= {Finish.CANCELLED, Finish.LENGTH} and Finish.CANCELLED in finishes
    assert_nothing_leaked(engine)
    with pytest.raises(UsageError, match="the engine is closed; make another one"):
        engine.submit(wanted[0])


CATALOG = {"speculative": True, "speculative_widths": (1, 2, 4, 8)}


@pytest.mark.parametrize(
    ("options", "most"),
    [({"concurrency": 1}, 7), ({"draft_tokens": 3}, 3), ({"draft_tokens": 0}, 0), ({"adaptive_verification": True}, 7)],
)
def test_a_start_may_use_less_than_was_prepared(prepared: Any, solo: Solo, options: dict[str, Any], most: int) -> None:
    wanted = [request(number, max_new_tokens=30, stop_ids=()) for number in range(3)]
    with Engine(prepared(concurrency=2, drafts=None, **CATALOG), **options) as engine:
        outputs = engine.generate(wanted)
    assert [(one.tokens, one.finish) for one in outputs] == [solo(one) for one in wanted]
    shapes = engine.metrics.snapshot()["rounds"]
    assert max(shape["width"] for shape in shapes) <= most + 1
    assert max(shape["batch"] for shape in shapes) <= options.get("concurrency", 2)


def test_more_than_was_prepared_is_refused(prepared: Any) -> None:
    with pytest.raises(UsageError, match="2 were prepared"):
        Engine(prepared(concurrency=2), concurrency=3)
    with pytest.raises(UsageError, match="was not prepared; prepared: 0, 1, 2, 3, 4, 5, 6, 7"):
        Engine(prepared(concurrency=2), draft_tokens=8)


def test_lost_prefixes_are_warned_about_with_the_cure(prepared: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A budget of few checkpoints: coming back to an evicted prompt says so."""
    wanted = [request(number, prompt=[number % 6] * 66, max_new_tokens=2, stop_ids=()) for number in range(6)]
    model = prepared(concurrency=1, snapshot_bytes=1 << 19)
    with Engine(model) as engine:
        for one in (*wanted, wanted[0]):
            engine.submit(one).result()
    lost = engine.metrics.snapshot()["prefix"]["lost_tokens"]
    assert lost["evicted"] > 0
    found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any(
        "tokens were seen before and are consumed again, because their checkpoint was evicted" in m for m in found
    )


def test_text_is_that_of_the_tokens(prepared: Any) -> None:
    model = prepared(concurrency=2)
    with Engine(model) as engine:
        one = request(4, max_new_tokens=20, stop_ids=())
        assert "".join(engine.submit(one).text()) == model.tokenizer.decode(list(engine.submit(one).tokens()))


def test_history_drafts_are_for_recipes_that_declare_them(prepared: Any, solo: Solo) -> None:
    wanted = [request(number, max_new_tokens=40, stop_ids=()) for number in range(4)] * 2
    with Engine(prepared(concurrency=2), history_drafts=True) as engine:
        outputs = engine.generate(wanted)
    assert [(one.tokens, one.finish) for one in outputs] == [solo(one) for one in wanted]
    figures = engine.metrics.snapshot()
    assert figures["proposed_copies"] > 0
    assert figures["output"]["tokens"] == sum(len(one.tokens) for one in outputs)
    with pytest.raises(UsageError, match=r"history_drafts: recipe 'qwen3.8-flash' drafts nothing as prepared"):
        Engine(prepared(drafts=None), history_drafts=True)


def test_the_package_offers_the_engine_without_importing_it() -> None:
    assert specdec.Engine is Engine and specdec.Request is Request
    assert {"Engine", "Grammar", "Request", "SamplingParams", "hookimpl", "__version__"} <= set(dir(specdec))
    with pytest.raises(AttributeError, match="has no attribute 'Motor'"):
        specdec.Motor  # noqa: B018


# --- loading -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"concurency": 2},
            r"unknown option 'concurency' of Engine\.load; did you mean 'concurrency'\? options: device, dtype,",
        ),
        ({"elephant": 2}, r"unknown option 'elephant' of Engine\.load; options: device, .*, snapshot_bytes$"),
        ({"device": "gpu"}, "device 'gpu' is not supported; allowed: cpu, cuda, cuda:N"),
        ({"device": "cuda:99"}, "device 'cuda:99' is not usable here: .*; use cpu"),
        ({"dtype": "float16"}, "dtype is 'float16'; allowed: float32, float64, bfloat16"),
        ({"dtype": torch.float32}, r"dtype is torch\.float32; allowed: float32"),
        ({"max_draft_tokens": 9}, "max_draft_tokens 9 must be between 0 and 7"),
        ({"prefill_tokens": 512}, "prefill_tokens is 512; give a sequence of integers"),
        ({"context": 1 << 40}, "context is 1099511627776; the checkpoint's max_position_embeddings is"),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_the_words_of_the_caller(
    directory: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        Engine.load("qwen3.8-flash", directory, **options)
