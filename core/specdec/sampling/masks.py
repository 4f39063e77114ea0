"""Grammar masks: which tokens each row of a verification may emit, one bit per token.

Row j of a lane decides the token after the pending token and its first j drafts, so its mask is that of the grammar after exactly
those. A forbidden token has probability 0 under the target's law; a draft that is forbidden is therefore rejected like any
other, and the correction is drawn from what is allowed. Which rows there are, and what their bits say, is the host's work
(``specdec.serving.grammar``).

Bit v % 32 of word v // 32 is token v, the lowest bit first: the layout of xgrammar, llguidance and vLLM.

Letters: B lanes, W verified rows, R slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.state.requests import Lanes

_BITS = 32


def mask_words(vocab_size: int) -> int:
    """32-bit words of one mask."""
    return -(-vocab_size // _BITS)


def forbid(logits: Tensor, words: Tensor, vocab_size: int) -> Tensor:
    """Logits with −inf added where the mask's bit is 0.

    Args:
        logits: [B, W, at least V], any floating dtype.
        words: [B, W, ceil(V / 32)] int32; bits from V on mean nothing.
        vocab_size: V; ids from here on are padding and are dropped.

    Returns:
        [B, W, V] in float64 for float64 logits, else float32; new storage. A NaN logit stays NaN, forbidden or not, and a row
        of which nothing is allowed has no law. Capturable.
    """
    bit = torch.arange(_BITS, dtype=torch.int32, device=words.device)
    allowed = ((words.unsqueeze(-1) >> bit) & 1).flatten(2)[..., :vocab_size] > 0
    # added, not written over: a NaN must stay visible
    return logits[..., :vocab_size] + torch.where(allowed, 0.0, -torch.inf)


class MaskFrames:
    """Masks of every slot's verified rows, [R + 1, W_max, ceil(V / 32)] int32 on the device; the spare slot allows everything.

    The host writes a slot's rows before it submits the round that reads them; the copy to the device follows the rounds before it
    in the stream's order. Rows of a slot may be written while one round that reads earlier ones is still in flight, not two.
    """

    def __init__(self, *, slots: int, width: int, vocab_size: int, device: torch.device) -> None:
        self.width = width
        self.vocab_size = vocab_size
        shape = (slots + 1, width, mask_words(vocab_size))
        self.words = torch.full(shape, -1, dtype=torch.int32, device=device)
        # two of each: the copy for a queued round may still be reading the other
        pinned = device.type == "cuda"
        self._hosts = [torch.full(shape, -1, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._turn = [0] * (slots + 1)

    def write(self, slot: int, rows: Sequence[bytes]) -> None:
        """Sets the masks of a slot's first rows and allows everything in the rows behind them. Host side, before a round.

        rows: at most W_max masks of ceil(V / 32) little-endian 32-bit words each. Raises ValueError for more rows or another
        length.
        """
        size = 4 * self.words.shape[2]
        if len(rows) > self.width:
            raise ValueError(f"{len(rows)} masks for slot {slot}: a round verifies at most {self.width} rows")
        wrong = [len(row) for row in rows if len(row) != size]
        if wrong:
            raise ValueError(f"a mask of {wrong[0]} bytes for slot {slot}: {self.vocab_size} tokens take {size}")
        self._turn[slot] ^= 1
        host = self._hosts[self._turn[slot]][slot]
        host.fill_(-1)
        if rows:
            host[: len(rows)] = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.int32).view(len(rows), -1)
        self.words[slot].copy_(host, non_blocking=True)

    def clear(self, slot: int) -> None:
        """Allows everything in all rows of a slot, for requests without grammar. Host side, between rounds."""
        self.words[slot].fill_(-1)

    def apply(self, lanes: Lanes, logits: Tensor) -> Tensor:
        """Logits [B, W, V] with each lane's masks applied; see ``forbid``. logits: [B, W, at least V]. Capturable."""
        words = self.words.index_select(0, lanes.slots)[:, : logits.shape[1]]
        return forbid(logits, words, self.vocab_size)
