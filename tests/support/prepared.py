"""A loaded target and drafter with an arena, and admission by hand, for tests that drive rounds themselves."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from specdec.interfaces import Capacities
from specdec.round.arena import Arena
from specdec.sampling.params import SamplingParams
from specdec.serving.prompt_rows import PromptRows


@frozen(kw_only=True, eq=False)
class Prepared:
    """Target, drafter and arena on one page pool per store."""

    target: Any
    drafter: Any
    arena: Arena
    capacities: Capacities

    def admit(
        self,
        slot: int,
        prompt: list[int],
        *,
        budget: int = 64,
        chunks: tuple[int, ...] = (),
        stops=(),
        output: tuple[int, ...] = (),
        min_new_tokens: int = 0,
        **sampling,
    ):
        """Resets a slot, reserves its pages, consumes the prompt in the given chunk sizes and writes its request row.

        output: what the request emitted before; all but its last token are consumed with the prompt.
        """
        for store in (self.target.store, self.drafter.store):
            store.reset(slot)
            reach = store.page_table.shape[1]
            store.set_pages(slot, range(1 + slot * reach, 1 + (slot + 1) * reach))
        prompts = PromptRows(self.target, self.drafter, self.arena.device)
        inputs = [*prompt, *output[:-1]]
        start, sizes = 0, list(chunks) or [len(inputs)]
        while start < len(inputs):
            size = sizes.pop(0) if sizes else len(inputs) - start
            chunk = inputs[start : start + size]
            prompts.consume(chunk, slot, start)
            start += len(chunk)
        self.arena.requests.admit(
            slot,
            request=slot + 100,
            epoch=1,
            consumed=len(inputs),
            budget=budget,
            sampling=SamplingParams(**sampling),
            stop_ids=tuple(stops),
            prompt=prompt,
            output=output,
            min_new_tokens=min_new_tokens,
        )
