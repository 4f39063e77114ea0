"""Width policies: how many rows of each lane a round verifies.

A policy is asked before every round with drafts and told afterwards what the round cost and brought.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specdec.control.acceptance import AcceptanceHistory, RequestSurvival
from specdec.control.controller import Decision, Reason, WidthController
from specdec.drafting.history import Copy
from specdec.preparation import PreparationConfig
from specdec.round.completion import Completion
from specdec.scheduling.device import LanePlan, RoundPlan
from specdec.scheduling.resident import Resident

# plain tuples: a batch makes one of each for every lane of every round

#: A lane before its round: its request, most drafts it may use, and the copy that takes the place of the first ones.
Prospect = tuple[Resident, int, Copy | None]
#: A lane after its round, if it was still its request's: what was frozen for it, its request, and its record.
Outcome = tuple[LanePlan, Resident, Completion]


class WidthPolicy(Protocol):
    """drafts: most drafts of a round that this policy would ever choose."""

    drafts: int

    def choose(self, batch: int, widths: Sequence[int], lanes: Sequence[Prospect]) -> Decision:
        """One of ``widths``, those prepared at this batch capacity, for lanes of which some may draft."""

    def observe(self, plan: RoundPlan, seconds: float, outcomes: Sequence[Outcome]) -> None:
        """A collected round and its device seconds."""


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


class AdaptiveWidth:
    """The width of most expected tokens per second, from each request's own acceptance and measured round costs."""

    def __init__(self, controller: WidthController, history: AcceptanceHistory) -> None:
        self.controller = controller
        self.history = history
        self.drafts = controller.widths[-1] - 1

    def choose(self, batch: int, widths: Sequence[int], lanes: Sequence[Prospect]) -> Decision:
        """See ``WidthPolicy.choose``."""
        outlooks = []
        for resident, ceiling, copy in lanes:
            request = resident.acceptance or self._begin(resident)
            outlook = request.outlook
            if outlook is None or copy is not None or ceiling != self.drafts:
                if copy is None:
                    outlook = request.survival(ceiling)
                else:
                    outlook = request.survival(ceiling, len(copy.tokens), copy.match_length)
            outlooks.append(outlook)
        return self.controller.choose(batch, outlooks, allowed=widths)

    def observe(self, plan: RoundPlan, seconds: float, outcomes: Sequence[Outcome]) -> None:
        """See ``WidthPolicy.observe``."""
        for lane, resident, done in outcomes:
            request = resident.acceptance or self._begin(resident)
            if lane.copies:
                request.observe(done.verified, done.accepted, copied_drafts(lane, done), lane.match_length)
            else:
                request.observe(done.verified, done.accepted)
        self.controller.observe(plan.batch, plan.width, seconds, [done.emitted for _, _, done in outcomes])

    def _begin(self, resident: Resident) -> RequestSurvival:
        found = resident.acceptance = RequestSurvival(self.history)
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
