"""Model, optimisers and data of one training run, and its steps."""

import argparse
import gc
import time
import traceback

import torch

from training import data, state
from training.architecture import Architecture
from training.model import WholeSequenceModel
from training.objectives import Objectives
from training.optimiser import Optimiser

BEGIN = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGIN:7.1f}] {text}", flush=True)


class Trainer:
    """Each ``*_step`` computes gradients and returns logged scalars."""

    def __init__(self, architecture: Architecture, arguments: argparse.Namespace, config: dict):
        self.a = a = arguments
        self.architecture, self.config = architecture, config
        self.device = torch.device(a.device)
        self.list = architecture.parameter_list(config)
        self.parameters = architecture.initialise(config, a.seed, self.device)
        if architecture.read_tokenizer is not None:
            architecture.read_tokenizer(config, self.parameters, a.corpus / "tokenizer.json")
        self.scales: dict[str, torch.Tensor] = {}
        if a.resume is not None:
            self.scales = state.load_state(a.resume, self.parameters)
            say(f"resumed {len(self.parameters)} tensors from {a.resume}")
        self.generator = torch.Generator(device=self.device).manual_seed(a.seed + 100)
        self.tokens = data.load_tokens(a.corpus / "train.bin.xz", self.device, a.token_limit)
        heldout = data.load_tokens(a.corpus / "heldout.bin.xz", self.device)
        self.heldout = data.windows(heldout, a.heldout_windows, a.context + 1)
        length = min(2048, 2 * a.context)
        self.long = (
            data.windows(heldout, max(1, a.heldout_windows // 12), length + 1) if length > a.budget + 3 else None
        )
        say(f"{self.tokens.numel():,} training tokens, {heldout.numel():,} held out")
        self.batch = a.batch
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.build(compiled=self.device.type == "cuda" and not a.no_compile)

    def new_model(self, values, dtype: torch.dtype = torch.float32) -> WholeSequenceModel:
        return self.architecture.model(self.config, values, dtype)

    def build(self, compiled: bool) -> None:
        own = self.architecture
        self.model = self.new_model(self.parameters, self.dtype)
        self.model.scales = self.scales
        self.compiled = compiled
        if compiled:
            self.model.compile()
        self.losses = Objectives(own.top_k, own.top_p, compiled)
        groups = {name: group for name, (_, group, _) in self.list.items()}
        width = self.config["moe_intermediate_size"]
        self.optimiser = Optimiser(self.parameters, groups, self.a.muon_lr, self.a.adam_lr, width)
        drafter = {
            n: p
            for n, p in self.parameters.items()
            if own.in_drafter(n, self.parameters) or own.in_selector(n, self.parameters)
        }
        self.drafter_optimiser = Optimiser(drafter, groups, self.a.muon_lr, self.a.adam_lr, width)

    def draw(self) -> torch.Tensor:
        return data.random_batch(self.tokens, self.batch, self.a.context + 1, self.generator)

    @torch.no_grad()
    def calibrate(self, batches: int = 8) -> None:
        """Sets every layer's activation scales from the largest magnitudes seen: amax / (6 · 448)."""
        found: dict[str, torch.Tensor] = {}
        model = self.new_model(self.parameters, self.dtype)
        model.measure = True
        for _ in range(batches):
            for prefix, value in model.target(self.draw()[:, :-1])[2]["largest"].items():
                found[prefix] = torch.maximum(found[prefix], value) if prefix in found else value.detach()
        for prefix, value in found.items():
            value = (value / (6 * 448)).clamp_min(1e-6)
            if prefix in self.scales:
                self.scales[prefix].copy_(value)
            else:
                self.scales[prefix] = value.clone()
        self.model.scales = self.scales

    def joint_step(self, quantised: bool, rate: float = 0.0) -> dict:
        """Phase 1.  ``rate``: learning-rate factor of the step, for the routers' own adjustment."""
        text, own = self.draw(), self.architecture
        model, losses = self.model, self.losses
        model.quantised = frozenset({"activations"} if quantised else ())
        model.stored = own.unquantised(self.parameters)
        if quantised:
            model.stored = {
                p: v for part in ("target", "mtp") for p, v in own.straight_through(self.parameters, part).items()
            }
        tokens = text[:, :-1]
        logits, h, statistics = model.target(tokens)
        loss = losses.language_loss(logits, text[:, 1:])
        balance = torch.stack(statistics["balance"]).mean()
        total = loss + own.balance_weight * balance
        logged = {"loss": loss, "balance": balance}
        detached, drafted = logits.detach(), {}
        law = losses.law(detached)
        for depth, draft in enumerate(model.chain(h, tokens, 2, statistics=drafted), start=1):
            kl, a = losses.depth_terms(detached, draft, law, depth)
            total = total + self.a.joint_weight * (1.0, 0.6)[depth - 1] * kl.mean()
            logged[f"a{depth}"] = a.mean()
        total.backward()
        model.stored = {}
        model.rebalance({"target": statistics, "mtp": drafted}, rate * own.balance_rate)
        return {k: v.detach() for k, v in logged.items()}

    def freeze_target(self) -> None:
        """From here the target runs in its stored form; only the drafter and the selectors change."""
        self.calibrate()
        stored = self.architecture.straight_through(self.parameters, "target")
        # Asking for gradients that nothing computes keeps the compiled blocks of phase 1.
        self.frozen = {n: v.detach().requires_grad_() for n, v in stored.items()}

    def drafter_step(self, sharp: float, rate: float = 0.0) -> dict:
        """Phase 2.  ``sharp`` in [0, 1]: weight of the acceptance objective against plain distillation."""
        tokens, own = self.draw()[:, :-1], self.architecture
        model, losses = self.model, self.losses
        model.quantised = frozenset({"activations"})
        model.stored = self.frozen
        # The graph of the target is dropped unused: running it in gradient mode spares a second set of compiled blocks.
        logits, h, statistics = model.target(tokens, keep=True)
        logits, h = logits.detach(), h.detach().requires_grad_()
        model.stored = {**self.frozen, **own.straight_through(self.parameters, "mtp")}
        law, keep, drafted = losses.law(logits), {}, {}
        total, logged, reach = 0.0, {}, None
        for depth, draft in enumerate(model.chain(h, tokens, 5, keep=keep, statistics=drafted), start=1):
            kl, a = losses.depth_terms(logits, draft, law, depth)
            # A depth counts as often as chains reach it, with a floor so that deep rows keep learning.
            weight = torch.ones_like(a) if reach is None else reach[:, : a.shape[1]].clamp_min(0.1)
            total = total + (weight * (sharp * (1 - a) + (0.1 + 0.9 * (1 - sharp)) * 0.5 * kl)).mean()
            reach = a.detach() if reach is None else reach[:, : a.shape[1]] * a.detach()
            logged[f"a{depth}"] = a.mean()
        few = max(1, self.batch // 8)
        selector = 0.0
        for p, kept in {**statistics["attention"], **keep}.items():
            selector = selector + model.selector_loss(p, *(t[:few] for t in kept))
        (total + 0.1 * selector).backward()
        model.stored = {}
        model.rebalance({"mtp": drafted}, rate * own.balance_rate)
        return {k: v.detach() for k, v in {"draft": total, "selector": selector, **logged}.items()}

    def discard(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def warm(self) -> None:
        """Runs every kind of step once, without an update: compiles, and finds out what does not fit."""
        for _ in range(4):
            try:
                if not self.scales:
                    self.calibrate(1)
                self.joint_step(False)
                self.discard()
                say("joint step ready")
                self.joint_step(True)
                self.discard()
                say("quantised joint step ready")
                if not self.a.hold:
                    self.freeze_target()
                    self.drafter_step(0.5)
                    self.discard()
                    say("drafter step ready")
                return
            except torch.cuda.OutOfMemoryError:
                say(f"out of memory with batch {self.batch}: halving it")
                self.discard()
                gc.collect()
                torch.cuda.empty_cache()
                self.batch //= 2
                if self.batch == 0:
                    raise
            except Exception:
                if not self.compiled:
                    raise
                say("compiled step failed, continuing without compilation:\n" + traceback.format_exc()[-3000:])
                self.discard()
                self.build(compiled=False)
        raise SystemExit("no step fits")
