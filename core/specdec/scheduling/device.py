"""What a scheduler drives: a loaded model or a simulation of one. Protocol and plain records; no torch.

Work is ordered: what is asked for later happens later, whether or not its results have been read. A device has two frames for
results, so at most two rounds are submitted and not collected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from attrs import field, frozen

if TYPE_CHECKING:
    from specdec.scheduling.resident import Resident
    from specdec.serving.grammar import GrammarState
    from specdec.serving.request import Request, TokenLogprobs
    from specdec.serving.stops import StopMatcher
    from specdec.state.prefix_records import PrefixStatistics

#: Rounds that may be submitted and not collected: results of a round lie in the frame of its number mod 2.
FRAMES = 2


@frozen(kw_only=True)
class LanePlan:
    """One lane of a round.

    ceiling: most drafts. copies: take the place of the first ones, after a match of ``match_length`` tokens. masks: what the
    grammar allows at each row that may be verified, the bonus row included; None without a grammar.
    """

    slot: int
    ceiling: int
    copies: tuple[int, ...] = ()
    match_length: int | None = None
    masks: tuple[bytes, ...] | None = None


@frozen(kw_only=True)
class RoundPlan:
    """What the host froze before a round.

    batch, width: the prepared shape; width 1 verifies pending tokens only. boundary: keep snapshots at crossed page boundaries.
    extended: some lane uses an option that needs the extended variant. first: no round, but the first token of each lane, from
    what its prompt left.
    """

    number: int
    batch: int
    width: int
    lanes: tuple[LanePlan, ...]
    boundary: bool = False
    extended: bool = False
    first: bool = False

    @property
    def slots(self) -> list[int]:
        """Slots in lane order."""
        return [lane.slot for lane in self.lanes]


@frozen(kw_only=True)
class RoundResult:
    """What a round left, by lane. records: completion records as in a frame. seconds: device time of the whole round.

    logprobs: columns by emitted token, () where not asked for. forecasts: None from devices whose rounds do not forecast.
    """

    records: Sequence[list[int]]
    seconds: float
    logprobs: Sequence[Any] = field(factory=tuple)
    forecasts: Sequence[Sequence[float]] | None = None


class Device(Protocol):
    """Slots, pages and rounds of one loaded model. Not thread-safe.

    concurrency: most requests at once, slots 0 … concurrency − 1. context: most tokens of a request. horizon: tokens behind the
    committed ones that a round may touch. page_tokens: tokens of a page. prefill_tokens: most tokens of a prompt chunk.
    publishes: whether prefix checkpoints are kept, so that chunks end at page boundaries.
    """

    concurrency: int
    context: int
    horizon: int
    page_tokens: int
    prefill_tokens: int
    publishes: bool

    def clock(self) -> float:
        """Seconds since some moment, monotonic."""

    def check(self, request: Request) -> None:
        """Raises UsageError or CapacityError, one line, if this device can never run the request."""

    def next_epoch(self) -> int:
        """A number no earlier admission had."""

    def matcher(self, request: Request) -> StopMatcher | None:
        """Looks for the request's stop strings, earlier output taken in; None if it has none."""

    def grammar(self, request: Request) -> GrammarState | None:
        """Where the request's output stands in its grammar, earlier output taken in; None if it has none."""

    def prefix_statistics(self) -> PrefixStatistics | None:
        """Counts of the prefix cache; None where no checkpoints are kept."""

    def batch_for(self, lanes: int) -> int:
        """The smallest prepared batch capacity that holds so many lanes."""

    def widths(self, batch: int) -> tuple[int, ...]:
        """Prepared widths at a batch capacity, increasing from 1."""

    def admit(self, resident: Resident, reach: int) -> int:
        """Resets the resident's slot, gives it pages for ``reach`` tokens and the state of the longest known prefix.

        Returns how many inputs need not be consumed. Raises CapacityError, leaving the slot without pages, if there are too few.
        """

    def reserve(self, slot: int, reach: int) -> None:
        """Further pages for ``reach`` tokens in all. Raises CapacityError, changing nothing, if there are too few."""

    def prefill(self, resident: Resident, end: int) -> tuple[TokenLogprobs, ...] | None:
        """Consumes inputs from ``resident.consumed`` up to ``end``. Returns prompt scores that became known, None unless asked
        for. Does not advance the resident."""

    def enter(self, resident: Resident) -> None:
        """Writes the request's row, so that rounds may name its slot."""

    def submit(self, plan: RoundPlan) -> Any:
        """Starts a round. Returns what ``publish`` needs of it if ``plan.boundary``, else None."""

    def collect(self, plan: RoundPlan, logprobs: bool) -> RoundResult:
        """Waits for a submitted round and reads its frame; rounds are collected in the order of submission."""

    def publish(self, resident: Resident, length: int, *, boundary: Any = None, lane: int = 0) -> None:
        """Makes a prefix checkpoint of the first ``length`` tokens, consumed and acknowledged. boundary, lane: see ``submit``;
        without, the slot's committed state must be that of ``length`` tokens."""

    def retire(self, slot: int) -> None:
        """No later round runs this slot's request, even if it names the slot."""

    def release(self, slot: int) -> None:
        """Gives the slot's pages back. Nothing submitted and uncollected may name the slot."""
