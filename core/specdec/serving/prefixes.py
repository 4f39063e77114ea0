"""Moves state between the slots of a loaded model and a prefix cache: what a request continues from, what it leaves behind.

The cache (``specdec.state.prefix``) decides; this module does the tensor work that follows from it, between rounds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from specdec.declaration import StateKind
from specdec.errors import UsageError
from specdec.scheduling.resident import TokenRun
from specdec.serving.slot_state import Snapshots
from specdec.snapshot_sizes import page_bytes
from specdec.state.pages import PagePool
from specdec.state.prefix import PrefixCache
from specdec.state.prefix_records import PageCopy
from specdec.state.store import StateStore

if TYPE_CHECKING:
    from specdec.serving.model import LoadedModel


def prefix_cache(model: LoadedModel, budget: int | None = None) -> PrefixCache:
    """An empty cache over the page pools of ``model``. budget: bytes, None takes the configuration's ``snapshot_bytes``.

    Its pages come from the model's pools and are free again when entries are evicted; ``PrefixCache.clear`` drops all.
    """
    return PrefixCache(
        pools=model.pools,
        page_bytes=[page_bytes(store.layout) for store in model.paged_stores],
        budget=model.config.snapshot_bytes if budget is None else budget,
    )


class PrefixState:
    """Continues slots from checkpoints and makes checkpoints of slots. Host side, between rounds only."""

    def __init__(self, model: LoadedModel, cache: PrefixCache, *, drafts: bool | None = None) -> None:
        """drafts: whether checkpoints have draft state; None if the model has a drafter.

        Raises UsageError for a cache whose checkpoints are of the other kind.
        """
        self.drafts = model.drafter is not None if drafts is None else drafts
        if cache.drafts not in (None, self.drafts):
            kind = "without" if self.drafts else "with"
            raise UsageError(
                f"the prefix cache holds checkpoints of requests {kind} drafts; make one for this start with prefix_cache(model)"
            )
        ordinary = model.ordinary if model.drafter is not None and not self.drafts else None
        self.model = model
        self.cache = cache
        self.slot_state = model.slot_state if ordinary is None else ordinary.slot_state
        cache.drafts = self.drafts

    @property
    def _pools(self) -> tuple[PagePool, ...]:
        return self.cache.pools

    def admit(self, slot: int, run: TokenRun, reach: int, *, reuse: bool = True) -> int:
        """Resets a slot, gives it pages for ``reach`` tokens and the state of the longest checkpoint of its prompt.

        reuse: False uses no checkpoint, for a request that needs every prompt token to be consumed by itself.
        Returns how many prompt tokens need not be consumed. Raises CapacityError, leaving the slot without pages, if running
        requests hold too many.
        """
        # whoever had the slot before and was abandoned holds nothing any more
        self.cache.release(slot)
        claim = self.cache.claim(slot, run.tokens, reach, reuse=reuse)
        try:
            for store in self.model.stores:
                store.reset(slot)
            for store, pool in zip(self.model.paged_stores, self._pools, strict=True):
                store.set_pages(slot, pool.owned(slot))
            self._copy(claim.copies)
            if claim.entry is not None:
                self.slot_state.restore(slot, claim.entry.state, claim.consumed)
        except BaseException:
            self.cache.release(slot)
            raise
        finally:
            self.cache.settle(claim)
        return claim.consumed

    def extend(self, slot: int, reach: int) -> None:
        """Gives a slot further pages for ``reach`` tokens in all. Raises CapacityError, changing nothing, if too few are free."""
        grown = self.cache.extend(slot, reach)
        for store, pool, more in zip(self.model.paged_stores, self._pools, grown, strict=True):
            if more:
                store.set_pages(slot, pool.owned(slot))

    def publish(
        self, slot: int, run: TokenRun, length: int, *, boundary: Snapshots | None = None, lane: int = 0
    ) -> None:
        """Makes a checkpoint of the first ``length`` tokens of a slot, all of them consumed and acknowledged.

        boundary: snapshots that a round took there, of which ``lane`` is this request's; None takes the slot's committed state,
        which must then be that of ``length`` consumed tokens.
        """
        key = run.key(length)
        if self.cache.touch(key, run.tokens, length):
            return
        state = self.slot_state.snapshot(slot) if boundary is None else _lane(boundary, lane)
        size = sum(value.nbytes for part in state.values() for value in part.values())
        rows = [length - lag for lag in self.model.page_lags]
        self._copy(self.cache.publish(slot, key, run.tokens, length, rows, state, size))

    def _copy(self, copies: Iterable[PageCopy]) -> None:
        for copy in copies:
            copy_rows(self.model.paged_stores[copy.pool], copy.source, copy.destination, copy.rows)


def copy_rows(store: StateStore, source: int, destination: int, rows: int) -> None:
    """Copies the first ``rows`` tokens of a page, complete groups only. What lies behind them belongs to nobody's prefix."""
    for field in store.layout.fields:
        if field.kind is StateKind.PAGED:
            tensor, entries = store[field.name], rows // field.extent
            tensor[:, destination, :entries] = tensor[:, source, :entries]


def _lane(state: Snapshots, lane: int) -> Snapshots:
    """One lane's part, in storage of its own: the next round may reuse the buffers."""
    return {
        owner: {name: value[:, lane : lane + 1].clone() for name, value in part.items()}
        for owner, part in state.items()
    }
