"""Counts from completion records: what was offered, accepted and emitted, by depth. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import define, field

from specdec.round.completion import Completion


@define(kw_only=True)
class DraftStatistics:
    """Running totals over completions.

    A depth counts as *judged* in a round only if a draft was verified there and every draft before it was accepted;
    acceptance at a depth is accepted / judged, survival is accepted / rounds that verified the depth. The first token of a
    request comes without a round and counts as a token only.
    """

    tokens: int = 0
    rounds: int = 0
    offered: int = 0
    accepted: int = 0
    verified_by_depth: list[int] = field(factory=list)
    judged_by_depth: list[int] = field(factory=list)
    accepted_by_depth: list[int] = field(factory=list)
    tokens_in_rounds: int = 0

    def add(self, completion: Completion, *, in_round: bool) -> None:
        """Counts one record. in_round: False for the record of a request's first token."""
        self.tokens += completion.emitted
        if not in_round:
            return
        self.rounds += 1
        self.tokens_in_rounds += completion.emitted
        self.offered += completion.offered
        self.accepted += completion.accepted
        while len(self.verified_by_depth) < completion.offered:
            for counts in (self.verified_by_depth, self.judged_by_depth, self.accepted_by_depth):
                counts.append(0)
        for depth in range(completion.verified):
            self.verified_by_depth[depth] += 1
            self.judged_by_depth[depth] += completion.accepted >= depth
            self.accepted_by_depth[depth] += completion.accepted > depth

    @classmethod
    def of(cls, completions: Iterable[tuple[Completion, bool]]) -> DraftStatistics:
        """Totals over (record, in_round) pairs."""
        statistics = cls()
        for completion, in_round in completions:
            statistics.add(completion, in_round=in_round)
        return statistics

    @property
    def tokens_per_round(self) -> float:
        """Emitted tokens per round, the bonus or corrected token included; 0 before the first round."""
        return self.tokens_in_rounds / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """accepted / judged per depth, depth 1 first; 0 where nothing was judged."""
        return [a / j if j else 0.0 for a, j in zip(self.accepted_by_depth, self.judged_by_depth, strict=True)]

    @property
    def survival_by_depth(self) -> list[float]:
        """accepted / verified per depth: the probability that the whole prefix up to it was accepted."""
        return [a / o if o else 0.0 for a, o in zip(self.accepted_by_depth, self.verified_by_depth, strict=True)]
