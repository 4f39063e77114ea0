"""Makes the memory plan of a preparation from declarations alone: no weights, no device, no torch.

What the core allocates follows from the catalog and the layouts and is computed here, buffer by buffer, as ``specdec.round``,
``specdec.state`` and ``specdec.sampling`` allocate it; what a model holds beside its state is the plugin's to declare
(``Recipe.memory``). Tests compare every item with real allocations.

Letters: R request slots, B lanes, K draft tokens, W = K + 1, V vocabulary.

Declaration layer: the standard library, attrs and other declaration modules only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen

from specdec.catalog import RoundShape, batch_capacities, chunk_sizes
from specdec.declaration import Recipe
from specdec.errors import UsageError
from specdec.held import HeldTensor, ModelMemory
from specdec.interfaces import Capacities
from specdec.layout import StateKind, StateLayout
from specdec.memory import KINDS, MemoryItem, MemoryPlan, ShapeMemory
from specdec.memory_remedies import remedies
from specdec.named_functions import call_named
from specdec.preparation import PreparationConfig
from specdec.snapshot_sizes import checkpoint_pages, page_bytes, snapshot_bytes

if TYPE_CHECKING:
    from specdec.checkpoint.reader import Checkpoint

__all__ = ["capacities_for", "ordinary_shapes", "plan_memory", "prepared_shapes", "state_layouts"]

#: Granularity of the CUDA caching allocator: every tensor takes a multiple of it.
CUDA_BLOCK = 512
#: Workspaces of the matrix library, one for each of the two streams that multiply; as on the newest GPUs.
_LIBRARY_BYTES = 2 * (32 << 20)
#: Bytes in use for each logit of a round: the logits, their law with its sort and sums, and the copies in between.
_LOGIT_BYTES = 48
# Sizes that their modules, which need torch, have as well; tests hold them together.
_STOP_IDS = 8
_INTEGERS, _FLOATS, _FACTORS = 11, 3, 3
_METADATA = 16
_MAX_LOGPROBS = 20
_MASK_BITS = 32


def capacities_for(recipe: Recipe, config: PreparationConfig, dtype: str) -> Capacities:
    """What the options ask to hold; pages for prefix checkpoints come on top. dtype: torch dtype name of activations."""
    slots = batch_capacities(config.concurrency)[-1]
    reach = -(-(config.context + recipe.max_draft_tokens + 1) // recipe.target_layout.page_tokens)
    return Capacities(
        slots=slots,
        context=config.context,
        pages=config.pages or slots * reach,
        max_draft_tokens=recipe.max_draft_tokens,
        dtype=dtype,
        prefill_rows=config.prefill_tokens[-1],
        draft_tokens=config.max_draft_tokens,
    )


def prepared_shapes(config: PreparationConfig) -> tuple[RoundShape, ...]:
    """Round shapes that this configuration prepares; without speculation, plain decoding at every batch capacity."""
    return config.shapes() if config.speculative else _one_token_shapes(config)


def ordinary_shapes(config: PreparationConfig) -> tuple[RoundShape, ...]:
    """Rounds without draft work that are prepared beside those of ``prepared_shapes``, for a start with zero drafts."""
    return _one_token_shapes(config) if config.speculative and not config.mtp_only else ()


def _one_token_shapes(config: PreparationConfig) -> tuple[RoundShape, ...]:
    return tuple(
        RoundShape(batch=batch, draft_tokens=0, verify_width=1) for batch in batch_capacities(config.concurrency)
    )


def plan_memory(
    recipe: Recipe,
    config: PreparationConfig,
    *,
    settings: Mapping[str, Any] | None = None,
    checkpoint: Checkpoint | None = None,
    dtype: str = "bfloat16",
    device: str = "cuda",
    kernels: bool | None = None,
    budget: int | None = None,
    budget_source: str = "memory_bytes",
    subject: str | None = None,
) -> MemoryPlan:
    """The plan of one preparation.

    settings: contents of a checkpoint's ``config.json``; None plans for the recipe's own checkpoint. checkpoint: its open
    headers, which say how weights are stored; None takes them to be stored as the recipe's. device: ``cpu`` or ``cuda``. kernels:
    whether kernels read experts as they are stored; None if they may, on CUDA below float64. budget:
    bytes that may be used, None for ``config.memory_bytes``; budget_source: what messages call it. subject: whose plan it is.

    Raises UsageError if the recipe declares no memory or the context exceeds the checkpoint's, CheckpointError for settings that
    the plugin refuses, CapacityError for a snapshot budget below one checkpoint. Whether the plan fits is its ``check``.
    """
    if kernels is None:
        kernels = device == "cuda" and dtype != "float64"
    declared = _declared(recipe, settings, checkpoint, capacities_for(recipe, config, dtype), kernels)
    limit = declared.context_limit
    if limit is not None and config.context > limit:
        raise UsageError(f"context is {config.context}; the model's max_position_embeddings is {limit}; lower it")
    if subject is None:
        subject = str(checkpoint.directory) if checkpoint is not None else recipe.checkpoint

    def plan(changed: PreparationConfig) -> MemoryPlan:
        capacities = capacities_for(recipe, changed, dtype)
        model = declared if changed is config else _declared(recipe, settings, checkpoint, capacities, kernels)
        builder = _Builder(recipe=recipe, config=changed, capacities=capacities, model=model, device=device)
        return MemoryPlan(
            recipe=recipe.name,
            subject=subject,
            device=device,
            dtype=dtype,
            items=builder.items(),
            shapes=builder.shape_memory(),
            budget=config.memory_bytes if budget is None else budget,
            budget_source=budget_source,
        )

    found = plan(config)
    if not found.shortage:
        return found
    layouts = [declared.target_layout, *([declared.drafter_layout] if config.speculative else [])]
    least = sum(page_bytes(layout) + snapshot_bytes(layout) for layout in layouts)
    fits = remedies(recipe, config, lambda changed: not plan(changed).shortage, least_snapshot=least)
    return evolve(found, remedies=fits)


def state_layouts(
    recipe: Recipe,
    config: PreparationConfig,
    *,
    settings: Mapping[str, Any] | None = None,
    checkpoint: Checkpoint | None = None,
    dtype: str = "bfloat16",
) -> tuple[StateLayout, ...]:
    """Layouts of the target and, where it is prepared, the drafter, at the sizes of a checkpoint; arguments as ``plan_memory``.

    Those that the recipe declares where it declares no memory, which are its own checkpoint's.
    """
    layouts = (recipe.target_layout, recipe.drafter_layout)
    if recipe.memory is not None:
        declared = _declared(recipe, settings, checkpoint, capacities_for(recipe, config, dtype), False)
        layouts = (declared.target_layout, declared.drafter_layout)
    return layouts if config.speculative else layouts[:1]


def _declared(
    recipe: Recipe,
    settings: Mapping[str, Any] | None,
    checkpoint: Checkpoint | None,
    capacities: Capacities,
    kernels: bool,
) -> ModelMemory:
    if recipe.memory is None:
        raise UsageError(
            f"recipe {recipe.name!r} declares no memory, so nothing can be planned; its plugin must name a function in "
            "Recipe.memory"
        )
    found = call_named(recipe, "memory", settings, checkpoint, capacities, kernels, returns=ModelMemory)
    if recipe.target_recipe is not None:
        # what was declared beside the target is the drafter of the target's own recipe
        found = evolve(found, drafter_layout=recipe.drafter_layout, drafter=(), draft_constants=0)
    if recipe.drafter_memory is not None:
        found = call_named(recipe, "drafter_memory", found, capacities, returns=ModelMemory)
    return found


@frozen(kw_only=True)
class _Builder:
    """Items of one plan. ``sizes`` collects the tensors of the device as (count, bytes of one), for what the allocator adds."""

    recipe: Recipe
    config: PreparationConfig
    capacities: Capacities
    model: ModelMemory
    device: str
    sizes: list[tuple[int, int]] = field(factory=list, init=False)

    # --- parts ---------------------------------------------------------------------------------------------------------

    @property
    def speculative(self) -> bool:
        return self.config.speculative

    @property
    def rows(self) -> int:
        """R + 1: slots and the spare one."""
        return self.capacities.slots + 1

    @property
    def width(self) -> int:
        """W_max, whatever is prepared."""
        return self.recipe.max_draft_tokens + 1

    @property
    def captures(self) -> bool:
        """Whether rounds are captured as graphs."""
        return self.device != "cpu" and self.config.cuda_graphs

    @property
    def owners(self) -> tuple[tuple[str, StateLayout, tuple[HeldTensor, ...]], ...]:
        target = ("target", self.model.target_layout, self.model.target)
        if not self.speculative:
            return (target,)
        return target, ("drafter", self.model.drafter_layout, self.model.drafter)

    @property
    def layouts(self) -> list[StateLayout]:
        return [layout for _, layout, _ in self.owners]

    @property
    def extra_pages(self) -> int:
        """Pages of each pool for prefix checkpoints."""
        if not self.config.snapshot_bytes:
            return 0
        return checkpoint_pages(self.layouts, self.config.snapshot_bytes)

    def items(self) -> tuple[MemoryItem, ...]:
        """All items, by kind."""
        found = [
            *self._weights(),
            *self._state(),
            *self._requests(),
            *self._frames(),
            *self._rounds(),
            *self._scratch(),
            *self._boundary(),
            *self._reserved(),
            *self._host(),
        ]
        if self.device != "cpu":
            added = sum(count * (-size % CUDA_BLOCK) for count, size in self.sizes)
            detail = f"each tensor takes a multiple of {CUDA_BLOCK} bytes"
            found.append(MemoryItem(name="allocator rounding", bytes=added, kind="rounding", detail=detail))
        order = list(KINDS)
        return tuple(sorted((item for item in found if item.bytes), key=lambda item: order.index(item.kind)))

    def _item(self, name: str, kind: str, tensors: Iterable[tuple[int, int]], detail: str = "") -> MemoryItem:
        """An item of tensors given as (count, bytes of one)."""
        parts = list(tensors)
        self.sizes.extend(parts)
        total = sum(count * size for count, size in parts)
        return MemoryItem(name=name, bytes=total, kind=kind, detail=detail)

    def _weights(self) -> Iterable[MemoryItem]:
        for owner, _, held in self.owners:
            self.sizes.extend((tensor.count, tensor.each) for tensor in held)
            for name, (count, size) in _merged(held).items():
                tensors = f"{count} tensor{'s' if count != 1 else ''}"
                yield MemoryItem(name=f"{owner} {name}", bytes=size, kind="weights", detail=tensors)

    # --- state ---------------------------------------------------------------------------------------------------------

    def _state(self) -> Iterable[MemoryItem]:
        pages = self.capacities.pages + self.extra_pages
        for owner, layout, _ in self.owners:
            for one in layout.fields:
                size = one.bytes(self.rows, pages + 1, layout.max_draft_tokens, layout.page_tokens)
                if one.kind is StateKind.PAGED:
                    detail = f"{pages} pages of {layout.page_tokens} tokens and the trash page, {one.layers} layers"
                    yield self._item(f"{owner} {one.name}", "pages", [(1, size)], detail)
                else:
                    entries = one.rows(layout.max_draft_tokens)
                    shape = "×".join(str(extent) for extent in (one.layers, self.rows, entries, *one.shape))
                    yield self._item(
                        f"{owner} {one.name}", "state", [(1, size)], f"{one.kind.value} {shape} {one.dtype}"
                    )
            yield self._item(
                f"{owner} store tables", "tables", self._store_tables(layout), "page table, selection, faults"
            )

    def _store_tables(self, layout: StateLayout) -> Iterable[tuple[int, int]]:
        horizon = layout.max_draft_tokens + 1
        reach = -(-(self.capacities.context + horizon) // layout.page_tokens)
        yield 1, self.rows * reach * 8
        yield 2, self.rows * 8
        yield from ((1, one.extent * 8) for one in layout.fields if one.kind is StateKind.WINDOW)
        yield 1, 8

    def _requests(self) -> Iterable[MemoryItem]:
        table = [(1, self.rows * _INTEGERS * 8), (1, self.rows * _FLOATS * 4), (1, self.rows * _STOP_IDS * 8)]
        yield self._item("request table", "tables", table, f"{self.rows} rows")
        if self.config.extended_sampling:
            vocabulary = self.rows * self.model.vocab_size
            sizes = (vocabulary, 4 * vocabulary, 4 * vocabulary, _FACTORS * 4, self.rows * _FACTORS * 4)
            yield self._item("option tables", "tables", [(1, size) for size in sizes], "penalties and biases by slot")

    # --- rounds --------------------------------------------------------------------------------------------------------

    @property
    def _confidence(self) -> int:
        return self.recipe.confidence_width if self.speculative else 0

    def _frame_sizes(self) -> dict[str, list[int]]:
        rows = 2 * self.rows
        sizes = {"completion frames": [rows * (_METADATA + self.width) * 8]}
        if self._confidence:
            sizes["forecast frames"] = [rows * self._confidence * 4]
        if self.config.extended_sampling:
            ranked = rows * self.width * min(_MAX_LOGPROBS, self.model.vocab_size)
            sizes["log-probability frames"] = [rows * self.width * 4, ranked * 4, ranked * 8]
        return sizes

    @property
    def _mask_bytes(self) -> int:
        return self.rows * self.width * -(-self.model.vocab_size // _MASK_BITS) * 4 if self.config.grammar else 0

    def _frames(self) -> Iterable[MemoryItem]:
        for name, sizes in self._frame_sizes().items():
            yield self._item(name, "frames", [(1, size) for size in sizes], "two, alternating by round")
        yield self._item(
            "grammar masks", "frames", [(1, self._mask_bytes)], "a bit for each token of every verified row"
        )

    def _staging(self, shape: RoundShape) -> int:
        copies = shape.draft_tokens if self.recipe.supports_history_drafts else 0
        return 8 * (2 * shape.batch + 2 + (shape.batch * (1 + copies) if copies else 0))

    def _chunks(self) -> list[int]:
        """Staging buffers of captured prompt chunks: slot, start and tokens; twice where there are ordinary operations."""
        if not self.captures:
            return []
        sizes = [8 * (rows + 2) for rows in chunk_sizes(self.config.prefill_tokens, self.config.context)]
        return sizes * 2 if ordinary_shapes(self.config) else sizes

    def _programs(self) -> list[RoundShape]:
        """Shapes of all programs that have staging buffers and constants: rounds, ordinary ones, first tokens."""
        config = self.config
        return [*prepared_shapes(config), *ordinary_shapes(config), *_one_token_shapes(config)]

    def _constants(self, shape: RoundShape) -> list[tuple[int, int]]:
        padding = shape.batch * (self.width - shape.verify_width)
        calibration = shape.draft_tokens * self.model.draft_constants
        return [(1, shape.verify_width * 8), (1, padding * 8), (1, calibration)]

    def _rounds(self) -> Iterable[MemoryItem]:
        shapes = self._programs()
        staging = [self._staging(shape) for shape in shapes] + self._chunks()
        yield self._item("staging buffers", "rounds", [(1, size) for size in staging], f"{len(staging)} programs")
        constants = [part for shape in shapes for part in self._constants(shape)]
        yield self._item("round constants", "rounds", constants)

    def _scratch(self) -> Iterable[MemoryItem]:
        # views of an earlier, smaller buffer keep it, so every growth counts
        shapes = sorted(prepared_shapes(self.config), key=lambda shape: -shape.target_rows)
        for name, per_draft in (("draft_probs", self.model.vocab_size * 4), ("draft_tokens", 8)):
            held, grown = 0, []
            for shape in shapes:
                size = shape.batch * shape.draft_tokens * per_draft
                if size > held:
                    held = size
                    grown.append((1, size))
            yield self._item(f"scratch {name}", "scratch", grown, "of the greatest shape")

    def _boundary(self) -> Iterable[MemoryItem]:
        if self.device == "cpu" or not self.config.snapshot_bytes:
            return
        for owner, layout, _ in self.owners:
            fields = [f for f in layout.fields if f.kind not in (StateKind.PAGED, StateKind.RECORDS)]
            single = (StateKind.ROW, StateKind.COLUMNS)
            sizes = [f.layers * f.entry_bytes * (1 if f.kind in single else f.extent) for f in fields]
            slots = self.capacities.slots
            yield self._item(
                f"{owner} boundary state", "boundary", [(1, size * slots) for size in sizes], f"{slots} lanes"
            )

    def _reserved(self) -> Iterable[MemoryItem]:
        work = [shape.work for shape in self.shape_memory()]
        rows, lane = self.capacities.prefill_rows, self.model.lane_bytes
        chunk = rows * self.model.row_bytes + lane
        if self.captures:
            most = max([*work, chunk])
            detail = "estimated: graphs share it, so the greatest counts; measured once prepared"
            yield MemoryItem(name="graph pool", bytes=most, kind="graphs", detail=detail, estimated=True)
        elif self.device != "cpu":
            detail = "estimated: the greatest round or prompt chunk"
            yield MemoryItem(name="eager work", bytes=max([*work, chunk]), kind="work", detail=detail, estimated=True)
        if self.device != "cpu":
            detail = "estimated: matrix products, two streams"
            yield MemoryItem(
                name="library workspaces", bytes=_LIBRARY_BYTES, kind="work", detail=detail, estimated=True
            )
        pages = sum(layout.bytes(0, self.extra_pages) for layout in self.layouts)
        left = max(self.config.snapshot_bytes - pages, 0)
        yield MemoryItem(
            name="prefix checkpoint states", bytes=left, kind="snapshots", detail="snapshot_bytes less its pages"
        )
        yield MemoryItem(name="headroom", bytes=self.config.headroom_bytes, kind="headroom", detail="headroom_bytes")

    def _host(self) -> Iterable[MemoryItem]:
        # on a CPU the host reads frames where they are
        frames = 0 if self.device == "cpu" else sum(map(sum, self._frame_sizes().values()))
        staging = 2 * sum(self._staging(shape) for shape in self._programs())
        for name, size in (
            ("transfer frames", frames),
            ("staging copies", staging),
            ("mask copies", 2 * self._mask_bytes),
        ):
            yield MemoryItem(name=name, bytes=size, kind="host")

    def shape_memory(self) -> tuple[ShapeMemory, ...]:
        """What each shape of the catalog needs, in the catalog's order."""
        vocabulary, model = self.model.vocab_size, self.model
        state = sum(map(snapshot_bytes, self.layouts)) if self.config.snapshot_bytes else 0
        found = []
        for shape in prepared_shapes(self.config):
            drafts = shape.batch * shape.draft_tokens
            logits = shape.batch * shape.verify_width * vocabulary
            found.append(
                ShapeMemory(
                    batch=shape.batch,
                    draft_tokens=shape.draft_tokens,
                    verify_width=shape.verify_width,
                    target_rows=shape.target_rows,
                    staging=self._staging(shape),
                    constants=sum(count * size for count, size in self._constants(shape)),
                    scratch=drafts * (vocabulary * 4 + 8),
                    boundary=shape.batch * state,
                    work=logits * _LOGIT_BYTES + shape.target_rows * model.row_bytes + shape.batch * model.lane_bytes,
                )
            )
        return tuple(found)


def _merged(tensors: Iterable[HeldTensor]) -> dict[str, tuple[int, int]]:
    """Count and bytes of tensors by the first part of their names, in the order of first appearance."""
    found: dict[str, tuple[int, int]] = {}
    for tensor in tensors:
        name = tensor.name.partition(".")[0]
        count, size = found.get(name, (0, 0))
        found[name] = (count + tensor.count, size + tensor.bytes)
    return found
