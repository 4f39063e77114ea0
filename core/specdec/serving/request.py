"""What a caller asks for and what it gets back. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from attrs import field, frozen
from attrs.converters import optional

from specdec.catalog import require_integer
from specdec.errors import UsageError
from specdec.round.completion import Completion, Finish
from specdec.sampling.options import EXTENDED_OPTIONS, MAX_LOGPROBS, options_in_use
from specdec.sampling.params import SamplingParams
from specdec.serving.grammar import Grammar
from specdec.serving.stops import MAX_STOP_STRINGS


def _token_ids(ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(ids)


def _strings(value: Any) -> tuple[Any, ...]:
    if isinstance(value, str):
        return (value,)
    try:
        return tuple(value)
    except TypeError:
        raise UsageError(f"stop is {value!r}; it must be a string or several") from None


@frozen(kw_only=True)
class Request:
    """One generation request.

    prompt: token ids, at least one. stop_ids: token ids that end the output; None takes the checkpoint's. max_new_tokens: output
    budget, at least 1; the context may end a request earlier. draft_tokens: most drafts per round for this request; None takes
    the round's. min_new_tokens: stop ids are forbidden while fewer tokens than this were emitted, so the earliest one is the
    token after them; budget and context may still end the request. ignore_eos: the checkpoint's stop ids end nothing, and are
    not forbidden either; other ``stop_ids`` still do. logprobs: 0 to 20, log-probabilities of each emitted token and of that
    many most probable ones under the target's unmodified distribution; None asks for none. prompt_logprobs: the same of each
    prompt token but the first, delivered with ``Progress``; such a request consumes its whole prompt even if a prefix
    checkpoint has the state already.

    stop: strings that end the output where its text contains one, at most 16; a single one need not be in a tuple. The output
    ends with the token whose text completes the string, and its text before it (``Emission.text``); see ``StopMatcher``. One
    that is complete before ``min_new_tokens`` tokens were emitted, its last token among them, ends nothing. The host has to read
    a token before the next one may be consumed, so rounds of such a request have no drafts, whatever ``draft_tokens`` says.

    grammar: what the text of the output must be (``Grammar``). Stop ids are allowed exactly where the text is complete, so an
    output that ends with STOP is valid; the budget, the context or a stop string may cut it anywhere. Only copied drafts are
    verified for such a request, each row under the grammar after its prefix; drafts of the drafter are not.

    output: tokens of this request that an earlier run emitted, when it is resumed. They are not emitted again; they count for
    the budget, penalties, minimum and stop strings. All but the last are consumed, the last is pending, and rounds go on as if
    nothing had happened: the words of a round depend on the seed and the committed position only. A request that takes earlier
    output as part of its ``prompt`` instead is another request: its first token is drawn without a round, with the first word
    of the position before it, and its output counts start at zero.

    Raises UsageError for an empty prompt, a token that is no integer, a budget below 1, a minimum above it, a number out of
    range, a stop string that is none or empty, too many of them, a grammar that is none, or an output that already fills the
    budget.
    """

    prompt: tuple[int, ...] = field(converter=_token_ids)
    sampling: SamplingParams = field(factory=SamplingParams)
    max_new_tokens: int = 128
    stop_ids: tuple[int, ...] | None = field(default=None, converter=optional(_token_ids))
    draft_tokens: int | None = None
    min_new_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = field(default=(), converter=_strings)
    output: tuple[int, ...] = field(default=(), converter=_token_ids)
    grammar: Grammar | None = None

    def __attrs_post_init__(self) -> None:
        if not self.prompt:
            raise UsageError("the prompt is empty; give at least one token of text")
        for name in ("prompt", "stop_ids", "output"):
            wrong = [token for token in getattr(self, name) or () if type(token) is not int]
            if wrong:
                raise UsageError(f"{name} holds {wrong[0]!r}; it takes token ids, which are integers")
        require_integer("max_new_tokens", self.max_new_tokens, 1, None, "a request is for at least one token")
        if self.draft_tokens is not None:
            require_integer("draft_tokens", self.draft_tokens, 0, None, "0 decodes without drafts")
        budget = f"the budget is max_new_tokens {self.max_new_tokens}"
        require_integer("min_new_tokens", self.min_new_tokens, 0, self.max_new_tokens, budget)
        if not isinstance(self.ignore_eos, bool):
            raise UsageError(f"ignore_eos is {self.ignore_eos!r}; it must be True or False")
        if self.logprobs is not None:
            require_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS, "0 gives those of emitted tokens alone")
        if self.prompt_logprobs is not None:
            why = "0 gives those of prompt tokens alone"
            require_integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS, why)
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise UsageError(f"grammar is {self.grammar!r}; it must be a Grammar, such as Grammar(kind='json')")
        self._check_stop()
        if len(self.output) >= self.max_new_tokens:
            raise UsageError(f"output holds {len(self.output)} tokens, but {budget}; raise it to resume this request")

    def _check_stop(self) -> None:
        for string in self.stop:
            if not isinstance(string, str):
                raise UsageError(f"stop holds {string!r}; it takes strings")
            if not string:
                raise UsageError("stop holds an empty string, which every text contains; give at least one character")
            if any("\ud800" <= character <= "\udfff" for character in string):
                raise UsageError(f"stop holds {string!r}, which is no text that UTF-8 can write; no output contains it")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise UsageError(
                f"stop holds {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are supported, for the host looks for each "
                "of them between two rounds"
            )

    @property
    def inputs(self) -> tuple[int, ...]:
        """Tokens consumed before the first round: the prompt, and earlier output but for its last token, which is pending."""
        return self.prompt + self.output[:-1]

    @property
    def options_in_use(self) -> Mapping[str, Any]:
        """Options that change something, by name."""
        return options_in_use(
            self.sampling,
            min_new_tokens=self.min_new_tokens,
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            stop=self.stop,
            grammar=self.grammar,
        )

    @property
    def extended(self) -> bool:
        """Whether rounds with this request must be extended ones."""
        return not self.options_in_use.keys().isdisjoint(EXTENDED_OPTIONS)


@frozen(kw_only=True)
class TokenLogprobs:
    """What the target thought of one token, emitted or of the prompt: natural logarithms of its own probabilities, before
    penalties, bias, temperature and filters.

    top: (token, log-probability) of the most probable ones, greatest first, the lowest id first among equals; as many as were
    asked for, or the whole vocabulary if it has fewer.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@frozen(kw_only=True)
class Progress:
    """Prompt tokens consumed so far of one request; with earlier output, its tokens but the last count as well.

    logprobs: None unless the request asked for ``prompt_logprobs``. Those of all its events in order are one for each prompt
    token from the second on, each delivered once even if the caller left a step unfinished and the prompt started again.
    """

    request: int
    consumed: int
    total: int
    logprobs: tuple[TokenLogprobs, ...] | None = None


class Emission(NamedTuple):
    """Tokens one round emitted for one request, with the round's record; finish is NONE while the request runs.

    A named tuple, for a batch makes one for each lane of every round.

    logprobs: one for each of ``tokens`` if the request asked for them, else None. forecasts: for each draft of the round the
    calibrated probability that it is accepted if the earlier ones are, from recipes whose rounds forecast, else None.

    text: what this emission adds to the output's text if the request has stop strings, else None. It lags behind ``tokens``
    while a character or what may become a stop string is incomplete; that is released with what settles it, at the latest with
    the emission that says why the request ended. All of a request's joined are the decoded tokens, cut where the stop string
    begins; ``finish`` is then STOP, which the round's record does not know. A resumed request goes on with the text that its
    earlier output had not released, whether or not a cancellation gave it out.

    error: why a request ended that could not be run on, one line, with FAULT; else None.
    """

    request: int
    tokens: tuple[int, ...]
    finish: Finish
    completion: Completion
    logprobs: tuple[TokenLogprobs, ...] | None = None
    forecasts: tuple[float, ...] | None = None
    text: str | None = None
    error: str | None = None


Event = Progress | Emission
