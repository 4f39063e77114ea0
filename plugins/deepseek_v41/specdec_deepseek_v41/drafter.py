"""The DSpark drafter of DeepSeek-V4.1-Flash: a noncausal block of three stages, a Markov head, a confidence head.

    M_t = rms(Wmain F_t);  window row of stage s = rows_s(M_t)          F_t: the target's features of committed input t
    block: pending token at its own position N, then noise tokens;  h = last collapse,  U = rms(h) Wheadᵀ
    logits_k = U_{k−1} + G e_k,  e_k = E[x_{k−1}],  x_0 pending;  c_k = σ(w · (h_{k−1} | e_k))

A block has L rows, the preparation's draft-token maximum, and is evaluated at its full length whatever number of drafts D ≤ L a
round draws: the block is noncausal, so its length changes every proposal. Rows of a block are not kept: history is the window of
each stage, N inputs of it, and it needs no token that is not consumed. c_k looks at no token from x_k on. Source: official
inference code of the release.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.checkpoint.reader import Checkpoint
from specdec.checkpoint.weights import Weights
from specdec.control.calibration import read_temperatures
from specdec.declaration import Recipe
from specdec.interfaces import Capacities, Proposer
from specdec.ops.norms import rms_norm
from specdec.state.requests import Lanes
from specdec.state.store import StateStore

from .draft_stage import DraftStage
from .hyper_connection import collapse, first_read, open_streams
from .linear import Linear
from .state import drafter_layout
from .target import DeepseekTarget


class DsparkDrafter:
    """Draft weights and draft windows; embedding and head are the target's. Methods are the core's ``Drafter`` protocol."""

    #: Windows hold inputs: no row waits for a token.
    lag = 0

    def __init__(
        self, checkpoint: Checkpoint, target: DeepseekTarget, capacities: Capacities, *, qdq: bool = True
    ) -> None:
        """qdq: whether rows are rounded as the cache rounds them; False only in tests."""
        g, device = target.geometry, target.device
        layout = drafter_layout(g, max_draft_tokens=capacities.max_draft_tokens, dtype=capacities.dtype)
        # no field has pages
        self.store = StateStore(layout, slots=capacities.slots, pages=0, context=capacities.context, device=device)
        self.target = target
        self.geometry = g
        self.folder = Path(checkpoint.directory)
        weights = Weights(checkpoint, prefix="mtp.", dtype=target.dtype, device=device)
        last = weights.under(f"{g.num_stages - 1}.")
        self.stages = [DraftStage.load(weights.under(f"{stage}."), g, qdq=qdq) for stage in range(g.num_stages)]
        self.projection = Linear.load(weights, {"0.main_proj.weight": g.hidden_size}, g.feature_width)
        self.projection_scale = weights.precise_vector("0.main_norm.weight", g.hidden_size)
        self.final_scale = last.precise_vector("norm.weight", g.hidden_size)
        # the Markov and confidence heads are float32 or wider whatever the activations are
        rank = g.dspark_markov_rank
        self.token_table = last.matrix("markov_head.embed.weight", g.vocab_size, rank)
        self.transition = last.precise_vector("markov_head.head.weight", g.vocab_size, rank)
        self.confidence = last.precise_vector("confidence_head.proj.weight", 1, g.hidden_size + rank)
        self._first_read = first_read(g, self.projection_scale)
        #: L, rows of a block.
        self.block_length = capacities.draft_tokens
        self._noise = torch.full((1, max(self.block_length - 1, 0)), g.dspark_noise_token_id, device=device)
        self._steps = torch.arange(max(self.store.horizon, g.sliding_window), device=device)

    @classmethod
    def load(
        cls, *, recipe: Recipe, checkpoint: Checkpoint, target: DeepseekTarget, capacities: Capacities
    ) -> DsparkDrafter:
        """Loads ``mtp.*`` and allocates the draft windows.

        Raises CheckpointError for a missing or misshapen tensor, or unknown storage.
        """
        return cls(checkpoint, target, capacities)

    def temperatures(self, draft_tokens: int) -> tuple[float, ...]:
        """Calibration of a block's first drafts, from its length's file beside the weights; all 1 without one. Host side,
        preparation only.

        Raises CheckpointError if the file is not usable.
        """
        return read_temperatures(self.folder, self.block_length)[:draft_tokens]

    # --- history -----------------------------------------------------------------------------------------------------

    def _window_rows(self, features: Tensor, positions: Tensor) -> list[Tensor]:
        """Rows [T, d] of every stage for committed inputs. features: [T, 3·H]; positions: [T] int64."""
        x = rms_norm(self.projection(features), self.projection_scale, self.geometry.rms_norm_eps)
        rotation = self.target.plain_table.at(positions)
        return [stage.attention.rows(x, rotation) for stage in self.stages]

    def _check_history(self, slots: Tensor, consumed: Tensor) -> None:
        """As many inputs were absorbed as the target consumed."""
        self.store.flag(slots, self.store.read_row("rows", 0, slots) != consumed)

    # --- Drafter protocol --------------------------------------------------------------------------------------------

    def prefill(self, feedback: Tensor, tokens: Tensor, slot: Tensor, start: int | Tensor) -> None:
        """See ``Drafter.prefill``. Rows that the windows would push out again are not computed."""
        rows, extent = feedback.shape[0], self.geometry.sliding_window
        kept = min(rows, extent)
        first = torch.zeros_like(slot) + start
        self._check_history(slot, first)
        positions = first + (rows - kept) + self._steps[:kept]
        for number, made in enumerate(self._window_rows(feedback[rows - kept :], positions)):
            window = self.store.read_window("window", number, slot)
            self.store.write_window("window", number, slot, torch.cat([window[:, kept:], made.unsqueeze(0)], dim=1))
        self.store.write_row("rows", slot, first + rows)

    def propose(self, lanes: Lanes, draft_tokens: int, proposer: Proposer) -> Tensor | None:
        """See ``Drafter.propose``. The whole block is run, and nothing for 0 drafts."""
        self._check_history(lanes.slots, lanes.consumed)
        if draft_tokens == 0:
            return None
        hidden = self._run_block(lanes)[:, :draft_tokens]
        precise = self.transition.dtype
        vector = rms_norm(hidden, self.final_scale, self.geometry.rms_norm_eps)
        base = F.linear(vector.to(self.target.head.dtype), self.target.head)
        token, embedded = lanes.pending, []
        for depth in range(draft_tokens):
            embedded.append(F.embedding(token, self.token_table).to(precise))
            token = proposer.draw(depth, base[:, depth] + F.linear(embedded[-1], self.transition))
        seen = torch.cat([hidden.to(precise), torch.stack(embedded, dim=1)], dim=-1)
        return torch.sigmoid(F.linear(seen, self.confidence).squeeze(-1)).to(torch.float32)

    def _run_block(self, lanes: Lanes) -> Tensor:
        """Collapsed streams [B, L, H] behind the last stage, before its norm."""
        extent, count, length = self.geometry.sliding_window, lanes.count, self.block_length
        noise = self._noise.expand(count, -1)
        tokens = torch.cat([lanes.pending.unsqueeze(1), noise], dim=1)
        positions = lanes.consumed.unsqueeze(1) + self._steps[:length]
        rotation = self.target.plain_table.at(positions.flatten())
        streams, pre = open_streams(F.embedding(tokens.flatten(), self.target.embedding), self._first_read)
        # window row i is position N − extent + i; every row of the block is seen
        known = self._steps[:extent] >= extent - lanes.consumed.unsqueeze(1)
        bias = torch.zeros(count, extent + length, dtype=pre.dtype, device=pre.device)
        bias[:, :extent] = torch.where(known, 0.0, float("-inf"))
        for number, stage in enumerate(self.stages):
            window = self.store.read_window("window", number, lanes.slots)
            streams, pre = stage(streams, pre, window, bias.unsqueeze(1), rotation)
        return collapse(streams, pre).unflatten(0, (count, length))

    def absorb(self, lanes: Lanes, tokens: Tensor, emitted: Tensor) -> None:
        """See ``Drafter.absorb``. Every verified input leaves a candidate row; what was not packed leaves rubbish that ``commit``
        does not select."""
        width = tokens.shape[1]
        features = self.target.feedback_rows(lanes.slots, width).flatten(0, 1)
        positions = lanes.consumed.unsqueeze(1) + self._steps[:width]
        for number, made in enumerate(self._window_rows(features, positions.flatten())):
            self.store.write_candidates("window", number, lanes.slots, made.unflatten(0, (lanes.count, width)))

    def commit(self, lanes: Lanes, emitted: Tensor) -> None:
        """See ``Drafter.commit``."""
        self.store.write_row("rows", lanes.slots, lanes.consumed + emitted)
        self.store.commit(lanes.slots, emitted)

    def snapshot(self, slots: Tensor, taken: Tensor | None = None) -> dict[str, Tensor]:
        """See ``Drafter.snapshot``."""
        return self.store.state_after(slots, torch.zeros_like(slots) if taken is None else taken)

    def restore(self, slot: Tensor, state: Mapping[str, Tensor], consumed: Tensor) -> None:
        """See ``Drafter.restore``. The snapshot must be of exactly ``consumed`` inputs: rows pushed out are gone."""
        self.store.restore(slot, {**state, "rows": torch.zeros_like(state["rows"]) + consumed})

    def faults(self, slots: Tensor) -> Tensor:
        """See ``Drafter.faults``."""
        return self.store.faults.index_select(0, slots)
