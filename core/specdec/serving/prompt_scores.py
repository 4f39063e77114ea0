"""Log-probabilities of prompt tokens, read chunk by chunk while the prompt is consumed.

Row i of a prompt, the logits after token i, scores token i + 1; so the first token has no score and the last row, which decides
the first emitted token, gives none. Numbers are those of ``specdec.sampling.logprobs``: the target's unmodified distribution.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from specdec.interfaces import Target
from specdec.sampling.logprobs import ranked_logprobs
from specdec.serving.request import Request, TokenLogprobs

#: Most logits that exist at once: memory for scores depends neither on the chunk nor on the prompt.
LOGITS_AT_ONCE = 1 << 22


class PromptScores:
    """Scores of one request's prompt. Kept while the prompt is consumed, restarts included: what was taken is not given again."""

    def __init__(self, request: Request, number: int) -> None:
        assert request.prompt_logprobs is not None
        self.number = number
        self.count = request.prompt_logprobs
        self.prompt = request.prompt
        self._taken = 0
        self._read: tuple[int, tuple[TokenLogprobs, ...]] = (0, ())

    @classmethod
    def of(cls, request: Request, number: int, known: PromptScores | None) -> PromptScores | None:
        """Scores for a request whose prompt is about to be consumed: ``known`` if they are this request's, else new ones.

        None if the request asks for none.
        """
        if request.prompt_logprobs is None:
            return None
        return known if known is not None and known.number == number else cls(request, number)

    def read(self, target: Target, start: int, end: int, tokens: Tensor) -> None:
        """Scores what the chunk just consumed decides, before anything else uses the target.

        start, end: inputs of the chunk; tokens: all inputs [total] int64, on the target's device.
        """
        stop = min(end, len(self.prompt) - 1)
        found: list[TokenLogprobs] = []
        step = max(LOGITS_AT_ONCE // target.vocab_size, 1)
        for first in range(max(start, self._taken), stop, step):
            rows = min(step, stop - first)
            logits = target.prefill_logits(rows, first - start)
            found.extend(self._scores(logits[:, : target.vocab_size], tokens[first + 1 : first + 1 + rows]))
        self._read = (max(stop, self._taken), tuple(found))

    def _scores(self, logits: Tensor, tokens: Tensor) -> Iterator[TokenLogprobs]:
        """logits: [T, V]; tokens: [T] int64. Synchronises with the device."""
        ranked = ranked_logprobs(logits.unsqueeze(0), tokens.unsqueeze(0), min(self.count, logits.shape[1]))
        columns = (t[0].tolist() for t in (tokens.unsqueeze(0), ranked.chosen, ranked.tokens, ranked.values))
        for token, chosen, ids, values in zip(*columns, strict=True):
            yield TokenLogprobs(token=token, logprob=chosen, top=tuple(zip(ids, values, strict=True)))

    def take(self) -> tuple[TokenLogprobs, ...]:
        """What the last ``read`` found, to be delivered now."""
        self._taken, found = self._read
        self._read = (self._taken, ())
        return found
