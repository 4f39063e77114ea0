"""A round that decides in the middle how many drafts of each lane it verifies.

Its drafter forecasts the acceptance of its drafts. Drafts are admitted by the top-P rule (``specdec.round.allocation``) under
ceilings and a row capacity that the host fixed before the round, and the target runs on the admitted rows alone, packed. All the
rest is the chain round: the same acceptance, clip and commit, with the admitted drafts of a lane for its chain.

Letters: B lanes, K drafts, W = K + 1, P target rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import asdict
from torch import Tensor

from specdec.catalog import RoundShape
from specdec.errors import PluginError
from specdec.interfaces import Drafter, PackedTarget
from specdec.places import method_of
from specdec.round.allocation import PackedRows, admit_top, calibrated, prefix_survival
from specdec.round.arena import Arena
from specdec.round.contract import expect
from specdec.round.proposer import ChainProposer
from specdec.round.temperature_proposers import BoundedProposer, GumbelProposer
from specdec.round.transaction import ChainRound
from specdec.sampling.gumbel import draft_noise
from specdec.sampling.sampler import RoundWords
from specdec.state.requests import SEED, Lanes


class AllocatedRound(ChainRound):
    """One shape (B, D, W, P) whose verified prefixes are allocated inside the round. ``offered`` of a record is the ceiling a
    lane came with, ``verified`` what it was allocated."""

    target: PackedTarget

    def __init__(
        self,
        *,
        target: PackedTarget,
        drafter: Drafter,
        shape: RoundShape,
        arena: Arena,
        max_draft_tokens: int,
        temperatures: Sequence[float] | None = None,
    ) -> None:
        """temperatures: calibration of the forecasts, one per draft (``specdec.control.calibration``); None leaves them as they
        are.

        Raises ValueError for a shape without drafts or that verifies fewer than it draws, another number of temperatures than
        drafts, or an arena without forecast frames.
        """
        drafts = shape.draft_tokens
        if drafts < 1 or shape.verify_width != drafts + 1:
            raise ValueError(
                f"an allocated round draws drafts and may verify all of them, got {drafts} and width {shape.verify_width}; the "
                "chain round serves width one"
            )
        if temperatures is not None and len(temperatures) != drafts:
            raise ValueError(f"{len(temperatures)} calibration temperatures for {drafts} drafts; one for each")
        if arena.forecasts is None:
            raise ValueError("an allocated round needs an arena with confidence_width, where forecasts are published")
        super().__init__(target=target, drafter=drafter, shape=shape, arena=arena, max_draft_tokens=max_draft_tokens)
        self.forecast_frames = arena.forecasts
        scaled = temperatures is not None and any(temperature != 1 for temperature in temperatures)
        self.temperatures = (
            torch.tensor(list(temperatures or ()), dtype=torch.float32, device=arena.device) if scaled else None
        )

    def proposer(self, lanes: Lanes, words: RoundWords) -> ChainProposer:
        """See ``ChainRound.proposer``. One lane draws from the whole vocabulary, several from a bounded part of it."""
        common = super().proposer(lanes, words)
        if self.shape.batch > 1:
            return BoundedProposer(**asdict(common, recurse=False))
        noise = draft_noise(
            lanes.integers[:, SEED],
            lanes.consumed,
            drafts=self.shape.draft_tokens,
            vocab_size=self.target.vocab_size,
            max_draft_tokens=self.max_draft_tokens,
        )
        return GumbelProposer(**asdict(common, recurse=False), noise=noise)

    def verify(self, lanes: Lanes, block: Tensor, offered: Tensor, forecasts: Tensor | None) -> tuple[Tensor, Tensor]:
        """See ``ChainRound.verify``: allocates, then runs the target on the packed rows."""
        if forecasts is None:
            raise PluginError(
                f"{method_of(self.drafter, 'propose')} returns None; recipes with confidence_width need forecasts [B, K] float32"
            )
        if self.temperatures is not None:
            forecasts = calibrated(forecasts, self.temperatures)
        self.forecast_frames.write(self._settlement.frame_rows(lanes), forecasts)
        rows = self.shape.target_rows
        admitted = admit_top(prefix_survival(forecasts), offered, lanes.live, rows)
        packed = PackedRows.pack(
            lanes, admitted, width=self.shape.verify_width, rows=rows, spare=self.arena.requests.spare
        )
        logits = self.target.verify_rows(packed.gather(block), packed)
        expect(logits, (rows, self.target.vocab_size), "P, V", of=self.target, method="verify_rows", padded=True)
        return packed.scatter(logits), admitted
