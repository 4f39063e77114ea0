"""Models with a prefix cache, and generators that watch what must hold around one: private windows, untouched published pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import glm_models
import torch
from attrs import evolve, frozen
from committed_state import assert_same_state, committed_state
from serving_runs import FEW_TOKENS, FEW_TOKENS_SEED
from small_checkpoint import byte_tokenizer, write_small_checkpoint

from specdec.declaration import StateKind
from specdec.interfaces import Drafter
from specdec.preparation import PreparationConfig
from specdec.recipes import recipe_book
from specdec.round.completion import Completion, Finish
from specdec.round.transaction import ChainRound, FirstToken
from specdec.sampling.params import SamplingParams
from specdec.scheduling.device import RoundPlan
from specdec.scheduling.resident import Resident
from specdec.serving.device import ModelDevice
from specdec.serving.generate import Generator
from specdec.serving.model import LoadedModel
from specdec.serving.prefixes import prefix_cache
from specdec.serving.request import Emission, Progress, Request
from specdec.state.pages import PagePool
from specdec.state.prefix_records import PrefixEntry
from specdec.testing.scripted import ScriptedDrafter
from specdec_glm53 import geometry as glm_geometry

PREFILL_ROWS = 48


def prepare_model(directory: Path, *, context: int, recipe_name: str = "qwen3.8-flash", **options: Any) -> LoadedModel:
    """A float64 model whose prompt chunks do not divide pages; options as ``PreparationConfig.for_recipe``."""
    recipe = recipe_book().recipe(recipe_name)
    options = {"max_draft_tokens": 7, "snapshot_bytes": 1 << 24, "adaptive_verification": False, **options}
    config = PreparationConfig.for_recipe(recipe, context=context, prefill_tokens=(PREFILL_ROWS,), **options)
    return LoadedModel.prepare(recipe, config, directory=directory, dtype="float64")


def with_drafter(model: LoadedModel, drafter: Drafter) -> LoadedModel:
    """The same target, stores and arena with rounds that draft through another drafter. Use one of the two models at a time."""
    batches = sorted(model.first_tokens)
    return LoadedModel(
        recipe=model.recipe,
        config=model.config,
        target=model.target,
        drafter=drafter,
        tokenizer=model.tokenizer,
        defaults=model.defaults,
        capacities=model.capacities,
        device=model.device,
        rounds={
            key: ChainRound(
                target=model.target,
                drafter=drafter,
                shape=captured.shape,  # type: ignore[attr-defined]
                arena=model.arena,
                max_draft_tokens=model.recipe.max_draft_tokens,
            )
            for key, captured in model.rounds.items()
        },
        first_tokens={
            batch: FirstToken(target=model.target, drafter=drafter, arena=model.arena, batch=batch) for batch in batches
        },
        arena=model.arena,
    )


@frozen(kw_only=True, eq=False)
class Outcome:
    """One finished request. records: its completions without what names request, round and slot. prefilled: prompt tokens
    consumed step by step. state: committed state when it ended."""

    tokens: list[int]
    finish: Finish
    records: list[Completion]
    prefilled: list[int]
    state: dict[str, torch.Tensor]


class WatchedDevice:
    """A model device that checks every window before it is written and keeps the committed state that requests end with."""

    def __init__(self, inner: ModelDevice, *, poison: bool = False) -> None:
        self.inner = inner
        self.poison = poison
        self.states: dict[int, dict[str, torch.Tensor]] = {}
        self._residents: dict[int, Resident] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def admit(self, resident: Resident, reach: int) -> int:
        consumed = self.inner.admit(resident, reach)
        self._residents[resident.slot] = resident
        self._check_window(resident.slot, consumed, len(resident.request.inputs) - consumed)
        return consumed

    @torch.inference_mode()
    def submit(self, plan: RoundPlan) -> Any:
        if not plan.first:
            for lane in plan.lanes:
                self._check_window(lane.slot, self._residents[lane.slot].consumed, plan.width)
            if self.poison:
                for store in self.inner.model.stores:
                    store.poison()
        return self.inner.submit(plan)

    def retire(self, slot: int) -> None:
        resident = self._residents.pop(slot)
        if resident.entered and resident.settled:
            with torch.inference_mode():
                self.states[resident.number] = committed_state(self.inner.model, slot, resident.consumed)
        self.inner.retire(slot)

    def _check_window(self, slot: int, consumed: int, tokens: int) -> None:
        """Every page that prompt or round will write is private to the slot."""
        for lag, pool in enumerate(self.inner.model.pools):
            first = max(consumed - lag, 0)
            assert pool.writable(slot, first, max(tokens, 1)), (slot, first, tokens)


class WatchedGenerator(Generator):
    """Keeps outcomes and checks every step. poison: overwrite what is not committed state before every round."""

    def __init__(self, model: LoadedModel, *, poison: bool = False, **options: Any) -> None:
        super().__init__(model, **options)
        self.watched = WatchedDevice(self._device, poison=poison)
        self._scheduler.device = self._scheduler.admission.device = self.watched
        self.states = self.watched.states
        self.events: dict[int, list[Emission]] = {}
        self.progress: dict[int, list[int]] = {}
        self._sums: dict[tuple[PrefixEntry, int, int], bytes] = {}

    def outcomes(self, requests: Iterable[Request] = ()) -> list[Outcome]:
        """Runs the requests and returns their outcomes in order of submission."""
        requests = list(requests)
        numbers = [self.submit(request) for request in requests]
        for event in self.run():
            self.keep(event)
        return [self.outcome(number) for number in numbers]

    def keep(self, event: Emission | Progress) -> None:
        """Files an event under its request."""
        if isinstance(event, Emission):
            self.events.setdefault(event.request, []).append(event)
        else:
            self.progress.setdefault(event.request, []).append(event.consumed)

    def outcome(self, number: int) -> Outcome:
        """What became of a finished request whose events were kept."""
        events = self.events[number]
        return Outcome(
            tokens=[token for event in events for token in event.tokens],
            finish=events[-1].finish,
            records=[event.completion._replace(request=0, epoch=0, round=0, slot=0) for event in events],
            prefilled=self.progress.get(number, []),
            state=self.states.get(number, {}),
        )

    def step(self) -> Iterator[Any]:
        """As the generator's, with the published pages checked behind it."""
        yield from super().step()
        with torch.inference_mode():
            self.check_published()

    def check_published(self) -> None:
        """Pages that a checkpoint holds have the bytes they had when it was first seen."""
        seen = {}
        for entry in self._prefixes.cache:
            for number, store in enumerate(self.model.stores):
                for page in entry.pages[number]:
                    found = page_sum(store, page)
                    before = self._sums.get((entry, number, page), found)
                    assert before == found, f"page {page} of pool {number}, published at {entry.length}, was written"
                    seen[entry, number, page] = found
        self._sums = seen


def page_sum(store: Any, page: int) -> bytes:
    """Checksum of all bytes of one page."""
    digest = blake2b(digest_size=16)
    for field in store.layout.fields:
        if field.kind is StateKind.PAGED:
            digest.update(store[field.name][:, page].contiguous().numpy().tobytes())
    return digest.digest()


@contextmanager
def few_pages(model: LoadedModel, pages: int) -> Iterator[None]:
    """Fresh pools of fewer pages than the stores have, so that requests compete for them."""
    original = model.pools
    model.pools = tuple(PagePool(pages=pages, page_tokens=pool.page_tokens) for pool in original)
    try:
        yield
    finally:
        model.pools = original


def cached(model: LoadedModel, *, budget: int | None = None, **options: Any) -> WatchedGenerator:
    """A watched generator with an empty prefix cache of its own. End with ``assert_nothing_held``."""
    return WatchedGenerator(model, prefix_cache=prefix_cache(model, budget), **options)


def cache_of(generator: Generator) -> Any:
    """The generator's prefix cache."""
    return generator._prefixes.cache


def assert_nothing_held(generator: Generator) -> None:
    """Without requests and entries, every page and slot is free; empties the cache."""
    model = generator.model
    cache_of(generator).clear()
    assert [pool.free for pool in model.pools] == [pool.pages for pool in model.pools]
    assert sorted(generator._free_slots) == list(range(model.config.concurrency))
    assert not generator._residents and not generator._waiting
    table = model.arena.requests
    assert torch.equal(table.integers, table.integers[table.spare].expand_as(table.integers))


CONTEXT = 288
GREEDY = SamplingParams(greedy=True)
SAMPLED = SamplingParams(temperature=1.0, seed=77)


def _qwen(directory: Path) -> Path:
    return write_small_checkpoint(directory, seed=FEW_TOKENS_SEED, geometry=FEW_TOKENS)


def _glm(directory: Path) -> Path:
    glm_models.write_random_checkpoint(directory, GLM_SEED, GLM_FEW_TOKENS)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


#: Checkpoints of six tokens and few layers by recipe.
WRITERS = {"qwen3.8-flash": _qwen, "glm-5.3-flash": _glm}
#: Two layers; sparse selection begins at twelve tokens.
GLM_FEW_TOKENS = evolve(
    glm_geometry.TINY,
    vocab_size=6,
    eos_token_id=(5,),
    num_hidden_layers=2,
    layer_types=("linear_attention", "indexed_attention"),
    mlp_layer_types=("dense", "sparse"),
    index_topk=8,
    n_routed_experts=4,
    num_experts_per_tok=2,
    hc_sinkhorn_iters=4,
)
#: A seed whose drafts are accepted at several depths.
GLM_SEED = 19


class PrefixBench:
    """Models of one checkpoint of the six-token vocabulary, and cold runs to compare with."""

    def __init__(self, directory: Path, recipe_name: str = "qwen3.8-flash") -> None:
        torch.set_num_threads(1)
        self.recipe_name = recipe_name
        self.directory = WRITERS[recipe_name](directory)
        self._prepared: dict[int, LoadedModel] = {}
        self._known: dict[tuple[Request, int], Outcome] = {}

    def model(self, concurrency: int) -> LoadedModel:
        """The model under test by concurrency."""
        if concurrency not in self._prepared:
            self._prepared[concurrency] = prepare_model(
                self.directory,
                context=CONTEXT,
                recipe_name=self.recipe_name,
                concurrency=concurrency,
                extended_sampling=True,
            )
        return self._prepared[concurrency]

    @cached_property
    def _untouched(self) -> LoadedModel:
        return prepare_model(
            self.directory,
            context=CONTEXT,
            recipe_name=self.recipe_name,
            concurrency=1,
            snapshot_bytes=0,
            extended_sampling=True,
        )

    def cold(self, request: Request, width: int = 4) -> Outcome:
        """A request alone on a model that never had a prefix cache; each different one is run once."""
        if (request, width) not in self._known:
            self._known[request, width] = WatchedGenerator(self._untouched, width=width).outcomes([request])[0]
        return self._known[request, width]


def tokens(seed: int, count: int) -> list[int]:
    """Token ids of the six-token vocabulary."""
    return torch.randint(0, 6, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def request(prompt: list[int], *, new: int = 64, sampling: SamplingParams = GREEDY, **options: Any) -> Request:
    return Request(prompt=prompt, max_new_tokens=new, sampling=sampling, stop_ids=(), **options)


def assert_equal_runs(found: Outcome, expected: Outcome) -> None:
    """Same tokens, same rounds (drafts offered and accepted, draft rows), same committed state."""
    assert found.tokens == expected.tokens
    assert found.finish is expected.finish
    assert found.records == expected.records
    assert_same_state(found.state, expected.state)


class Crossings:
    """Requests whose first round consumes exactly as many tokens as asked, whatever the drafter would have proposed."""

    def __init__(self, model: LoadedModel, concurrency: int) -> None:
        self.drafter = ScriptedDrafter(model.drafter, slots=model.capacities.slots, max_draft_tokens=7)
        self.scripted = with_drafter(model, self.drafter)
        self.own = model
        self.published: set[tuple[int, int]] = set()

    def cross(
        self, generator: WatchedGenerator, runs: list[tuple[list[int], list[int], int]], *, forget: bool = False
    ) -> None:
        """runs: prompt, greedy continuation and consumed tokens t of the one round; the requests are cancelled after it.

        ``published`` is what the cache held before they were; ``forget`` drops what it held before the round.
        """
        numbers = [generator.submit(request(prompt, new=32)) for prompt, _, _ in runs]
        list(generator.step())
        if forget:
            cache_of(generator).clear()
        script = {}
        for resident in generator._residents.values():
            prompt, output, taken = runs[numbers.index(resident.number)]
            assert resident.run.tokens.tolist() == prompt + output[:1]
            right = output[1:taken]
            script[resident.slot] = [*right, *((token + 1) % 6 for token in output[taken:8])]
        self.drafter.write(script)
        list(generator.step())
        self.published = {(entry.length, entry.sequence[0]) for entry in cache_of(generator)}
        for number, (prompt, _, taken) in zip(numbers, runs, strict=True):
            resident = next(r for r in generator._residents.values() if r.number == number)
            assert resident.consumed == len(prompt) + taken
            assert generator.cancel(number)
        list(generator.step())

    def generators(self, **options: Any) -> tuple[WatchedGenerator, WatchedGenerator]:
        """One that follows the script and one with the real drafter, on the same pages and prefix cache."""
        scripted = cached(self.scripted, width=8)
        self.own.pools = self.scripted.pools
        return scripted, WatchedGenerator(self.own, prefix_cache=cache_of(scripted), **options)
