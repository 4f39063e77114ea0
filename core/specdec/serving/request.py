"""What a caller asks for and what it gets back. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import field, frozen
from attrs.converters import optional

from specdec.catalog import require_integer
from specdec.errors import UsageError
from specdec.round.completion import Completion, Finish
from specdec.sampling.options import EXTENDED_OPTIONS, MAX_LOGPROBS, options_in_use
from specdec.sampling.params import SamplingParams


def _token_ids(ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(ids)


@frozen(kw_only=True)
class Request:
    """One generation request.

    prompt: token ids, at least one. stop_ids: token ids that end the output; None takes the checkpoint's. max_new_tokens: output
    budget, at least 1; the context may end a request earlier. draft_tokens: most drafts per round for this request; None takes
    the round's. min_new_tokens: stop ids are forbidden while fewer tokens than this were emitted, so the earliest one is the
    token after them; budget and context may still end the request. ignore_eos: the checkpoint's stop ids end nothing, and are
    not forbidden either; other ``stop_ids`` still do. logprobs: 0 to 20, log-probabilities of each emitted token and of that
    many most probable ones under the target's unmodified distribution; None asks for none.

    output: tokens of this request that an earlier run emitted, when it is resumed. They are not emitted again; they count for
    the budget, penalties and minimum. All but the last are consumed, the last is pending, and rounds go on as if nothing had
    happened: the words of a round depend on the seed and the committed position only. A request that takes earlier output as
    part of its ``prompt`` instead is another request: its first token is drawn without a round, with the first word of the
    position before it, and its output counts start at zero.

    Raises UsageError for an empty prompt, a token that is no integer, a budget below 1, a minimum above it, a number out of
    range, or an output that already fills the budget.
    """

    prompt: tuple[int, ...] = field(converter=_token_ids)
    sampling: SamplingParams = field(factory=SamplingParams)
    max_new_tokens: int = 128
    stop_ids: tuple[int, ...] | None = field(default=None, converter=optional(_token_ids))
    draft_tokens: int | None = None
    min_new_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    output: tuple[int, ...] = field(default=(), converter=_token_ids)

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
        if len(self.output) >= self.max_new_tokens:
            raise UsageError(f"output holds {len(self.output)} tokens, but {budget}; raise it to resume this request")

    @property
    def inputs(self) -> tuple[int, ...]:
        """Tokens consumed before the first round: the prompt, and earlier output but for its last token, which is pending."""
        return self.prompt + self.output[:-1]

    @property
    def options_in_use(self) -> Mapping[str, Any]:
        """Options that change something, by name."""
        return options_in_use(
            self.sampling, min_new_tokens=self.min_new_tokens, ignore_eos=self.ignore_eos, logprobs=self.logprobs
        )

    @property
    def extended(self) -> bool:
        """Whether rounds with this request must be extended ones."""
        return not self.options_in_use.keys().isdisjoint(EXTENDED_OPTIONS)


@frozen(kw_only=True)
class Progress:
    """Prompt tokens consumed so far of one request."""

    request: int
    consumed: int
    total: int


@frozen(kw_only=True)
class TokenLogprobs:
    """What the target thought of one emitted token: natural logarithms of its own probabilities, before penalties, bias,
    temperature and filters.

    top: (token, log-probability) of the most probable ones, greatest first, the lowest id first among equals; as many as were
    asked for, or the whole vocabulary if it has fewer.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@frozen(kw_only=True)
class Emission:
    """Tokens one round emitted for one request, with the round's record. finish is NONE while the request runs.

    logprobs: one for each of ``tokens`` if the request asked for them, else None.
    """

    request: int
    tokens: tuple[int, ...]
    finish: Finish
    completion: Completion
    logprobs: tuple[TokenLogprobs, ...] | None = None


Event = Progress | Emission
