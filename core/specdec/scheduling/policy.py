"""Width policies: how many rows of each lane a round verifies.

A policy is asked before every round with drafts and told afterwards what the round cost and brought.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from specdec.control.acceptance import AcceptanceHistory, RequestSurvival
from specdec.control.controller import Decision, LaneOutlook, Reason, WidthController
from specdec.drafting.history import Copy
from specdec.preparation import PreparationConfig
from specdec.round.completion import Completion
from specdec.scheduling.device import LanePlan, RoundPlan
from specdec.scheduling.resident import Resident


class Prospect(NamedTuple):
    """A lane before its round: most drafts it may use, and the copy that takes the place of the first ones."""

    resident: Resident
    ceiling: int
    copy: Copy | None


class Outcome(NamedTuple):
    """A lane after its round, if it was still its request's."""

    lane: LanePlan
    resident: Resident
    completion: Completion


class WidthPolicy(Protocol):
    """drafts: most drafts of a round that this policy would ever choose."""

    drafts: int

    def choose(self, batch: int, widths: Sequence[int], lanes: Sequence[Prospect]) -> Decision:
        """One of ``widths``, those prepared at this batch capacity, for lanes of which some may draft."""

    def observe(self, plan: RoundPlan, seconds: float, outcomes: Sequence[Outcome]) -> None:
        """A collected round and its device seconds."""

    def ended(self, number: int) -> None:
        """The request of this number will have no more rounds."""


class FixedWidth:
    """One width for every round, or width one where it was not prepared. Keeps the acceptance history all the same."""

    def __init__(self, width: int, history: AcceptanceHistory | None = None) -> None:
        """history: learns the outcomes of rounds; None learns nothing."""
        self.width = width
        self.drafts = width - 1
        self.history = history

    def choose(self, batch: int, widths: Sequence[int], lanes: Sequence[Prospect]) -> Decision:
        """See ``WidthPolicy.choose``."""
        width = self.width if self.width in widths else 1
        return Decision(batch=batch, width=width, reason=Reason.FIXED, candidates={})

    def observe(self, plan: RoundPlan, seconds: float, outcomes: Sequence[Outcome]) -> None:
        """See ``WidthPolicy.observe``."""
        if self.history is not None:
            for lane, _, done in outcomes:
                if done.verified:
                    self.history.observe(done.verified, done.accepted, copied_drafts(lane, done), lane.match_length)

    def ended(self, number: int) -> None:
        """See ``WidthPolicy.ended``."""


class AdaptiveWidth:
    """The width of most expected tokens per second, from each request's own acceptance and measured round costs."""

    def __init__(self, controller: WidthController, history: AcceptanceHistory) -> None:
        self.controller = controller
        self.history = history
        self.drafts = controller.widths[-1] - 1
        self._requests: dict[int, RequestSurvival] = {}

    def choose(self, batch: int, widths: Sequence[int], lanes: Sequence[Prospect]) -> Decision:
        """See ``WidthPolicy.choose``."""
        outlooks = []
        for resident, ceiling, copy in lanes:
            copied = (0, None) if copy is None else (len(copy.tokens), copy.match_length)
            outlooks.append(LaneOutlook(self._survival(resident).survival(ceiling, *copied)))
        return self.controller.choose(batch, outlooks, allowed=widths)

    def observe(self, plan: RoundPlan, seconds: float, outcomes: Sequence[Outcome]) -> None:
        """See ``WidthPolicy.observe``."""
        emitted = 0
        for lane, resident, done in outcomes:
            emitted += done.emitted
            survival = self._survival(resident)
            survival.observe(done.verified, done.accepted, copied_drafts(lane, done), lane.match_length)
        self.controller.observe(plan.batch, plan.width, seconds, emitted)

    def ended(self, number: int) -> None:
        """See ``WidthPolicy.ended``."""
        self._requests.pop(number, None)

    def _survival(self, resident: Resident) -> RequestSurvival:
        found = self._requests.get(resident.number)
        if found is None:
            found = self._requests[resident.number] = RequestSurvival(self.history)
        return found


def copied_drafts(lane: LanePlan, completion: Completion) -> int:
    """How many of the verified drafts of a lane were copied."""
    return min(len(lane.copies), completion.verified)


def width_policy(config: PreparationConfig) -> WidthPolicy:
    """The policy that a configuration asks for."""
    drafts = config.max_draft_tokens
    history = AcceptanceHistory(max(drafts, 1))
    if config.fixed_width is not None or not drafts:
        return FixedWidth(config.fixed_width or 1, history)
    rows = {(shape.batch, shape.verify_width): shape.packed_rows for shape in config.shapes() if shape.packed_rows}
    return AdaptiveWidth(WidthController(config.speculative_widths, rows=rows), history)
