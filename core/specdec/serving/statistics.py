"""Counts from completion records: what was offered, accepted and emitted, by depth and source. Torch-free.

A record is kept as its outcome, and equal outcomes are counted together; every figure is a sum over them. So adding a record
costs the same whatever its depth, and figures cannot disagree with each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from attrs import define, field

from specdec.round.completion import Completion

#: Where a draft came from: the drafter. A copied one is of ``copied_source``.
LEARNED = "learned"
#: Where an emitted token came from that was no draft: drawn after the prompt, or by the target as correction or bonus.
FIRST, TARGET = "first", "target"


def copied_source(match_length: int | None) -> str:
    """Source of copied drafts: ``copied_8`` for a match of eight tokens, ``copied`` where its length was not given."""
    return "copied" if match_length is None else f"copied_{match_length}"


class Outcome(NamedTuple):
    """What one record says. emitted: tokens delivered; copies: bit k set if draft k was copied, offered drafts only."""

    offered: int
    verified: int
    accepted: int
    emitted: int
    copies: int
    match_length: int | None

    def source(self, depth: int) -> str:
        """Source of the draft at a depth, from 0."""
        return copied_source(self.match_length) if self.copies >> depth & 1 else LEARNED


@define(kw_only=True)
class DraftCounts:
    """Drafts of one depth and source: offered to the target, verified by it, judged (see ``DraftStatistics``), accepted, and
    emitted, which leaves out those behind the end of the output."""

    offered: int = 0
    verified: int = 0
    judged: int = 0
    accepted: int = 0
    emitted: int = 0


@define(kw_only=True)
class DraftStatistics:
    """Running totals over completions.

    A depth counts as *judged* in a round only if a draft was verified there and every draft before it was accepted;
    acceptance at a depth is accepted / judged, survival is accepted / rounds that verified the depth. The first token of a
    request comes without a round and counts as a token only.

    ``tokens`` are those delivered. A record may hold more where the host ended the request inside it, because a stop string
    was complete or it was cancelled meanwhile; those behind the end are ``cut_tokens`` and nothing else. What the target judged
    is counted as it was judged, also behind an end.

    outcomes: how often each outcome occurred. inconsistent: records that contradict themselves; their delivered tokens count,
    their drafts do not.
    """

    outcomes: Counter[Outcome] = field(factory=Counter)
    first_tokens: int = 0
    cut_tokens: int = 0
    inconsistent: int = 0

    def add(
        self, completion: Completion, *, in_round: bool, match_length: int | None = None, delivered: int | None = None
    ) -> int:
        """Counts one record and returns how many tokens it delivered.

        in_round: False for the record of a request's first token. match_length: tokens that the copied drafts were found by.
        delivered: tokens of the record that belong to the output, None for all of them.
        """
        emitted = completion.emitted
        tokens = emitted if delivered is None else delivered
        offered, verified, accepted = completion.offered, completion.verified, completion.accepted
        copies = completion.copy_sources
        if copies:
            copies &= (1 << max(offered, 0)) - 1
        if not (offered >= verified >= accepted >= 0 <= tokens <= emitted <= accepted + 1):
            # whatever else the record says: what was delivered stays the sum of what is counted
            tokens = max(tokens, 0)
            self.inconsistent += 1
            offered = verified = accepted = copies = 0
        self.cut_tokens += max(emitted - tokens, 0)
        if not in_round:
            self.first_tokens += tokens
            return tokens
        self.outcomes[Outcome(offered, verified, accepted, tokens, copies, match_length if copies else None)] += 1
        return tokens

    def merge(self, other: DraftStatistics) -> None:
        """Adds the totals of another."""
        self.outcomes.update(other.outcomes)
        self.first_tokens += other.first_tokens
        self.cut_tokens += other.cut_tokens
        self.inconsistent += other.inconsistent

    def since(self, earlier: DraftStatistics) -> DraftStatistics:
        """What came since ``earlier``, a copy of these totals as they were."""
        return DraftStatistics(
            outcomes=self.outcomes - earlier.outcomes,
            first_tokens=self.first_tokens - earlier.first_tokens,
            cut_tokens=self.cut_tokens - earlier.cut_tokens,
            inconsistent=self.inconsistent - earlier.inconsistent,
        )

    @classmethod
    def of(cls, completions: Iterable[tuple[Completion, bool]]) -> DraftStatistics:
        """Totals over (record, in_round) pairs."""
        statistics = cls()
        for completion, in_round in completions:
            statistics.add(completion, in_round=in_round)
        return statistics

    # --- totals ----------------------------------------------------------------------------------------------------

    def _sum(self, name: str) -> int:
        return sum(getattr(outcome, name) * times for outcome, times in self.outcomes.items())

    @property
    def tokens(self) -> int:
        """Tokens delivered."""
        return self.first_tokens + self.tokens_in_rounds

    @property
    def tokens_in_rounds(self) -> int:
        """Tokens delivered by rounds."""
        return self._sum("emitted")

    @property
    def rounds(self) -> int:
        """Records of rounds: a round of several requests counts once for each."""
        return self.outcomes.total()

    @property
    def offered(self) -> int:
        """Drafts that the target could use; a round without drafts adds nothing."""
        return self._sum("offered")

    @property
    def verified(self) -> int:
        """Drafts that the target judged."""
        return self._sum("verified")

    @property
    def accepted(self) -> int:
        """Drafts in accepted prefixes."""
        return self._sum("accepted")

    @property
    def tokens_per_round(self) -> float:
        """Emitted tokens per round, the bonus or corrected token included; 0 before the first round."""
        return self.tokens_in_rounds / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """accepted / verified over all depths; 0 where nothing was verified."""
        verified = self.verified
        return self.accepted / verified if verified else 0.0

    # --- by depth and source ---------------------------------------------------------------------------------------

    def drafts(self) -> dict[tuple[str, int], DraftCounts]:
        """Drafts by source and depth, depth 1 first; in order of source and depth."""
        table: dict[tuple[str, int], DraftCounts] = {}
        for outcome, times in self.outcomes.items():
            for depth in range(outcome.offered):
                counts = table.setdefault((outcome.source(depth), depth + 1), DraftCounts())
                counts.offered += times
                if depth < outcome.verified:
                    counts.verified += times
                    counts.judged += times * (outcome.accepted >= depth)
                if depth < outcome.accepted:
                    counts.accepted += times
                    counts.emitted += times * (depth < outcome.emitted)
        return dict(sorted(table.items()))

    def tokens_by_source(self) -> dict[str, int]:
        """Tokens delivered by where they came from; the values add up to ``tokens``."""
        drafted = sum(min(outcome.emitted, outcome.accepted) * times for outcome, times in self.outcomes.items())
        sources = {FIRST: self.first_tokens, TARGET: self.tokens_in_rounds - drafted, LEARNED: 0}
        for (source, _), counts in self.drafts().items():
            sources[source] = sources.get(source, 0) + counts.emitted
        return sources

    def _by_depth(self, name: str) -> list[int]:
        """One count summed over sources, depth 1 first."""
        table = self.drafts()
        values = [0] * max((depth for _, depth in table), default=0)
        for (_, depth), counts in table.items():
            values[depth - 1] += getattr(counts, name)
        return values

    @property
    def verified_by_depth(self) -> list[int]:
        """Rounds in which the draft at each depth was verified, depth 1 first."""
        return self._by_depth("verified")

    @property
    def judged_by_depth(self) -> list[int]:
        """Those of them in which every draft before it was accepted."""
        return self._by_depth("judged")

    @property
    def accepted_by_depth(self) -> list[int]:
        """Rounds in which the draft at each depth was accepted."""
        return self._by_depth("accepted")

    @property
    def acceptance_by_depth(self) -> list[float]:
        """accepted / judged per depth, depth 1 first; 0 where nothing was judged (``judged_by_depth`` tells)."""
        return [a / j if j else 0.0 for a, j in zip(self.accepted_by_depth, self.judged_by_depth, strict=True)]

    @property
    def survival_by_depth(self) -> list[float]:
        """accepted / verified per depth: the probability that the whole prefix up to it was accepted."""
        return [a / o if o else 0.0 for a, o in zip(self.accepted_by_depth, self.verified_by_depth, strict=True)]

    def as_data(self) -> dict[str, Any]:
        """Plain types for JSON; see ``serving.metrics`` for the keys."""
        return {
            "tokens": self.tokens,
            "tokens_by_source": self.tokens_by_source(),
            "cut_tokens": self.cut_tokens,
            "lane_rounds": self.rounds,
            "tokens_per_round": self.tokens_per_round,
            "offered": self.offered,
            "verified": self.verified,
            "accepted": self.accepted,
            "acceptance_rate": self.acceptance_rate,
            "drafts": [
                {
                    "source": source,
                    "depth": depth,
                    "offered": counts.offered,
                    "verified": counts.verified,
                    "judged": counts.judged,
                    "accepted": counts.accepted,
                    "emitted": counts.emitted,
                }
                for (source, depth), counts in self.drafts().items()
            ],
            "inconsistent_records": self.inconsistent,
        }
