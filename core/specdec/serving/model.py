"""A loaded model: checkpoint, target, drafter, arena and the rounds of its catalog."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen

from specdec.catalog import RoundShape, batch_capacities, chunk_sizes
from specdec.checkpoint.accepted import check_model_type, context_limit, open_checkpoint, text_config
from specdec.checkpoint.reader import Checkpoint
from specdec.checkpoint.tokenizer import Tokenizer
from specdec.declaration import Recipe
from specdec.errors import CheckpointError, UsageError
from specdec.interfaces import Capacities, Drafter, Round, Target
from specdec.memory import MemoryPlan
from specdec.memory_plan import capacities_for, ordinary_shapes, prepared_shapes
from specdec.preparation import PreparationConfig
from specdec.recipes import recipe_book
from specdec.round.arena import Arena
from specdec.round.graphs import GraphPool, prepared_variants
from specdec.round.transaction import FirstToken
from specdec.sampling.params import SamplingParams
from specdec.sampling.sampler import sampler_for
from specdec.serving.budget import checked_plan
from specdec.serving.placement import activation_dtype, usable_device
from specdec.serving.prompt_rows import PromptRows
from specdec.serving.slot_state import SlotState
from specdec.snapshot_sizes import checkpoint_pages
from specdec.state.pages import PagePool
from specdec.state.store import StateStore

# Stop ids a request may carry: the checkpoint's and a few of its own.
STOP_IDS = 8

_SAMPLING = ("temperature", "top_k", "top_p", "min_p")


@frozen(kw_only=True)
class GenerationDefaults:
    """Sampling and stop ids of a checkpoint: ``generation_config.json`` where it speaks, the recipe elsewhere."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    stop_ids: tuple[int, ...]

    @classmethod
    def read(cls, checkpoint: Checkpoint, recipe: Recipe) -> GenerationDefaults:
        """Reads the checkpoint's file if it has one; keys that are absent or null there leave the recipe's value.

        Raises CheckpointError if the file is not a JSON object or a value is not usable.
        """
        path = _part(checkpoint, "generation_config.json")
        found = {name: value for name, value in checkpoint.generation_config().items() if value is not None}
        values = {name: getattr(recipe.sampling, name) for name in _SAMPLING}
        values.update({name: found[name] for name in _SAMPLING if name in found})
        try:
            SamplingParams(**values)
        except UsageError as error:
            raise CheckpointError(f"{path}: {error}; correct the file") from error
        ids = found.get("eos_token_id", text_config(checkpoint).get("eos_token_id"))
        source = path if "eos_token_id" in found else _part(checkpoint, "config.json")
        if ids is None:
            ids = list(recipe.eos_token_ids)
        ids = ids if isinstance(ids, list) else [ids]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise CheckpointError(f"{source}: eos_token_id is {ids!r}; it must be a token id or a list of token ids")
        if len(ids) > STOP_IDS:
            raise CheckpointError(f"{source}: eos_token_id lists {len(ids)} ids; at most {STOP_IDS} are supported")
        return cls(**values, stop_ids=tuple(ids))

    def sampling(self, **overrides: Any) -> SamplingParams:
        """Sampling options with the given ones replaced (None keeps the default)."""
        values = {name: getattr(self, name) for name in _SAMPLING}
        values.update({name: value for name, value in overrides.items() if value is not None})
        return SamplingParams(**values)


def _part(checkpoint: Checkpoint, name: str) -> Path:
    """Where a checkpoint says something: the file of a folder, or the one file that holds all."""
    return checkpoint.directory / name if checkpoint.directory.is_dir() else checkpoint.directory


def _stores(target: Target, drafter: Drafter | None) -> tuple[StateStore, ...]:
    return (target.store,) if drafter is None else (target.store, drafter.store)


@frozen(kw_only=True, eq=False)
class OrdinaryOperations:
    """What a start with zero drafts runs on the target alone: rounds of width one by batch capacity, prompts, checkpoints."""

    rounds: dict[tuple[int, int], Round]
    prompts: PromptRows
    slot_state: SlotState


def _capture(
    graphs: GraphPool,
    config: PreparationConfig,
    rounds: Mapping[tuple[int, int], Round],
    first: Mapping[int, FirstToken],
    prompts: PromptRows,
    slot_state: SlotState,
    spare: int,
) -> None:
    """Captures rounds in every variant that the configuration may ask for, prompt chunks and snapshots. Staged lanes are still
    the spare slot, which is written."""
    extended, masked = config.extended_sampling, config.grammar
    variants = prepared_variants(boundary=config.snapshot_bytes > 0, extended=extended, masked=masked)
    for one in rounds.values():
        one.program.capture(graphs, variants)
    for sampled in first.values():
        sampled.program.capture(graphs, prepared_variants(boundary=False, extended=extended, masked=masked))
    prompts.capture(graphs, chunk_sizes(config.prefill_tokens, config.context), spare)
    if config.snapshot_bytes:
        slot_state.capture(graphs, spare)


class LoadedModel:
    """Everything a generation loop needs. Build with ``prepare``."""

    def __init__(
        self,
        *,
        recipe: Recipe,
        config: PreparationConfig,
        target: Target,
        drafter: Drafter | None,
        tokenizer: Tokenizer,
        defaults: GenerationDefaults,
        capacities: Capacities,
        device: torch.device,
        rounds: dict[tuple[int, int], Round],
        first_tokens: dict[int, FirstToken],
        arena: Arena,
        prompts: PromptRows | None = None,
        slot_state: SlotState | None = None,
        ordinary: OrdinaryOperations | None = None,
        graphs: GraphPool | None = None,
        memory: MemoryPlan | None = None,
    ) -> None:
        self.recipe = recipe
        self.config = config
        self.target = target
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.capacities = capacities
        self.device = device
        self.rounds = rounds
        self.first_tokens = first_tokens
        self.arena = arena
        #: How prompts are consumed.
        self.prompts = PromptRows(target, drafter, device) if prompts is None else prompts
        #: What prefix checkpoints take from slots and give to them.
        self.slot_state = SlotState(target, drafter, arena) if slot_state is None else slot_state
        #: Decoding and prompts without draft work, for a start with zero drafts; None without a drafter or with ``mtp_only``.
        self.ordinary = ordinary
        #: Pool of the captured rounds; None where rounds run eagerly.
        self.graphs = graphs
        #: What was planned and checked before anything was allocated, the pool measured; None where nothing limits it.
        self.memory = memory
        # one pool per store that has pages, shared by every generator and prefix cache of this model
        self.pools = tuple(
            PagePool(pages=store.pages, page_tokens=store.layout.page_tokens) for store in self.paged_stores
        )
        # numbers of admissions; never used twice, so that no record of a slot's earlier owner is taken for its present one
        self.epochs = count(1)

    @property
    def stores(self) -> tuple[StateStore, ...]:
        """The target's state store, and the drafter's if there is one."""
        return _stores(self.target, self.drafter)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know about how this model was prepared, one line each."""
        return () if self.arena.sampler.note is None else (self.arena.sampler.note,)

    @property
    def paged_stores(self) -> tuple[StateStore, ...]:
        """Those of ``stores`` whose layout has paged fields; the pools are theirs."""
        return tuple(store for store in self.stores if store.layout.paged)

    @property
    def page_lags(self) -> tuple[int, ...]:
        """For every pool, how many positions its store is behind the consumed tokens."""
        lags = (0,) if self.drafter is None else (0, self.drafter.lag)
        return tuple(lag for store, lag in zip(self.stores, lags, strict=True) if store.layout.paged)

    @classmethod
    def prepare(
        cls,
        recipe: Recipe,
        config: PreparationConfig,
        *,
        directory: str | Path | None = None,
        device: str = "cpu",
        dtype: str | None = None,
    ) -> LoadedModel:
        """Opens the checkpoint, loads target and drafter through the owner's hooks and builds every round of the catalog.

        directory: folder or file of the checkpoint, None for the embedded one. device: torch device, such as ``cpu`` or
        ``cuda:0``. dtype: torch dtype name of activations; None takes float32 on a CPU and bfloat16 elsewhere. Allocates
        everything that rounds use.

        Raises CheckpointError, PluginError, CapacityError or UsageError with one line each.
        """
        where = usable_device(device)
        dtype = activation_dtype(dtype, where)
        hooks = recipe_book().hooks_for(recipe)
        with open_checkpoint(recipe, directory) as checkpoint, torch.inference_mode():
            check_model_type(checkpoint, recipe)
            defaults = GenerationDefaults.read(checkpoint, recipe)
            tokenizer = checkpoint.tokenizer()
            limit = context_limit(checkpoint)
            if limit is not None and config.context > limit:
                raise UsageError(
                    f"context is {config.context}; the checkpoint's max_position_embeddings is {limit} "
                    f"({checkpoint.directory}); lower it"
                )
            memory = checked_plan(recipe, config, checkpoint, device=where, dtype=dtype)
            capacities = capacities_for(recipe, config, dtype)
            slots = capacities.slots
            target = hooks.build_target_state(checkpoint=checkpoint, capacities=capacities, device=where)
            drafter = None
            if config.speculative:
                drafter = hooks.load_drafter(checkpoint=checkpoint, target=target, capacities=capacities)
            if config.snapshot_bytes:
                # known only now: the size of a checkpoint follows from the layouts of what was loaded
                stores = _stores(target, drafter)
                extra = checkpoint_pages([store.layout for store in stores], config.snapshot_bytes)
                capacities = evolve(capacities, pages=capacities.pages + extra)
                for store in stores:
                    store.resize_pages(capacities.pages)
            arena = Arena(
                slots=slots,
                max_draft_tokens=recipe.max_draft_tokens,
                stop_ids=STOP_IDS,
                device=where,
                extended=config.extended_sampling,
                vocab_size=target.vocab_size,
                confidence_width=recipe.confidence_width if config.speculative else 0,
                grammar=config.grammar,
                sampler=sampler_for(where, config.sampler),
            )
            rounds = {}
            # the largest shape first: smaller ones then share its scratch
            for shape in sorted(cls.shapes(config), key=lambda shape: -shape.target_rows):
                key = (shape.batch, shape.verify_width)
                rounds[key] = hooks.capture_round(target=target, drafter=drafter, shape=shape, arena=arena)
            first_tokens = {
                batch: FirstToken(target=target, drafter=drafter, arena=arena, batch=batch)
                for batch in batch_capacities(config.concurrency)
            }
            prompts = PromptRows(target, drafter, where)
            ordinary = OrdinaryOperations(
                rounds={
                    (shape.batch, 1): hooks.capture_round(target=target, drafter=None, shape=shape, arena=arena)
                    for shape in ordinary_shapes(config)
                },
                prompts=PromptRows(target, None, where),
                slot_state=SlotState(target, None, arena),
            )
            slot_state = SlotState(target, drafter, arena)
            graphs = None
            if where.type == "cuda" and config.cuda_graphs:
                graphs = GraphPool(where)
                _capture(graphs, config, rounds, first_tokens, prompts, slot_state, slots)
                if ordinary.rounds:
                    _capture(graphs, config, ordinary.rounds, {}, ordinary.prompts, ordinary.slot_state, slots)
                for store in _stores(target, drafter):
                    # rehearsals left a prompt of their own in the spare slot
                    store.reset(store.spare)
        return cls(
            recipe=recipe,
            config=config,
            target=target,
            drafter=drafter,
            tokenizer=tokenizer,
            defaults=defaults,
            capacities=capacities,
            device=where,
            rounds=rounds,
            first_tokens=first_tokens,
            arena=arena,
            prompts=prompts,
            slot_state=slot_state,
            ordinary=ordinary if ordinary.rounds else None,
            graphs=graphs,
            memory=memory if memory is None or graphs is None else memory.measured(graphs=graphs.bytes),
        )

    @staticmethod
    def shapes(config: PreparationConfig) -> tuple[RoundShape, ...]:
        """Round shapes that this configuration prepares; without speculation, plain decoding at every batch capacity."""
        return prepared_shapes(config)
