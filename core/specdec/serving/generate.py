"""The generation loop: several requests in one batch at a fixed verification width; finished lanes leave, waiting ones enter.

Plain decoding is the same loop at width one. It is the scheduler in its simplest setting: whole prompts first, one round at a
time, pages for a request's whole reach, errors raised where they happen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from specdec.control.acceptance import AcceptanceHistory
from specdec.errors import UsageError
from specdec.scheduling.policy import FixedWidth
from specdec.scheduling.resident import Resident, Waiting
from specdec.scheduling.scheduler import Scheduler
from specdec.serving.device import ModelDevice
from specdec.serving.model import LoadedModel
from specdec.serving.ranks import RankAgreement
from specdec.serving.request import Event, Request
from specdec.state.prefix import PrefixCache


class Generator:
    """Runs requests over a loaded model. Not thread-safe.

    The state of running requests is the model's, so only one generator of a model may have requests running at a time.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        width: int | None = None,
        prefix_cache: PrefixCache | None = None,
        ranks: RankAgreement | None = None,
    ) -> None:
        """width: verification width of every round; None takes the configuration's fixed width or the widest prepared.
        prefix_cache: checkpoints to continue prompts from and to leave behind, made by ``serving.prefixes.prefix_cache`` for
        this model; None does without. ranks: compares every round with the other ranks of a tensor-parallel run before any of
        it is applied, and raises DesynchronisationError from ``step`` and ``run`` if they differ.

        Raises UsageError if the width was not prepared or the cache is another model's.
        """
        widths = model.config.speculative_widths
        if width is None:
            width = model.config.fixed_width or widths[-1]
        self.width = width
        if self.width not in widths:
            raise UsageError(f"width {self.width} was not prepared; prepared: {', '.join(map(str, widths))}")
        self.model = model
        drafts = model.config.max_draft_tokens
        #: How often drafts were accepted, learned from the outcomes of rounds alone; None where nothing is drafted.
        self.acceptance = AcceptanceHistory(drafts) if drafts else None
        self._device = ModelDevice(model, prefix_cache=prefix_cache)
        self._prefixes = self._device.prefixes
        self._scheduler = Scheduler(
            self._device,
            FixedWidth(width, self.acceptance),
            check_records=None if ranks is None else ranks.check,
        )

    @property
    def _waiting(self) -> deque[Waiting]:
        return self._scheduler.admission.waiting

    @property
    def _residents(self) -> dict[int, Resident]:
        return self._scheduler.admission.residents

    @property
    def _free_slots(self) -> list[int]:
        return self._scheduler.admission.free_slots

    def submit(self, request: Request) -> int:
        """Queues a request and returns its number. Raises as ``ModelDevice.check`` does."""
        return self._scheduler.submit(request)

    def run(self, requests: Iterable[Request] = ()) -> Iterator[Event]:
        """Submits ``requests`` and yields events until nothing is waiting or running.

        Raises as ``submit`` does, before any of ``requests`` is queued.
        """
        requests = list(requests)
        for request in requests:
            self._device.check(request)
        for request in requests:
            self.submit(request)
        while self._scheduler.busy:
            yield from self.step()

    def cancel(self, number: int) -> bool:
        """Ends a waiting or running request; its slot and pages are free at once, and an emission without tokens says CANCELLED
        in the next step. What was acknowledged of it may serve as a prefix. False if it has ended already or never existed.
        """
        return self._scheduler.cancel(number)

    def step(self) -> Iterator[Event]:
        """Consumes the prompt of every waiting request that fits, then samples first tokens or runs one round over all.

        A caller may stop iterating at any event: the next step goes on from there.
        """
        return self._scheduler.step()
