"""Trains the small checkpoint: one command, a wall-clock budget, results always written.

    PYTHONPATH=core python plugins/qwen38/training/train.py --corpus DIR --out DIR --seconds 570

Phases of the training time (shares of what is left of the budget after loading, warm-up and a reserve):

1. joint: next-token loss of the target plus a small distillation loss of draft depths 1 and 2 whose gradient reaches the
   trunk; in the last part expert weights, activations and the n-gram table are trained in their stored form.
2. drafter: the target is frozen in its stored form; the MTP layer maximises the expected acceptance of five recursive
   drafts, and the selectors learn the attention mass of the compressed groups.

``--resume DIR`` starts from the weights of an earlier run; ``--hold`` keeps the learning rate up and leaves out phase 2
(for a run that another one continues).
"""

import argparse
import functools
import gc
import json
import math
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parents[2] / "core"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import data  # noqa: E402
import evaluation  # noqa: E402
import export  # noqa: E402
import objectives  # noqa: E402
from model import Model  # noqa: E402
from optimiser import Optimiser  # noqa: E402
from parameters import MTP, initialise, parameter_list, text_config  # noqa: E402
from quantisation import straight_through, unquantised  # noqa: E402

BEGIN = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGIN:7.1f}] {text}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=570, help="wall-clock budget of the whole command")
    parser.add_argument("--reserve", type=float, default=45, help="seconds kept for evaluation and export")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--budget", type=int, default=512, help="indexer_budget in tokens")
    parser.add_argument("--table-base", type=int, default=20_000, help="ngram_vocab_size_base")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--drafter-share", type=float, default=0.38, help="share of training time of phase 2")
    parser.add_argument("--quantised-share", type=float, default=0.25, help="last share of phase 1 in the stored form")
    parser.add_argument("--decay-share", type=float, default=0.5, help="last share of phase 1 in which the rate falls")
    parser.add_argument("--joint-weight", type=float, default=0.15, help="weight of the drafter's loss in phase 1")
    parser.add_argument("--hold", action="store_true")
    parser.add_argument("--start-factor", type=float, default=1.0, help="peak learning-rate factor (use < 1 on resume)")
    parser.add_argument("--resume", type=Path, default=None)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--token-limit", type=int, default=None, help="read only the first tokens of the corpus")
    parser.add_argument("--heldout-windows", type=int, default=192)
    parser.add_argument("--log-every", type=int, default=100)
    return parser.parse_args()


class Trainer:
    """Model, optimiser and data of one run; each ``*_step`` computes gradients and returns logged scalars."""

    def __init__(self, arguments):
        self.a = a = arguments
        self.device = torch.device(a.device)
        self.config = text_config(a.layers, budget=a.budget, table_base=a.table_base)
        self.list = parameter_list(self.config)
        self.parameters = initialise(self.config, a.seed, self.device)
        self.scales: dict[str, torch.Tensor] = {}
        if a.resume is not None:
            self.scales = export.load_state(a.resume, self.parameters)
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

    def build(self, compiled: bool) -> None:
        self.model = Model(self.config, self.parameters, self.dtype)
        self.model.scales = self.scales
        self.compiled = compiled
        language, rows, lawful = objectives.language_loss, objectives.row_terms, objectives.lawful
        if compiled:
            self.model.compile()
            language, rows, lawful = (torch.compile(f, dynamic=False) for f in (language, rows, lawful))
        self.losses = (language, functools.partial(objectives.depth_terms, row_terms=rows), lawful)
        groups = {name: group for name, (_, group, _) in self.list.items()}
        width = self.config["moe_intermediate_size"]
        self.optimiser = Optimiser(self.parameters, groups, self.a.muon_lr, self.a.adam_lr, width)
        drafter = {n: p for n, p in self.parameters.items() if n.startswith(MTP) or ".indexer." in n}
        self.drafter = drafter
        self.drafter_optimiser = Optimiser(drafter, groups, self.a.muon_lr, self.a.adam_lr, width)

    def draw(self) -> torch.Tensor:
        return data.random_batch(self.tokens, self.batch, self.a.context + 1, self.generator)

    @torch.no_grad()
    def calibrate(self, batches: int = 8) -> None:
        """Sets every layer's activation scales from the largest magnitudes seen: amax / (6 · 448)."""
        found: dict[str, torch.Tensor] = {}
        model = Model(self.config, self.parameters, self.dtype)
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

    def joint_step(self, quantised: bool) -> dict:
        text = self.draw()
        model, (language, terms, lawful) = self.model, self.losses
        model.quantised = frozenset({"activations"} if quantised else ())
        model.stored = unquantised(self.parameters)
        if quantised:
            model.stored = {**straight_through(self.parameters, "target"), **straight_through(self.parameters, "mtp")}
        tokens = text[:, :-1]
        logits, h, statistics = model.target(tokens)
        loss = language(logits, text[:, 1:])
        balance = torch.stack(statistics["balance"]).mean()
        total = loss + 0.01 * balance
        logged = {"loss": loss, "balance": balance}
        detached = logits.detach()
        law = lawful(detached)
        for depth, draft in enumerate(model.chain(h, tokens, 2), start=1):
            kl, a = terms(detached, draft, law, depth)
            total = total + self.a.joint_weight * (1.0, 0.6)[depth - 1] * kl.mean()
            logged[f"a{depth}"] = a.mean()
        total.backward()
        model.stored = {}
        return {k: v.detach() for k, v in logged.items()}

    def freeze_target(self) -> None:
        """From here the target runs in its stored form; only the drafter and the selectors change."""
        self.calibrate()
        stored = straight_through(self.parameters, "target")
        # Asking for gradients that nothing computes keeps the compiled blocks of phase 1.
        self.frozen = {n: v.detach().requires_grad_() for n, v in stored.items()}

    def drafter_step(self, sharp: float) -> dict:
        """``sharp`` in [0, 1]: weight of the acceptance objective against plain distillation."""
        tokens = self.draw()[:, :-1]
        model, (_, terms, lawful) = self.model, self.losses
        model.quantised = frozenset({"activations"})
        model.stored = self.frozen
        # The graph of the target is dropped unused: running it in gradient mode spares a second set of compiled blocks.
        logits, h, statistics = model.target(tokens, keep=True)
        logits, h = logits.detach(), h.detach().requires_grad_()
        model.stored = {**self.frozen, **straight_through(self.parameters, "mtp")}
        law, keep = lawful(logits), {}
        total, logged, reach = 0.0, {}, None
        for depth, draft in enumerate(model.chain(h, tokens, 5, keep=keep), start=1):
            kl, a = terms(logits, draft, law, depth)
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


def joint_factor(a, f: float, step: int) -> float:
    """Learning-rate factor at share ``f`` of phase 1: warm-up, constant, then 1 − √ decay to 3 %."""
    warm = min(1.0, (step + 1) / 100)
    if a.hold or f < 1 - a.decay_share:
        return a.start_factor * warm
    return a.start_factor * warm * max(0.03, 1 - math.sqrt((f - (1 - a.decay_share)) / a.decay_share))


def drafter_factor(a, f: float, step: int) -> float:
    """Learning-rate factor at share ``f`` of phase 2: short warm-up, constant, linear decay to 0 over the last 60 %."""
    return 0.6 * min(1.0, (step + 1) / 50) * min(1.0, max(0.0, (1 - f) / 0.6))


def run(trainer: Trainer, results: dict) -> None:
    a = trainer.a
    start = time.monotonic()
    available = a.seconds - (start - BEGIN) - a.reserve
    share = 0.0 if a.hold else a.drafter_share
    ends = {"joint": start + available * (1 - share), "drafter": start + available}
    say(f"training for {available:.0f} s with batch {trainer.batch} × {a.context}, compiled: {trainer.compiled}")
    results["batch"], results["compiled"] = trainer.batch, trainer.compiled
    good, healthy = None, 1.0
    gc.collect()
    gc.freeze()
    for phase in ("joint", "drafter"):
        if phase == "drafter":
            if a.hold:
                break
            trainer.freeze_target()
            good = None
        begin, end, step, quantised = time.monotonic(), ends[phase], 0, False
        optimiser = trainer.optimiser if phase == "joint" else trainer.drafter_optimiser
        while (now := time.monotonic()) < end:
            f = (now - begin) / max(end - begin, 1e-9)
            if phase == "joint":
                if not quantised and not a.hold and f > 1 - a.quantised_share:
                    quantised = True
                    trainer.calibrate()
                    say("from here in stored form (NVFP4 experts and activations, FP8 table)")
                factor = joint_factor(a, f, step)
                logged = trainer.joint_step(quantised)
            else:
                factor = drafter_factor(a, f, step)
                logged = trainer.drafter_step(min(1.0, 0.3 + 1.4 * f))
            optimiser.step(factor * healthy)
            step += 1
            if step % 10 == 0 and trainer.device.type == "cuda":
                torch.cuda.synchronize()  # the clock above must not run ahead of the device
            if step % a.log_every == 0 or step == 1:
                values = {k: round(float(v), 4) for k, v in logged.items()}
                rate = step * trainer.batch * a.context / (time.monotonic() - begin)
                say(f"{phase} {step} f={f:.3f} lr={factor:.3f} {rate / 1e3:.0f}k tok/s {values}")
                results["history"].append({"phase": phase, "step": step, "time": round(now - BEGIN, 1), **values})
                if all(math.isfinite(v) for v in values.values()):
                    good = {n: p.detach().clone() for n, p in trainer.parameters.items()}
                elif good is not None:
                    healthy *= 0.5
                    say(f"not finite: back to the last good weights, learning rate × {healthy}")
                    for n, p in trainer.parameters.items():
                        p.data.copy_(good[n])
                    optimiser.reset()
        results["steps"][phase] = step
        results["tokens"][phase] = step * trainer.batch * a.context
        say(f"{phase} ends after {step} steps")
        export.save_state(a.out, trainer.parameters, trainer.scales)
    if trainer.device.type == "cuda":
        results["peak_memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)


def command_line(arguments: list[str]) -> str:
    """The command with folders replaced by their roles (they differ between machines)."""
    words = ["python", "plugins/qwen38/training/train.py"]
    roles = {"--corpus": "CORPUS", "--out": "OUT", "--resume": "EARLIER_OUT"}
    for before, word in zip(["", *arguments], arguments):
        words.append(roles.get(before, word))
    return " ".join(words)


def main() -> None:
    a = parse()
    a.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(a.seed)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.cache_size_limit = 64
    cuda = a.device.startswith("cuda")
    results = {
        "command": command_line(sys.argv[1:]),
        "hardware": torch.cuda.get_device_name() if cuda else "CPU",
        "torch": torch.__version__,
        "text_config_arguments": {"layers": a.layers, "budget": a.budget, "table_base": a.table_base},
        "context": a.context,
        "steps": {},
        "tokens": {},
        "history": [],
        "corpus": json.loads((a.corpus / "manifest.json").read_text()),
    }
    if a.resume is not None and (a.resume / "results.json").exists():
        earlier = json.loads((a.resume / "results.json").read_text())
        own = {k: earlier[k] for k in ("command", "hardware", "steps", "tokens", "batch") if k in earlier}
        results["earlier_runs"] = [*earlier.get("earlier_runs", []), own]
    trainer = Trainer(a)
    results["parameters"] = {
        "target": sum(p.numel() for n, p in trainer.parameters.items() if not n.startswith(MTP)),
        "mtp": sum(p.numel() for n, p in trainer.parameters.items() if n.startswith(MTP)),
    }
    say(f"parameters {results['parameters']}")
    try:
        trainer.warm()
        run(trainer, results)
    except (Exception, KeyboardInterrupt):
        results["failure"] = traceback.format_exc()
        say("training stopped:\n" + results["failure"])
    trainer.discard()
    trainer.model.stored = {}
    if cuda:
        torch.cuda.empty_cache()
    export.save_state(a.out, trainer.parameters, trainer.scales)
    say("weights saved")
    try:
        if a.hold or not trainer.scales:
            trainer.calibrate(4)
        batch = max(1, min(trainer.batch, 16))
        results |= evaluation.report(
            trainer.config, trainer.parameters, trainer.scales, trainer.heldout, batch, trainer.long
        )
        say(json.dumps({k: results[k] for k in ("heldout_loss", "acceptance", "long_context") if k in results}))
    except Exception:
        results["evaluation_failure"] = traceback.format_exc()
        say("evaluation failed:\n" + results["evaluation_failure"])
    try:
        export.save_state(a.out, trainer.parameters, trainer.scales)
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "tiny"
            tokenizer = a.corpus / "tokenizer.json"
            size = export.write_checkpoint(
                folder, trainer.config, trainer.parameters, trainer.scales, tokenizer, results
            )
            export.pack(folder, a.out / "tiny.tar")
        results["checkpoint_bytes"] = size
        say(f"checkpoint {size:,} bytes")
    except Exception:
        results["export_failure"] = traceback.format_exc()
        say("export failed:\n" + results["export_failure"])
    (a.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    say("done")
    if any(k in results for k in ("failure", "evaluation_failure", "export_failure")):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
