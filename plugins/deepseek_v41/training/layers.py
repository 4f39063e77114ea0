"""Differentiable parallel (whole-sequence) forms of the architecture's blocks, as functions of tensors.

Shapes: B sequences, T tokens, S streams, H hidden size, h heads, D head size, G compressed rows, E experts.  The streams ``x``
are ``[B, T, S, H]`` in the compute dtype.  Matrix products run in the dtype of their input; norms, gates, softmax and mixing
coefficients in float32 (float64 where the input has it).  ``caches`` rounds what the caches hold, ``inputs`` what quantised
weights multiply; both with the identity as gradient.  No function changes its inputs.
"""

import math

import torch
import torch.nn.functional as F
from training.blocks import linear

from plugins.deepseek_v41.training.rounding import fp4_16, fp8_32, wide

EPS = 1e-20


def unit(x: torch.Tensor) -> torch.Tensor:
    """x / rms(x) over the last axis, float32."""
    x = wide(x)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def norm(x, weight):
    return (unit(x) * wide(weight)).to(x.dtype)


def quantised_linear(x, weight, inputs: bool):
    return linear(fp8_32(x) if inputs else x, weight)


def rotate(x, cos, sin):
    """Rotates the trailing pairs of ``x [..., D]``; ``cos, sin [..., pairs]`` float32, broadcast over leading axes."""
    kept, turned = x.split([x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]], -1)
    a, b = wide(turned).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return torch.cat([kept, turned.to(x.dtype)], -1)


def site(x, pre, fn, base, scale, weight, eps: float):
    """One mixing site: the normed block input under ``pre`` of the site before, and the coefficients made here.

    Returns ``m [B, T, H]`` (``weight`` is the RMSNorm after the collapse), ``pre [B, T, S]`` for the next site, ``post
    [B, T, S]`` and the logits of the mixing matrix ``[B, T, S, S]``, the last three float32.
    """
    streams = x.shape[-2]
    flat = wide(x.flatten(-2))
    mixed = F.linear(flat, fn.to(flat.dtype)) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)
    own, post, comb = mixed.split([streams, streams, streams * streams], -1)
    own_base, post_base, comb_base = base.split([streams, streams, streams * streams])
    own = torch.sigmoid(own * scale[0] + own_base) + eps
    post = 2 * torch.sigmoid(post * scale[1] + post_base)
    logits = (comb * scale[2] + comb_base).unflatten(-1, (streams, streams))
    return norm(collapse(x, pre), weight), own, post, logits.contiguous()


def collapse(x, pre):
    return (pre.unsqueeze(-1) * wide(x)).sum(-2).to(x.dtype)


def combine(x, y, post, comb):
    """Writes a block's output ``y [B, T, H]`` back: stream j gets ``post[j] · y + Σ_i comb[i, j] · x[i]``."""
    # A product of 4 × 4 matrices: elementwise, exact in float32 and fused.
    mixed = (comb.unsqueeze(-1) * wide(x).unsqueeze(-2)).sum(-3)
    return (mixed + post.unsqueeze(-1) * wide(y).unsqueeze(-2)).to(x.dtype)


def inject(x, rows, wkv, q_weight, k_weight, inputs: bool):
    """Adds the gated value of looked-up ``rows [B, T, lookups, width]`` to every stream."""
    streams, width = x.shape[-2:]
    projected = quantised_linear(rows.flatten(-2).to(x.dtype), wkv, inputs)
    key, value = projected.split([streams * width, width], -1)
    key, read = wide(key.unflatten(-1, (streams, width))), wide(x)
    dot = (read * wide(q_weight) * wide(k_weight) * key).sum(-1)
    for part in (read, key):
        dot = dot * torch.rsqrt(part.square().mean(-1) + EPS)
    dot = dot * width**-0.5
    root = dot.abs().clamp_min(1e-6).sqrt()
    gate = torch.sigmoid(torch.where(dot < 0, -root, root)).unsqueeze(-1)
    return (read + gate * wide(value).unsqueeze(-2)).to(x.dtype)


def projections(m, q_a, q_norm, q_b, kv, kv_norm, cos, sin, heads: int, caches: bool, inputs: bool):
    """Returns the normed query latent ``[B, T, rank]``, queries ``[B, T, h, D]`` and the window row ``[B, T, D]``.

    ``cos, sin [B or 1, T, pairs]`` of the rows' positions.
    """
    m = fp8_32(m) if inputs else m
    latent = norm(linear(m, q_a), q_norm)
    q = quantised_linear(latent, q_b, inputs).unflatten(-1, (heads, -1))
    q = rotate(q, cos.unsqueeze(-2), sin.unsqueeze(-2))
    return latent, q, window_rows(m, kv, kv_norm, cos, sin, caches, False)


def fuse(features, project, weight, inputs: bool):
    """The drafter's context rows ``[B, T, H]`` of its features."""
    return norm(quantised_linear(features, project, inputs), weight)


def window_rows(m, kv, kv_norm, cos, sin, caches: bool, inputs: bool):
    k = rotate(norm(quantised_linear(m, kv, inputs), kv_norm), cos, sin)
    return fp8_32(k) if caches else k


def compress(m, kv, gate, weight, cos, sin, caches: bool):
    """Latents and compressed rows, both ``[B, G, D]``: of every row, or with ``gate`` of every pair of rows.

    ``cos, sin [1, G, pairs]`` of each group's first position.
    """
    latent = linear(m, kv)
    if gate is not None:
        pairs = latent.shape[1] // 2
        both = torch.stack([wide(latent), wide(linear(m, gate))], -2)[:, : 2 * pairs].unflatten(1, (pairs, 2))
        value, score = both.unbind(-2)
        latent = (torch.softmax(score, 2) * value).sum(2).to(m.dtype)
    latent = norm(latent, weight)
    rows = rotate(latent, cos, sin)
    return latent, fp4_16(rows) if caches else rows


def visible_rows(length: int, groups: int, ratio: int, device) -> torch.Tensor:
    """Boolean ``[T, G]``: which compressed rows every query may see."""
    position = torch.arange(length, device=device)
    return torch.arange(groups, device=device) < ((position + 1) // ratio).unsqueeze(-1)


def sink_softmax(parts: list[torch.Tensor], sink: torch.Tensor) -> list[torch.Tensor]:
    """Probabilities of logits split over several tensors ``[..., h, n_i]`` with one more logit ``sink [h]`` in the sum."""
    sink = sink.unsqueeze(-1).to(parts[0].dtype)
    largest = sink.detach()
    for part in parts:
        largest = torch.maximum(largest, part.detach().amax(-1, keepdim=True))
    powers = [(part - largest).exp() for part in parts]
    total = (sink - largest).exp()
    for power in powers:
        total = total + power.sum(-1, keepdim=True)
    return [power / total for power in powers]


def in_blocks(k, window: int):
    """Rows ``[B, T, D]``, T a multiple of ``window`` → own and previous block ``[B, T / window, 2 · window, D]``."""
    blocks = k.unflatten(1, (-1, window))
    return torch.cat([F.pad(blocks[:, :-1], (0, 0, 0, 0, 1, 0)), blocks], 2)


def attention_probabilities(q, k, rows, sink, window: int, ratio: int, selected):
    """Probabilities of one attention layer: over own and previous block of window rows, and over compressed rows.

    ``q [B, T, h, D]``, ``k [B, T, D]`` with T a multiple of ``window``; ``rows [B, G, D]`` or None; ``selected`` boolean
    ``[B, T, G]`` or None (all visible rows).  Returns ``[B, T, h, 2 · window]`` and ``[B, T, h, G]`` or None.
    """
    length, heads, dim = q.shape[1:]
    blocks = in_blocks(k, window)
    near = q.unflatten(1, (-1, window)).flatten(2, 3) @ blocks.mT
    near = wide(near).unflatten(2, (window, heads)).flatten(1, 2) * dim**-0.5
    row = torch.arange(length, device=q.device)
    column = torch.arange(2 * window, device=q.device) - window + (row // window * window).unsqueeze(-1)  # position
    seen = (column <= row.unsqueeze(-1)) & (column > row.unsqueeze(-1) - window) & (column >= 0)
    near = near.masked_fill(~seen.unsqueeze(-2), -math.inf)
    if rows is None:
        return sink_softmax([near], sink)[0], None
    far = wide(q.flatten(1, 2) @ rows.mT).unflatten(1, (length, heads)) * dim**-0.5
    seen = visible_rows(length, rows.shape[1], ratio, q.device) if selected is None else selected
    far = far.masked_fill(~seen.unsqueeze(-2), -math.inf)
    near, far = sink_softmax([near, far], sink)
    return near, far


def output(o, cos, sin, o_a, o_b, groups: int, inputs: bool):
    """``o [B, T, h, D]`` rotated back at its own position, then the grouped output projection → ``[B, T, H]``."""
    o = rotate(o, cos.unsqueeze(-2), -sin.unsqueeze(-2)).flatten(-2).unflatten(-1, (groups, -1))
    weight = o_a.to(o.dtype).unflatten(0, (groups, -1))
    return quantised_linear(torch.einsum("btgi,gri->btgr", o, weight).flatten(-2), o_b, inputs)


def attention(q, k, rows, sink, o_a, o_b, cos, sin, window: int, ratio: int, groups: int, inputs: bool, selected=None):
    """One target layer's attention over its window and its compressed rows → ``[B, T, H]``."""
    length, heads = q.shape[1:3]
    extra = -length % window
    if extra:
        q, k = F.pad(q, (0, 0, 0, 0, 0, extra)), F.pad(k, (0, 0, 0, extra))
        selected = None if selected is None else F.pad(selected, (0, 0, 0, extra))
    near, far = attention_probabilities(q, k, rows, sink, window, ratio, selected)
    o = near.to(q.dtype).unflatten(1, (-1, window)).flatten(2, 3) @ in_blocks(k, window)
    o = o.unflatten(2, (window, heads)).flatten(1, 2)
    if far is not None:
        o = o + (far.to(q.dtype).flatten(1, 2) @ rows).unflatten(1, (-1, heads))
    return output(o[:, :length], cos, sin, o_a, o_b, groups, inputs)


def block_attention(
    q, own, context, anchors, sink, o_a, o_b, cos, sin, window: int, length: int, groups: int, inputs: bool
):
    """Attention of draft blocks: every row sees the window before its anchor and all rows of its block.

    ``q [B, A·L, h, D]``, ``own [B, A·L, D]``, ``context [B, T, D]``, ``anchors [B, A]`` → ``[B, A·L, H]``.
    """
    heads, dim = q.shape[2:]
    far = wide(q.flatten(1, 2) @ context.mT).unflatten(1, (-1, length, heads)) * dim**-0.5  # [B, A, L, h, T]
    column, anchor = torch.arange(context.shape[1], device=q.device), anchors.unsqueeze(-1)
    seen = (column < anchor) & (column >= anchor - window)
    far = far.masked_fill(~seen[:, :, None, None], -math.inf)
    own = own.unflatten(1, (-1, length))
    near = q.unflatten(1, (-1, length)).flatten(2, 3) @ own.mT
    near = wide(near).unflatten(2, (length, heads)) * dim**-0.5
    near, far = (p.to(q.dtype) for p in sink_softmax([near, far], sink))
    o = (near.flatten(2, 3) @ own).unflatten(2, (length, heads)).flatten(1, 2)
    o = o + (far.flatten(1, 3) @ context).unflatten(1, (-1, heads))
    return output(o, cos, sin, o_a, o_b, groups, inputs)


def activated(gate, up, limit: float):
    """Clamped SwiGLU: the gate from above, the other branch from both sides; float32."""
    return F.silu(wide(gate).clamp(max=limit)) * wide(up).clamp(-limit, limit)


def mixture(
    m, router, bias, w1, w2, w3, shared_1, shared_2, shared_3, top_k: int, factor: float, limit: float, inputs: bool
):
    """Mixture of experts, computed densely over all experts.

    Returns ``y [B, T, H]``, the load-balancing loss (scalar, 1 when balanced) and every expert's share of the tokens ``[E]``.
    """
    experts = w1.shape[0]
    logits = F.linear(wide(m), router.to(wide(m).dtype))
    s = F.softplus(logits, threshold=60.0).sqrt()
    choice = s + bias
    before = (choice.unsqueeze(-1) < choice.unsqueeze(-2)).sum(-1)
    # Equal scores: the earlier expert first.
    index = torch.arange(experts, device=m.device)
    equal = (choice.unsqueeze(-1) == choice.unsqueeze(-2)) & (index.unsqueeze(-1) > index)
    kept = (before + equal.sum(-1)) < top_k
    w = s * kept
    w = factor * w / (w.sum(-1, keepdim=True) + 1e-20)
    load = kept.float().mean((0, 1))
    balance = experts / top_k * (load * (s / s.sum(-1, keepdim=True)).mean((0, 1))).sum()
    m = fp8_32(m) if inputs else m
    gate, up = (linear(m, t.flatten(0, 1)).unflatten(-1, (experts, -1)) for t in (w1, w3))
    inner = (activated(gate, up, limit) * w.unsqueeze(-1)).to(m.dtype)
    y = quantised_linear(inner.flatten(-2), w2.transpose(0, 1).flatten(1), inputs)
    inner = activated(linear(m, shared_1), linear(m, shared_3), limit).to(m.dtype)
    return y + quantised_linear(inner, shared_2, inputs), balance, load


def head_norm(x, pre, weight):
    """The collapsed streams and their norm, both ``[B, T, H]``."""
    h = collapse(x, pre)
    return h, norm(h, weight)
