"""Doubly stochastic mixing matrices: softmax over rows, then alternating normalisation, with its gradient.

On a GPU one kernel runs all iterations (forty normalisations of 4 × 4 matrices would be as many launches); it keeps every
normalisation's divisors, from which the backward kernel walks the iterations back.
"""

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


def plain(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """``logits [..., S, S]`` float32 → the matrix after ``iterations`` column and ``iterations − 1`` row normalisations."""
    c = torch.softmax(logits, -1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


if triton is not None:

    @triton.jit
    def _forward(
        logits, out, rows, columns, count, eps, S: tl.constexpr, ITERATIONS: tl.constexpr, BLOCK: tl.constexpr
    ):
        t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        s = tl.arange(0, S)
        at = t[:, None, None] * (S * S) + s[None, :, None] * S + s[None, None, :]
        valid = (t < count)[:, None, None]
        c = tl.load(logits + at, mask=valid, other=0.0)
        c = tl.exp(c - tl.max(c, axis=2)[:, :, None])
        c = c / tl.sum(c, axis=2)[:, :, None] + eps
        line = t[:, None] * (S * ITERATIONS) + s[None, :]
        there = (t < count)[:, None]
        divisor = tl.sum(c, axis=1) + eps
        c = c / divisor[:, None, :]
        tl.store(columns + line, divisor, mask=there)
        for i in range(1, ITERATIONS):
            divisor = tl.sum(c, axis=2) + eps
            c = c / divisor[:, :, None]
            tl.store(rows + line + i * S, divisor, mask=there)
            divisor = tl.sum(c, axis=1) + eps
            c = c / divisor[:, None, :]
            tl.store(columns + line + i * S, divisor, mask=there)
        tl.store(out + at, c, mask=valid)

    @triton.jit
    def _backward(
        out, gradient, rows, columns, result, count, eps, S: tl.constexpr, ITERATIONS: tl.constexpr, BLOCK: tl.constexpr
    ):
        t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        s = tl.arange(0, S)
        at = t[:, None, None] * (S * S) + s[None, :, None] * S + s[None, None, :]
        valid = (t < count)[:, None, None]
        c = tl.load(out + at, mask=valid, other=0.25)
        g = tl.load(gradient + at, mask=valid, other=0.0)
        line = t[:, None] * (S * ITERATIONS) + s[None, :]
        there = (t < count)[:, None]
        for step in range(ITERATIONS - 1):
            i = ITERATIONS - 1 - step
            divisor = tl.load(columns + line + i * S, mask=there, other=1.0)[:, None, :]
            g = (g - tl.sum(g * c, axis=1)[:, None, :]) / divisor
            c = c * divisor
            divisor = tl.load(rows + line + i * S, mask=there, other=1.0)[:, :, None]
            g = (g - tl.sum(g * c, axis=2)[:, :, None]) / divisor
            c = c * divisor
        divisor = tl.load(columns + line, mask=there, other=1.0)[:, None, :]
        g = (g - tl.sum(g * c, axis=1)[:, None, :]) / divisor
        c = c * divisor - eps
        g = c * (g - tl.sum(g * c, axis=2)[:, :, None])
        tl.store(result + at, g, mask=valid)


class Kernel(torch.autograd.Function):
    """The same function by the kernels; ``logits [..., S, S]`` float32 contiguous, S a power of two."""

    @staticmethod
    def forward(ctx, logits, iterations: int, eps: float):
        size, block = logits.shape[-1], 64
        count = logits.numel() // size**2
        out = torch.empty_like(logits)
        rows, columns = logits.new_empty(count, iterations, size), logits.new_empty(count, iterations, size)
        grid = (-(-count // block),)
        _forward[grid](logits, out, rows, columns, count, eps, S=size, ITERATIONS=iterations, BLOCK=block)
        ctx.save_for_backward(out, rows, columns)
        ctx.constants = (iterations, eps, size, count, block, grid)
        return out

    @staticmethod
    def backward(ctx, gradient):
        out, rows, columns = ctx.saved_tensors
        iterations, eps, size, count, block, grid = ctx.constants
        result = torch.empty_like(out)
        gradient = gradient.contiguous()
        _backward[grid](out, gradient, rows, columns, result, count, eps, S=size, ITERATIONS=iterations, BLOCK=block)
        return result, None, None


def kernel(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    return Kernel.apply(logits.contiguous(), iterations, eps)


class Sinkhorn:
    """The kernel on a GPU where it compiles and agrees with the plain form on a probe; the plain form otherwise."""

    def __init__(self, device: torch.device, iterations: int, eps: float):
        self.iterations, self.eps, self.function = iterations, eps, plain
        if device.type != "cuda" or triton is None:
            return
        try:
            probe = torch.randn(1000, 4, 4, generator=torch.Generator().manual_seed(0)).to(device) * 2
            weight, found = probe.roll(1, 0), []
            with torch.enable_grad():
                for function in (plain, kernel):
                    read = probe.clone().requires_grad_()
                    value = function(read, iterations, eps)
                    found.append((value.detach(), torch.autograd.grad((value * weight).sum(), read)[0]))
            error = max(float((a - b).abs().max()) for a, b in zip(*found))
            if not error < 1e-4:
                raise RuntimeError(f"kernel differs from the plain form by {error}")
            self.function = kernel
        except Exception as error:  # any failure has the same cure
            print(f"mixing matrices run without their kernel: {type(error).__name__}: {str(error)[:500]}", flush=True)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        return self.function(logits, self.iterations, self.eps)
