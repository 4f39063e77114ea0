"""``specdec run --chat``: a conversation, turn by turn, over one engine that keeps what it has read.

Torch is imported inside ``chat`` only. Answers go to stdout as they come; what the chat asks for and says goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field

from specdec.cli.options import prepared_model
from specdec.cli.output import replace_unwritable, say, show, write, write_file
from specdec.cli.run import drafting_of, finished, read_prompt, summary_of, summary_text
from specdec.cli.tables import json_text
from specdec.errors import CapacityError, CheckpointError, ExitCode, UsageError

if TYPE_CHECKING:
    from specdec.checkpoint.chat import ChatTemplate
    from specdec.checkpoint.reader import Checkpoint
    from specdec.checkpoint.tokenizer import Tokenizer
    from specdec.cli.generation import Answer
    from specdec.declaration import Recipe
    from specdec.preparation import PreparationConfig
    from specdec.serving.conversation import Conversation
    from specdec.serving.engine import Engine
    from specdec.serving.model import LoadedModel
    from specdec.serving.request import Request

__all__ = ["chat"]

#: Tokens of a whole chat that are prepared for, unless asked for more or the checkpoint has fewer.
CONTEXT = 4096
#: States that prefix checkpoints have room for, beside the pages of a whole context: the last turn's and a few before it.
_STATES = 4


def chat(
    args: argparse.Namespace,
    recipe: Recipe,
    config: PreparationConfig,
    sampling: dict[str, Any],
    options: dict[str, Any],
) -> int:
    """Runs the chat; sampling, options: what was given for every turn, by the names of ``SamplingParams`` and ``Request``.

    Returns OK when standard input ended, FAILURE if a turn ended with a fault. Raises UsageError for an option that a chat
    cannot honour, no turn at all or a turn that is no text, CapacityError when the context is full.
    """
    if args.prompt == "-":
        raise UsageError(
            "--prompt - and --chat would both read standard input; give the first turn as --prompt TEXT or there"
        )
    if args.prompt_logprobs is not None:
        raise UsageError(
            "--prompt-logprobs would read the whole chat again in every turn; leave it out, or leave out --chat"
        )
    system = _text("--system", args.system)
    turns = _Turns.of(args)

    from specdec.checkpoint.accepted import check_model_type, context_limit, open_checkpoint
    from specdec.checkpoint.chat import ChatTemplate
    from specdec.sampling.params import SamplingParams
    from specdec.serving.conversation import Conversation
    from specdec.serving.request import Request

    # one request with every option, to check them and for what they need prepared
    first = Request(prompt=(0,), sampling=SamplingParams(**sampling), max_new_tokens=args.max_new_tokens, **options)
    with open_checkpoint(recipe, args.checkpoint) as checkpoint:
        check_model_type(checkpoint, recipe)
        tokenizer, tokenizer_config = checkpoint.tokenizer(), checkpoint.tokenizer_config()
        template = ChatTemplate.of(tokenizer_config)
        limit = context_limit(checkpoint)
        config = evolve(
            config,
            context=min(CONTEXT, limit or CONTEXT) if args.context is None else args.context,
            extended_sampling=first.extended,
            grammar=first.grammar is not None,
        )
        config = evolve(config, snapshot_bytes=_snapshot_bytes(args, recipe, config, checkpoint))
    conversation = Conversation(tokenizer, template, system=system)
    replace_unwritable()
    model = prepared_model(args, recipe, config)
    request = evolve(
        first,
        sampling=model.defaults.sampling(**sampling),
        stop_ids=_stop_ids(args, model, tokenizer, template),
    )
    return _Chat(args=args, model=model, conversation=conversation, request=request, limit=limit).run(turns)


def _snapshot_bytes(args: argparse.Namespace, recipe: Recipe, config: PreparationConfig, checkpoint: Checkpoint) -> int:
    """Budget of prefix checkpoints with which the latest turn's always stays."""
    from specdec.memory_plan import capacities_for, state_layouts
    from specdec.snapshot_sizes import page_bytes, snapshot_bytes

    dtype = args.dtype or ("float32" if args.device.startswith("cpu") else "bfloat16")
    layouts = state_layouts(recipe, config, settings=checkpoint.config, checkpoint=checkpoint, dtype=dtype)
    pages, states = sum(map(page_bytes, layouts)), sum(map(snapshot_bytes, layouts))
    return capacities_for(recipe, config, dtype).pages * pages + _STATES * (2 * pages + states)


def _stop_ids(
    args: argparse.Namespace, model: LoadedModel, tokenizer: Tokenizer, template: ChatTemplate | None
) -> tuple[int, ...] | None:
    """The checkpoint's stop ids and, with a template, its end-of-sequence token, which ends an answer there; None for the first
    alone."""
    from specdec.serving.model import STOP_IDS

    token = None if template is None else template.special_tokens.get("eos_token")
    found = None if token is None else tokenizer.token_id(token)
    if found is None or args.ignore_eos or found in model.defaults.stop_ids:
        return None
    if len(model.defaults.stop_ids) >= STOP_IDS:
        raise CheckpointError(
            f"the checkpoint has {STOP_IDS} stop ids, the most there may be, and its chat template ends answers with another, "
            f"{token!r}; take one out of eos_token_id"
        )
    return (*model.defaults.stop_ids, found)


def _text(option: str, text: str | None) -> str | None:
    """The option's text. Raises UsageError if it came as bytes that are not UTF-8."""
    try:
        (text or "").encode("utf-8")
    except UnicodeError as error:
        raise UsageError(f"{option}: not UTF-8 text; convert it to UTF-8") from error
    return text


@define(kw_only=True)
class _Turns:
    """Turns as they are asked for: of the prompt option if there is one, then of standard input, a line each."""

    first: str | None
    terminal: bool
    lines: int = 0

    @classmethod
    def of(cls, args: argparse.Namespace) -> _Turns:
        """Raises UsageError if there can be none: standard input is closed or, where it is no terminal, has no line."""
        given = args.prompt is not None or args.prompt_file is not None
        turns = cls(first=read_prompt(args) if given else None, terminal=sys.stdin is not None and sys.stdin.isatty())
        if not given and not turns.terminal:
            # read before anything is loaded
            turns.first = next(turns._read(), None)
            if turns.first is None:
                raise UsageError(
                    "no turn; standard input is empty, so write one turn in a line there, or give --prompt"
                )
        return turns

    def __iter__(self) -> Iterator[str]:
        if self.first is not None:
            yield self.first
        yield from self._read()

    def _read(self) -> Iterator[str]:
        """Lines without their ends; empty ones are no turns."""
        while (line := self._line()) is not None:
            if line:
                yield line

    def _line(self) -> str | None:
        if sys.stdin is None:
            return None
        if self.terminal and sys.stderr is not None and sys.stderr.isatty():
            show("> ")
        try:
            line = sys.stdin.buffer.readline()
        except OSError as error:
            raise UsageError(f"standard input: {error.strerror or error}; give the turns as UTF-8 text") from error
        except KeyboardInterrupt:
            show("\n")
            raise
        if not line:
            if self.terminal:
                show("\n")
            return None
        self.lines += 1
        try:
            return line.decode("utf-8").rstrip("\r\n")
        except UnicodeError as error:
            message = f"line {self.lines} of standard input: not UTF-8 text; convert it to UTF-8"
            if not self.terminal:
                raise UsageError(message) from error
            say(f"specdec: {message}")
            return ""


@define(kw_only=True)
class _Chat:
    """One chat over one engine. request: what every turn asks for, but for its prompt. limit: the checkpoint's most tokens."""

    args: argparse.Namespace
    model: LoadedModel
    conversation: Conversation
    request: Request
    limit: int | None
    answers: list[Answer] = field(factory=list)
    prompt_tokens: int = 0

    def run(self, turns: _Turns) -> int:
        """Until the turns end. Raises CapacityError when the context is full."""
        from specdec.serving.engine import Engine

        code = int(ExitCode.OK)
        with Engine(
            self.model, history_drafts=self.args.history_drafts, queue_depth=1, trace=self.args.trace
        ) as engine:
            try:
                for text in turns:
                    code = self._turn(engine, text, interruptible=turns.terminal)
                    if code:
                        break
            finally:
                # whatever ended it: what was answered stands
                self._report(engine)
        return code

    def _turn(self, engine: Engine, text: str, *, interruptible: bool) -> int:
        from specdec.cli.generation import answer_to
        from specdec.round.completion import Finish

        context = self.model.config.context
        prompt = self.conversation.ask(text)
        if len(prompt) >= context:
            raise CapacityError(f"with this turn the chat has {len(prompt)} tokens; {self._full()}")
        request = evolve(self.request, prompt=prompt)
        before = engine.metrics.totals()
        answer = answer_to(self.args, engine, request, interruptible=interruptible, quiet=True)
        self.answers.append(answer)
        self.prompt_tokens += len(prompt)
        cancelled = answer.finish is Finish.CANCELLED
        if cancelled and not answer.tokens:
            self.conversation.withdraw()
        else:
            stopped = answer.finish is Finish.STOP and answer.tokens[-1] in self._stops
            self.conversation.answered(answer.tokens, answer.text, stopped=stopped)
        if self.args.json:
            summary = {
                **drafting_of(self.args, self.model, request),
                "prompt_tokens": len(prompt),
                "reused_tokens": answer.reused_tokens,
                **summary_of(engine.metrics.totals().since(before), answer.seconds),
                "prompt_seconds": answer.prompt_seconds,
                "finish": answer.finish.name.lower(),
            }
            data = {"turn": len(self.answers), "prompt": text, **answer.as_data(request, summary)}
            write(json.dumps(data, ensure_ascii=False, allow_nan=False))
        else:
            write("")
        if cancelled:
            say("specdec: this turn was interrupted; Ctrl-C again leaves")
        if answer.finish is Finish.CONTEXT:
            raise CapacityError(f"the answer ends here; {self._full()}")
        return finished(answer)

    @property
    def _stops(self) -> tuple[int, ...]:
        return self.model.defaults.stop_ids if self.request.stop_ids is None else self.request.stop_ids

    def _full(self) -> str:
        """That the context is full, and what helps."""
        context = self.model.config.context
        larger = self.limit is None or context < self.limit
        most = "" if self.limit is None else f" (the checkpoint has up to {self.limit})"
        cure = f"raise --context{most} or begin a new chat" if larger else "begin a new chat"
        return f"the context of {context} tokens{'' if larger else ', all that the checkpoint has,'} is full; {cure}"

    def _report(self, engine: Engine) -> None:
        """The summary of the chat, unless each turn had its own, and the file of metrics."""
        if not self.args.json and self.answers:
            summary = {
                **drafting_of(self.args, self.model, self.request),
                "turns": len(self.answers),
                "prompt_tokens": self.prompt_tokens,
                "reused_tokens": sum(answer.reused_tokens for answer in self.answers),
                **summary_of(engine.metrics.totals(), sum(answer.seconds for answer in self.answers)),
                "prompt_seconds": sum(answer.prompt_seconds for answer in self.answers),
            }
            say(summary_text(summary))
        if self.args.metrics is not None:
            write_file("--metrics", self.args.metrics, json_text(engine.metrics.snapshot()))
