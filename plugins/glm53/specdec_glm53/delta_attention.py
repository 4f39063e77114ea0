"""Linear attention layer of GLM-5.3-Flash (KDA): short convolution, delta rule with channel decays, gated output norm.

    q, k, v = silu(conv(x Wq | x Wk | x Wv));   q, k of unit length per head, q / √d
    g = bound · sigmoid(exp(A_log) · ((x Wfa) Wfb + dt_bias))       log decay of every key channel, in (bound, 0)
    β = sigmoid(x Wb);   o = delta rule;   y = (rms(o) · w · sigmoid((x Wga) Wgb)) Wo

Source: the ``glm5_next`` class of transformers 5.24 and b12x 1.5.1. All heads are assumed local: q, k, v, their convolutions,
Wb, Wfb, Wgb, A_log, dt_bias and the state split by head, Wo by input column; Wfa, Wga and w are the same for every shard.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from specdec.checkpoint.weights import Weights
from specdec.ops.channel_delta_rule import channel_delta_rule_chunks, channel_delta_rule_rows
from specdec.ops.delta_gates import channel_gates
from specdec.ops.norms import gated_rms_norm, unit_norm
from specdec.ops.short_conv import silu_conv
from specdec.state.store import StateStore

from .geometry import Geometry

# Added to the sum of squares of keys and queries; the constant of the reference class.
UNIT_EPS = 1e-6


@frozen(kw_only=True, eq=False)
class DeltaAttention:
    """Weights of one layer, D = heads · d.

    projection: [3·D + 2·d + heads, H], rows q, k, v, forget bottleneck, gate bottleneck, β; forget_up, gate_up: [D, d]; taps:
    [kernel, 3·D]; rate: exp(A_log) [heads, 1] and shift: rate · dt_bias [heads, d], in the accumulate dtype, as norm [d] is;
    output: [H, D].
    """

    projection: Tensor
    forget_up: Tensor
    gate_up: Tensor
    taps: Tensor
    rate: Tensor
    shift: Tensor
    norm: Tensor
    output: Tensor
    geometry: Geometry

    @classmethod
    def load(cls, weights: Weights, geometry: Geometry) -> DeltaAttention:
        """Reads one ``self_attn`` block. Raises CheckpointError for a missing or misshapen tensor."""
        g = geometry
        heads, dim, width, hidden = g.linear_num_heads, g.linear_head_dim, g.linear_width, g.hidden_size
        parts = (("q", width), ("k", width), ("v", width), ("f_a", dim), ("g_a", dim), ("b", heads))
        taps = [weights.precise_vector(f"{part}_conv1d.weight", width, 1, g.linear_conv_kernel_dim) for part in "qkv"]
        rate = weights.precise_vector("A_log", heads).exp().unsqueeze(-1)
        return cls(
            projection=torch.cat([weights.matrix(f"{part}_proj.weight", rows, hidden) for part, rows in parts]),
            forget_up=weights.matrix("f_b_proj.weight", width, dim),
            gate_up=weights.matrix("g_b_proj.weight", width, dim),
            taps=torch.cat(taps)[:, 0].t().contiguous(),
            rate=rate,
            shift=rate * weights.precise_vector("dt_bias", width).view(heads, dim),
            norm=weights.precise_vector("o_norm.weight", dim),
            output=weights.matrix("o_proj.weight", hidden, width),
            geometry=g,
        )

    def __call__(
        self, x: Tensor, store: StateStore, layer: int, slots: Tensor, column: Tensor, *, prompt: bool
    ) -> Tensor:
        """x: [B·T, H] → [B·T, H]. layer: index among linear layers; slots: [B]; column: flat committed column of ``kda_state``
        [B].

        A verification writes a state column for each row and window candidates; a prompt chunk writes committed state: the
        window itself and column 0.
        """
        g = self.geometry
        batch = slots.shape[0]
        rows = x.shape[0] // batch
        heads, dim, width = g.linear_num_heads, g.linear_head_dim, g.linear_width
        qkv, forget, gate, b = F.linear(x, self.projection).split([3 * width, dim, dim, heads], dim=-1)
        qkv = qkv.view(batch, rows, -1)
        extended = torch.cat([store.read_window("kda_conv", layer, slots), qkv], dim=1)
        if prompt:
            store.write_window("kda_conv", layer, slots, extended[:, rows:])
        else:
            store.write_candidates("kda_conv", layer, slots, qkv)
        mixed = silu_conv(extended, self.taps, rows, rounds_first=False).view(batch, rows, 3, heads, dim)
        unit = unit_norm(mixed[:, :, :2], UNIT_EPS)
        q, k, v = unit[:, :, 0] * dim**-0.5, unit[:, :, 1], mixed[:, :, 2].to(unit.dtype)
        raw = F.linear(forget, self.forget_up).view(batch, rows, heads, dim)
        b = b.view(batch, rows, heads)
        log_decay, beta = channel_gates(raw, b, self.rate, self.shift, g.linear_lower_bound)
        state = store.read_column("kda_state", layer, column)
        if prompt:
            out, last = channel_delta_rule_chunks(state, q, k, v, log_decay, beta)
            states = last.unsqueeze(1)
        else:
            out, states = channel_delta_rule_rows(state, q, k, v, log_decay, beta)
        store.write_columns("kda_state", layer, slots, states)
        opened = F.linear(gate, self.gate_up).view(batch * rows, heads, dim)
        gated = gated_rms_norm(out.reshape(batch * rows, heads, dim), opened, self.norm, g.rms_norm_eps, "sigmoid")
        return F.linear(gated.flatten(1), self.output)
