"""Muon for matrices, AdamW for everything else.

Muon (K. Jordan et al., 2024): Nesterov momentum orthogonalised by five Newton–Schulz steps with the coefficients
(3.4445, −4.7750, 2.0315); the update of an ``[out, in]`` matrix is scaled by √max(1, out/in), so one step changes entries
by about lr/√in.  Equal shapes are stacked and orthogonalised in one batch.
"""

import torch


def orthogonalise(g: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Approximate orthogonal factor of every matrix in ``g [n, out, in]``."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16() if g.is_cuda else g.float()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * (square @ square)) @ x
    return (x.mT if tall else x).float()


class Muon:
    """``entries``: list of (parameter, matrix shape); a stacked parameter is viewed as many matrices of that shape."""

    def __init__(self, entries, momentum: float = 0.95, weight_decay: float = 0.01):
        self.momentum, self.weight_decay, self.groups = momentum, weight_decay, []
        shapes = {}
        for parameter, shape in entries:
            shapes.setdefault(shape, []).append(parameter)
        for shape, parameters in shapes.items():
            counts = [p.numel() // (shape[0] * shape[1]) for p in parameters]
            state = torch.zeros(sum(counts), *shape, device=parameters[0].device)
            self.groups.append((shape, parameters, counts, state))

    def reset(self) -> None:
        for *_, state in self.groups:
            state.zero_()

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for shape, parameters, counts, state in self.groups:
            if parameters[0].grad is None:
                continue
            g = torch.cat([p.grad.reshape(-1, *shape) for p in parameters])
            state.lerp_(g, 1 - self.momentum)
            update = orthogonalise(g.lerp(state, self.momentum))
            scale = lr * max(1.0, shape[0] / shape[1]) ** 0.5
            pieces = [u.reshape(p.shape) for u, p in zip(update.split(counts), parameters)]
            torch._foreach_mul_(parameters, 1 - lr * self.weight_decay)
            torch._foreach_add_(parameters, pieces, alpha=-scale)


class Optimiser:
    """Both optimisers over a named parameter dictionary; ``step(factor)`` applies the scheduled learning-rate factor.

    ``groups``: name → ``muon``, ``adam``, ``plain``, ``table`` or ``buffer`` (left alone).  ``width``: rows of one matrix of
    a stacked ``gate_up_proj``.
    """

    def __init__(self, named, groups: dict[str, str], muon_lr: float, adam_lr: float, width: int):
        entries, adam, plain, table = [], [], [], []
        named = {n: p for n, p in named.items() if groups[n] != "buffer"}
        for name, parameter in named.items():
            kind = groups[name]
            if kind == "muon":
                shape = tuple(parameter.shape[-2:])
                if name.endswith("gate_up_proj"):
                    shape = (width, shape[1])  # gate and up are two matrices
                entries.append((parameter, shape))
            else:
                {"adam": adam, "plain": plain, "table": table}[kind].append(parameter)
        self.muon, self.muon_lr = Muon(entries), muon_lr
        options = [
            {"params": adam, "weight_decay": 0.01, "base": adam_lr},
            {"params": plain, "weight_decay": 0.0, "base": adam_lr},
            {"params": table, "weight_decay": 0.0, "base": 2 * adam_lr},
        ]
        options = [o for o in options if o["params"]]
        self.adam = torch.optim.AdamW(options, lr=adam_lr, betas=(0.9, 0.98), eps=1e-10, fused=adam[0].is_cuda)
        self.parameters = list(named.values())

    def reset(self) -> None:
        self.muon.reset()
        self.adam.state.clear()

    def step(self, factor: float, clip: float = 1.0) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters, clip, foreach=True)
        for group in self.adam.param_groups:
            group["lr"] = group["base"] * factor
        self.adam.step()
        self.muon.step(self.muon_lr * factor)
        for parameter in self.parameters:
            parameter.grad = None
