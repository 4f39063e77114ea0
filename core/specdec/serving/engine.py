"""The engine: many callers, one loaded model. A worker thread runs the scheduler; callers submit, iterate, cancel and close.

Policy of a step: one prompt chunk, then one round over everyone who may run. So the tokens of running requests never wait for
more than a chunk, and a new request's first token comes after the chunks of the requests before it and its own, with one round
between two chunks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from attrs import define, field, frozen

from specdec.checkpoint.tokenizer import TextStream
from specdec.control.trace import TraceWriter
from specdec.drafting.history import HistoryRing
from specdec.errors import SpecdecError, UsageError
from specdec.failures import reported
from specdec.preparation import PreparationConfig
from specdec.recipes import recipe_book
from specdec.round.completion import Finish
from specdec.scheduling.emissions import farewell
from specdec.scheduling.policy import width_policy
from specdec.scheduling.scheduler import Scheduler
from specdec.serving.device import ModelDevice
from specdec.serving.metrics import Metrics
from specdec.serving.model import LoadedModel
from specdec.serving.prefixes import prefix_cache
from specdec.serving.request import Emission, Event, Request

#: Output tokens whose pages a request gets at a time: a page, so that long budgets do not keep others out.
RESERVED_OUTPUT = 64


@frozen(kw_only=True)
class Output:
    """All of one request. error: why it could not be run to its end, one line, else None."""

    tokens: tuple[int, ...]
    text: str
    finish: Finish
    error: str | None


@define(eq=False)
class Stream:
    """One submitted request. Iterating gives its events as they come and ends behind the one that finishes it.

    Made by ``Engine.submit``; one consumer. Leaving the loop early does not stop the request, ``cancel`` does.
    """

    request: Request
    _engine: Engine
    _text: TextStream
    _events: SimpleQueue[Event] = field(factory=SimpleQueue)
    _ended: bool = False
    # the scheduler's number, once the worker has taken the request
    _number: int | None = None

    def __iter__(self) -> Iterator[Event]:
        while not self._ended:
            event = self._events.get()
            self._ended = isinstance(event, Emission) and event.finish is not Finish.NONE
            yield event

    def tokens(self) -> Iterator[int]:
        """Emitted token ids in order. Raises SpecdecError if the request cannot be run to its end."""
        for event in self:
            if isinstance(event, Emission):
                yield from event.tokens
                _raise(event)

    def text(self) -> Iterator[str]:
        """Pieces of text as they become certain, without stop strings. Raises as ``tokens``."""
        for event in self:
            if isinstance(event, Emission):
                yield self.piece(event)
                _raise(event)

    def piece(self, emission: Emission) -> str:
        """Text that one of this request's emissions adds, each given once and in order."""
        text = self._text.push(emission.tokens) if emission.text is None else emission.text
        return text if emission.finish is Finish.NONE or emission.text is not None else text + self._text.finish()

    def result(self) -> Output:
        """Waits for the end and returns everything that was not iterated before."""
        tokens: list[int] = []
        pieces: list[str] = []
        finish, error = Finish.NONE, None
        for event in self:
            if isinstance(event, Emission):
                tokens.extend(event.tokens)
                pieces.append(self.piece(event))
                finish, error = event.finish, event.error
        return Output(tokens=tuple(tokens), text="".join(pieces), finish=finish, error=error)

    def cancel(self) -> None:
        """Ends the request soon; its last event says CANCELLED unless it ended before. Any thread may call it, any number of
        times."""
        self._engine._tell(self, cancel=True)


def _check_names(options: Iterable[str]) -> None:
    """Raises UsageError for an option that ``Engine.load`` does not have."""
    makers = (Engine.load, PreparationConfig.for_recipe)
    known = [one.name for make in makers for one in signature(make).parameters.values() if one.kind is one.KEYWORD_ONLY]
    for name in options:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise UsageError(f"unknown option {name!r} of Engine.load; {hint}options: {', '.join(known)}")


def _raise(emission: Emission) -> None:
    if emission.error is not None:
        raise SpecdecError(emission.error)


class Engine:
    """Serves requests from any thread. A context manager that closes itself; use one engine per loaded model at a time."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        history_drafts: bool = False,
        prefixes: bool | None = None,
        concurrency: int | None = None,
        draft_tokens: int | None = None,
        adaptive_verification: bool | None = None,
        fixed_width: int | None = None,
        queue_depth: int = 2,
        chunks_per_step: int = 1,
        reserved_output: int | None = RESERVED_OUTPUT,
        metrics: Metrics | None = None,
        trace: str | Path | None = None,
    ) -> None:
        """The policy of widths is the model's configuration: its ``fixed_width``, or adaptive without one.

        concurrency, draft_tokens, adaptive_verification, fixed_width: use a part of what was prepared, or another policy; see
        ``PreparationConfig.reduce``. Zero drafts run the ordinary operations, which keep no draft state. history_drafts: copy
        drafts from decoded history. prefixes: keep prefix checkpoints; None does where ``snapshot_bytes`` is set. queue_depth:
        rounds submitted before the first is read. chunks_per_step, reserved_output: see ``Scheduler``. metrics: counts here, None
        makes its own. trace: file for one JSON line per round.

        Raises UsageError for an option that the recipe does not offer or a number out of range.
        """
        recipe = model.recipe
        config = model.config.reduce(
            concurrency=concurrency,
            max_draft_tokens=draft_tokens,
            adaptive_verification=adaptive_verification,
            fixed_width=fixed_width,
        )
        if history_drafts and not (recipe.supports_history_drafts and config.max_draft_tokens):
            why = "drafts nothing as prepared" if recipe.supports_history_drafts else "declares no history drafts"
            raise UsageError(f"history_drafts: recipe {recipe.name!r} {why}; leave the option out")
        keeps = config.snapshot_bytes > 0 if prefixes is None else prefixes
        self.model = model
        self.metrics = Metrics() if metrics is None else metrics
        self._trace = None if trace is None else TraceWriter(trace)
        self._device = ModelDevice(
            model, config, prefix_cache=prefix_cache(model) if keeps else None, queued=queue_depth > 1
        )
        self._scheduler = Scheduler(
            self._device,
            width_policy(config),
            queue_depth=queue_depth,
            chunks_per_step=chunks_per_step,
            reserved_output=reserved_output,
            isolate=True,
            history=HistoryRing() if history_drafts else None,
            metrics=self.metrics,
            trace=self._trace,
        )
        self._changed = threading.Condition()
        self._inbox: deque[tuple[Stream, bool]] = deque()
        self._streams: dict[int, Stream] = {}
        self._closing = False
        self._draining = False
        self._failure: str | None = None
        self._worker = threading.Thread(target=self._work, name="specdec-engine", daemon=True)
        self._worker.start()

    @classmethod
    def load(
        cls,
        recipe: str,
        checkpoint: str | Path | None = None,
        *,
        device: str = "cpu",
        dtype: str | None = None,
        history_drafts: bool = False,
        trace: str | Path | None = None,
        **options: Any,
    ) -> Engine:
        """Loads a recipe and serves it. device, dtype: see ``LoadedModel.prepare``. options: those of
        ``PreparationConfig.for_recipe``.

        Raises UsageError, PluginError, CheckpointError or CapacityError with one line each.
        """
        _check_names(options)
        record = recipe_book().recipe(recipe)
        config = PreparationConfig.for_recipe(record, **options)
        model = LoadedModel.prepare(record, config, directory=checkpoint, device=device, dtype=dtype)
        return cls(model, history_drafts=history_drafts, trace=trace)

    # --- callers ---------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether nothing is queued, running or in flight."""
        return not (self._inbox or self._scheduler.busy)

    def submit(self, request: Request) -> Stream:
        """Queues a request. Any thread may call it.

        Raises UsageError or CapacityError if the model can never run it, and UsageError if the engine is closed.
        """
        self._device.check(request)
        stream = Stream(request, self, self.model.tokenizer.stream())
        self._tell(stream, cancel=False)
        return stream

    def generate(self, requests: Iterable[Request]) -> list[Output]:
        """Runs requests together and returns their outputs in order. Raises as ``submit`` does, before any is queued."""
        requests = list(requests)
        for request in requests:
            self._device.check(request)
        streams = [self.submit(request) for request in requests]
        return [stream.result() for stream in streams]

    def _tell(self, stream: Stream, *, cancel: bool) -> None:
        with self._changed:
            if self._closing and not cancel:
                raise UsageError(
                    f"the engine is closed{f': {self._failure}' if self._failure else ''}; make another one"
                )
            self._inbox.append((stream, cancel))
            self._changed.notify()

    def close(self, *, drain: bool = False) -> None:
        """Ends the engine: what is waiting or running is cancelled, or run to its end with ``drain``. Waits for the worker.

        A second call does nothing.
        """
        with self._changed:
            self._closing, self._draining = True, self._draining or drain
            self._changed.notify()
        if threading.current_thread() is not self._worker:
            self._worker.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- worker ----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while self._take():
                for event in self._scheduler.step():
                    self._deliver(event)
        except BaseException as error:  # nobody else would ever tell the callers
            self._failure = reported(error)
        finally:
            self._finish()

    def _take(self) -> bool:
        """Takes what callers asked for; waits where there is nothing to do. False when the engine is done."""
        with self._changed:
            while not (self._inbox or self._scheduler.busy or self._closing):
                self._changed.wait()
            asked = list(self._inbox)
            self._inbox.clear()
            closing = self._closing
        for stream, cancel in asked:
            self._obey(stream, cancel)
        if closing and not self._draining:
            for number in list(self._streams):
                self._scheduler.cancel(number)
        return self._scheduler.busy or not closing

    def _obey(self, stream: Stream, cancel: bool) -> None:
        if not cancel:
            stream._number = self._scheduler.submit(stream.request)
            self._streams[stream._number] = stream
        elif stream._number is not None:
            self._scheduler.cancel(stream._number)

    def _deliver(self, event: Event) -> None:
        stream = self._streams[event.request]
        if isinstance(event, Emission) and event.finish is not Finish.NONE:
            del self._streams[event.request]
        stream._events.put(event)

    def _finish(self) -> None:
        """Tells every caller that is left, and lets nobody in any more."""
        with self._changed:
            self._closing = True
            left = [stream for stream, cancel in self._inbox if not cancel]
            self._inbox.clear()
        finish = Finish.CANCELLED if self._failure is None else Finish.FAULT
        for stream in [*self._streams.values(), *left]:
            text = "" if stream.request.stop else None
            number = -1 if stream._number is None else stream._number
            stream._events.put(farewell(number, finish, 0, None, text=text, error=self._failure))
        self._streams.clear()
        if self._trace is not None:
            self._trace.close()
