"""Log-probabilities of emitted tokens, read from the rows that decided them.

What is reported is the target's own distribution: the log-softmax of its raw logits at that row, before penalties, bias,
temperature and filters. So the numbers do not depend on a request's sampling options, and a token that was accepted, corrected
or drawn as bonus has the number that plain decoding would have reported.

They travel beside the completion records: two frames that alternate by round, one row per slot, persistent; written in the
round, read by the host only if somebody asked.
"""

from collections.abc import Sequence

import torch
from attrs import field, frozen
from torch import Tensor

from specdec.sampling.options import MAX_LOGPROBS

LogprobColumn = tuple[float, list[tuple[int, float]]]
"""One row as the host reads it: the chosen token's log-probability, and (token, log-probability) of the greatest."""


@frozen(kw_only=True, eq=False)
class RankedLogprobs:
    """Log-probabilities of some rows."""

    chosen: Tensor = field()
    """[B, W] float32, of the token given for the row."""
    values: Tensor = field()
    """[B, W, n] float32, greatest first."""
    tokens: Tensor = field()
    """[B, W, n] int64, whose they are; the lowest id first among equal logits."""


def ranked_logprobs(logits: Tensor, tokens: Tensor, count: int) -> RankedLogprobs:
    """Log-softmax of every row: of its token and of the ``count`` most probable ones.

    Computed in float64 for float64 logits, else in float32, and rounded to float32 at the end.

    Args:
        logits: [B, W, V] of any floating dtype, padding ids left out.
        tokens: [B, W] int64; a negative one (no token) reads as token 0, and its number means nothing.
        count: at most V.

    Returns:
        New storage. A row with a NaN is NaN. Does not synchronise.
    """
    if logits.dtype != torch.float64:
        logits = logits.to(torch.float32)
    # ranked by the logits: among tokens whose log-probabilities round to the same number their order still means something
    order = logits.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, tokens.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return RankedLogprobs(
        chosen=chosen.to(torch.float32), values=logprobs.gather(-1, order).to(torch.float32), tokens=order
    )


class LogprobFrames:
    """The persistent buffers, [2 · (R + 1), W_max, …]; row frame · (R + 1) + slot, as completion frames have them."""

    def __init__(self, *, slots: int, width: int, vocab_size: int, device: torch.device) -> None:
        self.slots = slots
        self.count = min(MAX_LOGPROBS, vocab_size)
        self.vocab_size = vocab_size
        rows = 2 * (slots + 1)
        self.chosen = torch.zeros(rows, width, dtype=torch.float32, device=device)
        self.values = torch.zeros(rows, width, self.count, dtype=torch.float32, device=device)
        self.tokens = torch.zeros(rows, width, self.count, dtype=torch.int64, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of the three buffers."""
        return sum(t.numel() * t.element_size() for t in self.buffers)

    def write(self, rows: Tensor, logits: Tensor, tokens: Tensor) -> None:
        """Stores what a round's rows say. rows: [B] int64 buffer rows; logits: [B, W, V]; tokens: [B, W] int64. Capturable."""
        ranked = ranked_logprobs(logits[..., : self.vocab_size], tokens, self.count)
        width = tokens.shape[1]
        self.chosen[:, :width].index_copy_(0, rows, ranked.chosen)
        self.values[:, :width].index_copy_(0, rows, ranked.values)
        self.tokens[:, :width].index_copy_(0, rows, ranked.tokens)

    @property
    def buffers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Chosen, values and tokens."""
        return self.chosen, self.values, self.tokens

    def read(self, frame: int, slots: list[int], buffers: Sequence[Tensor] | None = None) -> list[list[LogprobColumn]]:
        """Columns of each slot. buffers: the host's copies; None reads ``self.buffers`` and synchronises with the device. Called
        between rounds only."""
        rows = torch.tensor([frame * (self.slots + 1) + slot for slot in slots], dtype=torch.int64)
        sources = self.buffers if buffers is None else buffers
        rows = rows.to(sources[0].device)
        chosen, values, tokens = (source.index_select(0, rows).tolist() for source in sources)
        return [
            [(one, list(zip(*top, strict=True))) for one, *top in zip(*columns, strict=True)]
            for columns in zip(chosen, tokens, values, strict=True)
        ]
