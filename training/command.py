"""The training command of every plugin: phases, a wall-clock budget, results always written.

Phases of the training time (shares of what is left of the budget after loading, warm-up and a reserve):

1. joint: next-token loss of the target plus a small distillation loss of the drafter (depths 1 and 2 of a recursive one,
   all slots of a block) whose gradient reaches the trunk; in the last part the quantised tensors and activations are
   trained in their stored form.
2. drafter: the target is frozen in its stored form; the drafter maximises the expected acceptance of five recursive
   drafts or of a block, and the selectors learn the attention mass of the compressed groups.

``--resume DIR`` starts from the weights of an earlier run; ``--hold`` keeps the learning rate up and leaves out phase 2
(for a run that another one continues).
"""

import argparse
import gc
import json
import math
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

from training import state
from training.architecture import Architecture
from training.trainer import BEGIN, Trainer, say


def parse(own: Architecture, description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=f"{description}\n{__doc__}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=570, help="wall-clock budget of the whole command")
    parser.add_argument("--reserve", type=float, default=45, help="seconds kept for evaluation and export")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=own.layers)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument(
        "--budget", type=int, default=own.budget, help="tokens or compressed rows the selector may keep"
    )
    for name, (_, default, text) in own.options.items():
        parser.add_argument(name, type=type(default), default=default, help=text)
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
                    say(f"from here in stored form ({trainer.architecture.stored_form})")
                factor = joint_factor(a, f, step)
                logged = trainer.joint_step(quantised, factor)
            else:
                factor = drafter_factor(a, f, step)
                logged = trainer.drafter_step(min(1.0, 0.3 + 1.4 * f), factor)
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
        state.save_state(a.out, trainer.parameters, trainer.scales)
    if trainer.device.type == "cuda":
        results["peak_memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)


def command_line(script: str, arguments: list[str]) -> str:
    """The command with folders replaced by their roles (they differ between machines)."""
    words = ["python", script]
    roles = {"--corpus": "CORPUS", "--out": "OUT", "--resume": "EARLIER_OUT"}
    for before, word in zip(["", *arguments], arguments):
        words.append(roles.get(before, word))
    return " ".join(words)


def first_results(own: Architecture, a: argparse.Namespace, text_arguments: dict) -> dict:
    results = {
        "command": command_line(own.command, sys.argv[1:]),
        "hardware": torch.cuda.get_device_name() if a.device.startswith("cuda") else "CPU",
        "torch": torch.__version__,
        "text_config_arguments": text_arguments,
        "context": a.context,
        "steps": {},
        "tokens": {},
        "history": [],
        "corpus": json.loads((a.corpus / "manifest.json").read_text()),
    }
    if a.resume is not None and (a.resume / "results.json").exists():
        earlier = json.loads((a.resume / "results.json").read_text())
        kept = {k: earlier[k] for k in ("command", "hardware", "steps", "tokens", "batch") if k in earlier}
        results["earlier_runs"] = [*earlier.get("earlier_runs", []), kept]
    return results


def finish(trainer: Trainer, results: dict) -> None:
    """Evaluation and export; a failure of either is recorded and does not stop the other."""
    a, own = trainer.a, trainer.architecture
    try:
        if a.hold or not trainer.scales:
            trainer.calibrate(4)
        batch = max(1, min(trainer.batch, 16))
        trainer.losses = type(trainer.losses)(own.top_k, own.top_p)
        results |= own.report(
            trainer.new_model,
            own.checkpoint_values,
            trainer.losses,
            trainer.parameters,
            trainer.scales,
            trainer.heldout,
            batch,
            trainer.long,
        )
        say(
            json.dumps(
                {k: results[k] for k in ("heldout_loss", "acceptance", "calibration", "long_context") if k in results}
            )
        )
    except Exception:
        results["evaluation_failure"] = traceback.format_exc()
        say("evaluation failed:\n" + results["evaluation_failure"])
    try:
        state.save_state(a.out, trainer.parameters, trainer.scales)
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "tiny"
            tokenizer = a.corpus / "tokenizer.json"
            size = own.write_checkpoint(folder, trainer.config, trainer.parameters, trainer.scales, tokenizer, results)
            state.pack(folder, a.out / "tiny.tar")
        results["checkpoint_bytes"] = size
        say(f"checkpoint {size:,} bytes")
    except Exception:
        results["export_failure"] = traceback.format_exc()
        say("export failed:\n" + results["export_failure"])


def main(own: Architecture, description: str | None = None) -> None:
    """Parses the command line and trains; exits with 1 when training, evaluation or export failed."""
    a = parse(own, description)
    a.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(a.seed)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.cache_size_limit = 64
    text_arguments = {"layers": a.layers, "budget": a.budget}
    for name, (keyword, _, _) in own.options.items():
        text_arguments[keyword] = getattr(a, name.removeprefix("--").replace("-", "_"))
    results = first_results(own, a, text_arguments)
    trainer = (own.trainer or Trainer)(own, a, own.text_config(**text_arguments))
    results["parameters"] = {
        "target": sum(p.numel() for n, p in trainer.parameters.items() if not own.in_drafter(n, trainer.parameters)),
        "mtp": sum(p.numel() for n, p in trainer.parameters.items() if own.in_drafter(n, trainer.parameters)),
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
    if a.device.startswith("cuda"):
        torch.cuda.empty_cache()
    state.save_state(a.out, trainer.parameters, trainer.scales)
    say("weights saved")
    finish(trainer, results)
    (a.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    say("done")
    if any(k in results for k in ("failure", "evaluation_failure", "export_failure")):
        raise SystemExit(1)
