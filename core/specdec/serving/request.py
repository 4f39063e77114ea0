"""What a caller asks for and what it gets back. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import field, frozen
from attrs.converters import optional

from specdec.catalog import require_integer
from specdec.errors import UsageError
from specdec.round.completion import Completion, Finish
from specdec.sampling.params import SamplingParams


def _token_ids(ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(ids)


@frozen(kw_only=True)
class Request:
    """One generation request.

    prompt: token ids, at least one. stop_ids: token ids that end the output; None takes the checkpoint's. max_new_tokens: output
    budget, at least 1; the context may end a request earlier. draft_tokens: most drafts per round for this request; None takes
    the round's.

    Raises UsageError for an empty prompt, a token that is no integer, a budget below 1 or a negative draft ceiling.
    """

    prompt: tuple[int, ...] = field(converter=_token_ids)
    sampling: SamplingParams = field(factory=SamplingParams)
    max_new_tokens: int = 128
    stop_ids: tuple[int, ...] | None = field(default=None, converter=optional(_token_ids))
    draft_tokens: int | None = None

    def __attrs_post_init__(self) -> None:
        if not self.prompt:
            raise UsageError("the prompt is empty; give at least one token of text")
        for name in ("prompt", "stop_ids"):
            wrong = [token for token in getattr(self, name) or () if type(token) is not int]
            if wrong:
                raise UsageError(f"{name} holds {wrong[0]!r}; it takes token ids, which are integers")
        require_integer("max_new_tokens", self.max_new_tokens, 1, None, "a request is for at least one token")
        if self.draft_tokens is not None:
            require_integer("draft_tokens", self.draft_tokens, 0, None, "0 decodes without drafts")


@frozen(kw_only=True)
class Progress:
    """Prompt tokens consumed so far of one request."""

    request: int
    consumed: int
    total: int


@frozen(kw_only=True)
class Emission:
    """Tokens one round emitted for one request, with the round's record. finish is NONE while the request runs."""

    request: int
    tokens: tuple[int, ...]
    finish: Finish
    completion: Completion


Event = Progress | Emission
