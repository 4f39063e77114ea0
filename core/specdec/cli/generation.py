"""One request as a command shows it: text to standard output as it comes, progress and the live line to a terminal."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from typing import TYPE_CHECKING, Any

from attrs import define, field

from specdec.cli.live import LiveLine
from specdec.cli.options import PREFILL_ROWS, grammar_options
from specdec.cli.output import clear_progress, progress, say
from specdec.errors import UsageError

if TYPE_CHECKING:
    from types import FrameType

    from specdec.round.completion import Finish
    from specdec.serving.engine import Engine, Stream
    from specdec.serving.request import Request, TokenLogprobs

__all__ = ["Answer", "answer_to"]


@define(kw_only=True)
class Answer:
    """What came of a request. prompt_seconds: until the first token; seconds: from there to the end."""

    finish: Finish
    pieces: list[str] = field(factory=list)
    tokens: list[int] = field(factory=list)
    logprobs: list[TokenLogprobs] = field(factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(factory=list)
    error: str | None = None
    prompt_seconds: float = 0.0
    seconds: float = 0.0
    # prompt tokens that a prefix checkpoint had
    reused_tokens: int = 0

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.pieces)

    def as_data(self, request: Request, summary: dict[str, Any]) -> dict[str, Any]:
        """Plain types for JSON."""
        data: dict[str, Any] = {"text": self.text, "tokens": self.tokens, "summary": summary}
        if request.logprobs is not None:
            data["logprobs"] = [_logprobs_data(one) for one in self.logprobs]
        if request.prompt_logprobs is not None:
            data["prompt_logprobs"] = [_logprobs_data(one) for one in self.prompt_logprobs]
        return data


def answer_to(
    args: argparse.Namespace, engine: Engine, request: Request, *, interruptible: bool = False, quiet: bool = False
) -> Answer:
    """Runs a request, writing its text unless ``--json`` was given.

    interruptible: Ctrl-C ends this request alone, with what it has. quiet: no lines about the prompt where there is no terminal.
    Raises UsageError or CapacityError if the model cannot run the request, and what writing raises.
    """
    from specdec.round.completion import Finish
    from specdec.serving.request import Progress

    try:
        stream = engine.submit(request)
    except UsageError as refusal:
        given = grammar_options(args)
        if not given:
            raise
        raise UsageError(f"{given[0]}: {refusal}") from refusal
    answer = Answer(finish=Finish.NONE)
    started, first = time.perf_counter(), None
    with _interrupting(stream, interruptible), LiveLine(streaming=not args.json) as live:
        for event in stream:
            if isinstance(event, Progress):
                answer.prompt_logprobs.extend(event.logprobs or ())
                _progress(event.consumed, event.total, quiet)
                continue
            first = first or time.perf_counter()
            answer.tokens.extend(event.tokens)
            answer.logprobs.extend(event.logprobs or ())
            answer.finish, answer.error = event.finish, event.error
            answer.pieces.append(stream.piece(event))
            if not args.json:
                live.write(answer.pieces[-1])
            live.update(event)
    finished = time.perf_counter()
    first = first or finished
    answer.prompt_seconds, answer.seconds = first - started, finished - first
    figures = engine.metrics.request(event.request)
    answer.reused_tokens = 0 if figures is None else figures["reused_tokens"]
    return answer


@contextmanager
def _interrupting(stream: Stream, interruptible: bool) -> Iterator[None]:
    """Lets the first Ctrl-C cancel the request; a second one interrupts as usual."""
    if not interruptible or threading.current_thread() is not threading.main_thread():
        yield
        return

    def cancel(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        stream.cancel()

    before = signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _logprobs_data(one: TokenLogprobs) -> dict[str, Any]:
    """Plain types for JSON, which has no infinity: a token that the target excludes has null."""

    def number(value: float) -> float | None:
        return value if isfinite(value) else None

    return {
        "token": one.token,
        "logprob": number(one.logprob),
        "top": [{"token": token, "logprob": number(value)} for token, value in one.top],
    }


def _progress(consumed: int, total: int, quiet: bool) -> None:
    """One line on a terminal that rewrites itself; elsewhere one line per chunk of a prompt with several."""
    if sys.stderr is not None and sys.stderr.isatty():
        progress(f"prompt {consumed}/{total} tokens")
        if consumed == total:
            clear_progress()
    elif total > PREFILL_ROWS and not quiet:
        say(f"specdec: prompt {consumed}/{total} tokens")
