"""Which drafts of which lane are verified when a round has fewer target rows than its lanes have drafts.

Forecasts decide: c[b, j] is the probability that draft j of lane b is accepted if the earlier ones are, so the product over a
prefix is the probability that the prefix survives. The top-P rule admits the drafts of greatest survival under each lane's
ceiling until the rows are used up. Survival never grows along a lane, so what is admitted of a lane is a prefix.

The rule is causal: whether draft j is verified depends on survivals up to j, which were known before draft j was drawn, and never
on how many drafts behind it would fit. A rule that looks at the whole block first and then picks a length lets a drawn token
decide whether it is judged, and the emitted text no longer follows the target's law.

Letters: B lanes, K draft tokens, W = K + 1, P physical target rows.
"""

from __future__ import annotations

import torch
from attrs import field, frozen
from torch import Tensor

from specdec.state.requests import Lanes

#: Drafts of a smaller survival are never verified: a row costs more than it can bring. SGLang's limit.
LEAST_SURVIVAL = 1e-6


@frozen(kw_only=True, eq=False)
class PackedRows:
    """Rows of a packed target pass: the pending token of each lane followed by its admitted drafts, lane after lane.

    A row sees its lane's committed state and the rows of its lane with a smaller index. Rows that are not live, padding and
    dead lanes, write to the spare slot and the trash page only.
    """

    lanes: Lanes = field()
    """Lanes of the round, B of them."""
    lane: Tensor = field()
    """[P] int64: lane of each row; some lane for padding."""
    index: Tensor = field()
    """[P] int64: place of the row in its lane's block, 0 for the pending token."""
    position: Tensor = field()
    """[P] int64: number of inputs before the row, N + index."""
    live: Tensor = field()
    """[P] bool: whether the row belongs to a running request."""
    slots: Tensor = field()
    """[P] int64: slot of the row's lane, the spare slot where the row is not live."""
    starts: Tensor = field()
    """[B] int64: first row of each lane; meaningless where the length is 0."""
    lengths: Tensor = field()
    """[B] int64: rows of each lane, 1 + admitted drafts, 0 for dead lanes."""
    width: int = field()
    """W: most rows of a lane."""

    @classmethod
    def pack(cls, lanes: Lanes, admitted: Tensor, *, width: int, rows: int, spare: int) -> PackedRows:
        """admitted: [B] int64 drafts to verify per lane, at most W − 1, of which 1 + admitted summed over live lanes must not
        exceed ``rows``. spare: slot that nobody owns. Capturable."""
        lengths = (admitted + 1) * lanes.live
        ends = lengths.cumsum(0)
        starts = ends - lengths
        number = torch.arange(rows, device=admitted.device)
        lane = (ends.unsqueeze(0) <= number.unsqueeze(1)).sum(1).clamp(max=lanes.count - 1)
        index = (number - starts.index_select(0, lane)).clamp(0, width - 1)
        live = number < ends[-1]
        return cls(
            lanes=lanes,
            lane=lane,
            index=index,
            position=lanes.consumed.index_select(0, lane) + index,
            live=live,
            slots=torch.where(live, lanes.slots.index_select(0, lane), spare),
            starts=starts,
            lengths=lengths,
            width=width,
        )

    @classmethod
    def full(cls, lanes: Lanes, *, width: int) -> PackedRows:
        """B·W rows, all drafts of every lane: the rectangular layout. Rows of dead lanes are there, but not live."""
        lane = torch.arange(lanes.count, device=lanes.slots.device).repeat_interleave(width)
        index = torch.arange(width, device=lanes.slots.device).repeat(lanes.count)
        starts = torch.arange(lanes.count, device=lanes.slots.device) * width
        return cls(
            lanes=lanes,
            lane=lane,
            index=index,
            position=lanes.consumed.index_select(0, lane) + index,
            live=lanes.live.index_select(0, lane),
            slots=lanes.slots.index_select(0, lane),
            starts=starts,
            lengths=torch.full_like(starts, width),
            width=width,
        )

    @property
    def count(self) -> int:
        """P."""
        return self.lane.shape[0]

    def gather(self, block: Tensor) -> Tensor:
        """Rows of a block by lane. block: [B, W, …]; returns [P, …]."""
        return block.flatten(0, 1).index_select(0, self.lane * self.width + self.index)

    def scatter(self, rows: Tensor) -> Tensor:
        """Rows back to their lanes. rows: [P, …]; returns [B, W, …], with copies of a lane's last row, or of some row, where it
        has fewer: real values, because zeros or leftovers could become NaN downstream."""
        block = torch.arange(self.width, device=rows.device)
        last = (self.lengths - 1).clamp(min=0).unsqueeze(1)
        source = (self.starts.unsqueeze(1) + torch.minimum(block, last)).clamp(max=self.count - 1)
        return rows.index_select(0, source.reshape(-1)).unflatten(0, (self.lengths.shape[0], self.width))


def calibrated(forecasts: Tensor, temperatures: Tensor) -> Tensor:
    """Forecasts with their logits divided by a temperature per depth. forecasts: [B, K]; temperatures: [K], above 0."""
    return torch.sigmoid(torch.logit(forecasts) / temperatures)


def prefix_survival(forecasts: Tensor) -> Tensor:
    """Probability that each prefix is accepted, [B, K] float32. forecasts: [B, K] float32.

    Never grows along a lane: forecasts count between 0 and 1, one that is not a number counts as 0.
    """
    running = [torch.nan_to_num(forecasts[:, 0], nan=0.0).clamp(0.0, 1.0)]
    # one product after another: a parallel scan may round a later prefix above an earlier one
    for depth in range(1, forecasts.shape[1]):
        running.append(running[-1] * torch.nan_to_num(forecasts[:, depth], nan=0.0).clamp(0.0, 1.0))
    return torch.stack(running, dim=1)


def admit_top(survival: Tensor, ceilings: Tensor, live: Tensor, rows: int) -> Tensor:
    """The top-P rule: drafts admitted per lane, [B] int64.

    survival: [B, K] float32 that never grows along a lane; ceilings: [B] int64 most drafts of each lane; live: [B] bool; rows: P,
    at least one for each lane. Each live lane has a row for its pending token; the rest goes to the drafts of greatest survival,
    at equal survival the smaller depth first, then the lower lane. Capturable.
    """
    lanes, drafts = survival.shape
    depth = torch.arange(drafts, device=survival.device)
    allowed = (depth < ceilings.unsqueeze(1)) & live.unsqueeze(1) & (survival >= LEAST_SURVIVAL)
    # depth-major order makes a stable sort break ties by depth, then lane
    by_depth = torch.where(allowed, survival, -1.0).t().reshape(-1)
    order = by_depth.sort(descending=True, stable=True).indices
    room = rows - live.sum()
    number = torch.arange(lanes * drafts, device=survival.device)
    taken = torch.zeros_like(by_depth, dtype=torch.bool).scatter(0, order, number < room)
    return (taken.view(drafts, lanes).t() & allowed).sum(1)
