"""What a caller asks for and what it gets back. Torch-free."""

from __future__ import annotations

from attrs import field, frozen

from specdec.errors import UsageError
from specdec.round.completion import Completion, Finish
from specdec.sampling.params import SamplingParams


@frozen(kw_only=True)
class Request:
    """One generation request.

    prompt: token ids, at least one. stop_ids: token ids that end the output; None takes the checkpoint's. max_new_tokens: output
    budget, at least 1; the context may end a request earlier. draft_tokens: most drafts per round for this request; None takes
    the round's.

    Raises UsageError for an empty prompt, a budget below 1 or a negative draft ceiling.
    """

    prompt: tuple[int, ...] = field(converter=tuple)
    sampling: SamplingParams = field(factory=SamplingParams)
    max_new_tokens: int = 128
    stop_ids: tuple[int, ...] | None = None
    draft_tokens: int | None = None

    def __attrs_post_init__(self) -> None:
        if not self.prompt:
            raise UsageError("the prompt is empty; give at least one token of text")
        if self.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens is {self.max_new_tokens}; allowed: 1 or more")
        if self.draft_tokens is not None and self.draft_tokens < 0:
            raise UsageError(f"draft_tokens is {self.draft_tokens}; allowed: 0 or more")


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
