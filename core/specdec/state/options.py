"""Device state of the sampling options that ordinary rounds leave out: what each slot's penalties and biases are made of.

Sizes at V vocabulary ids and R slots: 9 · (R + 1) · V bytes, allocated only if the preparation asks for these options.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.sampling.params import SamplingParams
from specdec.sampling.penalties import counts_before, penalise
from specdec.state.upload import upload

# columns of ``factors``
PRESENCE, FREQUENCY, REPETITION = range(3)


class OptionTable:
    """Occurrences and biases per slot; row R is the neutral spare row of dead lanes.

    prompt: [R + 1, V] bool, tokens of the prompt; counts: [R + 1, V] int32, of the committed output; bias: [R + 1, V] float32;
    factors: [R + 1, 3] float32, presence, frequency and repetition penalty. Rows of requests without these options have neutral
    factors and no bias; their occurrences then change nothing and are not kept.
    """

    def __init__(self, *, slots: int, vocab_size: int, device: torch.device) -> None:
        self.device = device
        self.vocab_size = vocab_size
        shape = (slots + 1, vocab_size)
        self.prompt = torch.zeros(shape, dtype=torch.bool, device=device)
        self.counts = torch.zeros(shape, dtype=torch.int32, device=device)
        self.bias = torch.zeros(shape, dtype=torch.float32, device=device)
        self._neutral = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float32).to(device)
        self.factors = self._neutral.repeat(slots + 1, 1)

    @property
    def nbytes(self) -> int:
        """Bytes of all tables."""
        return sum(t.numel() * t.element_size() for t in (self.prompt, self.counts, self.bias, self.factors))

    # --- host side, between rounds -------------------------------------------------------------------------------

    def admit(self, slot: int, sampling: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Starts a slot: the prompt and what was already emitted are counted here, once."""
        self.retire(slot)
        if not sampling.shapes_logits:
            return
        factors = [sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty]
        self.factors[slot] = upload(factors, torch.float32, self.device)
        self.prompt[slot].index_fill_(0, self._ids(prompt), True)
        emitted = torch.bincount(torch.tensor(list(output), dtype=torch.int64), minlength=self.vocab_size)
        self.counts[slot] = emitted.to(torch.int32).to(self.device)
        tokens = self._ids([token for token, _ in sampling.logit_bias])
        values = upload([value for _, value in sampling.logit_bias], torch.float32, self.device)
        self.bias[slot].index_copy_(0, tokens, values)

    def retire(self, slot: int) -> None:
        """Makes a slot neutral."""
        self.prompt[slot] = False
        self.counts[slot] = 0
        self.bias[slot] = 0.0
        self.factors[slot] = self._neutral

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return upload(list(tokens), torch.int64, self.device)

    # --- device side, inside a round -----------------------------------------------------------------------------

    def penalise(self, slots: Tensor, logits: Tensor, drafts: Tensor) -> Tensor:
        """Logits [B, W, V] after penalties and bias, each row at its own prefix. slots: [B]; drafts: [B, W − 1] int64."""
        factors = self.factors.index_select(0, slots)
        return penalise(
            logits,
            prompt=self.prompt.index_select(0, slots),
            counts=counts_before(self.counts.index_select(0, slots), drafts),
            presence=factors[:, PRESENCE],
            frequency=factors[:, FREQUENCY],
            repetition=factors[:, REPETITION],
            bias=self.bias.index_select(0, slots),
        )

    def commit(self, slots: Tensor, tokens: Tensor, emitted: Tensor) -> None:
        """Counts what a round emitted. slots, emitted: [B]; tokens: [B, W] int64, the first ``emitted`` of a lane are its own."""
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        once = (columns < emitted.unsqueeze(1)).to(torch.int32)
        index = slots.unsqueeze(1) * self.vocab_size + tokens.clamp(0, self.vocab_size - 1)
        self.counts.view(-1).scatter_add_(0, index.view(-1), once.view(-1))
