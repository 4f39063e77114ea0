"""Attention over rows that are keys and values of all heads, with a sink: a logit of each head that only takes weight.

    o_h = Σ_i exp(ℓ_hi) row_i / (Σ_i exp(ℓ_hi) + exp(sink_h)),  ℓ_hi = q_h · row_i / √d

``attend`` takes the rows as one tensor. ``attend_window`` finds them where they are, in a window of a buffer and in the groups of
a paged field; it exists as a kernel only, and who has none copies the rows together for ``attend``.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from specdec.ops.norms import accumulate_dtype
from specdec.ops.select import uses_cuda
from specdec.state.store import StateStore


@frozen(kw_only=True, eq=False)
class Groups:
    """Groups of ``ratio`` tokens of a paged field that P rows attend to.

    entries: [·, d] the field's flat entries of one layer; slots: [P]; complete: [P] int64, how many groups a row may see. ids:
    [P, most] int64 with counted [P, most] bool, False where a row has fewer; both None for the first ``complete`` groups, at
    most ``most``.
    """

    store: StateStore
    entries: Tensor
    slots: Tensor
    complete: Tensor
    ratio: int
    most: int
    ids: Tensor | None = None
    counted: Tensor | None = None


def attend(q: Tensor, keys: Tensor, bias: Tensor, sink: Tensor) -> Tensor:
    """Attention of n queries that see the same rows.

    q: [G, n, heads, d]; keys: [G, S, d], all finite, even those that are not seen; bias: [G, 1, S], 0 for a row that is seen and
    −∞ for another, and sink: [heads] in the accumulate dtype. Returns [G, n, heads, d] in the dtype of q; arithmetic is float32
    or wider. Changes nothing.
    """
    if uses_cuda("attend", q, keys, bias, sink):
        from specdec.ops.cuda.sink_attention import attend_sink

        return attend_sink(q, keys, bias, sink)
    count, queries, heads, width = q.shape
    precise = accumulate_dtype(q.dtype)
    wide = keys.to(precise)
    logits = torch.baddbmm(bias, q.flatten(1, 2).to(precise), wide.transpose(1, 2), alpha=width**-0.5)
    taken = sink.expand(count, queries, heads).reshape(count, -1, 1)
    weights = torch.softmax(torch.cat([logits, taken], dim=-1), dim=-1)[..., :-1]
    return torch.bmm(weights, wide).view(q.shape).to(q.dtype)


def attends_in_place(like: Tensor) -> bool:
    """Whether ``attend_window`` has a kernel for queries of this dtype and device."""
    return uses_cuda("attend_window", like)


def attend_window(
    q: Tensor, window: Tensor, last: Tensor, positions: Tensor, extent: int, sink: Tensor, groups: Groups | None
) -> Tensor:
    """Attention of each of P rows to the ``extent`` entries of a buffer that end at its own, and to groups.

    q: [P, heads, d]; window: [·, d]; last: [P] int64 entry of each row's own; positions: [P] int64: entries before position 0 are
    not seen, and may hold anything, as groups that are not complete may; sink: [heads] float32. Returns [P, heads, d] in the
    dtype of q. Only where ``attends_in_place``.
    """
    from specdec.ops.cuda import sink_attention

    return sink_attention.attend_window(q, window, last, positions, extent, sink, groups)
