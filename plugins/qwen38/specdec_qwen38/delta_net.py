"""Gated delta net layer of Qwen3.8-Flash: short convolution, delta rule, gated output norm.

Source: the ``qwen4_exp`` class of transformers 5.24. Projections are stored head-first: queries, keys, values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from specdec.ops.delta_gates import head_gates
from specdec.ops.delta_rule import delta_rule_chunks, delta_rule_rows
from specdec.ops.norms import gated_rms_norm, unit_norm
from specdec.ops.short_conv import silu_conv
from specdec.state.store import StateStore

from .geometry import Geometry
from .weights import Weights

# Added to the sum of squares of keys and queries; the constant of the reference class.
UNIT_EPS = 1e-6


@frozen(kw_only=True, eq=False)
class DeltaNet:
    """Weights of one layer. projection: [qkv + z + 2·Hv, H], rows qkv, z, b, a; taps: [kernel, qkv]; rate = −exp(A_log)."""

    projection: Tensor
    taps: Tensor
    rate: Tensor
    bias: Tensor
    norm: Tensor
    output: Tensor
    geometry: Geometry

    @classmethod
    def load(cls, weights: Weights) -> DeltaNet:
        g = weights.geometry
        heads, hidden = g.linear_num_value_heads, g.hidden_size
        parts = (("qkv", g.qkv_width), ("z", g.value_width), ("b", heads), ("a", heads))
        taps = weights.precise_vector("conv1d.weight", g.qkv_width, 1, g.linear_conv_kernel_dim)
        return cls(
            projection=torch.cat([weights.matrix(f"in_proj_{part}.weight", rows, hidden) for part, rows in parts]),
            taps=taps[:, 0].t().contiguous(),
            rate=-weights.precise_vector("A_log", heads).exp(),
            bias=weights.precise_vector("dt_bias", heads),
            norm=weights.matrix("norm.weight", g.linear_value_head_dim),
            output=weights.matrix("out_proj.weight", hidden, g.value_width),
            geometry=g,
        )

    def __call__(
        self, m: Tensor, store: StateStore, layer: int, slots: Tensor, column: Tensor | None, *, prompt: bool
    ) -> Tensor:
        """m: [B·T, H] → [B·T, H]. layer: index among delta net layers; column: flat committed column [B] where the store keeps
        whole states per row, None where it keeps one live matrix and records.

        A verification writes records (or columns) and window candidates; a prompt chunk (B = 1) and a single row write
        committed state.
        """
        g = self.geometry
        batch = slots.shape[0]
        rows = m.shape[0] // batch
        key_heads, group = g.linear_num_key_heads, g.linear_num_value_heads // g.linear_num_key_heads
        projected = F.linear(m, self.projection).view(batch, rows, -1)
        qkv, z, b, a = projected.split(
            [g.qkv_width, g.value_width, g.linear_num_value_heads, g.linear_num_value_heads], dim=-1
        )
        extended = torch.cat([store.read_window("delta_conv", layer, slots), qkv], dim=1)
        if prompt:
            store.write_window("delta_conv", layer, slots, extended[:, rows:])
        else:
            store.write_candidates("delta_conv", layer, slots, qkv)
        mixed = silu_conv(extended, self.taps, rows, rounds_first=True)
        heads = mixed[..., : 2 * g.key_width].view(batch, rows, 2, key_heads, g.linear_key_head_dim)
        unit = unit_norm(heads, UNIT_EPS)
        q, k = unit[:, :, 0] * g.linear_key_head_dim**-0.5, unit[:, :, 1]
        v = mixed[..., 2 * g.key_width :].to(q.dtype).view(batch, rows, key_heads, -1)
        log_decay, beta = (x.view(batch, rows, key_heads, group) for x in head_gates(a, b, self.rate, self.bias))
        if column is None:
            state = store.read_row("delta_state", layer, slots)
        else:
            state = store.read_column("delta_state", layer, column)
        if prompt:
            out, last = delta_rule_chunks(state, q, k, v, log_decay, beta)
            self._keep(store, layer, slots, last, column)
        else:
            decay = log_decay.exp()
            recorded = column is None and rows > 1
            result = delta_rule_rows(state, q, k, v, decay, beta, keep_states=not recorded)
            out = result.outputs
            if column is not None:
                store.write_columns("delta_state", layer, slots, torch.stack(result.states, dim=1))
            elif not recorded:
                # nothing can be rejected: the live matrix is updated directly
                self._keep(store, layer, slots, result.states[0], column)
            else:
                store.write_records("delta_corrections", layer, slots, result.corrections)
                store.write_records("delta_keys", layer, slots, k)
                store.write_records("delta_decays", layer, slots, decay)
        out, z = (x.reshape(batch * rows, -1, g.linear_value_head_dim) for x in (out, z))
        gated = gated_rms_norm(out, z, self.norm, g.rms_norm_eps, g.output_gate_type)
        return F.linear(gated.flatten(1), self.output)

    @staticmethod
    def _keep(store: StateStore, layer: int, slots: Tensor, state: Tensor, column: Tensor | None) -> None:
        """Makes ``state`` [B, Hk, G·v, d] the committed one."""
        if column is None:
            store.write_row("delta_state", slots, state, layer=layer)
        else:
            store.write_columns("delta_state", layer, slots, state.unsqueeze(1))
