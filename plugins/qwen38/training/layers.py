"""Differentiable parallel (whole-sequence) forms of the architecture's blocks, as functions of tensors.

Shapes: B sequences, T tokens, S streams, H hidden size, D = S·H, E experts, C chunk length.  The residual ``x`` is
``[B, T, S, H]`` float32.  Matrix products run in the dtype of ``m`` (the compute dtype); norms, gates' softmax, the
recurrence and attention scores of the selector run in float32.  All norms are zero-centred (``1 + weight``) except the
output norm of the linear layers.  No function changes its inputs.
"""

import math

import torch
import torch.nn.functional as F
from training.blocks import attend_chain as attend_chain
from training.blocks import causal_convolution, chunk_states, fake_activation, linear, unit_lower_inverse

EPS = 1e-6


def unit(x: torch.Tensor) -> torch.Tensor:
    """x / rms(x) over the last axis, float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def mix(x, norm, down, up, inject, dtype):
    """Hyper-connection input mix: returns block input ``m [B, T, H]`` and injection weights ``b [B, T, S]`` (or None)."""
    streams = x.shape[-2]
    n = (unit(x) * (1 + norm.view(x.shape[-2:]))).to(dtype)
    flat = n.flatten(-2)
    gate = torch.sigmoid(linear(F.silu(linear(flat, down) / streams), up)).view(n.shape)
    m = (gate * n).float().mean(-2).to(dtype)
    return m, None if inject is None else 2 * torch.sigmoid(linear(flat, inject).float() / streams)


def combine(x, y, b):
    """Adds ``b[s] · y`` to every stream of the residual."""
    return x + b.unsqueeze(-1) * y.float().unsqueeze(-2)


def delta_rule(q, k, v, log_decay, beta, chunk: int = 32):
    """Gated delta rule over whole sequences in chunked form, float32.

    ``q, k [B, T, heads, dk]`` (normalised, q scaled), ``v [B, T, heads, dv]``, ``log_decay, beta [B, T, heads]``; returns
    ``o [B, T, heads, dv]``.  Chunk states follow from a log-depth scan over the affine maps S → P·S + R of the chunks, so
    nothing is sequential in T.
    """
    length = q.shape[1]
    pad = -length % chunk
    if pad:
        q, k, v = (F.pad(t, (0, 0, 0, 0, 0, pad)) for t in (q, k, v))
        log_decay, beta = (F.pad(t, (0, 0, 0, pad)) for t in (log_decay, beta))
    # [B, heads, chunks, C, d] and [B, heads, chunks, C]
    q, k, v, log_decay, beta = (
        t.transpose(1, 2).contiguous().unflatten(2, (-1, chunk)) for t in (q, k, v, log_decay, beta)
    )
    c = log_decay.cumsum(-1)
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    ratio = (c.unsqueeze(-1) - c.unsqueeze(-2)).masked_fill(~causal, -math.inf).exp()
    kt = k.transpose(-1, -2)
    a = ((k @ kt) * ratio * beta.unsqueeze(-1)).tril(-1)
    inverse = unit_lower_inverse(a)
    scaled = torch.cat([v, k * c.exp().unsqueeze(-1)], -1) * beta.unsqueeze(-1)
    u, w = (inverse @ scaled).split([v.shape[-1], k.shape[-1]], -1)
    total = c[..., -1:]
    keyed = (k * (total - c).exp().unsqueeze(-1)).transpose(-1, -2)
    eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    p = eye * total.exp().unsqueeze(-1) - keyed @ w
    state = chunk_states(p, keyed @ u)
    fresh = u - w @ state
    o = (q * c.exp().unsqueeze(-1)) @ state + ((q @ kt) * ratio) @ fresh
    return o.flatten(2, 3).transpose(1, 2)[:, :length].contiguous()


def gated_delta_net(m, qkv, z, b, a, conv, a_log, dt_bias, norm, out, key_heads: int, key_dim: int, value_dim: int):
    """One linear-attention block: ``m [B, T, H]`` → ``[B, T, H]``."""
    heads = a_log.shape[0]
    c = F.silu(causal_convolution(linear(m, qkv), conv.to(m.dtype)))
    q, k, v = c.split([key_heads * key_dim, key_heads * key_dim, heads * value_dim], -1)

    def normalised(t):
        t = t.unflatten(-1, (key_heads, key_dim)).float()
        t = t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6)
        return t.repeat_interleave(heads // key_heads, dim=2)

    log_decay = -a_log.float().exp() * F.softplus(linear(m, a).float() + dt_bias.float())
    beta = torch.sigmoid(linear(m, b).float())
    o = delta_rule(
        normalised(q) * key_dim**-0.5, normalised(k), v.unflatten(-1, (heads, value_dim)).float(), log_decay, beta
    )
    gate = torch.sigmoid(linear(m, z).float()).unflatten(-1, (heads, value_dim))
    return linear((unit(o) * norm.float() * gate).to(m.dtype).flatten(-2), out)


def rotary_table(config: dict, length: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cos and sin ``[length, rotary/2]`` float32 of text positions (all three axes equal)."""
    rope = config["rope_parameters"]
    rotary = int(config["head_dim"] * rope["partial_rotary_factor"])
    inverse = float(rope["rope_theta"]) ** (-torch.arange(0, rotary, 2, dtype=torch.float32, device=device) / rotary)
    angle = torch.arange(length, dtype=torch.float32, device=device).unsqueeze(-1) * inverse
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Rotates the first dims of ``x [B, T, heads, d]`` float32; ``cos, sin [T, half]``."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def attention_inputs(m, q_proj, k_proj, v_proj, q_norm, k_norm, cos, sin):
    """Returns q ``[B, heads, T, d]``, k, v ``[B, kv, T, d]`` (normalised, rotated) and gate ``[B, T, heads·d]``.

    All contiguous: compiled blocks are specialised to their inputs' strides.
    """
    dim = q_norm.shape[0]
    q, gate = linear(m, q_proj).unflatten(-1, (-1, 2 * dim)).split(dim, -1)
    k, v = (linear(m, w).unflatten(-1, (-1, dim)) for w in (k_proj, v_proj))
    q = rotate(unit(q) * (1 + q_norm), cos, sin).to(m.dtype)
    k = rotate(unit(k) * (1 + k_norm), cos, sin).to(m.dtype)
    q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    return q, k, v, gate.flatten(-2).contiguous()


def attention_output(o, gate, o_proj):
    """``o [B, T, heads·d]`` gated elementwise and projected: ``[B, T, H]``."""
    return linear(o * torch.sigmoid(gate), o_proj)


def mixture(
    m, router, gate_up, down, shared_gate, shared_up, shared_down, shared_switch, top_k: int, scales=None, measure=False
):
    """Mixture of experts, computed densely over all experts.

    Returns ``y [B, T, H]``, the load-balancing loss (scalar, 1 when balanced) and, with ``measure``, the largest
    magnitudes of the block input and of the routed intermediates (``[2]``, for the activation scales).  ``scales [2]``
    float32 switches NVFP4 activation quantisation on.
    """
    experts, double, _ = gate_up.shape
    p = torch.softmax(F.linear(m.float(), router.float()), -1)
    # An expert is kept when fewer than top_k are better: cheaper than a sort for so few.
    kept = (p.unsqueeze(-1) < p.unsqueeze(-2)).sum(-1) < top_k
    w = p * kept
    w = w / w.sum(-1, keepdim=True)
    balance = experts / top_k * (kept.float().mean((0, 1)) * p.mean((0, 1))).sum()
    read = m if scales is None else fake_activation(m, scales[0])
    gate, up = linear(read, gate_up.flatten(0, 1)).unflatten(-1, (experts, 2, double // 2)).unbind(-2)
    inner = F.silu(gate) * up
    largest = None
    if measure:
        routed = inner.detach() * kept.unsqueeze(-1)
        largest = torch.stack([m.detach().abs().amax().float(), routed.abs().amax().float()])
    if scales is not None:
        inner = fake_activation(inner, scales[1])
    inner = inner * w.unsqueeze(-1).to(m.dtype)
    y = linear(inner.flatten(-2), down.transpose(0, 1).flatten(1))
    shared = linear(F.silu(linear(m, shared_gate)) * linear(m, shared_up), shared_down)
    return y + torch.sigmoid(linear(m, shared_switch)) * shared, balance, largest


def ngram_rows(tokens, multipliers, primes, offsets, heads_per_ngram: int, eos: int):
    """Hash rows ``[B, T, heads]`` int64 of every token's 2-gram and 3-gram; end-of-text cuts the history."""
    lags, cut = [tokens], torch.zeros_like(tokens, dtype=torch.bool)
    for lag in range(1, len(multipliers)):
        previous = F.pad(tokens, (lag, 0), value=eos)[:, : tokens.shape[1]]
        cut = cut | (previous == eos)
        lags.append(torch.where(cut, eos, previous))
    mixed, rows = lags[0] * multipliers[0], []
    for order in range(2, len(multipliers) + 1):
        mixed = mixed ^ (lags[order - 1] * multipliers[order - 1])
        for head in range((order - 2) * heads_per_ngram, (order - 1) * heads_per_ngram):
            rows.append(mixed.remainder(primes[head]) + offsets[head])
    return torch.stack(rows, -1)


def layer_embedding(x, e, key_proj, value_proj, norm_key, norm_query, norm_conv, conv, dilation: int):
    """Per-layer embedding: residual ``x`` and n-gram embeddings ``e [B, T, width]`` → the residual's increment."""
    shape = x.shape[-2:]
    key = unit(linear(e, key_proj).unflatten(-1, shape)) * (1 + norm_key.view(shape))
    query = unit(x) * (1 + norm_query.view(shape))
    similarity = (key * query).sum(-1) / math.sqrt(shape[-1])
    gate = torch.sigmoid(similarity.sign() * similarity.abs().clamp_min(1e-6).sqrt())
    u = gate.unsqueeze(-1) * linear(e, value_proj).float().unsqueeze(-2)
    normed = (unit(u) * (1 + norm_conv.view(shape))).flatten(-2)
    return u + F.silu(causal_convolution(normed, conv.float(), dilation)).unflatten(-1, shape)


def feedback(r, e, norm_embedding, norm_hidden, fc_embedding, fc_hidden, dtype):
    """MTP input fusion: residual ``r [B, T, S, H]`` and embeddings ``e [B, T, H]`` → ``[B, T, S, H]`` float32."""
    a = linear((unit(e) * (1 + norm_embedding)).to(dtype), fc_embedding)
    b = (unit(r.flatten(-2)) * (1 + norm_hidden)).to(dtype).unflatten(-1, r.shape[-2:])
    return (linear(b, fc_hidden) + a.unsqueeze(-2)).float()
