"""A loaded target and drafter on a test bench: admission by hand, rounds of any shape, and rewinding to an earlier image.

Everything is made by the recipe's hooks, as serving makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from specdec.catalog import RoundShape
from specdec.checkpoint.accepted import open_checkpoint
from specdec.declaration import Recipe, StateKind
from specdec.interfaces import Capacities, Drafter, Round, Target
from specdec.recipes import RecipeHooks, recipe_book
from specdec.round.allocation import PackedRows
from specdec.round.arena import Arena
from specdec.round.graphs import GraphPool, Program, Variant
from specdec.round.transaction import FirstToken
from specdec.sampling.params import SamplingParams
from specdec.sampling.sampler import sampler_for
from specdec.serving.prompt_rows import CapturedChunk, PromptRows
from specdec.state.store import StateStore
from specdec.testing.scripted import ScriptedDrafter

#: Stop ids a request of the suite may carry.
STOP_IDS = 8


def buffers(holder: object) -> list[Tensor]:
    """Every tensor that a store or a request table holds, in a fixed order."""
    found: list[Tensor] = []
    for value in vars(holder).values():
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, dict):
            found.extend(item for item in value.values() if isinstance(item, Tensor))
    return found


@frozen(kw_only=True, eq=False)
class Image:
    """Copies of all state of a bench."""

    copies: tuple[Tensor, ...]


@frozen(kw_only=True, eq=False)
class Bench:
    """Target, drafter and arena of one recipe. Slots own interleaved pages, so that no page table is the identity.

    chosen_by: [R, V] float64, logits that plain decoding chose by in its last round; see ``keep_rows``. pool: where graphs live;
    None if rounds are eager.
    """

    recipe: Recipe
    hooks: RecipeHooks
    directory: Path
    target: Target
    drafter: Drafter
    arena: Arena
    capacities: Capacities
    chosen_by: Tensor
    pool: GraphPool | None = None
    _held: dict[Any, Any] = field(factory=dict)

    @classmethod
    def prepare(
        cls,
        recipe: str | Recipe,
        directory: str | Path,
        *,
        dtype: str = "float64",
        slots: int = 4,
        context: int = 192,
        device: str = "cpu",
        captured: bool = False,
    ) -> Bench:
        """Loads a checkpoint folder through the hooks of the recipe's owner.

        captured: rounds run as CUDA graphs, captured when a shape is first asked for and kept for all tests.

        Raises CheckpointError or PluginError as they do, CaptureError for captured rounds on another device than CUDA.
        """
        hooks = recipe_book().hooks_for(recipe)
        record, where = hooks.recipe, torch.device(device)
        page = record.target_layout.page_tokens
        capacities = Capacities(
            slots=slots,
            context=context,
            pages=slots * -(-(context + record.max_draft_tokens + 1) // page),
            max_draft_tokens=record.max_draft_tokens,
            dtype=dtype,
            prefill_rows=context,
        )
        with open_checkpoint(record, directory) as checkpoint, torch.inference_mode():
            target = hooks.build_target_state(checkpoint=checkpoint, capacities=capacities, device=where)
            drafter = hooks.load_drafter(checkpoint=checkpoint, target=target, capacities=capacities)
            arena = Arena(
                slots=slots,
                max_draft_tokens=record.max_draft_tokens,
                stop_ids=STOP_IDS,
                device=where,
                extended=True,
                vocab_size=target.vocab_size,
                confidence_width=record.confidence_width,
                sampler=sampler_for(where),
            )
            chosen_by = torch.zeros(slots, target.vocab_size, dtype=torch.float64, device=where)
        return cls(
            recipe=record,
            hooks=hooks,
            directory=Path(directory),
            target=target,
            drafter=drafter,
            arena=arena,
            capacities=capacities,
            chosen_by=chosen_by,
            pool=GraphPool(where) if captured else None,
        )

    @property
    def stores(self) -> tuple[StateStore, StateStore]:
        """State of the target, state of the drafter."""
        return self.target.store, self.drafter.store

    @property
    def vocab(self) -> int:
        """V."""
        return self.target.vocab_size

    @property
    def spare(self) -> int:
        """The slot that dead lanes name."""
        return self.capacities.slots

    def where(self, *slots: int) -> Tensor:
        """Slots, or other numbers, as a tensor [n] int64 on the bench's device."""
        return torch.tensor(slots, dtype=torch.int64, device=self.arena.device)

    def capture(
        self,
        drafts: int,
        lanes: int,
        drafter: Drafter | None,
        rows: int = 0,
        *,
        variant: Variant | None = None,
        eager: bool = False,
    ) -> Round:
        """The round of ``lanes`` lanes with ``drafts`` drafts, as the plugin's or the core's hook builds it.

        rows: physical target rows, 0 for one for every draft and pending token. variant: the only one that the round will be
        asked for, captured if the bench captures; None or eager: it runs eagerly.
        """
        shape = RoundShape(batch=lanes, draft_tokens=drafts, verify_width=drafts + 1, packed_rows=rows)

        def build() -> Round:
            return self.hooks.capture_round(target=self.target, drafter=drafter, shape=shape, arena=self.arena)

        return self._program((shape, drafter), build, drafter, None if eager else variant)

    def first_token(
        self, lanes: int, drafter: Drafter | None, *, variant: Variant | None = None, eager: bool = False
    ) -> FirstToken:
        """Samples the first token of ``lanes`` requests. variant, eager: as for ``capture``."""

        def build() -> FirstToken:
            return FirstToken(target=self.target, drafter=drafter, arena=self.arena, batch=lanes)

        return self._program((lanes, drafter), build, drafter, None if eager else variant)

    def _program(self, key: Any, build: Callable[[], Any], drafter: Drafter | None, variant: Variant | None) -> Any:
        # other drafters are made for one test, and what they record or change happens in Python
        if self.pool is None or variant is None or not any(drafter is one for one in (None, self.drafter, self.script)):
            return build()
        key = (*key, variant)
        if key not in self._held:
            built = build()
            program: Program = built.program
            program.capture(self.pool, [variant])
            self._held[key] = built
        return self._held[key]

    @property
    def script(self) -> ScriptedDrafter:
        """A scripted drafter around the bench's own: always the same one, so that rounds with it are captured once."""
        key = ("script", self.drafter)
        if key not in self._held:
            self._held[key] = ScriptedDrafter(
                self.drafter, slots=self.capacities.slots, max_draft_tokens=self.recipe.max_draft_tokens
            )
        return self._held[key]

    def keep_rows(self, logits: Tensor) -> Tensor:
        """Copies logits [B, 1, V] of plain decoding to where they outlast the round, captured or not; returns them."""
        rows = logits[:, 0, : self.vocab]
        self.chosen_by[: rows.shape[0]].copy_(rows)
        return logits

    # --- requests ------------------------------------------------------------------------------------------------

    def reset(self, slot: int) -> None:
        """Gives a slot its initial state and its own pages."""
        for store in self.stores:
            store.reset(slot)
            reach = store.page_table.shape[1]
            store.set_pages(slot, range(1 + slot, 1 + slot + reach * self.capacities.slots, self.capacities.slots))

    def admit(
        self,
        slot: int,
        prompt: Sequence[int],
        *,
        budget: int = 64,
        chunks: Iterable[int] = (),
        output: Sequence[int] = (),
        **entry: Any,
    ) -> None:
        """Resets a slot, consumes the prompt in chunks of the given sizes (the last takes the rest) and writes the
        request's row.

        output: tokens to take as emitted already; all but the last are consumed with the prompt, no first token is
        sampled. entry: as for ``enter``.
        """
        self.reset(slot)
        where = self.where(slot)
        inputs = [*prompt, *output[:-1]]
        sizes = iter(chunks)
        start = 0
        while start < len(inputs):
            size = next(sizes, len(inputs) - start)
            self.consume(where, inputs[start : start + size], start)
            start += size
        self.enter(slot, prompt, budget=budget, output=output, **entry)

    def enter(
        self,
        slot: int,
        prompt: Sequence[int],
        *,
        budget: int,
        output: Sequence[int] = (),
        stops: Sequence[int] = (),
        request: int | None = None,
        epoch: int = 1,
        min_new_tokens: int = 0,
        **sampling: Any,
    ) -> None:
        """Writes the row of a request whose prompt is consumed. sampling: fields of ``SamplingParams``."""
        self.arena.requests.admit(
            slot,
            request=slot + 100 if request is None else request,
            epoch=epoch,
            consumed=len(prompt) + max(len(output) - 1, 0),
            budget=budget,
            sampling=SamplingParams(**sampling),
            stop_ids=tuple(stops),
            prompt=prompt,
            output=output,
            min_new_tokens=min_new_tokens,
        )

    def consume(self, where: Tensor, chunk: Sequence[int], start: int) -> None:
        """One prompt chunk through target and drafter, as serving does it."""
        rows = PromptRows(self.target, self.drafter, self.arena.device)
        watched = any("prefill" in vars(one) for one in (self.target, self.drafter))
        if self.pool is None or watched:
            # a test that looks into prompts has put something in the place of a method
            rows.run(self.where(*chunk), where, start)
            return
        key = ("prompt", len(chunk))
        if key not in self._held:
            self._held[key] = CapturedChunk(rows, len(chunk))
        self._held[key].capture(self.pool, start == 0, self.spare)
        self._held[key].replay(chunk, int(where), start)

    def copy_pages(self, source: int, destination: int) -> None:
        """Gives a slot fresh pages with the contents of another slot's."""
        for store in self.stores:
            ours, theirs = store.page_table[destination], store.page_table[source]
            for declared in store.layout.fields:
                if declared.kind is StateKind.PAGED:
                    tensor = store.tensors[declared.name]
                    tensor[:, ours] = tensor[:, theirs]

    def move(
        self, source: int, destination: int, target: Mapping[str, Tensor], drafter: Mapping[str, Tensor], consumed: int
    ) -> None:
        """Restores snapshots of one slot's target and drafter into another one, with copies of its pages."""
        self.reset(destination)
        self.copy_pages(source, destination)
        slot, length = self.where(destination), self.where(consumed)
        self.target.restore(slot, target, length)
        self.drafter.restore(slot, drafter, length)

    # --- images --------------------------------------------------------------------------------------------------

    def _buffers(self) -> list[Tensor]:
        requests = self.arena.requests
        holders = (*self.stores, requests, requests.options, self.arena.logprobs, self.arena.forecasts)
        return [self.arena.frames, *(tensor for holder in holders if holder for tensor in buffers(holder))]

    def image(self) -> Image:
        """Copies all state: both stores, page tables, request table, frames."""
        return Image(copies=tuple(tensor.clone() for tensor in self._buffers()))

    def rewind(self, image: Image) -> None:
        """Puts an image back."""
        for tensor, copy in zip(self._buffers(), image.copies, strict=True):
            tensor.copy_(copy)


@contextmanager
def altered_verification(target: Target, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Rounds see other target logits for the length of a block: ``change`` of [B, W, V], which packed rows are taken from."""
    verify, verify_rows = target.verify, getattr(target, "verify_rows", None)
    with replaced(target, "verify", lambda tokens, lanes: change(verify(tokens, lanes))):
        if verify_rows is None:
            yield
            return

        def packed(tokens: Tensor, rows: PackedRows) -> Tensor:
            return rows.gather(change(rows.scatter(verify_rows(tokens, rows))))

        with replaced(target, "verify_rows", packed):
            yield


@contextmanager
def replaced(owner: object, name: str, value: Any) -> Iterator[Any]:
    """Gives an object another method for the length of a block. Yields the original."""
    original, own = getattr(owner, name), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield original
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
