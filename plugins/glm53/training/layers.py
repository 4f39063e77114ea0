"""Differentiable parallel (whole-sequence) forms of the architecture's blocks, as functions of tensors.

Shapes: B sequences, T tokens, S streams, H hidden size, E experts, C chunk length.  The streams ``x`` are ``[B, T, S, H]``
in the compute dtype.  Matrix products run in the dtype of their input (the compute dtype); norms, gates, the recurrence,
mixing coefficients and the selector's scores run in float32.  No function changes its inputs.
"""

import torch
import torch.nn.functional as F
from training.blocks import attend_chain as attend_chain
from training.blocks import causal_convolution, chunk_states, fake_activation, linear, unit_lower_inverse

EPS = 1e-5


def unit(x: torch.Tensor) -> torch.Tensor:
    """x / rms(x) over the last axis, float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def norm(x, weight, dtype):
    return (unit(x) * weight.float()).to(dtype)


def coefficients(x, fn, base, scale, weight, eps: float):
    """One mixing site: the normed block input, the output weights and the raw mixing matrix.

    Returns ``m [B, T, H]`` (``weight`` is the RMSNorm that follows the collapse), ``post [B, T, S]`` and the logits of the
    mixing matrix ``[B, T, S, S]``, both float32.
    """
    streams = x.shape[-2]
    mixed = F.linear(unit(x.flatten(-2)), fn.float())
    pre, post, comb = mixed.split([streams, streams, streams * streams], -1)
    pre_base, post_base, comb_base = base.split([streams, streams, streams * streams])
    pre = torch.sigmoid(pre * scale[0] + pre_base) + eps
    post = 2 * torch.sigmoid(post * scale[1] + post_base)
    u = (pre.unsqueeze(-1) * x.float()).sum(-2)
    logits = (comb * scale[2] + comb_base).unflatten(-1, (streams, streams))
    return norm(u, weight, x.dtype), post, logits.contiguous()


def combine(x, y, post, comb):
    """Writes a block's output ``y [B, T, H]`` back: stream j gets ``post[j] · y + Σ_i comb[i, j] · x[i]``."""
    # A product of 4 × 4 matrices: elementwise, exact in float32 and fused.
    mixed = (comb.unsqueeze(-1) * x.float().unsqueeze(-2)).sum(-3)
    return (mixed + post.unsqueeze(-1) * y.float().unsqueeze(-2)).to(x.dtype)


def mean_norm(x, weight):
    """Final norm of the mean over streams: ``[B, T, H]``."""
    return norm(x.float().mean(-2), weight, x.dtype)


def delta_rule(q, k, v, log_decay, beta, chunk: int = 16):
    """Gated delta rule with a decay per key channel, over whole sequences in chunked form, float32.

    ``q, k [B, T, heads, dk]`` (normalised, q scaled), ``v [B, T, heads, dv]``, ``log_decay [B, T, heads, dk]`` in (−5, 0],
    ``beta [B, T, heads]``; returns ``o [B, T, heads, dv]``.  Products of decays between two rows of a chunk are taken
    relative to the chunk's middle: with half a chunk of eight rows both factors stay within e^±40.
    """
    length = q.shape[1]
    pad = -length % chunk
    if pad:
        q, k, v, log_decay = (F.pad(t, (0, 0, 0, 0, 0, pad)) for t in (q, k, v, log_decay))
        beta = F.pad(beta, (0, 0, 0, pad))
    # [B, heads, chunks, C, d] and [B, heads, chunks, C, 1]
    q, k, v, log_decay, beta = (
        t.transpose(1, 2).contiguous().unflatten(2, (-1, chunk)) for t in (q, k, v, log_decay, beta.unsqueeze(-1))
    )
    c = log_decay.cumsum(-2)
    middle = c[..., chunk // 2 - 1 : chunk // 2, :]
    later, earlier = (c - middle).exp(), (middle - c).exp()
    against = (k * earlier).transpose(-1, -2)
    a = (((k * later) @ against) * beta).tril(-1)
    inverse = unit_lower_inverse(a)
    from_start = c.exp()
    scaled = torch.cat([v, k * from_start], -1) * beta
    u, w = (inverse @ scaled).split([v.shape[-1], k.shape[-1]], -1)
    total = c[..., -1:, :]
    keyed = (k * (total - c).exp()).transpose(-1, -2)
    state = chunk_states(torch.diag_embed(total.squeeze(-2).exp()) - keyed @ w, keyed @ u)
    fresh = u - w @ state
    o = (q * from_start) @ state + ((q * later) @ against).tril() @ fresh
    return o.flatten(2, 3).transpose(1, 2)[:, :length].contiguous()


def delta_attention(m, q, k, v, conv_q, conv_k, conv_v, fa, fb, ga, gb, b, a_log, dt_bias, weight, out, bound: float):
    """One linear-attention block: ``m [B, T, H]`` → ``[B, T, H]``."""
    heads = a_log.shape[0]
    raw = linear(m, torch.cat([q, k, v]))
    c = F.silu(causal_convolution(raw.float(), torch.cat([conv_q, conv_k, conv_v]).float()))
    cq, ck, cv = (t.unflatten(-1, (heads, -1)) for t in c.chunk(3, -1))

    def normalised(t):
        return t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6)

    f = linear(linear(m, fa), fb).float() + dt_bias.float()
    log_decay = bound * torch.sigmoid(a_log.float().exp().unsqueeze(-1) * f.unflatten(-1, (heads, -1)))
    beta = torch.sigmoid(linear(m, b).float())
    o = delta_rule(normalised(cq) * cq.shape[-1] ** -0.5, normalised(ck), cv, log_decay, beta)
    gate = torch.sigmoid(linear(linear(m, ga), gb).float()).unflatten(-1, (heads, -1))
    return linear((unit(o) * weight.float() * gate).to(m.dtype).flatten(-2), out)


def attention_inputs(m, q_a, q_norm, q_b, kv_a, kv_norm, kv_b, heads: int, key_dim: int):
    """Returns the normed query residual ``[B, T, rank]`` and q, k, v ``[B, heads, T, d]``, all contiguous."""
    residual = norm(linear(m, q_a), q_norm, m.dtype)
    q = linear(residual, q_b).unflatten(-1, (heads, key_dim))
    latent = norm(linear(m, kv_a), kv_norm, m.dtype)
    kv = linear(latent, kv_b).unflatten(-1, (heads, -1))
    k, v = kv[..., :key_dim], kv[..., key_dim:]
    q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    return residual, q, k, v


def group_scores(m, residual, wq_b, wk, k_weight, k_bias, weights_proj, ape, gate, heads: int):
    """Selector scores ``[B, T, groups]`` float32 of every query and every complete group (no causal masking)."""
    ratio, dim = ape.shape
    groups = m.shape[1] // ratio
    query = linear(residual, wq_b).float().unflatten(-1, (heads, dim))
    key = F.layer_norm(linear(m, wk).float(), (dim,), k_weight.float(), k_bias.float(), 1e-6)
    logits = linear(m, gate).float()
    key, logits = (t[:, : groups * ratio].unflatten(1, (groups, ratio)) for t in (key, logits))
    pooled = (torch.softmax(logits + ape.float(), 2) * key).sum(2)
    weight = F.linear(m.float(), weights_proj.float()) * heads**-0.5
    scores = torch.relu(torch.einsum("bthd,bgd->bthg", query, pooled) * dim**-0.5)
    return (scores * weight.unsqueeze(-1)).sum(2)


def activated(gate, up, limit: float):
    """Clamped SwiGLU: the gate from above, the other branch from both sides."""
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def dense(m, gate, up, down, limit: float):
    return linear(activated(linear(m, gate), linear(m, up), limit), down)


def mixture(
    m,
    router,
    bias,
    gate_up,
    down,
    shared_gate,
    shared_up,
    shared_down,
    top_k: int,
    factor: float,
    limit: float,
    scales=None,
    measure=False,
):
    """Mixture of experts, computed densely over all experts.

    Returns ``y [B, T, H]``, the load-balancing loss (scalar, 1 when balanced), every expert's share of the tokens ``[E]``
    and, with ``measure``, the largest magnitudes of the block input and of the routed intermediates (``[2]``, for the
    activation scales).  ``scales [2]`` float32 switches NVFP4 activation quantisation on.
    """
    experts, double, _ = gate_up.shape
    s = torch.sigmoid(F.linear(m.float(), router.float()))
    choice = s.detach() + bias
    # An expert is kept when fewer than top_k are better: cheaper than a sort for so few.
    kept = (choice.unsqueeze(-1) < choice.unsqueeze(-2)).sum(-1) < top_k
    w = s * kept
    w = factor * w / (w.sum(-1, keepdim=True) + 1e-20)
    load = kept.float().mean((0, 1))
    balance = experts / top_k * (load * (s / s.sum(-1, keepdim=True)).mean((0, 1))).sum()
    read = m if scales is None else fake_activation(m, scales[0])
    gate, up = linear(read, gate_up.flatten(0, 1)).unflatten(-1, (experts, 2, double // 2)).unbind(-2)
    inner = activated(gate, up, limit)
    largest = None
    if measure:
        routed = inner.detach() * kept.unsqueeze(-1)
        largest = torch.stack([m.detach().abs().amax().float(), routed.abs().amax().float()])
    if scales is not None:
        inner = fake_activation(inner, scales[1])
    inner = inner * w.unsqueeze(-1).to(m.dtype)
    y = linear(inner.flatten(-2), down.transpose(0, 1).flatten(1))
    return y + dense(m, shared_gate, shared_up, shared_down, limit), balance, load, largest


def feedback(h, e, e_norm, h_norm, eh_proj, input_norm):
    """MTP input: feedback rows ``h`` and embeddings ``e``, both ``[B, T, H]`` → residual and normed attention input."""
    z = linear(torch.cat([norm(e, e_norm, h.dtype), norm(h, h_norm, h.dtype)], -1), eh_proj)
    return z, norm(z, input_norm, h.dtype)


def add_norm(x, y, weight):
    """``x + y`` and its norm."""
    total = x + y
    return total, norm(total, weight, x.dtype)
